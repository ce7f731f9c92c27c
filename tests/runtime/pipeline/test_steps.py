"""Steps of `dcpc.compile(pipeline=)` on gloo ranks: the plain model's numbers on any schedule."""

import random
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dcpc
from dcpc.api import cut_with
from dcpc.compiled.pipeline import stage_bytes
from dcpc.errors import DataError, PlanError
from dcpc.plan.options import PlanOptions
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.pipeline.executor import PipelineBatch, run_schedule
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.schedule import Action, PipelineSchedule
from tests.cases.asks import PAD, TEXT, Texts, trained
from tests.cases.exactness import SPLITTING
from tests.cases.launch import RanksError, run_ranks
from tests.fuzz.pipelines import drawn_schedule

SETTINGS = 3  # of recompute
DATA = Texts([48, 10, 16, 37, 24, 16, 48, 5, 12, 40, 16, 9], silent=[2])
LONG = Texts([48, 16, 48, 48, 48, 48, 48, 9], silent=[2])
SILENT = Texts([9, 12], silent=[0, 1])
BUCKETS = dcpc.Buckets(TEXT, sizes=[{"seq": n, "batch": 2} for n in (16, 48)])


class Skipping(nn.Module):
    """Sends a value that skips blocks and one without a gradient; the embedding is the head, too.

    Every block changes a sample's place by those before it alone: padding changes nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(6)
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = skip = self.embedding(input_ids)
        largest = x.argmax(-1)
        for block in self.blocks:
            x = x + block(x.cumsum(1) * 0.1) + skip * (largest % 3)[..., None]
        logits = x @ self.embedding.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def steps_of(compiled: dcpc.CompiledModel, data: Texts) -> list[Step]:
    found = dcpc.DataLoader(data, compiled, tokens_per_step=110, pad=PAD, weight="labels")
    return list(found)


def made(stages: int, **options: Any) -> dcpc.CompiledModel:
    warnings.simplefilter("ignore")
    model = Skipping().double()
    options = {"backend": "eager", "device": SPLITTING, "verify": "off", **options}
    return dcpc.compile(model, BUCKETS, pipeline=stages, **options)


def with_drawn_schedules(step: Step, stages: int) -> Step:
    """Returns the step with another order on each stage and another recompute, drawn."""
    rng, texts = random.Random(step.index), []
    for replica in range(len(step.plan.pipelines)):
        count = len(step.plan.of(replica * stages))
        drawn = drawn_schedule(10 * step.index + replica, stages, count) if count else None
        settings = tuple(
            tuple(rng.randrange(SETTINGS) for _ in range(count)) for _ in range(stages)
        )
        orders = drawn.orders if drawn else ((),) * stages
        texts.append(str(PipelineSchedule(orders, settings)))
    return replace(step, plan=replace(step.plan, pipelines=tuple(texts)))


def drawn_steps(rank: int, stages: int) -> tuple[float, list[tuple[int, ...]], set[str], str]:
    """Returns the worst error of an epoch, micro-batches of each step, actions, a refusal."""
    compiled = made(stages)
    steps = [with_drawn_schedules(step, stages) for step in steps_of(compiled, DATA)]
    found = trained(compiled, steps, Skipping().double(), DATA)
    kinds = {kind for s in steps for text in s.plan.pipelines for kind in "FBIW" if kind in text}
    (silent,) = steps_of(compiled, SILENT)
    with pytest.raises(DataError) as error:
        compiled.train_step(silent)
    return found.worst, found.counts, kinds, str(error.value)


def check_drawn(ranks: int, stages: int) -> None:
    for worst, counts, kinds, said in run_ranks(drawn_steps, ranks, stages, timeout_s=240.0):
        assert worst < 1e-10
        assert len({*counts}) > 1, "another number of micro-batches from step to step"
        assert kinds == set("FBIW"), "backwards whole and in two parts"
        assert "got a total weight of 0.0" in said


@pytest.mark.multirank
def test_two_stages_have_the_plain_models_numbers_on_drawn_schedules():
    check_drawn(2, 2)


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_four_ranks_have_the_plain_models_numbers_on_drawn_schedules(stages):
    check_drawn(4, stages)


def short_of_memory(rank: int, memory: float) -> tuple[float, int]:
    """Returns the worst error of an epoch, and how often something is made again in it."""
    compiled = made(2, memory=memory)
    steps = steps_of(compiled, LONG)
    found = trained(compiled, steps, Skipping().double(), LONG)
    plans = [PipelineSchedule.of_text(text) for s in steps for text in s.plan.pipelines]
    return found.worst, sum(sum(map(sum, plan.settings)) for plan in plans)


@pytest.mark.multirank
def test_planned_steps_recompute_where_memory_is_short_and_have_the_plain_models_numbers():
    options = PlanOptions(backend="eager", device=SPLITTING, world=2)
    plan = cut_with(Skipping().double(), BUCKETS, options, 2).plan
    sizes = {"seq": 48, "batch": 1}
    programs = [stage.by_trace[0] for stage in plan.stages]
    least = [program.recomputing(program.study(sizes).steps) for program in programs]
    least_bytes = max(stage_bytes(stage, sizes) for stage in least)
    memory = least_bytes + 0.3 * (max(plan.needed_bytes) - least_bytes)
    found = run_ranks(short_of_memory, 2, memory, timeout_s=240.0)
    assert all(worst < 1e-10 for worst, _ in found)
    assert found[0][1] == found[1][1] > 0


def uneven(rank: int) -> None:
    PipelineGrid.make(Groups.default(), 3, ())


@pytest.mark.multirank
def test_ranks_that_are_no_multiple_of_the_stages_are_refused():
    with pytest.raises(RanksError, match="got 2 ranks; expected a multiple of 3"):
        run_ranks(uneven, 2, timeout_s=30.0)


class Whole:
    """A stage whose backward is not divided."""

    index, count, parameters = 0, 1, ()

    def at(self, sizes):
        return self


def test_a_backward_in_two_parts_is_refused_of_a_stage_that_has_one():
    grid = PipelineGrid.make(Groups.default(), 1, ())
    schedule = PipelineSchedule((tuple(Action(kind, 0) for kind in "FIW"),), ((0,),))
    with pytest.raises(PlanError, match=r"got a backward in two parts \(I, W\)"):
        run_schedule([Whole()], [PipelineBatch({}, {}, 1.0)], schedule, grid)
