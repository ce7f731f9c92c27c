"""Steps of `dcpc.compile(pipeline=2, speeds=)` on two gloo ranks, one slowed down by repeats.

The slow rank does all of its stage's work several times. A measured step is a `train_step` of a
plan that the loader made: agreement of ranks, the executor and the sum of gradients are in it. The
prediction is the replay of that plan's schedule: the profile says what share of the model a stage
is, forward, backward and its parts; how fast a core of this machine is says the whole model, which
both ranks run between steps. Messages, which are small, are left out. Ranks keep the memory that
they free: the pages of a step are not asked of the system again in the next, as on a GPU.
"""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import dcpc
from benchmarks.harness import Cell
from dcpc.api import cut_with
from dcpc.compiled.pipeline import CutModel, ProgramStage, pipeline_work, run_in_turn
from dcpc.plan.options import PlanOptions
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.runtime.pipeline.schedule import Hop, PipelineSchedule, PipelineWork, StageCost, replay
from dcpc.runtime.pipeline.schedule.actions import (
    BACKWARD_WEIGHT,
    FORWARD,
)
from models.gpt import GPT, GPTConfig

TOKENS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
BUCKETS = dcpc.Buckets(TOKENS, [{"seq": 128, "batch": 4}, {"seq": 512, "batch": 1}])
SAMPLES = (128, 128, 128, 128, 512) * 3  # of a step
REPEATS, SLOW = 2, 1  # how often the slow rank works, and which it is
SPEEDS = (1.0, 1 / REPEATS)
VOCABULARY = 512
# Of glibc's mallopt: what is freed is not given back below so many bytes, nor mapped apart.
TRIM_THRESHOLD, MMAP_THRESHOLD, KEPT_BYTES = -1, -3, 1 << 30


