"""Every system trains every sample once (VideoSys: or says so), on disjoint ranks."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from dcpc.commands.simulate import videosys
from dcpc.commands.simulate.model_rows import Packing
from dcpc.commands.simulate.outcome import of_steps, outcomes_text
from dcpc.commands.simulate.systems import DCPC, PACKING, PADDED, SYSTEMS
from dcpc.commands.simulate.timeline import StepTimeline, chrome_trace, of_step
from dcpc.commands.simulate.workload import Epoch
from tests.commands.simulate.rows import LONG, MIDDLE, SHORT, model_costs

PACKED = Packing(LONG, 2, 1, 1e-4, (64, 8192), (1e-4, 2e-2), 4.0)
DROPS = {"VideoSys intra", "VideoSys inter", "VideoSys inter + PAC"}


def epoch(batches: int = 3, size: int = 60) -> Epoch:
    rng = np.random.default_rng(1)
    buckets = [SHORT, MIDDLE, LONG]
    numbers = iter(range(batches * size))
    made = tuple(
        tuple((next(numbers), buckets[b]) for b in rng.choice(3, size, p=[0.7, 0.25, 0.05]))
        for _ in range(batches)
    )
    return Epoch(made, {i: b["seq"] - i % 50 for batch in made for i, b in batch})


def assert_disjoint(line: StepTimeline) -> None:
    by_rank: dict[int, list[tuple[float, float]]] = {}
    for span in line.spans:
        assert span.begin_s <= span.end_s <= line.end_s + 1e-12
        for rank in range(span.first_rank, span.first_rank + span.ranks):
            by_rank.setdefault(rank, []).append((span.begin_s, span.end_s))
    assert set(by_rank) <= set(range(line.world))
    for spans in by_rank.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(spans))


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_trains_each_sample_at_most_once_on_disjoint_ranks(name):
    costs, given = model_costs(), epoch()
    costs = replace(costs, packing=PACKED)
    plans = list(SYSTEMS[name](costs, given))
    outcome = of_steps(name, plans, costs, given.tokens, shown=len(plans))
    trained = sorted(i for plan in plans for mb in plan.micro_batches for i in mb.sample_ids)
    assert len(trained) == len(set(trained)) == outcome.samples
    assert outcome.dropped == len(given.tokens) - len(trained)
    if name not in DROPS:
        assert trained == sorted(given.tokens)
    for line in outcome.shown:
        assert_disjoint(line)
    makespans = sum(plan.makespan_s + costs.reduction_s for plan in plans)
    assert outcome.seconds_s == pytest.approx(makespans)
    assert sum(line.end_s for line in outcome.shown) == pytest.approx(makespans)
    assert 0 <= outcome.idle_share < 1


def test_dcpc_is_ahead_of_every_baseline_but_for_rows_not_worth_compiling():
    costs, given = model_costs(), epoch()
    found = {
        name: of_steps(name, system(costs, given), costs, given.tokens)
        for name, system in SYSTEMS.items()
        if name != PACKING
    }
    assert found[DCPC].dropped == 0
    for name, outcome in found.items():
        assert found[DCPC].tokens_per_s >= 0.97 * outcome.tokens_per_s, name
    text = outcomes_text("title", list(found.values()))
    assert DCPC in text
    assert PADDED in text


def test_idle_share_counts_ranks_that_wait_and_ranks_without_work():
    costs = model_costs()
    first = next(iter(SYSTEMS[PADDED](costs, Epoch((((0, LONG),),), {0: 8192}))))
    line = of_step(first)
    ranks = first.micro_batches[0].sp
    assert line.idle_share == pytest.approx(1 - ranks / 8)
    assert line.busy_s().tolist() == pytest.approx(list(first.busy_s))


def test_chrome_trace_has_every_rank_of_every_span_in_order():
    costs, given = model_costs(), epoch()
    lines = [of_step(p, costs.reduction_s) for p in SYSTEMS[DCPC](costs, given)]
    events = [e for e in chrome_trace({"dcpc": lines})["traceEvents"] if e["ph"] == "X"]
    assert len(events) == sum(span.ranks for line in lines for span in line.spans)
    by_rank: dict[int, list[tuple[float, float]]] = {}
    for e in events:
        by_rank.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in by_rank.values():
        spans.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(spans))
    end_us = max(end for spans in by_rank.values() for _, end in spans)
    assert end_us / 1e6 == pytest.approx(sum(line.end_s for line in lines), rel=1e-6)


def test_chrome_trace_of_many_ranks_shows_blocks():
    line = StepTimeline(4096, (), 1.0)
    names = [e for e in chrome_trace({"x": [line]})["traceEvents"] if e["name"] == "thread_name"]
    assert len(names) == 64
    assert names[1]["args"]["name"] == "ranks 64-127"


def test_inter_drops_a_bucket_that_cannot_fill_its_accumulation_and_intra_keeps_more():
    costs = model_costs(usual=8)
    samples = [(i, SHORT) for i in range(500)] + [(500 + i, LONG) for i in range(9)]
    trained = {
        mode: {i for p in videosys.steps(costs, samples, mode) for mb in p.micro_batches
               for i in mb.sample_ids}
        for mode in ("intra", "inter", "pac")
    }  # fmt: skip
    assert len(trained["intra"]) > len(trained["inter"])
    assert len(trained["inter"]) < len(samples)
