"""The largest GPT that trains within a fixed memory of a rank, by who holds the parameters."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks import harness
from dcpc import Buckets
from dcpc.api import plan
from dcpc.errors import PlanError
from dcpc.runtime.groups.local_ranks import run_ranks
from examples.large_model import ADAM, LargeModel, train
from examples.stdlib_source import StdlibSource
from models.gpt import GPTConfig
from tests.exact.parameters_steps import TEXT

RANKS = 4
# Of the memory for what no plan counts: samples that the loader has made ahead, numbers on which
# ranks agree, scalars.
RESERVED = 0.02
MODES = ("whole", "rounds", "pull")
# The number of layers is searched for from what parameters alone allow.
FULL = LargeModel(
    GPTConfig(dim=512, n_layers=1, n_heads=8), torch.float32, 150_000_000, (32, 64),
    tokens_per_step=512, steps=2, tolerance=0.0,
)  # fmt: skip
QUICK = replace(
    FULL, model=GPTConfig(dim=128, n_layers=1, n_heads=4), memory_bytes=8_000_000, lengths=(32,),
    tokens_per_step=256, steps=2,
)  # fmt: skip


def with_layers(setting: LargeModel, layers: int) -> LargeModel:
    """Returns the same of another depth."""
    return replace(setting, model=replace(setting.model, n_layers=layers))


def fits(setting: LargeModel, mode: str) -> bool:
    """Whether every bucket has a plan within the memory."""
    options = {"memory": setting.memory_bytes, "optimizer": ADAM, "parameters": mode}
    try:
        plan(
            setting.on_meta(), Buckets(TEXT, [{"seq": n} for n in setting.lengths]), world=RANKS,
            backend="eager", device="cpu", **options,
        )  # fmt: skip
    except PlanError:
        return False
    return True


def deepest(setting: LargeModel, mode: str) -> int:
    """Returns the most layers with which it fits; one more does not."""
    one, two = (parameter_bytes(with_layers(setting, n)) for n in (1, 2))
    copies = 4 if mode == "whole" else 4 / RANKS
    high = int((setting.memory_bytes / copies - one) / (two - one)) + 2  # cannot fit
    low = 0
    step = max(1, high // 8)
    while high - low > 1:  # first down from above in strides, then by halves
        middle = max(high - step, low + 1) if low == 0 else (low + high) // 2
        if fits(with_layers(setting, middle), mode):
            low = middle
        else:
            high, step = middle, 2 * step
    return low


def parameter_bytes(setting: LargeModel) -> int:
    """Returns the bytes of all parameters."""
    return sum(p.nbytes for p in setting.on_meta().parameters())


def measure(quick: bool) -> dict[str, harness.Cell]:
    """Returns the figure; trains the largest one in "rounds" and prints what it takes."""
    setting = QUICK if quick else FULL
    memory_bytes = setting.memory_bytes
    setting = replace(setting, memory_bytes=int((1 - RESERVED) * memory_bytes))
    largest = {mode: with_layers(setting, deepest(setting, mode)) for mode in MODES}
    sizes = {mode: parameter_bytes(found) for mode, found in largest.items()}
    data = StdlibSource(max(setting.lengths), limit=400)
    trained = {
        mode: run_ranks(train, RANKS, largest[mode], mode, data, timeout_s=300.0)
        for mode in (("rounds",) if quick else ("rounds", "pull"))
    }
    rows: list[tuple[harness.Cell, ...]] = []
    for mode, found in largest.items():
        ranks = trained.get(mode)
        peak = max(r.measured_bytes for r in ranks) / 1e6 if ranks else None
        rows.append(
            (mode, found.model.n_layers, sizes[mode] / 1e6, sizes[mode] / sizes["whole"], peak)
        )
    title = f"largest GPT of width {setting.model.dim} on {RANKS} ranks of "
    header = ("mode", "layers", "parameters MB", "over whole", "peak MB of training")
    harness.print_table(f"{title}{memory_bytes / 1e6:g} MB", header, rows)
    for mode, ranks in trained.items():
        most = max(r.measured_bytes for r in ranks)
        if most > memory_bytes:
            print(f"missed: the largest model in {mode} takes {most} of {memory_bytes} B")
    return {"largest_model_over_whole": sizes["rounds"] / sizes["whole"]}