class Texts:
    """Random tokens, of the lengths of a step."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(i)
        ids, labels = torch.randint(VOCABULARY, (2, SAMPLES[i]), generator=drawn)
        return {"input_ids": ids, "labels": labels}


class RepeatedStage:
    """A stage that does its work several times, as a slower device takes longer for it.

    Each of the runs has an equal part of the gradient, so that their sum is the stage's own.

    Attributes:
        busy_s: seconds of the processor in each call so far, in order.

    Args:
        stage: of a pipeline.
        repeats: how often.
        busy_s: to which seconds are added.
    """

    def __init__(self, stage: ProgramStage, repeats: int, busy_s: list[float]) -> None:
        self.stage, self.repeats, self.busy_s = stage, repeats, busy_s
        self.index, self.count, self.parameters = stage.index, stage.count, stage.parameters
        self.received, self.sent = stage.received, stage.sent

    def at(self, sizes: Mapping[str, int]) -> RepeatedStage:
        """What runs a micro-batch: the same at all sizes."""
        return self

    def forward(
        self, inputs: Mapping[str, Tensor], received: tuple[Tensor, ...], seed: int = 0
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What the stage sends, and what its backward needs."""
        begin_s = time.thread_time()
        runs = [self.stage.forward(inputs, received, seed) for _ in range(self.repeats)]
        self.busy_s.append(time.thread_time() - begin_s)
        return runs[0][0], [saved for _, saved in runs]

    def backward(self, saved: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Gradients of what it received."""
        begin_s = time.thread_time()
        found = [self.stage.backward(each, self._share(grads)) for each in saved]
        self.busy_s.append(time.thread_time() - begin_s)
        return _added(found)

    def backward_input(
        self, saved: Any, grads: tuple[Tensor | None, ...]
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        """Gradients of what it received, and what `backward_weight` needs."""
        begin_s = time.thread_time()
        found = [self.stage.backward_input(each, self._share(grads)) for each in saved]
        self.busy_s.append(time.thread_time() - begin_s)
        return _added([made for made, _ in found]), [rest for _, rest in found]

    def backward_weight(self, rest: Any) -> None:
        """Adds to gradients of parameters."""
        begin_s = time.thread_time()
        for each in rest:
            self.stage.backward_weight(each)
        self.busy_s.append(time.thread_time() - begin_s)

    def _share(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None else g / self.repeats for g in grads)


def _added(runs: Sequence[tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    return tuple(
        None if parts[0] is None else torch.stack([p for p in parts if p is not None]).sum(0)
        for parts in zip(*runs, strict=True)
    )


@dataclass(frozen=True)
class RankSeconds:
    """What a rank measured, the fastest step and the fastest pass of the whole model.

    Attributes:
        step_s: of a step.
        busy_s: seconds of the processor in each action of a step.
        whole_s: of each micro-batch through the whole model, on the clock.
        whole_busy_s: the same, of the processor.
        sizes: of each micro-batch.
        schedule: of the step, as text.
        stage: which one this rank has.
        error: the largest relative error of a gradient.
    """

    step_s: float
    busy_s: list[float]
    whole_s: list[float]
    whole_busy_s: list[float]
    sizes: list[dict[str, int]]
    schedule: str
    stage: int
    error: float


def model() -> GPT:
    """The model, the same on every rank."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=VOCABULARY, dim=192, n_layers=6, n_heads=6))


def two_ranks(rank: int, cut: CutModel, steps: int) -> RankSeconds:
    """Runs steps, and in between the whole model on both ranks at once.

    Args:
        rank: this one.
        cut: another copy of the model in stages, all of which this rank has.
        steps: that are measured.
    """
    warnings.simplefilter("ignore")
    _keep_memory()
    busy_s: list[float] = []
    repeats = REPEATS if rank == SLOW else 1
    # The stage that this rank gets is the only one that is asked for its lane.
    ProgramStage.in_lane = lambda self, lane: RepeatedStage(self, repeats, busy_s)  # type: ignore
    compiled = dcpc.compile(
        model(), BUCKETS, pipeline=2, speeds=SPEEDS, backend="eager", device="cpu", verify="off"
    )
    (step,) = dcpc.DataLoader(
        Texts(), compiled, samples_per_step=len(SAMPLES), weight="labels", shuffle=False
    )
    result = compiled.train_step(step)
    error = _gradient_error(compiled, step, result.total_weight)
    data = [mb.inputs for mb in step.micro_batches]
    for inputs in data:  # compiles what the executor has not
        _run_whole(cut, inputs)
    measured_s: list[float] = []
    passes: list[list[tuple[float, float]]] = []
    busy_s.clear()
    for _ in range(steps):
        compiled.zero_grad()
        dist.barrier()
        measured_s.append(compiled.train_step(step).seconds_s)
        dist.barrier()
        passes.append([_run_whole(cut, inputs) for inputs in data])
    schedule = PipelineSchedule.of_text(step.plan.pipelines[0])
    count = len(schedule.orders[compiled.stage])
    busy = [busy_s[i : i + count] for i in range(0, len(busy_s), count)]
    whole_s, whole_busy_s = (
        min(([seconds[i] for seconds in each] for each in passes), key=sum) for i in (0, 1)
    )
    sizes = [{**mb.bucket.sizes, "batch": len(mb.samples)} for mb in step.micro_batches]
    return RankSeconds(
        min(measured_s), min(busy, key=sum), whole_s, whole_busy_s, sizes, str(schedule),
        compiled.stage, error,
    )  # fmt: skip


def _keep_memory() -> None:
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for option in (TRIM_THRESHOLD, MMAP_THRESHOLD):
            libc.mallopt(option, KEPT_BYTES)


def _gradient_error(compiled: dcpc.CompiledModel, step: Step, total: float) -> float:
    plain = model()
    for mb in step.micro_batches:
        (plain(**mb.inputs) * (mb.weight / total)).backward()
    wanted = dict(plain.named_parameters())
    return max(_relative(p.grad, wanted[n].grad) for n, p in compiled.named_parameters())


def _relative(found: Tensor | None, wanted: Tensor | None) -> float:
    assert found is not None, "the stage has the gradient"
    assert wanted is not None, "the plain model has the gradient"
    return float((found - wanted).abs().max() / wanted.abs().max())


def _run_whole(cut: CutModel, inputs: Mapping[str, Tensor]) -> tuple[float, float]:
    """Seconds of a micro-batch in one process, stage after stage: on the clock, and busy."""
    begin_s, busy_s = time.perf_counter(), time.thread_time()
    run_in_turn([stage.by_trace[0] for stage in cut.plan.stages], inputs)
    return time.perf_counter() - begin_s, time.thread_time() - busy_s


def measured(steps: int) -> dict[str, Cell]:
    """Figures of two ranks, one of which runs its work twice.

    On the clock, where whatever else runs on the machine is in; and in seconds of the processor,
    from which the same replay makes a step.

    Args:
        steps: that are measured.
    """
    torch.set_num_threads(1)
    options = PlanOptions(backend="eager", device="cpu", world=2)
    cut = cut_with(model(), BUCKETS, options, 2, SPEEDS)
    found = sorted(run_ranks(two_ranks, 2, cut, steps, timeout_s=300.0, fork=True),
                   key=lambda r: r.stage)  # fmt: skip
    first = found[0]
    schedule, cost = PipelineSchedule.of_text(first.schedule), cut.planner.cost
    work = pipeline_work(cost.rows, first.sizes, cost.devices)
    clock, busy = (
        replay(_scaled(work, cut, first.sizes, np.mean(seconds, axis=0)), schedule).makespan_s
        for seconds in ([r.whole_s for r in found], [r.whole_busy_s for r in found])
    )
    ran = replay(_as_ran(work, schedule, [r.busy_s for r in found]), schedule).makespan_s
    step_s = max(r.step_s for r in found)
    return {
        "measured_s": step_s, "predicted_s": clock, "measured_over_predicted": step_s / clock,
        "busy_over_predicted": ran / busy, "gradient_error": max(r.error for r in found),
    }  # fmt: skip


def _scaled(
    work: PipelineWork,
    cut: CutModel,
    sizes: Sequence[Mapping[str, int]],
    whole_s: Sequence[float],
) -> PipelineWork:
    """The same work in seconds of this machine; messages are left out.

    Args:
        work: as predicted.
        cut: the model in stages.
        sizes: of each micro-batch.
        whole_s: of each micro-batch what the whole model takes, nothing made again.
    """
    shapes = [tuple(sorted(each.items())) for each in sizes]
    mean_s = {
        shape: float(np.mean([s for s, x in zip(whole_s, shapes, strict=True) if x == shape]))
        for shape in shapes
    }
    whole = [stage.by_trace[0] for stage in cut.plan.stages]  # there is one trace
    told_s = [sum(stage.predict(each).seconds_s for stage in whole) for each in sizes]
    scales = [mean_s[shape] / told for shape, told in zip(shapes, told_s, strict=True)]
    costs = tuple(
        tuple(
            tuple(_times(cost, scale) for cost in options)
            for options, scale in zip(row, scales, strict=True)
        )
        for row in work.costs
    )
    return _without_messages(replace(work, costs=costs))


def _times(cost: StageCost, scale: float) -> StageCost:
    return replace(
        cost, forward_s=cost.forward_s * scale, backward_s=cost.backward_s * scale,
        weight_s=cost.weight_s * scale,
    )  # fmt: skip


def _without_messages(work: PipelineWork) -> PipelineWork:
    return replace(work, hops=tuple((Hop(),) * work.micro_batches for _ in work.hops))


def _as_ran(
    work: PipelineWork, schedule: PipelineSchedule, busy_s: Sequence[Sequence[float]]
) -> PipelineWork:
    """The same work with the seconds that each action took."""
    costs = []
    for row, order, seconds in zip(work.costs, schedule.orders, busy_s, strict=True):
        forward_s, backward_s, weight_s = ([0.0] * len(row) for _ in range(3))
        for action, took_s in zip(order, seconds, strict=True):
            if action.kind == FORWARD:
                forward_s[action.micro_batch] += took_s
                continue
            backward_s[action.micro_batch] += took_s
            weight_s[action.micro_batch] += took_s * (action.kind == BACKWARD_WEIGHT)
        costs.append(tuple(
            tuple(replace(c, forward_s=f, backward_s=b, weight_s=w) for c in options)
            for options, f, b, w in zip(row, forward_s, backward_s, weight_s, strict=True)
        ))  # fmt: skip
    return _without_messages(replace(work, costs=tuple(costs)))
