"""Lengths from files, and the simulator on a cost formula."""

import json
from pathlib import Path

import numpy as np
import pytest

from dcpc.commands.simulate import SimulationRequest, read_cost, simulate_cost, source_of
from dcpc.commands.simulate.formula import degrees_of
from dcpc.commands.simulate.outcome import of_batches
from dcpc.commands.simulate.packers import planners, plans_of
from dcpc.commands.simulate.workload import batches_of_lengths, read_histogram, read_lengths
from dcpc.errors import PlanError

COST = Path(__file__).parents[3] / "examples" / "flexsp_cost.json"
BATCHES = [[128, 4000, 70_000, 900, 900, 12_000, 300, 5000], [40_000, 256, 256, 8000, 1024, 640]]


@pytest.mark.parametrize("name", planners(read_cost(COST, 16), BATCHES))
def test_every_planner_places_each_sequence_once_and_its_timeline_adds_up(name):
    cost = read_cost(COST, 16)
    planner = planners(cost, BATCHES)[name]
    plans = list(plans_of(planner, BATCHES, cost))
    outcome = of_batches(name, plans, cost.comm_bytes)  # asserts each sequence once
    assert outcome.samples == sum(map(len, BATCHES))
    assert outcome.seconds_s == pytest.approx(sum(plan.makespan_s for plan, _ in plans))
    for line in outcome.shown:
        changes = sorted(
            (t, change, span.first_rank, span.ranks)
            for span in line.spans
            for t, change in ((span.begin_s, 1), (span.end_s, -1))
        )
        load = np.zeros(16, dtype=int)
        for t, change, first, ranks in changes:
            load[first : first + ranks] += change
            assert t <= line.end_s * (1 + 1e-12)
            assert load.max() <= 1
            assert load.min() >= 0


def test_sent_bytes_are_those_of_tokens_in_groups():
    cost = read_cost(COST, 16)
    batch = [[128, 128], [20_000]]
    plans = list(plans_of(planners(cost, batch)["first fit"], batch, cost))
    assert of_batches("x", plans, cost.comm_bytes).wire_bytes == 20_000 * cost.comm_bytes


def test_simulate_writes_a_trace_and_a_picture(tmp_path):
    lengths = tmp_path / "lengths.json"
    lengths.write_text(json.dumps({"lens": [500, 1000, 30_000, 900_000]}))
    request = SimulationRequest(8, 2, 100_000, trace=tmp_path / "t.json", png=tmp_path / "p.png")
    text = simulate_cost(read_cost(COST, 8), source_of(lengths, None), request)
    assert "dcpc" in text
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_degrees_of_many_ranks_are_few():
    assert degrees_of(8, 8) == tuple(range(1, 9))
    assert len(degrees_of(4096, 8)) < 50
    assert degrees_of(4096, 8)[-1] == 4096


def test_histogram_is_drawn_in_its_proportions(tmp_path):
    file = tmp_path / "h.csv"
    file.write_text('range,number\n"[0, 10]",30\n"[11, 20]",10\n')
    drawn = read_histogram(file).draw(4000, np.random.default_rng(0))
    assert drawn.min() >= 1
    assert drawn.max() <= 20
    assert (drawn <= 10).mean() == pytest.approx(0.75, abs=0.03)


def test_batches_reach_their_tokens(tmp_path):
    file = tmp_path / "l.json"
    file.write_text(json.dumps({"lens": [10, 20]}))
    batches = batches_of_lengths(read_lengths(file), 3, 1000)
    assert all(1000 <= sum(batch) < 1020 for batch in batches)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("{}", "without a list"),
        ("[3]", "without a list"),
        ("", "no JSON from line 1, column 1"),
        ('{"lens": [3, 4}', "no JSON from line 1, column 15"),
        ('{"lens": [0.5]}', "other values"),
        ('{"lens": []}', "0 lengths"),
        ('{"lens": [0]}', "from 0 tokens"),
    ],
)
def test_lengths_that_cannot_be_read_say_what_is_expected(tmp_path, text, wrong):
    file = tmp_path / "l.json"
    file.write_text(text)
    with pytest.raises(PlanError, match=wrong) as raised:
        read_lengths(file)
    assert "Error" not in str(raised.value)


def test_cost_file_with_an_unknown_field_is_refused(tmp_path):
    file = tmp_path / "c.json"
    file.write_text(json.dumps({**json.loads(COST.read_text()), "extra": 1}))
    with pytest.raises(PlanError, match="extra"):
        read_cost(file, 8)
