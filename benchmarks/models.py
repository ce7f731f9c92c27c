"""Models that others split by hand: exact, what is sent beside their schemes, what is split.

    evoformer   AlphaFold 2's trunk, beside FastFold's Dynamic Axial Parallelism (DAP)
    vae3d       Open-Sora v1.2's temporal autoencoder, beside the rows that its windows need
    gpt, stdit  those of the other benchmarks, for comparison; no reference for what they send

Bytes are those of the graphs that run (`Prediction.wire_bytes`), forward and backward, of a rank
between two others; of a trunk those of one block more. `exact` is the worst relative error of loss
and gradients in float64, of small models over ranks in one process.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from benchmarks.harness import Cell, parser, print_table, write_report
from dcpc.commands.check import SplitModel, coverage
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import traced
from dcpc.symbolic_profile import Device, find
from models.evoformer import Evoformer, EvoformerConfig
from models.vae3d import TemporalConfig, TemporalLoss, TemporalVAE
from tests.exact.models import CASES, Case, evoformer_buckets, latents_buckets
from tests.exact.models_references import dap_bytes, halo_bytes

# AlphaFold 2's two crops. Source: supplement, table 4: 128 of 512 sequences here, 512 in the last.
FOLDS = (
    {"batch": 1, "sequences": 128, "residues": 256},
    {"batch": 1, "sequences": 512, "residues": 384},
)
CLIPS = (
    {"batch": 1, "frames": 17, "height": 32, "width": 32},
    {"batch": 1, "frames": 17, "height": 45, "width": 80},
)
DEGREES = (2, 4, 8)
# Links that do not send while a rank computes: a ring hides what it sends nowhere.
PLAIN_LINK = replace(find("h100"), overlaps=False)


def sent(model: nn.Module, buckets: object, points: Sequence[Mapping[str, int]], device: Device,
         degrees: Sequence[int] = DEGREES) -> dict[tuple[int, int], float]:  # fmt: skip
    """Returns the bytes that a rank sends a step, by (index of the point, degree)."""
    priced = Runnable(traced(model, buckets, device, "eager")).priced  # type: ignore[arg-type]
    found: dict[tuple[int, int], float] = {}
    for i, point in enumerate(points):
        for sp in degrees:
            placement = priced.placement(point, sp)
            found[i, sp] = priced.at(placement).predict(0, point).wire_bytes
    return found


def evoformer_ratios(device: Device, points: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Returns what a block sends over what DAP sends, by point and degree."""
    every = []
    for blocks in (2, 3):
        with torch.device("meta"):
            model = Evoformer(EvoformerConfig(blocks=blocks))
        every.append(sent(model, evoformer_buckets(points), points, device))
    found = {}
    for (i, sp), more in every[1].items():
        point = points[i]
        reference = dap_bytes(EvoformerConfig(), point["sequences"], point["residues"], sp)
        name = f"{point['sequences']} x {point['residues']}, sp {sp}"
        found[name] = (more - every[0][i, sp]) / reference
    return found


def vae_ratios(config: TemporalConfig, points: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """Returns what the autoencoder sends over the rows that its windows need."""
    with torch.device("meta"):
        model = TemporalLoss(TemporalVAE(config))
    every = sent(model, latents_buckets(config, points), points, PLAIN_LINK)
    return {
        f"{points[i]['height']} x {points[i]['width']}, sp {sp}": count
        / halo_bytes(model.model, config, points[i])
        for (i, sp), count in every.items()
    }


def checked(case: Case, degrees: Sequence[int]) -> dict[str, Cell]:
    """Returns a small model's worst error, the share that is split, and ops that cannot be."""
    worst, shares, blocked = 0.0, [], 0
    split = SplitModel(case.model(), case.buckets, case.points[0], "eager", sp=degrees[0])
    for sp in degrees:
        one = split.of("eager", sp)
        covered = coverage(one)
        shares.append(covered.sharded_share)
        blocked = max(blocked, len(covered.blocked))
        for point in case.points:
            for recompute in ("none", "all"):
                found = one.difference(point, case.data(point), recompute, in_step=True)
                worst = max(worst, found.worst)
    return {"exact": worst, "flops_sharded": min(shares), "ops_replicated": blocked}


def measure(quick: bool) -> dict[str, Cell]:
    """Returns all figures, by model."""
    figures: dict[str, Cell] = {}
    for name, case in CASES.items():
        degrees = (2,) if quick else case.degrees
        figures |= {f"{name}_{k}": v for k, v in checked(case, degrees).items()}
        if case.published:
            figures[f"{name}_parameters_off"] = case.parameters_off()
    folds = FOLDS[:1] if quick else FOLDS
    ratios = {"evoformer": evoformer_ratios(PLAIN_LINK, folds)}
    if not quick:
        ratios["evoformer_h100"] = evoformer_ratios(find("h100"), folds)
    config = TemporalConfig(blocks=1) if quick else TemporalConfig()
    ratios["vae3d"] = vae_ratios(config, CLIPS[:1] if quick else CLIPS)
    for name, found in ratios.items():
        figures[f"{name}_wire_bytes_over_reference"] = max(found.values())
        rows = [[at, ratio] for at, ratio in found.items()]
        print_table(f"{name}: bytes sent over the reference's", ["at", "ratio"], rows)
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables and writes the figures."""
    given = parser("models", __doc__.splitlines()[0]).parse_args(arguments)
    warnings.simplefilter("ignore")
    figures = measure(given.quick)
    columns = ("exact", "wire_bytes_over_reference", "parameters_off", "flops_sharded",
               "ops_replicated")  # fmt: skip
    rows = []
    for name in CASES:
        cells = [figures.get(f"{name}_{column}") for column in columns]
        exact = cells[0]
        rows.append([name, f"{exact:.1e}" if isinstance(exact, float) else exact, *cells[1:]])
    print_table("models", ["model", *columns], rows)
    write_report("models", figures, given.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
