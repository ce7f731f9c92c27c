"""Plans with parameters in rounds of blocks: what a rank keeps and sends, degrees, best block."""

import warnings
from functools import cache
from typing import Any

import pytest
import torch

import dcpc
from dcpc.commands.simulate.model_rows import of_planned
from dcpc.errors import PlanError
from dcpc.plan.planning import Planned
from dcpc.runtime.planner.plans import rounds_of
from dcpc.runtime.planner.step_planner import plan_step
from dcpc.runtime.planner.table import mode_table
from dcpc.symbolic_profile import find
from dcpc.trace import trace
from models.gpt import GPT, GPTConfig
from tests.cases.ready import traced_once

BUCKETS = dcpc.Buckets(dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]"),
                       sizes=[{"seq": 64}, {"seq": 4096}])  # fmt: skip
H200 = find("h200")
WORLD = 16  # two nodes


@pytest.fixture(scope="module", autouse=True)
def _traces_are_made_once():
    """Tests plan one module for other blocks."""
    with traced_once():
        yield


@cache
def model() -> GPT:
    return GPT(GPTConfig(vocab_size=64, dim=64, n_layers=1, n_heads=4))


def planned(block: int | str | None, world: int = WORLD, **options: Any) -> Planned:
    options = {"device": "h200", "backend": "eager", "parameters": "rounds"} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dcpc.api.plan(model(), BUCKETS, world=world, block=block, **options)


def test_a_rank_keeps_its_rows_of_a_block_and_sends_within_it():
    whole = sum(p.nbytes for p in model().parameters())
    for block in (2, 8):
        found = planned(block, sp=1)
        request = found.request
        assert (request.block, request.gradient_bytes) == (block, whole // block)  # rows divide
        least = whole // block * 4  # with gradients and Adam's state
        assert least <= request.resident_bytes < least + 512 * len(request.residents)
        for bucket, plan in found.plans.items():
            # Gathered once or twice, and summed.
            sent = float(found.profile(bucket).wire_bytes) / (whole / block * (block - 1))
            assert sent == pytest.approx(2, abs=0.01) if not plan.menu_step else 2 <= sent <= 3
        owners, link = WORLD // block, H200.across
        sum_s = link.alpha_s + 2 * (owners - 1) / owners * whole / block / link.bytes_per_s
        assert found.sum_s == pytest.approx(sum_s)
        assert f"{owners} blocks of {block} ranks" in found.report()
        costs = of_planned(found, WORLD, H200)
        assert costs.reduction_s == found.sum_s
        assert costs.reduction_wire_bytes == 2 * (owners - 1) * whole  # of all ranks
    for block in (None, WORLD):
        alone = planned(block, sp=1)
        assert (alone.block, alone.sum_s) == (WORLD, 0.0)
        assert of_planned(alone, WORLD, H200).reduction_wire_bytes == 0


def test_degrees_are_within_a_block_or_of_whole_blocks():
    found = planned(4, world=12)
    assert found.request.sps == (1, 2, 4, 12)
    assert planned(3, world=12, sp=[2, 3, 5, 6]).request.sps == (3, 6)
    table = mode_table(found, "auto", 12, 8)
    short, long = table.buckets
    plan = plan_step([(i, long if i % 5 == 0 else short) for i in range(40)], table)
    assert plan.block == 4
    assert sum(len(rounds_of(plan, rank, 4)) for rank in (0, 4, 8)) >= 3  # none is refused
    with pytest.raises(PlanError, match=r"got sp=3 with block=4; expected a degree that divides"):
        planned(4, world=12, sp=3)
    with pytest.raises(PlanError, match=r"got block=5 with 12 ranks; expected a divisor.*\(2, 3"):
        planned(5, world=12)


def test_auto_takes_the_block_of_least_time_among_those_that_fit(monkeypatch):
    inputs = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
    (bucket,) = buckets = dcpc.Buckets(inputs, sizes=[{"seq": 8, "batch": 1}])
    options = {"sp": 1, "recompute": "none", "device": "cpu", "world": 4, "backend": "eager"}

    def made() -> GPT:
        with torch.device("meta"):
            return GPT(GPTConfig(vocab_size=100_000, dim=32, n_layers=1, n_heads=2))

    same = made()

    def wide(
        block: int | str, memory: float = 1e12, parameters: str = "rounds", model: GPT = same
    ) -> Planned:
        return dcpc.api.plan(
            model, buckets, block=block, memory=memory, parameters=parameters, **options
        )

    every = {block: wide(block) for block in (2, 4)}
    needed = {block: found.tables[bucket][0].needed_bytes for block, found in every.items()}
    seconds = {b: found.plans[bucket].seconds_s + found.sum_s for b, found in every.items()}
    assert needed[2] > needed[4]
    assert wide("auto").block == min(seconds, key=seconds.__getitem__)
    traces = []
    monkeypatch.setattr("dcpc.plan.traced.trace", lambda *args: traces.append(args) or trace(*args))
    assert wide("auto", needed[4], "auto", made()).block == 4
    assert len(traces) == 1  # whole, step, blocks of 2 and of 4: candidates of one trace
    monkeypatch.undo()
    with pytest.raises(PlanError, match="too little"):
        wide("auto", needed[4] / 2)
