"""transformers' Trainer, alone and with dcpc's mixin, on texts of very different lengths.

Two gloo ranks, one small Llama, float32, AdamW with a schedule and clipping; the same samples from
the standard library's source, one epoch, in every system:

    trainer          transformers' Trainer as it is; the data set lies in a random order
    group_by_length  the Trainer with train_sampling_strategy="group_by_length", which sorts within
                     50 batches as over a long data set (over so few samples within 4)
    batch_rebalance  the Trainer with train_sampling_strategy="batch_rebalance"
    packing          accelerate and DistributedDataParallel, each step's samples packed into rows of
                     the largest length, first-fit decreasing, rows dealt to the ranks by length
    dcpc             the Trainer with dcpc.hf.TrainerMixin, on the eager backend
    dcpc, packed     the same with loader_options={"packing": True}

dcpc has 8 buckets, chosen for the samples' lengths; its micro-batches run at the length of their
longest sample.

`trainer`, `packing` and both of dcpc make the same global batches: their losses are compared step
by step. The others order samples by themselves. Seconds are those of an epoch on the last rank,
from `on_train_begin` to `on_train_end`; each system runs once before it is timed. A ratio is the
median of the ratios of the repeats, in which systems take turns. Tokens are those of the samples,
without padding. `cpu_speedup_over_...` is the ratio of the processor seconds of the busiest rank:
it leaves out that ranks wait for each other, and holds on a machine that others use as well.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from transformers import logging

from benchmarks import harness
from benchmarks.hf_systems import Packed, Race, Texts, WithTrainer
from dcpc.runtime.groups.local_ranks import run_ranks
from examples.race import rank0_decides

RANKS = 2
LIMIT_S = 1500.0
OTHERS = ("trainer", "group_by_length", "batch_rebalance", "packing")
SAME_BATCHES = ("packing", "dcpc", "dcpc, packed")  # as those of the Trainer as it is

FULL = Race(48, 2, 4096, 128, 8, repeats=7, limit_s=200.0)
QUICK = Race(
    32, 1, 2048, 32, 8, repeats=3, limit_s=8.0,
    root=Path(asyncio.__file__).parent,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Raced:
    """What all ranks found.

    Attributes:
        seconds_s: of each system, of its timed epochs.
        cpu_s: the busiest rank's processor seconds, alike.
        padding: tokens of padding, of each.
        losses: of the steps of its first epoch, of each.
        trained: samples that dcpc trained in an epoch.
        tokens: of the samples.
    """

    seconds_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    padding: dict[str, int]
    losses: dict[str, list[float]]
    trained: int
    tokens: int


def on_rank(rank: int, race: Race, data: Texts, folder: str) -> Raced:
    """Runs the race on one rank."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    begin_s = time.monotonic()
    systems: dict[str, Packed | WithTrainer] = {
        "trainer": WithTrainer(race, data, folder, "sequential"),
        "group_by_length": WithTrainer(race, data, folder, "group_by_length"),
        "batch_rebalance": WithTrainer(race, data, folder, "batch_rebalance"),
        "packing": Packed(race, data),
        "dcpc": WithTrainer(race, data, folder, "sequential", packing=False),
        "dcpc, packed": WithTrainer(race, data, folder, "sequential", packing=True),
    }
    found = Raced({n: [] for n in systems}, {n: [] for n in systems}, {}, {}, 0, data.tokens)
    trained = 0
    names = list(systems)
    for turn in range(race.repeats + 1):  # in the first all is made that is made once
        if turn > 1 and not rank0_decides(time.monotonic() - begin_s < race.limit_s):
            break
        shift = turn % len(names)
        for name in (*names[shift:], *names[:shift]):
            counted = systems[name].epoch()
            sums = torch.tensor([counted.tokens, counted.padding])
            dist.all_reduce(sums)
            assert sums[0] == data.tokens, f"{name}: {sums[0]} tokens of {data.tokens}"
            if turn:
                busy = torch.tensor(counted.cpu_s)
                dist.all_reduce(busy, dist.ReduceOp.MAX)
                found.seconds_s[name].append(counted.seconds_s)
                found.cpu_s[name].append(float(busy))
                continue
            found.padding[name] = int(sums[1])
            found.losses[name] = list(counted.losses)
            trained = counted.samples or trained
    return replace(found, trained=trained)


def figures(found: Raced, race: Race) -> dict[str, harness.Cell]:
    """Returns the figures, and prints what they are made of."""

    def share(name: str) -> float:
        return found.padding[name] / (found.padding[name] + found.tokens)

    def ratio(taken: dict[str, list[float]], name: str, ours: str) -> float:
        return median(a / b for a, b in zip(taken[name], taken[ours], strict=True))

    def apart(name: str) -> float:
        pairs = zip(found.losses[name], found.losses["trainer"], strict=True)
        return max(abs(a - b) for a, b in pairs)

    rows = [
        (name, found.tokens / median(s), median(s), median(found.cpu_s[name]), share(name),
         found.losses[name][0], found.losses[name][-1],
         apart(name) if name in SAME_BATCHES else None)
        for name, s in found.seconds_s.items()
    ]  # fmt: skip
    header = (
        "system", "tokens/s", "s an epoch", "cpu s", "padding", "first loss", "last loss", "apart",
    )  # fmt: skip
    harness.print_table(
        f"{race.samples} samples, {found.tokens:,} tokens, {RANKS} ranks", header, rows, digits=4
    )
    losses = [(n, *(c[i] for c in found.losses.values())) for n, i in _shown(found.losses)]
    harness.print_table("losses", ("step", *found.losses), losses)
    return {
        **{f"speedup_over_{n}": ratio(found.seconds_s, n, "dcpc") for n in OTHERS},
        **{f"packed_speedup_over_{n}": ratio(found.seconds_s, n, "dcpc, packed") for n in OTHERS},
        **{f"cpu_speedup_over_{n}": ratio(found.cpu_s, n, "dcpc") for n in OTHERS},
        "loss_difference": max(apart(name) for name in SAME_BATCHES),
        "padding_share": share("dcpc"), "padding_share_trainer": share("trainer"),
        "padding_share_group_by_length": share("group_by_length"),
        "padding_share_batch_rebalance": share("batch_rebalance"),
        "samples_dropped": race.samples - found.trained,
        "tokens_per_s": found.tokens / median(found.seconds_s["dcpc"]),
        "tokens_per_s_trainer": found.tokens / median(found.seconds_s["trainer"]),
        "repeats": len(found.seconds_s["dcpc"]),
    }  # fmt: skip


def _shown(losses: dict[str, list[float]]) -> Sequence[tuple[str, int]]:
    """Returns which steps' losses are printed: at most ten, evenly spread."""
    count = min(map(len, losses.values()))
    picked = sorted({i * (count - 1) // 9 for i in range(10)})
    return [(str(i + 1), i) for i in picked]


def main() -> None:
    """Runs the benchmark."""
    args = harness.parser("hf_race", __doc__.partition("\n")[0]).parse_args()
    race = QUICK if args.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        found = run_ranks(on_rank, RANKS, race, Texts(race), folder, timeout_s=LIMIT_S)[0]
    made = figures(found, race)
    harness.finish("hf_race", made, args.json)


if __name__ == "__main__":
    main()
