"""Images beside clips in stages: where all traces are cut, numbers of each, memory, refusals."""

import json
from math import inf

import pytest
import torch
from torch import Tensor, nn

import dcpc
from dcpc.api import cut_with, plan_with
from dcpc.compiled.pipeline import (
    MixedBucket,
    ProgramCosts,
    ProgramStage,
    StageDevice,
    StageState,
    chain_of,
    cut_model,
    plan_stages,
    run_in_turn,
    shared_parameters,
    stage_bytes,
    stages_of,
    stages_problem,
)
from dcpc.compiled.pipeline.borders import common_borders
from dcpc.compiled.pipeline.stage_costs import mixed_costs, mixture_dims
from dcpc.errors import PlanError
from dcpc.plan.options import PlanOptions
from dcpc.runtime.planner.plan_file import plan_json, plan_of
from dcpc.runtime.planner.table import make_table
from dcpc.symbolic_profile import OptimizerMemory
from dcpc.verify import Verifier
from tests.cases.clips import CLIPS, ClipsCase
from tests.cases.stages import plain_gradients

OPTIONS = PlanOptions(backend="eager")


class Parts:
    """A model of a case, its traces, and where they may be cut."""

    def __init__(self, case: ClipsCase, model: nn.Module | None = None) -> None:
        self.case, self.model = case, model or case.make()
        self.planned = plan_with(self.model, case.buckets, OPTIONS, partly=True)
        self.traces = [runnable.traced for runnable in self.planned.traces]
        self.mixture = [
            MixedBucket(b.sizes, 1 / len(case.buckets), self.planned.traces.index(runnable))
            for b, runnable in self.planned.by_bucket.items()
        ]
        own = [[b for b in self.mixture if b.trace == t] for t in (0, 1)]
        pairs = list(zip(self.traces, own, strict=True))
        self.dims = [mixture_dims(v.program, buckets) for v, buckets in pairs]
        self.chains = [chain_of(v.program, d) for v, d in zip(self.traces, self.dims, strict=True)]
        self.places = common_borders(self.traces, self.chains, self.dims)

    def stages(self, places: list[int], trace: int) -> tuple[ProgramStage, ...]:
        """Returns a trace's stages between some of the places."""
        borders = [self.places.at[place][trace] for place in places]
        return stages_of(self.traces[trace], self.model, self.chains[trace], borders)

    def error(self, stages: tuple[ProgramStage, ...], sizes: dict, apart: bool = False) -> float:
        """Returns how far loss and gradients of stages in turn are from the model's."""
        inputs = self.case.data({**sizes, "batch": 2}, 3)
        (loss,), wanted = plain_gradients(self.model, [inputs], [1.0])
        errors = [float(abs(run_in_turn(stages, inputs, apart=apart).detach() / loss - 1))]
        # What one key leaves of a softmax's gradient is rounding, other one on each processor.
        largest = max(float(g.abs().max()) for g in wanted.values())
        for name, p in self.model.named_parameters():
            assert (p.grad is None) == (name not in wanted), name
            if p.grad is not None:
                scale = max(float(wanted[name].abs().max()), 1e-6 * largest)
                errors.append(float((p.grad - wanted[name]).abs().max()) / scale)
        self.model.zero_grad()
        return max(errors)


@pytest.fixture(scope="module")
def branching():
    return Parts(CLIPS["branching"])


def test_traces_of_all_places_have_the_models_numbers(branching):
    last = len(branching.places.at) - 1
    assert last > 6, "about one place after each block"
    for place in range(1, last):
        for trace, buckets in enumerate((branching.case.images, branching.case.clips)):
            stages, apart = branching.stages([0, place, last], trace), bool((place + trace) % 2)
            assert branching.error(stages, buckets[-1], apart) < 1e-10


def test_stages_of_both_traces_read_the_same_parameters_but_for_those_of_one(branching):
    last = len(branching.places.at) - 1
    both = {n for n, _ in branching.model.named_parameters() if n.split(".")[0] not in ONE}
    for place in range(1, last):
        images, clips = (branching.stages([0, place, last], trace) for trace in (0, 1))
        for one, other in zip(images, clips, strict=True):
            assert set(one.parameters) & both == set(other.parameters) & both


ONE = ("time", "gain")  # of one trace alone


