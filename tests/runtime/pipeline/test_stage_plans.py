"""Where a traced model is cut for a mixture of shapes: prices, memory, unequal devices."""

from functools import partial
from math import inf

import numpy as np
import pytest
import torch

from dcpc.compiled.pipeline import (
    MixedBucket,
    ProgramCosts,
    StageDevice,
    StageState,
    pipeline_work,
    plan_stages,
    run_in_turn,
    stage_bytes,
)
from dcpc.compiled.pipeline.stage_costs import mixed_costs
from dcpc.errors import PlanError
from dcpc.passes.stages.mixture import best_cut
from dcpc.plan.runnable import Runnable
from dcpc.runtime.parameters.modes import shares
from dcpc.symbolic_profile import OptimizerMemory
from tests.cases.stages import CASES, captured, of_one_trace, plain_gradients

SGD = partial(partial, torch.optim.SGD)
MIXTURE = (
    MixedBucket({"batch": 512, "seq": 16}, 0.5),
    MixedBucket({"batch": 128, "seq": 48}, 0.5),
)


@pytest.fixture(scope="module")
def tied():
    model, traced, chain = captured(CASES["gpt_tied"])
    return model, Runnable(traced), chain


def priced(runnable, chain, device, count):
    """Returns the costs of every stage on so many devices."""
    places = np.arange(len(chain.borders))[:, None]
    return mixed_costs([ProgramCosts(runnable, chain)], places, MIXTURE, [(device, count)])


def test_seconds_of_the_blocks_are_the_profiles(tied):
    _, runnable, chain = tied
    costs = priced(runnable, chain, StageDevice(), 1)
    whole = len(chain.borders) - 1
    for number, bucket in enumerate(MIXTURE):
        placement = runnable.priced.placement(bucket.sizes, 1)
        wanted = runnable.priced.at(placement).predict(0, bucket.sizes).seconds_s
        assert costs.seconds[number, 0, 0, 0, whole] == pytest.approx(wanted, rel=1e-12)


def test_a_plan_is_of_about_the_seconds_of_its_own_stages(tied):
    model, runnable, _ = tied
    plan = plan_stages([runnable], model, MIXTURE, [StageDevice()] * 2)
    for number, bucket in enumerate(MIXTURE):
        own = max(stage.at(bucket.sizes).predict(bucket.sizes).seconds_s for stage in plan.stages)
        assert plan.cut.bottleneck_s[number] == pytest.approx(own, rel=0.1)
    assert plan.menu_steps == ((0, 0), (0, 0))


def test_a_slow_device_gets_less_and_devices_are_told_by_number(tied):
    model, runnable, _ = tied
    equal = plan_stages([runnable], model, MIXTURE, [StageDevice()] * 2)
    unequal = plan_stages([runnable], model, MIXTURE, [StageDevice(0.25), StageDevice()])
    assert sorted(unequal.devices) == [0, 1]
    slow = unequal.devices.index(0)
    sizes = MIXTURE[1].sizes
    even = max(stage.at(sizes).predict(sizes).seconds_s for stage in equal.stages)
    assert unequal.stages[slow].at(sizes).predict(sizes).seconds_s < 0.8 * even
    assert unequal.cut.expected_s < 4 * equal.cut.expected_s


def test_memory_is_kept_to_by_recompute_and_numbers_stay(tied):
    model, runnable, _ = tied
    free = plan_stages([runnable], model, MIXTURE, [StageDevice()] * 2)
    most = 0.9 * max(free.needed_bytes)
    plan = plan_stages([runnable], model, MIXTURE, [StageDevice(1.0, most)] * 2)
    assert max(plan.needed_bytes) <= most
    assert any(step for steps in plan.menu_steps for step in steps)
    for stage, steps in zip(plan.stages, plan.menu_steps, strict=True):
        pairs = zip(MIXTURE, steps, strict=True)
        assert all(stage_bytes(stage.by_trace[0].recomputing(k), b.sizes) <= most for b, k in pairs)
    inputs = CASES["gpt_tied"].data({"batch": 2, "seq": 48}, 0)
    losses, wanted = plain_gradients(model, [inputs], [1.0])
    pairs = zip(plan.stages, plan.menu_steps, strict=True)
    stages = [stage.by_trace[0].recomputing(steps[1]) for stage, steps in pairs]
    assert abs(run_in_turn(stages, inputs, 1.0) - losses[0]) <= 1e-10
    for name, parameter in model.named_parameters():
        assert (parameter.grad - wanted[name]).abs().max() <= 1e-10 * wanted[name].abs().max()
    model.zero_grad()


