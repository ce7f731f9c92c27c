"""The rows of a plan: what is not tried would not have been chosen."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import dcpc
from dcpc.api import plan
from dcpc.ir import BucketPlan
from dcpc.ir.thresholds import WIDER_GROUP_GAIN
from dcpc.passes.placement.objective import Objective
from dcpc.passes.placement.placement import PlacementModel, place, solve
from dcpc.plan.choose import TriedRow, choose, least_recompute
from dcpc.plan.planning import Planned
from dcpc.symbolic_profile.seconds.hardware import H200
from models.gpt import GPT, GPTConfig

INPUTS = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
LENGTHS = [{"seq": n} for n in (64, 1024, 16384, 65536)]
DEGREES = (1, 2, 4, 8)
MEMORY = 1.46e9
DEVICE = replace(H200, gpu=False)  # bytes fit as they are, whatever an allocator makes of them


@cache
def planned(*degrees: int) -> Planned:
    """Returns the plan of a GPT, over all degrees or some."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=512, dim=256, n_layers=2, n_heads=8))
    buckets = dcpc.Buckets(INPUTS, LENGTHS)
    given = {"world": 8, "memory": MEMORY, "device": DEVICE, "backend": "eager"}
    return plan(model, buckets, sp=degrees[0] if degrees else "auto", **given)


def rows(
    bucket: dcpc.Bucket,
) -> tuple[dict[tuple[int, int], TriedRow], dict[tuple[int, int], TriedRow]]:
    """Returns the rows that are tried, and those that a free choice of one degree has."""
    tried = {(r.sp, r.micro_batch): r for r in planned().tables[bucket]}
    every = [r for sp in DEGREES for r in planned(sp).tables[bucket]]
    return tried, {(r.sp, r.micro_batch): r for r in every}


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(LENGTHS)))
def test_settings_that_are_not_tried_are_no_better(number):
    tried, every = rows(list(planned().plans)[number])
    fastest = min(r.seconds_s for r in tried.values() if r.fits)
    for (sp, batch), row in every.items():
        if (sp, batch) in tried or not row.fits or batch >= sp > 1:
            continue  # from sp samples on the batch would be split
        half = every.get((sp // 2, batch // 2))
        if batch > 1 and half is not None and half.fits:
            assert half.seconds_s <= row.seconds_s * 1.1, "half of both has as many rank-seconds"
        else:
            hardly_s = fastest * (1 - WIDER_GROUP_GAIN)
            assert row.seconds_s > hardly_s, "a wider group is hardly faster"


def test_wider_groups_are_tried_where_the_segments_of_others_do_not_fit(monkeypatch):
    """Bytes fit one rank, so wider groups seem not worth having; its segments do not."""
    enough = {8}

    def reserved(priced, bucket, row, request):
        return 0 if row.sp in enough else 2 * request.memory_bytes

    monkeypatch.setattr("dcpc.plan.planning._reserved_bytes", reserved)
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=512, dim=64, n_layers=1, n_heads=8))
    buckets = dcpc.Buckets(INPUTS, [{"seq": 64}])
    given = {"world": 8, "memory": MEMORY, "device": DEVICE, "backend": "eager"}
    (chosen,) = plan(model, buckets, **given).plans.values()
    assert chosen.sp == 8
    enough.clear()
    with pytest.raises(dcpc.PlanError, match="run on more ranks than 8"):
        plan(model, buckets, **given)


def test_plan_is_that_of_all_settings():
    sps = set()
    for bucket, chosen in planned().plans.items():
        free = [r for r in rows(bucket)[1].values() if r.sp == 1 or r.micro_batch < r.sp]
        best: BucketPlan = choose(bucket, free, int(MEMORY), 8)
        sample_s = chosen.seconds_s * chosen.sp / chosen.micro_batch
        assert sample_s <= best.seconds_s * best.sp / best.micro_batch * 1.05
        sps.add(chosen.sp)
    assert len(sps) > 1, "some lengths are split, some are not"


def test_some_settings_are_not_tried():
    short = next(iter(planned().plans))
    tried, every = rows(short)
    assert max(sp for sp, _ in tried) < max(DEGREES), "a short sample is not split over all ranks"
    assert len(tried) < len(every)


@pytest.mark.parametrize("known", [(), (0, 30, 52), range(53)], ids=str)
@pytest.mark.parametrize("first", [0, 1, 29, 30, 51, 52])
def test_the_least_recompute_that_fits(first, known):
    priced = []

    def row(step: int) -> TriedRow:
        priced.append(step)
        return TriedRow(1, 1, step, 1.0, lambda: 52, 0, 52 - step, fits=step >= first)

    assert least_recompute(row, lambda: 52, known).menu_step == first
    new = set(priced) - set(known)
    assert not new if len(known) == 53 else len(new) <= 3 + 6


def test_where_nothing_fits_the_smallest_is_told():
    """Its peak is lower where some is kept: nothing at all is kept at a price."""

    def row(step: int) -> TriedRow:
        return TriedRow(1, 1, step, 1.0, lambda: 4, 0, abs(3 - step) + 7, fits=False)

    assert least_recompute(row, lambda: 4, ()).menu_step == 3
    assert least_recompute(row, lambda: 0, ()).menu_step == 0


@pytest.mark.parametrize("sp", [2, 8])
def test_buckets_are_placed_together_as_alone(sp):
    known = planned().runnable.traced
    program, sharding = known.program, known.sharding
    model, objective = PlacementModel(program, sharding), Objective.of_group(known.device, sp)
    buckets = [{**sizes, "batch": batch} for sizes in LENGTHS for batch in (1, 3)]
    together = solve(program, buckets, sp, objective, model)
    alone = [place(program, sharding, sizes, sp, objective) for sizes in buckets]
    assert [b.cost_s for b in together] == pytest.approx([p.cost_s for p in alone], rel=1e-12)
    assert len({b.options for b in together}) > 1, "they are not all split alike"


@torch.library.custom_op("planning_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def row_by_row(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
    return torch.cat([2 * gradient[:, k : k + 1] for k in range(int(gradient.shape[1]))], 1)


twice.register_autograd(row_by_row)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.planning_tests.twice(self.inner(x)).square().mean()


def test_costs_of_a_graph_for_one_size_alone_are_warned_of_at_others():
    buckets = dcpc.Buckets({"x": "float32[batch, seq, 4]"}, [{"seq": 7}, {"seq": 13}])
    with pytest.warns(UserWarning, match=r"at seq = 13 are those of seq = \d+: torch differentiat"):
        plan(Twice(), buckets, backend="eager")
