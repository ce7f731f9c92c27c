"""Runs a schedule on this rank's stage: forwards, backwards, and messages to its neighbours.

It follows the list of actions and nothing else. The receive of an action is posted when the action
before it begins, with the shape that the stage knows from the plan's sizes; sends never wait. A
sent tensor is let go once a message proves that the neighbour has received it: the message of the
action at place p of its order comes after all that it received before p.

This is not torch.distributed.pipelining's runtime: that holds a stage's autograd graphs itself, has
float activations only, expects a gradient for each, and prepares its lists at construction. With
dcpc's stages (own backward, values without gradients, a new list each step) as much code would
override it as there is here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.errors import GroupError, PlanError
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.schedule import Action, PipelineSchedule, check
from dcpc.runtime.pipeline.schedule.actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
)
from dcpc.runtime.pipeline.schedule.check import waits_for
from dcpc.runtime.pipeline.stage import Shaped, Stage, StageSetting

AHEAD = 1  # receives posted before the action that takes them begins


@runtime_checkable
class SplitStage(Protocol):
    """A stage whose weight gradients may run after its input gradients are sent."""

    def backward_input(
        self, saved: Any, grads: tuple[Tensor | None, ...]
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        """Returns the gradients of the stage's inputs, and the values for `backward_weight`."""

    def backward_weight(self, rest: Any) -> None:
        """Adds to `.grad` of the stage's parameters."""


@dataclass(frozen=True, slots=True)
class PipelineBatch:
    """A micro-batch on this rank.

    Attributes:
        inputs: input name of the model -> tensor: at least those that this stage reads.
        sizes: length of every dim, batch included.
        weight: weight in the step's loss.
        seed: seed of its random numbers, the same in all stages.
    """

    inputs: Mapping[str, Tensor]
    sizes: Mapping[str, int]
    weight: float
    seed: int = 0


@dataclass(slots=True)
class _Sent:
    place: int  # in the neighbour's order, of the action that takes it
    works: list[dist.Work]
    tensors: tuple[Tensor, ...]


def run_schedule(
    settings: Sequence[StageSetting],
    batches: Sequence[PipelineBatch],
    schedule: PipelineSchedule,
    grid: PipelineGrid,
    mark: Callable[[], None] | None = None,
    returned: Callable[[int, tuple[Tensor, ...]], None] | None = None,
    name: Callable[[Action], AbstractContextManager[object]] | None = None,
) -> Tensor | None:
    """Adds the gradients of a step to this stage's parameters; the same call on all its neighbours.

    Args:
        settings: this rank's stage for each setting of recompute that the schedule names.
        batches: micro-batches of this pipeline.
        schedule: schedule of all its stages.
        grid: position of this rank.
        mark: function called before and after each action's computation on this stage.
        returned: function called on the last stage with the number of each micro-batch and its
            outputs, the loss first, detached.
        name: function that returns the context in which an action runs.

    Returns:
        The sum of weight * loss, float64, on the last stage; None elsewhere.

    Raises:
        PlanError: the schedule does not end, or splits a backward of a stage that cannot.
        GroupError: a neighbour sent nothing in time.
    """
    check(schedule, len(batches))
    stages = _stages_of(settings, batches, schedule, grid)
    run = _StageRun(stages, batches, schedule, grid)
    run.returned = returned
    return run.run(mark or (lambda: None), name or (lambda _: nullcontext()))


def _stages_of(
    settings: Sequence[StageSetting],
    batches: Sequence[PipelineBatch],
    schedule: PipelineSchedule,
    grid: PipelineGrid,
) -> list[Stage]:
    """Returns this rank's stage for each micro-batch.

    Raises:
        PlanError: it cannot run the schedule.
    """
    if schedule.stages != grid.stages or max(schedule.settings[grid.stage]) >= len(settings):
        raise PlanError(
            f"schedule: got {schedule.stages} stages and setting "
            f"{max(schedule.settings[grid.stage])} on stage {grid.stage}; expected {grid.stages} "
            f"stages and settings below {len(settings)}; make the plan from this model's costs"
        )
    pairs = zip(schedule.settings[grid.stage], batches, strict=True)
    stages = [settings[k].at(batch.sizes) for k, batch in pairs]
    apart = {a.micro_batch for a in schedule.orders[grid.stage] if a.kind == BACKWARD_INPUT}
    if not all(isinstance(stages[i], SplitStage) for i in apart):
        raise PlanError(
            f"schedule: got a backward in two parts (I, W) on stage {grid.stage}, which has only a "
            "whole one; expected B; plan with split=False"
        )
    return stages


