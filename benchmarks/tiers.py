"""Parameters in the host's memory or on a disk: bits, copies, the largest model, forward on a disk.

bits       weights after Adam steps over three lengths, at shares of the memory that whole
           parameters need, against whole ones; over two ranks against rounds on the device
optimum    copies of `kept_after` over the least of all choices, units of one size
warmed     copies over those of a policy that knows the room of the longest bucket alone, as one
           that warmed up on it (PatrickStar), on the steps of real texts
largest    parameters of the deepest GPT with a plan over those of the deepest one held whole
forward    tokens a second from a disk over accelerate's `disk_offload`, interleaved
"""

from __future__ import annotations

import itertools
import random
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

import dcpc
from benchmarks import harness
from benchmarks.parameters_largest import FULL, parameter_bytes, with_layers
from dcpc.api import plan
from dcpc.codegen import kept_after
from dcpc.compiled.memory.staying import StayingUnits
from dcpc.errors import PlanError
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.runtime.planner.plans import PlannedMicroBatch, RowSetting, rounds_of
from examples.large_model import ADAM, LargeModel
from examples.one_small_card import train
from examples.stdlib_source import PAD, StdlibSource
from models.gpt import GPT, GPTConfig

INPUTS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
LENGTHS = (32, 64, 256)
SMALL = GPTConfig(dim=64, n_layers=6, n_heads=4)
AWAY = {"host": "1GB", "away": "parameters"}


def small() -> GPT:
    """Returns a decoder with the parameters of every other."""
    torch.manual_seed(0)
    return GPT(SMALL)


def buckets(batch: int | None = None) -> dcpc.Buckets:
    """Returns three lengths."""
    more = {} if batch is None else {"batch": batch}
    return dcpc.Buckets(INPUTS, [{"seq": n, **more} for n in LENGTHS])


def weights(steps: int, **options: Any) -> list[Tensor]:
    """Returns a rank's weights after steps with Adam, one sample a micro-batch."""
    given = {"backend": "eager", "verify": "off", "tile": "none", "device": "cpu", "sp": 1}
    compiled = dcpc.compile(small(), buckets(1), **{**given, **options})
    loader = dcpc.DataLoader(
        StdlibSource(LENGTHS[-1], limit=200), compiled, samples_per_step=4, pad=PAD,
        weight="labels", mode="inter",
    )  # fmt: skip
    optimizer = torch.optim.Adam(compiled.parameters(), lr=1e-3)
    for step in itertools.islice(loader, steps):
        compiled.train_step(step)
        optimizer.step()
        optimizer.zero_grad()
    own = (getattr(p, "to_local", lambda p=p: p)() for p in compiled.parameters())
    return [p.detach().clone() for p in own]


def equal_on_ranks(rank: int, steps: int) -> bool:
    """Whether rows away train to the bits of rows on the device."""
    warnings.simplefilter("ignore")
    options = {"parameters": "rounds", "memory": 1e9}
    each = zip(weights(steps, **options), weights(steps, **options, **AWAY), strict=True)
    return all(torch.equal(a, b) for a, b in each)


def bits(steps: int, quick: bool) -> dict[str, harness.Cell]:
    """Returns how many runs have the bits of whole parameters."""
    whole = plan(small(), buckets(1), backend="eager", device="cpu", tile="none", memory=1e9)
    needs = max(row.needed_bytes for rows in whole.tables.values() for row in rows)
    expected = weights(steps, memory=1e9)
    equal = [
        all(map(torch.equal, expected, weights(steps, memory=share * needs, **AWAY)))
        for share in ((0.25,) if quick else (1.0, 0.5, 0.25))
    ]
    if not quick:
        equal += run_ranks(equal_on_ranks, 2, steps, timeout_s=300.0)
    return {"bit_equal": sum(equal), "cases": len(equal)}


def copied(uses: Sequence[int], stays: Sequence[bool], sizes: Sequence[int]) -> int:
    """Returns the bytes copied, all uses but those before which a unit stayed."""
    every = sum(sizes[unit] for unit in uses)
    return every - sum(sizes[u] for u, stay in zip(uses, stays, strict=True) if stay)


def least(uses: Sequence[int], room: Sequence[float]) -> int:
    """Returns the least copies of any choice, of units of one byte."""
    following = {i: uses.index(u, i + 1) for i, u in enumerate(uses) if u in uses[i + 1 :]}
    best = 0
    for chosen in itertools.product((False, True), repeat=len(following)):
        kept = [(i, end) for (i, end), yes in zip(following.items(), chosen, strict=True) if yes]
        full = any(sum(i < t < end for i, end in kept) > r for t, r in enumerate(room))
        best = best if full else max(best, len(kept))
    return len(uses) - best