def test_a_cut_shares_no_parameter_but_the_tied_one_and_each_stage_has_those_of_all_traces():
    case = CLIPS["branching"]
    for stages in (2, 4):
        model = case.make()
        cut = cut_with(model, case.buckets, PlanOptions(backend="eager", world=stages), stages)
        shared = shared_parameters(cut.plan.stages)
        assert [*shared] == ["embedding.weight"]
        every = [n for stage in cut.plan.stages for n in stage.parameters]
        assert sorted({*every}) == sorted(n for n, _ in model.named_parameters())
        held = dict(model.named_parameters())
        for stage in cut.plan.stages:
            kept = StageState.of(stage.by_trace, OptimizerMemory()).resident_bytes
            own = [held[n] for n in stage.parameters]
            assert kept == sum(p.nbytes * (4 if p.requires_grad else 1) for p in own)


def test_costs_of_a_mixture_are_those_of_each_traces_profile(branching):
    pairs = zip(branching.planned.traces, branching.chains, strict=True)
    costs = [ProgramCosts(runnable, chain) for runnable, chain in pairs]
    at = branching.places.array
    found = mixed_costs(costs, at, branching.mixture, [(StageDevice(), 2)], all_devices=True)
    seconds = found.seconds[:, 0, 0]
    for number, bucket in enumerate(branching.mixture):
        priced = branching.planned.traces[bucket.trace].priced
        told = priced.at(priced.placement(bucket.sizes, 1)).predict(0, bucket.sizes).seconds_s
        alone = mixed_costs(costs, at, branching.mixture, [(StageDevice(), 1)])
        assert alone.seconds[number, 0, 0, 0, -1] == pytest.approx(told, rel=1e-12)
        own = at[:, bucket.trace]
        assert all((seconds[number, a, b] < inf) == (own[a] < own[b])
                   for a in range(1, len(at)) for b in range(a + 1, len(at)))  # fmt: skip


def test_a_plan_is_of_about_the_seconds_of_its_own_stages_and_keeps_to_memory(branching):
    traces = branching.planned.traces
    free = plan_stages(traces, branching.model, branching.mixture, [StageDevice()] * 2)
    for number, bucket in enumerate(branching.mixture):
        own = [stage.at(bucket.sizes).predict(bucket.sizes).seconds_s for stage in free.stages]
        assert free.cut.bottleneck_s[number] == pytest.approx(max(own), rel=0.1)
    most = 0.7 * max(free.needed_bytes)
    devices = [StageDevice(1.0, most)] * 2
    plan = plan_stages(traces, branching.model, branching.mixture, devices, all_devices=True)
    assert max(plan.needed_bytes) <= most
    assert any(any(steps) for steps in plan.menu_steps)
    for stage, steps in zip(plan.stages, plan.menu_steps, strict=True):
        resident = StageState.of(stage.by_trace, OptimizerMemory()).resident_bytes
        needed = [
            stage_bytes(stage.at(b.sizes).recomputing(k), b.sizes, resident)
            for b, k in zip(branching.mixture, steps, strict=True)
        ]
        assert max(needed) == plan.needed_bytes[stage.index]
    for number, bucket in enumerate(branching.mixture):
        pairs = zip(plan.stages, plan.menu_steps, strict=True)
        stages = tuple(s.at(bucket.sizes).recomputing(steps[number]) for s, steps in pairs)
        assert branching.error(stages, bucket.sizes) < 1e-10


def test_a_plan_of_both_kinds_is_the_same_after_json(branching):
    case = branching.case
    cut = cut_model(branching.model, case.buckets, branching.planned, 2, 4)
    table = make_table(cut.planner.tables, 4, 4)
    buckets = list(case.buckets)
    samples = [(n, buckets[n % len(buckets)]) for n in range(11)]
    plan = cut.planner.plan(samples, table.hash)
    assert {mb.bucket["frames"] for mb in plan.micro_batches} == {1, 3, 5}
    assert sorted(i for mb in plan.micro_batches for i in mb.sample_ids) == list(range(11))
    again = plan_of(json.loads(json.dumps(plan_json(plan, table))), table, "test")
    assert again == plan
    assert again.fingerprint == plan.fingerprint


