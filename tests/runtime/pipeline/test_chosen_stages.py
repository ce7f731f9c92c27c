"""`pipeline="auto"` and the commands: what a model in stages is predicted to take, before ranks."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from typer.testing import CliRunner

import dcpc
from dcpc.api import cut_with, plan_with
from dcpc.commands.cli import app
from dcpc.compiled.pipeline import choose_stages
from dcpc.compiled.pipeline.trained.ladder import Ladder
from dcpc.errors import PlanError
from dcpc.plan.options import PlanOptions
from dcpc.runtime.pipeline.schedule import PipelineSchedule, check
from dcpc.runtime.planner.own_lengths import BatchLengths, OwnLengths
from tests.cases.asks import TEXT, gpt
from tests.cases.exactness import SPLITTING

BUCKETS = dcpc.Buckets(TEXT, sizes=[{"seq": n, "batch": 2} for n in (16, 48)])
OPTIONS = PlanOptions(backend="eager", device=SPLITTING, world=2)


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return gpt(layers=3, width=32)


def test_auto_takes_what_ends_first_and_fits(model):
    single = plan_with(model, BUCKETS, replace(OPTIONS, world=1, sp=1, memory=1e9), partly=True)
    whole = plan_with(model, BUCKETS, OPTIONS)
    ample = choose_stages(model, BUCKETS, whole, single, 2)
    assert ample.cut is None, "over this slow link a stage waits for messages"
    assert "no pipeline: a step of 8 samples" in ample.why
    state_bytes = 4 * sum(p.nbytes for p in model.parameters())

    def of_memory(share):
        request = replace(single.request, memory_bytes=int(share * state_bytes))
        misfit = PlanError("the whole model does not fit")
        return choose_stages(model, BUCKETS, misfit, replace(single, request=request), 2)

    short = of_memory(1.2)
    assert short.cut is not None
    assert max(short.cut.plan.needed_bytes) <= 1.2 * state_bytes
    assert "2 stages: a step of 8 samples" in short.why
    assert "no pipeline does not fit" in short.why
    with pytest.raises(PlanError, match="the whole model does not fit"):
        of_memory(0.3)


def test_a_plan_has_every_sample_once_in_micro_batches_of_a_bucket(model):
    planner = cut_with(model, BUCKETS, replace(OPTIONS, world=6), 2).planner
    own = tuple(BUCKETS)
    samples = [(i, own[i % 3 == 0]) for i in range(13)]
    found = planner.plan(samples, "hash")
    assert len(found.pipelines) == planner.replicas == 3
    assert sorted(i for mb in found.micro_batches for i in mb.sample_ids) == list(range(13))
    for mb in found.micro_batches:
        assert {dict(samples)[i] for i in mb.sample_ids} == {mb.bucket}
        assert len(mb.sample_ids) <= 2
    for replica, text in enumerate(found.pipelines):
        schedule = PipelineSchedule.of_text(text)
        assert str(schedule) == text
        check(schedule, len(found.of(2 * replica)))
        kept = range(1, len(found.of(2 * replica)))
        check(schedule.only(kept), len(kept))
    assert max(found.busy_s) <= found.makespan_s
    few = planner.plan(samples[:2], "hash")
    assert [len(few.of(rank)) for rank in range(6)] == [1, 1, 1, 1, 0, 0]


def test_micro_batches_of_stages_run_at_the_length_of_their_longest_sample(model):
    planner = cut_with(model, BUCKETS, replace(OPTIONS, world=2), 2).planner
    own = OwnLengths(lambda bucket, sizes: sizes["seq"] % 5 > 0, None, lambda bucket: {"seq": 2})
    given = [3, 47, 33, 12, 20, 48, 16, 2, 7, 34, 41, 47]
    samples = [(i, BUCKETS.holding({"seq": n})) for i, n in enumerate(given)]
    lengths = BatchLengths(own, {i: (("seq", n),) for i, n in enumerate(given)})
    found, padded = planner.plan(samples, "hash", lengths), planner.plan(samples, "hash")
    assert sorted(i for mb in found.micro_batches for i in mb.sample_ids) == [*range(len(given))]
    for mb in found.micro_batches:
        longest = max(given[i] for i in mb.sample_ids)
        assert mb.shape["seq"] == min(mb.bucket["seq"], longest + (longest % 5 == 0))
        assert {dict(samples)[i] for i in mb.sample_ids} == {mb.bucket}
        assert len(mb.sample_ids) <= 2
    assert {mb.shape["seq"] for mb in found.micro_batches} - {16, 48}
    tokens = [sum(len(mb.sample_ids) * mb.shape["seq"] for mb in p.micro_batches)
              for p in (found, padded)]  # fmt: skip
    assert tokens[0] < 0.9 * tokens[1]
    assert found.makespan_s < padded.makespan_s


def test_places_of_several_dims_hold_all_samples_before_them():
    buckets = [dcpc.Bucket.of({"h": 8, "w": 40}), dcpc.Bucket.of({"h": 40, "w": 40})]
    own = OwnLengths(lambda bucket, sizes: True, None, lambda bucket: {"h": 2, "w": 2})
    dims = {0: (9, 30), 1: (30, 9), 2: (3, 5), 3: (8, 40), 4: (40, 2), 5: (4, 5)}
    lengths = BatchLengths(own, {i: (("h", h), ("w", w)) for i, (h, w) in dims.items()})
    samples = [(i, buckets[0 if i in (2, 3, 5) else 1]) for i in dims]
    ladder = Ladder.of(samples, buckets, lengths)
    assert [ladder.homes[p] for p in ladder.places] == [1, 1, 0, 0, 1, 0]
    for (i, bucket), place in zip(samples, ladder.places, strict=True):
        sizes = ladder.sizes[place]
        assert dims[i][0] <= sizes["h"] <= bucket["h"]
        assert dims[i][1] <= sizes["w"] <= bucket["w"]
    for before, after in pairwise(range(len(ladder.sizes))):
        if ladder.homes[before] == ladder.homes[after]:
            assert all(n <= ladder.sizes[after][d] for d, n in ladder.sizes[before].items())


def test_simulate_writes_the_timeline_of_the_stages(tmp_path):
    trace, png = tmp_path / "step.json", tmp_path / "step.png"
    ran = CliRunner().invoke(app, [
        "simulate", "examples.train_text:model", "--buckets", "examples/buckets.yaml", "--world",
        "4", "--pipeline", "2", "--shares", "3,2,1,0", "--tokens-per-step", "8192", "--steps", "1",
        "--device", "h200", "--trace", str(trace), "--png", str(png),
    ])  # fmt: skip
    assert ran.exit_code == 0, ran.output
    assert "2 pipelines of 2 stages" in ran.output
    assert "step 0: " in ran.output
    assert {e["tid"] for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"} == {
        0, 1,
    }  # fmt: skip
    assert png.read_bytes()[:4] == b"\x89PNG"
    refused = CliRunner().invoke(app, [
        "report", "examples.train_text:model", "--seq", "64", "--world", "3", "--pipeline", "2",
    ])  # fmt: skip
    assert refused.exit_code == 1
    assert "got 3 ranks; expected a multiple of 2" in refused.output