class _StageRun:
    """The running schedule on this rank."""

    def __init__(
        self,
        stages: Sequence[Stage],
        batches: Sequence[PipelineBatch],
        schedule: PipelineSchedule,
        grid: PipelineGrid,
    ) -> None:
        self.grid, self.batches = grid, batches
        self.order = schedule.orders[grid.stage]
        self.stages = stages  # of each micro-batch
        # (stage, side, micro-batch) -> place in the stage's order
        self.places = {
            (s, FORWARD if a.kind == FORWARD else BACKWARD, a.micro_batch): place
            for s, order in enumerate(schedule.orders)
            for place, a in enumerate(order)
            if a.kind != BACKWARD_WEIGHT
        }
        self.posted: dict[Action, tuple[list[dist.Work], tuple[Tensor | None, ...]]] = {}
        self.sent: dict[int, deque[_Sent]] = {}
        self.saved: dict[int, Any] = {}
        self.received: dict[int, tuple[Tensor, ...]] = {}
        self.loss: Tensor | None = None
        self.returned: Callable[[int, tuple[Tensor, ...]], None] | None = None

    def run(
        self, mark: Callable[[], None], name: Callable[[Action], AbstractContextManager[object]]
    ) -> Tensor | None:
        for place, action in enumerate(self.order):
            for ahead in self.order[place : place + 1 + AHEAD]:
                self._post(ahead)
            taken = self._take(action)
            mark()
            with name(action):
                if action.kind == FORWARD:
                    self._forward(action.micro_batch, taken)
                else:
                    self._backward(action, taken)
            mark()
        for waiting in self.sent.values():
            self._let_go(waiting, len(self.places))
        return self.loss

    @property
    def last(self) -> bool:
        return self.grid.stage == self.grid.stages - 1

    def _forward(self, i: int, taken: tuple[Tensor | None, ...]) -> None:
        batch = self.batches[i]
        received = tuple(x for x in taken if x is not None)
        sends, self.saved[i] = self.stages[i].forward(batch.inputs, received, batch.seed)
        if self.last:
            part = sends[0].detach().double() * batch.weight
            self.loss = part if self.loss is None else self.loss + part
            if self.returned is not None:
                self.returned(i, (sends[0].detach(), *(x.detach() for x in sends[1:])))
        else:
            self._send(self.grid.stage + 1, FORWARD, i, sends)

    def _backward(self, action: Action, taken: tuple[Tensor | None, ...]) -> None:
        i, stage = action.micro_batch, self.stages[action.micro_batch]
        saved = self.saved.pop(i)
        if action.kind == BACKWARD_WEIGHT:
            assert isinstance(stage, SplitStage), "checked before the step"
            return stage.backward_weight(saved)
        if self.last:
            (_, dtype), *others = stage.sent(self.batches[i].sizes)
            device = self.grid.groups.device
            weight = torch.tensor(self.batches[i].weight, dtype=dtype, device=device)
            taken = (weight, *[None] * len(others))
        if action.kind == BACKWARD_INPUT:
            assert isinstance(stage, SplitStage), "checked before the step"
            grads, self.saved[i] = stage.backward_input(saved, taken)
        else:
            grads = stage.backward(saved, taken)
        if self.grid.stage > 0:
            shapes = stage.received(self.batches[i].sizes)
            filled = (
                self._empty(shape).zero_() if g is None else g
                for g, shape in zip(grads, shapes, strict=True)
                if _has_gradient(shape)
            )
            self._send(self.grid.stage - 1, BACKWARD, i, tuple(filled))
        return None

    def _shapes(self, action: Action) -> tuple[Shaped, ...]:
        """Returns the shapes of an action's message: activations, or gradients of those sent."""
        stage, sizes = self.stages[action.micro_batch], self.batches[action.micro_batch].sizes
        return stage.received(sizes) if action.kind == FORWARD else stage.sent(sizes)

    def _post(self, action: Action) -> None:
        need = waits_for(action, self.grid.stage, self.grid.stages)
        if need is None or action in self.posted:
            return
        back = action.kind != FORWARD
        pg, peer = self.grid.wire(need[0], back), self.grid.peer(need[0])
        into = tuple(
            None if back and not _has_gradient(shape) else self._empty(shape)
            for shape in self._shapes(action)
        )
        works = [dist.irecv(x, src=peer, group=pg) for x in into if x is not None]
        self.posted[action] = ([w for w in works if w is not None], into)

    def _take(self, action: Action) -> tuple[Tensor | None, ...]:
        """Returns the tensors of an action's message, once it has arrived."""
        need = waits_for(action, self.grid.stage, self.grid.stages)
        if need is None:
            return ()
        works, into = self.posted.pop(action)
        self._wait(works, f"{action} of stage {self.grid.stage}", need[0])
        place = self.places[(*need, action.micro_batch)]
        self._let_go(self.sent.get(need[0], deque()), place)
        return into

    def _send(self, to: int, side: str, i: int, values: tuple[Tensor, ...]) -> None:
        pg, peer = self.grid.wire(to, side != FORWARD), self.grid.peer(to)
        tensors = tuple(x.detach().contiguous() for x in values)
        works = [dist.isend(x, dst=peer, group=pg) for x in tensors]
        found = _Sent(self.places[to, side, i], [w for w in works if w is not None], tensors)
        self.sent.setdefault(to, deque()).append(found)

    def _let_go(self, waiting: deque[_Sent], place: int) -> None:
        """Drops sent tensors that a neighbour has taken before a place in its order."""
        for found in [f for f in waiting if f.place <= place]:
            self._wait(found.works, f"what stage {self.grid.stage} sent", self.grid.stage)
            waiting.remove(found)

    def _wait(self, works: Sequence[dist.Work], what: str, peer: int) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as e:
            raise GroupError(
                f"pipeline: {what} on rank {self.grid.peer(self.grid.stage)}: got "
                f"{str(e).splitlines()[0]}; expected the message of stage {peer} (rank "
                f"{self.grid.peer(peer)}) within {self.grid.groups.timeout_s:g} s; look at its log"
            ) from e

    def _empty(self, shape: Shaped) -> Tensor:
        return torch.empty(shape[0], dtype=shape[1], device=self.grid.groups.device)


def _has_gradient(shape: Shaped) -> bool:
    return shape[1].is_floating_point or shape[1].is_complex