@pytest.mark.parametrize("number", [0, 1])
def test_a_stage_of_one_trace_that_is_wrong_is_refused(branching, number, monkeypatch):
    case, model, planned = branching.case, branching.model, branching.planned
    cut = cut_model(model, case.buckets, planned, 2, 2)
    verifier = Verifier(model, case.buckets, planned, "auto")
    assert stages_problem(cut, model, verifier) is None
    assert len(verifier.lines) == 6
    assert sum("trace 2: loss and every gradient" in line for line in verifier.lines) == 3
    backward, wrong = ProgramStage.backward, cut.plan.stages[1].by_trace[number].runnable

    def worse(self, saved, grads):
        if self.runnable is wrong:
            grads = tuple(None if g is None else g * 0.99 for g in grads)
        return backward(self, saved, grads)

    monkeypatch.setattr(ProgramStage, "backward", worse)
    said = str(stages_problem(cut, model, verifier))
    assert f"2 stages, the least recompute, trace {number + 1}, run in turn, do not compute" in said


class Reversed(nn.Module):
    """Images go through the blocks from the last to the first: no place has the same behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks if x.shape[1] > 1 else reversed(self.blocks):
            x = x + torch.tanh(block(x))
        return (x - y).square().mean()


def test_traces_without_a_common_place_are_refused_with_what_to_do():
    case = CLIPS["branching"]
    options = PlanOptions(backend="eager", world=3)
    with pytest.raises(PlanError) as error:  # all blocks are before the place where the loss begins
        cut_with(Reversed().double(), case.buckets, options, 3)
    assert (
        "need 2 traces, as other dims are numbers in them (frames 1 | no dim), and 2 parts"
        in str(error.value)
    )
    assert "leave out the buckets of a trace" in str(error.value)
    stages = 40
    with pytest.raises(PlanError, match="expected one for each of 40 stages; take fewer stages"):
        cut_with(case.make(), case.buckets, PlanOptions(backend="eager", world=stages), stages)


class Again(nn.Module):
    """One block many times: all places have the same parameters on both sides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(8 if x.shape[1] > 1 else 6):
            x = x + self.block(x)
        return (x - y).square().mean()


def test_places_of_equal_parameters_are_taken_one_after_another():
    parts = Parts(CLIPS["branching"], Again().double())
    at = parts.places.at
    assert len(at) < 16, "not every border of one trace with every border of the other"
    for own in zip(*at, strict=True):
        assert list(own) == sorted(own)
    middle = len(at) // 2
    for trace, buckets in enumerate((parts.case.images, parts.case.clips)):
        assert parts.error(parts.stages([0, middle, len(at) - 1], trace), buckets[0]) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_stages_of_a_video_model_share_no_parameter_and_have_its_numbers(stages):
    parts = Parts(CLIPS["stdit"])
    cut = cut_model(parts.model, parts.case.buckets, parts.planned, stages, stages)
    # An image's query and key norms of frames have gradients of zeros and no call that reads them.
    assert not shared_parameters(cut.plan.stages)
    for trace, buckets in enumerate((parts.case.images, parts.case.clips)):
        each = tuple(stage.by_trace[trace] for stage in cut.plan.stages)
        for sizes in buckets:
            for apart in (False, True):
                assert parts.error(each, sizes, apart) < 1e-10


def test_stages_of_images_alone_know_a_dim_that_is_in_no_shape():
    case = CLIPS["branching"]
    specs = {n: str(spec) for n, spec in case.buckets.inputs.items()}
    buckets = dcpc.Buckets(specs, case.images)
    model = case.make()
    cut = cut_with(model, buckets, PlanOptions(backend="eager", world=2), 2)
    inputs = case.data({**case.images[0], "batch": 2}, 0)
    stages = [stage.by_trace[0] for stage in cut.plan.stages]
    assert stages[0].sizes(inputs, ()) == {**case.images[0], "batch": 2}
    loss = run_in_turn(stages, inputs)
    assert abs(float(loss.detach() / model(**inputs).detach()) - 1) < 1e-10


class Counted(nn.Module):
    """Takes means, whose count is a size of the first value of that shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x + x.mean(2, keepdim=True)))
        return x.square().mean() - y.mean()


def test_a_value_whose_size_alone_is_asked_for_later_is_not_sent():
    parts = Parts(CLIPS["branching"], Counted().double())
    for chain in parts.chains:
        assert len(chain.borders) > 4
        assert all(len(names) == 1 for names in chain.crossing[1:-1])
    last = len(parts.places.at) - 1
    for trace, buckets in enumerate((parts.case.images, parts.case.clips)):
        assert parts.error(parts.stages([0, last // 2, last], trace), buckets[0]) < 1e-10