def test_too_little_memory_is_refused(tied):
    model, runnable, _ = tied
    with pytest.raises(PlanError, match="expected a cut whose every stage fits"):
        plan_stages([runnable], model, MIXTURE, [StageDevice(1.0, 1e4)] * 2)


def test_memory_is_no_matter_where_it_is_plenty(tied):
    _, runnable, chain = tied
    free, ample = (
        best_cut(priced(runnable, chain, StageDevice(1.0, memory), 3)) for memory in (inf, 1e12)
    )
    assert free.expected_s == pytest.approx(ample.expected_s)


def test_costs_of_micro_batches_are_those_of_the_stages(tied):
    model, runnable, _ = tied
    devices = [StageDevice(), StageDevice(0.5, 1e9)]
    stages = plan_stages([runnable], model, MIXTURE, [StageDevice()] * 2).stages
    (first,), (last,) = (stage.by_trace for stage in stages)
    sizes = [bucket.sizes for bucket in MIXTURE]
    most = last.study(sizes[0]).steps
    rows = [[first], [last, last.recomputing(most)]]
    work = pipeline_work([[*map(of_one_trace, row)] for row in rows], sizes, devices)
    for number, each in enumerate(sizes):
        fastest, least = work.costs[1][number]
        assert fastest.forward_s + fastest.backward_s == pytest.approx(
            2 * last.predict(each).seconds_s
        )
        assert least.held_bytes < fastest.held_bytes
        found = last.predict(each)
        peak = max(fastest.forward_bytes, fastest.backward_bytes)
        assert peak == found.peak_bytes + found.input_bytes - found.returned_bytes
        assert work.hops[0][number].forward_bytes == each["batch"] * each["seq"] * 32 * 8
    assert work.memory_bytes == (inf, 1e9 - StageState.of([last], OptimizerMemory()).resident_bytes)


def test_what_a_rank_keeps_follows_from_the_optimizer_and_who_shares_its_rows(tied):
    model, runnable, _ = tied
    plan = plan_stages([runnable], model, MIXTURE, [StageDevice()] * 2)
    held = dict(model.named_parameters())
    for stage in plan.stages:
        own = [held[n] for n in stage.parameters]
        size, rows = sum(p.nbytes for p in own), sum(p.nbytes for p in shares(own, 4))
        kept = {
            momentum: StageState.of(
                stage.by_trace, OptimizerMemory(SGD(momentum=momentum))
            ).resident_bytes
            for momentum in (0.0, 0.9)
        }
        assert kept == {0.0: 2 * size, 0.9: 3 * size}
        assert (
            StageState.of(stage.by_trace, OptimizerMemory(given_bytes=7)).resident_bytes
            == 2 * size + 7
        )
        # Gradients on their way to those who share the rows, and what arrives.
        shared = StageState.of(stage.by_trace, OptimizerMemory(owners=4)).resident_bytes
        assert shared == 2 * size + 2 * rows + 2 * size
    least = plan_stages(
        [runnable], model, MIXTURE, [StageDevice(1.0, 1e12, OptimizerMemory(SGD()))] * 2
    ).needed_bytes
    most = max(plan.needed_bytes)
    assert max(least) < most - max(sum(held[n].nbytes for n in s.parameters) for s in plan.stages)
