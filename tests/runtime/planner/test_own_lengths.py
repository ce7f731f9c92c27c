"""Micro-batches at the lengths of their samples: these hold them, and end no later than buckets."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import dcpc
from dcpc.buckets import Bucket
from dcpc.commands.replay import replay
from dcpc.errors import PlanError
from dcpc.ir import PlanRow
from dcpc.runtime.planner.own_lengths import BatchLengths, OwnLengths
from dcpc.runtime.planner.plan_file import PlanFile, plan_json, plan_of
from dcpc.runtime.planner.plans import timeline
from dcpc.runtime.planner.step_planner import Allowed, plan_step
from dcpc.runtime.planner.table import PlanTable

SIZES = (8, 32, 100)
BUCKETS = tuple(Bucket.of({"seq": n}) for n in SIZES)
LAUNCH_S = 5.0


def seconds(bucket, row, sizes, count):
    return LAUNCH_S + count * sizes["seq"] * (1 + sizes["seq"] / 50) / row.sp**0.9


def table(world, batches=(1, 2, 4)):
    rows = [
        tuple(
            PlanRow(sp, m, 0, seconds(b, PlanRow(sp, m, 0, 0.0), b.sizes, m))
            for sp, m in product([d for d in (1, 2) if d <= world], batches)
        )
        for b in BUCKETS
    ]
    return PlanTable(BUCKETS, tuple(rows), world, node_ranks=8)


def own(runs_at=lambda bucket, sizes: True, multiple=1, seconds_at=seconds):
    return OwnLengths(runs_at, seconds_at, lambda bucket: {"seq": SIZES[0]}, multiple)


def batch(lengths):
    samples = [(i, next(b for b in BUCKETS if b["seq"] >= n)) for i, n in enumerate(lengths)]
    return samples, {i: (("seq", n),) for i, n in enumerate(lengths)}


lengths_of_batches = st.lists(st.integers(2, 100), min_size=1, max_size=20)


@settings(deadline=None, max_examples=40)
@given(
    lengths_of_batches,
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 8]),
    st.sampled_from(["auto", "inter"]),
    st.booleans(),
)
def test_every_sample_runs_once_at_a_length_that_holds_it(lengths, world, multiple, mode, pads):
    chosen = own(lambda bucket, sizes: sizes["seq"] % 7 != 0, multiple)
    samples, dims = batch(lengths)
    made = table(world) if mode == "auto" else table(1, (4,))
    allowed = Allowed(pads=pads and mode == "auto")
    plan = plan_step(samples, made, mode, allowed, BatchLengths(chosen, dims))
    assert sorted(i for mb in plan.micro_batches for i in mb.sample_ids) == [*range(len(lengths))]
    for mb in plan.micro_batches:
        longest = max(lengths[i] for i in mb.sample_ids)
        size = mb.shape["seq"]
        assert longest <= size <= mb.bucket["seq"]
        assert size in SIZES or (size % 7 and size % multiple == 0)
        if pads or size == mb.bucket["seq"]:
            continue
        between = range(-(-longest // multiple) * multiple, size, multiple)
        assert all(n % 7 == 0 or n < SIZES[0] for n in between)  # the least that is right
    assert 0 < plan.bound_s <= plan.makespan_s * (1 + 1e-9)
    assert plan.makespan_s == max(timeline(plan.micro_batches, made.world)[2])
    assert plan_of(plan_json(plan, made), made, "here").micro_batches == plan.micro_batches


@settings(deadline=None, max_examples=30, derandomize=True)
@given(lengths_of_batches, st.sampled_from([1, 2]))
def test_own_lengths_end_no_later_than_buckets(lengths, world):
    samples, dims = batch(lengths)
    made = table(world)
    at_own = plan_step(samples, made, "auto", None, BatchLengths(own(), dims))
    assert at_own.makespan_s <= plan_step(samples, made).makespan_s * 1.01


def test_samples_of_like_length_go_together():
    samples, dims = batch([34, 100, 35, 100, 34, 100, 35, 100])
    plan = plan_step(samples, table(1, (4,)), "inter", None, BatchLengths(own(), dims))
    assert sorted((len(mb.sample_ids), mb.shape["seq"]) for mb in plan.micro_batches) == [
        (4, 35),
        (4, 100),
    ]


@pytest.mark.parametrize("speeds", [(), (1.0, 0.5)])
def test_no_micro_batch_takes_less_in_two_parts_of_like_length(speeds, monkeypatch):
    monkeypatch.setitem(globals(), "LAUNCH_S", 20.0)
    several, finer = 0, table(2, (1, 2, 4, 8, 16))
    for seed in range(6):
        samples, dims = batch(np.random.default_rng(seed).integers(8, 100, 40).tolist())
        lengths, rows = BatchLengths(own(), dims), replace(finer, speeds=speeds)
        for mb in plan_step(samples, rows, "auto", Allowed(pads=True), lengths).micro_batches:
            ids = sorted(mb.sample_ids, key=lambda i: dims[i])
            whole_s = lengths.at_length(mb, rows.row_of(mb)).seconds_s
            several += len(ids) > 1
            for at in range(1, len(ids)):
                parts = [replace(mb, sample_ids=tuple(own)) for own in (ids[:at], ids[at:])]
                each = (lengths.at_length(part, rows.row_of(mb)) for part in parts)
                assert sum(part.seconds_s for part in each) >= whole_s * (1 - 1e-9)
    assert several


def test_where_the_trace_holds_for_buckets_alone_padding_stays():
    samples, dims = batch([9, 20, 40, 70])
    never = own(lambda bucket, sizes: False)
    plan = plan_step(samples, table(1), "auto", None, BatchLengths(never, dims))
    assert {mb.shape for mb in plan.micro_batches} == {*BUCKETS[1:]}
    assert all(not mb.dims for mb in plan.micro_batches)


def test_several_dims_are_all_right_together_or_the_buckets():
    bucket = Bucket.of({"frames": 16, "height": 64})
    chosen = OwnLengths(
        lambda b, sizes: sizes["frames"] % 2 == 0, None, lambda b: {"frames": 2, "height": 32}, 4
    )
    assert chosen.padded(bucket, (("frames", 5), ("height", 33))) == (("frames", 8), ("height", 36))
    odd = replace(chosen, multiple=1)
    assert odd.padded(bucket, (("frames", 6), ("height", 8))) == (("frames", 6), ("height", 32))
    assert odd.padded(bucket, (("frames", 5), ("height", 33))) == bucket.shape_key


def test_without_predictions_seconds_are_those_of_full_samples():
    row = PlanRow(1, 4, 0, 8.0)
    without = own(seconds_at=None)
    assert without.seconds_s(BUCKETS[2], row, (("seq", 40),), 1) == pytest.approx(2.0)
    assert without.seconds_s(BUCKETS[2], row, (("seq", 40),), 4) == 8.0


def test_a_plan_file_says_all_that_the_plan_is_made_of(tmp_path):
    samples, dims = batch([3, 20, 26, 27, 40, 70, 99, 100])
    made = table(2)
    lengths = BatchLengths(own(lambda bucket, sizes: sizes["seq"] % 7 != 0), dims)
    plan = plan_step(samples, made, "auto", None, lengths)
    file = tmp_path / "plan.json"
    PlanFile(plan, made, Allowed(), tuple(samples), lengths).write(file)
    read = PlanFile.read(file)
    assert read.plan == plan
    assert read.lengths is not None
    assert read.lengths.dims == dims
    assert "planned again: the same\n" in replay(read)


def test_a_plan_file_without_the_seconds_that_are_asked_for_is_refused(tmp_path):
    samples, dims = batch([20, 40])
    made = table(1)
    lengths = BatchLengths(own(), dims)
    plan = plan_step(samples, made, "auto", None, lengths)
    file = tmp_path / "plan.json"
    PlanFile(plan, made, Allowed(), tuple(samples), lengths).write(file)
    data = json.loads(file.read_text())
    data["lengths"]["seconds_s"] = []
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError, match="save the plan again"):
        replay(PlanFile.read(file))


class Pooled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        return F.adaptive_avg_pool2d(self.mix(x), 2).square().mean()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_lengths_that_inductor_would_compile_one_by_one_are_padded_to_buckets(backend):
    buckets = dcpc.Buckets({"x": "float32[batch, 3, h, w]"}, [{"h": 20, "w": 30}])
    compiled = dcpc.compile(Pooled(), buckets, backend=backend, verify="off", memory=1e9)
    (bucket,), dims = buckets, (("h", 9), ("w", 17))
    anew = backend == "inductor"
    assert compiled.own_lengths(None).padded(bucket, dims) == (bucket.shape_key if anew else dims)
    assert ("anew for each length" in compiled.report()) == anew
    x = torch.randn(2, 3, 9, 17)
    if anew:
        with pytest.raises(dcpc.DispatchError, match=r"got {h: 9, w: 17}; .*anew .*backend='eager"):
            compiled(x=x)
    else:
        torch.testing.assert_close(compiled(x=x), compiled.model(x))
    compiled.close()
