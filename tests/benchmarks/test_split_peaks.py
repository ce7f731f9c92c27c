"""Peaks of a plan on several ranks: of the one that holds most, however attention is split.

The mixture of experts is random, so its ranks' tokens choose other experts at each length.
"""

import warnings

import pytest
import torch
import torch.distributed as dist

import dcpc
from dcpc.codegen import bind_group
from dcpc.commands.check import SplitModel
from dcpc.plan.traced import group_name
from examples.allocator import measured_peak_bytes
from tests.cases.launch import run_ranks
from tests.cases.memory_models import MIXTURE, SUBJECTS

LENGTHS = (7, 31, 130)  # no number of ranks divides them all
CAUSAL = ("ring", "gathered", "heads")


def split_peaks(rank: int, name: str, sp: int) -> list[tuple[str, int, int]]:
    """(setting, measured, planned) peaks of a forward and a backward, of each way to split."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world, subject, found = dist.group.WORLD, SUBJECTS.get(name, MIXTURE), []
    assert world is not None
    bind_group(group_name(sp), world)
    sizes = [{"batch": 2, "seq": n} for n in LENGTHS]
    buckets = dcpc.Buckets(subject.inputs, [*subject.sizes, *sizes])
    first = SplitModel(subject.make(1), buckets, subject.placed_for, "eager", sp=sp)
    for way in CAUSAL[: 3 if first.lowerings().count("heads") else 2]:
        split = first.of("eager", sp, way)
        for steps in (0, split.study.steps):
            for at in sizes:
                variant, integers = split.runnable.variant(split.placement, steps, at, rank)
                inputs = subject.example(at)
                named = {**split.held(), **{p: inputs[n] for p, n in split.program.inputs.items()}}
                tensors = [named[p] for p in variant.placeholders]

                def both(variant=variant, tensors=tensors, integers=integers) -> torch.Tensor:
                    loss = variant(tensors, integers)
                    loss.backward()
                    return loss

                split.model.zero_grad()
                measured = measured_peak_bytes(both)
                planned = split.study.predict(steps, at).peak_bytes
                found.append((f"{way} {at} recompute {steps}", measured, planned))
    return found


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sp"), [("GPT", 2), ("Llama", 3), *(("mixture", sp) for sp in (1, 2, 4))]
)
def test_a_plan_has_the_peak_of_the_rank_that_holds_most(name, sp):
    """However attention is split, of lengths that ranks do not divide, recomputed or not."""
    every = run_ranks(split_peaks, sp, name, sp, timeout_s=200)
    assert len(every[0]) >= 12
    for of_ranks in zip(*every, strict=True):
        (setting, _, planned), *_ = of_ranks
        assert planned == pytest.approx(max(m for _, m, _ in of_ranks), rel=0.001), setting
