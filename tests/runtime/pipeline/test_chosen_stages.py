"""`pipeline="auto"` and the commands: what a model in stages is predicted to take, before ranks."""

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import dcpc
from dcpc.api import cut_with, plan_with
from dcpc.commands.cli import app
from dcpc.compiled.pipeline import choose_stages
from dcpc.errors import PlanError
from dcpc.plan.options import PlanOptions
from dcpc.runtime.pipeline.schedule import PipelineSchedule, check
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
