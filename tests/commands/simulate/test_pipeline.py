"""A pipeline's step as a timeline, a trace and a picture."""

import random
from math import inf

import pytest

from dcpc.commands.simulate.pipeline import (
    bubbles,
    draw_pipeline,
    pipeline_timeline,
    pipeline_trace,
    said,
)
from dcpc.runtime.pipeline.schedule import search
from tests.fuzz.pipelines import random_work


@pytest.fixture(scope="module")
def step():
    work = random_work(random.Random(1), 3, 5, 9.0)
    return work, search(work, limit=0)


def test_every_second_of_a_stage_is_work_or_a_bubble(step):
    work, found = step
    line = pipeline_timeline(work, found)
    assert line.busy_s() == pytest.approx([found.replay.makespan_s] * 3)
    waited_s = sum(b.end_s - b.begin_s for b in bubbles(found.replay))
    assert waited_s == pytest.approx(found.replay.bubble_share * 3 * found.replay.makespan_s)


def test_bubbles_say_what_they_wait_for(step):
    waits = bubbles(step[1].replay)
    first = step[1].replay.ran[1][0].action
    assert waits[[w.stage for w in waits].index(1)].why == f"{first} of stage 0"
    assert any(w.why == "the end of the step" for w in waits)


def test_trace_has_a_thread_a_stage_and_the_bytes_that_the_replay_says(step):
    work, found = step
    events = pipeline_trace(work, found, "gpt")["traceEvents"]
    assert {e["tid"] for e in events if e["ph"] == "X"} == {0, 1, 2}
    for stage, peak in enumerate(found.replay.peak_bytes):
        held = [e["args"]["bytes"] for e in events if e["name"] == f"bytes of stage {stage}"]
        assert max(held) == round(peak)
    assert found.bound.binds in events[0]["args"]["name"]


@pytest.mark.parametrize("size", [9.0, inf])
def test_picture_is_written(tmp_path, size):
    work = random_work(random.Random(1), 2, 3, size)
    found = search(work, split=True, limit=0)
    draw_pipeline(work, found, tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    assert f"is below {found.bound.seconds_s:.4g} s" in said(found)
