"""benchmarks.recompute: Rotor's programme against all schedules, ratios; the benchmark itself."""

import json
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.recompute import TorchPoint, budgets_of, ratio
from tests.cases.rotor_oracle import Stage, least_recompute


def schedules(s, t):
    """Every way to run blocks s to t forward and backward, their input being stored."""
    if s == t:
        yield (("keep", s), ("back", s))
        return
    for rest in schedules(s + 1, t):
        yield (("keep", s), *rest, ("back", s))
    for r in range(s, t):
        run = (*(("run", i) for i in range(s, r)), ("store", r))
        for after in schedules(r + 1, t):
            for again in schedules(s, r):
                yield (*run, *after, ("drop", r), *again)


def outcome(chain, schedule):
    """(cost, peak) of a schedule, by doing it."""
    held, cost, peak = {}, 0.0, 0.0
    for what, i in schedule:
        if what == "back":
            peak = max(peak, sum(held.values()) - held[i] + chain[i].alive_bytes)
            del held[i]
        elif what == "drop":
            del held["output", i]
        else:
            cost += chain[i].forward
            if what == "keep":
                held[i] = chain[i].kept_bytes
            if what == "store":
                held["output", i] = chain[i].output_bytes
    return cost, peak


@st.composite
def chains(draw):
    rng = random.Random(draw(st.integers(0, 10**6)))
    stages = []
    for _ in range(rng.randint(1, 4)):
        output = rng.randint(1, 4)
        kept = output + rng.randint(0, 9)
        stages.append(Stage(rng.randint(1, 9), kept, output, kept + rng.randint(0, 5)))
    return stages


@settings(max_examples=60, deadline=None)
@given(chains(), st.integers(1, 60))
def test_rotor_is_the_best_of_all_schedules(chain, limit):
    every = [outcome(chain, s) for s in schedules(0, len(chain) - 1)]
    fitting = [cost for cost, peak in every if peak <= limit]
    once = sum(stage.forward for stage in chain)
    expected = min(fitting, default=float("inf")) - once
    assert least_recompute(chain, limit) == expected


def test_enough_memory_runs_nothing_again_and_too_little_nothing_at_all():
    chain = [Stage(3.0, 10.0, 1.0, 12.0)] * 4
    assert least_recompute(chain, 42.0) == 0.0
    assert least_recompute(chain, 41.0) == 3.0
    assert least_recompute(chain, 11.0) == float("inf")


def test_ratios_of_nothing():
    assert ratio(0, 0, 10**9) == 1.0
    assert ratio(0, 10**6, 10**9) == 0.1
    assert ratio(10**6, 0, 10**9) == 10.0
    assert ratio(10**4, 0, 10**9) == 1.0


def test_budgets_are_torchs_undominated_peaks():
    points = [TorchPoint("dp", r, p, f) for r, p, f in ((1, 9, 0), (0.5, 7, 2), (0.4, 8, 3))]
    assert budgets_of(points, 2) == [(7, 2), (9, 0)]
    assert budgets_of(points, 6) == [(7, 2), (8, 2), (9, 0)]  # the third costs torch 2 elsewhere
    assert budgets_of([TorchPoint("dp", 1, p, 9 - p) for p in range(9)], 3) == [
        (0, 9), (4, 5), (8, 1),
    ]  # fmt: skip


@pytest.mark.slow
def test_quick_run_meets_every_budget(tmp_path):
    file = tmp_path / "recompute.json"
    command = [sys.executable, "-m", "benchmarks.recompute", "--quick", "--json", str(file)]
    subprocess.run(command, check=True, timeout=500)
    figures = json.loads(file.read_text())["figures"]
    assert figures["budgets_missed"] == 0
    assert figures["worst_ratio_vs_torch"] <= 1.02
    assert figures["best_ratio_vs_torch"] < 1.0
    assert figures["worst_ratio_vs_rotor"] <= 1.02