def optimum(plans: int) -> float:
    """Returns the worst copies of small step plans over the least."""
    draw, worst = random.Random(0), 1.0
    for _ in range(plans):
        units, uses, room = draw.randint(2, 4), list[int](), list[float]()
        while len(uses) < 10:
            again = range(units - 2, -1, -1) if draw.random() < 0.6 else ()
            mine = [*range(units), *again]
            uses += mine
            room += [draw.randint(0, units)] * len(mine)
        uses, room = uses[:12], room[:12]
        found = copied(uses, kept_after(uses, room, [1] * units), [1] * units)
        worst = max(worst, found / least(uses, room))
    return worst


def warmed(steps: int) -> float:
    """Returns bytes copied over those of a policy that knows one room."""
    options = {"backend": "eager", "memory": 12e6, "verify": "off", **AWAY}
    compiled = dcpc.compile(small(), buckets(1), **options)
    planned = compiled.planned
    loader = dcpc.DataLoader(
        StdlibSource(LENGTHS[-1], limit=400), compiled, samples_per_step=16, pad=PAD,
        weight="labels",
    )  # fmt: skip

    def setting(mb: PlannedMicroBatch) -> RowSetting:
        return RowSetting(mb.sp, mb.micro_batch, mb.menu_step)

    def again(mb: PlannedMicroBatch) -> frozenset[int]:
        placement = planned.placement(mb.bucket)
        return planned.by_bucket[mb.bucket].priced.gathered_again(placement, mb.menu_step)

    staying = StayingUnits(planned, setting, again)
    ours = fixed = 0
    for step in itertools.islice(loader, steps):
        uses, room = staying.uses(rounds_of(step.plan, 0, 1))
        sizes = staying.size_bytes
        ours += copied(uses, kept_after(uses, room, sizes), sizes)
        fixed += copied(uses, kept_after(uses, [min(room)] * len(uses), sizes), sizes)
    return ours / fixed


def fits(setting: LargeModel, world: int, **options: Any) -> bool:
    """Whether every bucket has a plan within the memory."""
    given = {"memory": setting.memory_bytes, "optimizer": ADAM, "backend": "eager", "device": "cpu"}
    try:
        plan(setting.on_meta(), setting.buckets, world=world, **{**given, **options})
    except PlanError:
        return False
    return True


def deepest(setting: LargeModel, world: int, most: int, **options: Any) -> LargeModel:
    """Returns the deepest model that fits, of up to so many layers."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        ok = fits(with_layers(setting, middle), world, **options)
        low, high = (middle, high) if ok else (low, middle)
    return with_layers(setting, low)


def largest() -> dict[str, harness.Cell]:
    """Returns parameters over whole ones on one rank and on four; trains the first."""
    setting = replace(FULL, memory_bytes=147_000_000)  # 2% for what no plan counts
    found: dict[str, harness.Cell] = {}
    whole = parameter_bytes(deepest(setting, 1, 4))
    for world, host, most in ((1, 2_600_000_000, 40), (4, 4_600_000_000, 80)):
        options = {"host": host, "away": "parameters", "parameters": "rounds"}
        one = deepest(setting, world, most, **options)
        found[f"largest_model_over_whole_{world}"] = parameter_bytes(one) / whole
        if world == 1:
            texts = StdlibSource(max(setting.lengths), limit=200)
            ran = train(replace(one, steps=2), texts, host, free=2)
            found["largest_measured_mb"] = ran.measured_bytes / 1e6
    return found


def forward(repeats: int) -> float:
    """Returns tokens a second of forward over accelerate's, parameters in a folder of this disk."""
    from accelerate import disk_offload

    config = GPTConfig(dim=512, n_layers=8, n_heads=8)
    torch.manual_seed(0)
    models = [GPT(config) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    draw = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, 256, (1, n), generator=draw) for n in (32, 48, 128, 64, 256, 40)]
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        ours = dcpc.compile(
            models[0], dcpc.Buckets(INPUTS, [{"seq": n} for n in LENGTHS]), backend="eager",
            memory="200MB", disk=f"{folder}:2GB", away="parameters", verify="off",
        )  # fmt: skip
        theirs = disk_offload(models[1], folder, execution_device=torch.device("cpu"))
        runs = {
            name: partial(_losses, m, batches) for name, m in (("ours", ours), ("theirs", theirs))
        }
        losses = {name: run() for name, run in runs.items()}  # the first call compiles
        assert losses["ours"] == losses["theirs"], "both compute the same"
        taken = harness.interleaved(runs, repeats)
    return median(b / a for a, b in zip(taken["ours"], taken["theirs"], strict=True))


def _losses(model: Any, batches: Sequence[Tensor]) -> list[float]:
    return [float(model(input_ids=ids, labels=ids)) for ids in batches]


def main() -> None:
    """Runs the benchmark."""
    args = harness.parser("tiers", __doc__.partition("\n")[0]).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    quick = args.quick
    figures = bits(2 if quick else 20, quick)
    figures["loads_over_optimum"] = optimum(40 if quick else 200)
    figures["loads_over_warmed_policy"] = warmed(2 if quick else 20)
    figures["tokens_over_disk_offload"] = forward(2 if quick else 9)
    if not quick:
        figures |= largest()
    harness.finish("tiers", figures, args.json)


if __name__ == "__main__":
    main()
