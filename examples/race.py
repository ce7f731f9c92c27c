"""Runs several systems over the same steps in turn, and what each of them took."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
import torch.distributed as dist
from torch import nn

from dcpc.codegen import wire_log
from examples.allocator import measured_peak_bytes
from examples.baselines import System


@dataclass(frozen=True, slots=True)
class Lap:
    """One step of one system.

    Attributes:
        system: its name.
        index: of the step.
        seconds_s: until the last rank was done, optimizer included.
        busy_s: processor seconds of the busiest rank: none of what others run on the machine.
        wire_bytes: sent by all ranks together, the sum of gradients included.
        loss: of the global batch.
    """

    system: str
    index: int
    seconds_s: float
    busy_s: float
    wire_bytes: int
    loss: float


class Entrant:
    """A system with its optimizer.

    Every rank sends `2 (p - 1) / p` of the gradients' bytes in their all-reduce (a ring does
    exactly that, and nothing sends less); the collectives of variants are counted as they run.
    """

    def __init__(self, system: System, optimizer: torch.optim.Optimizer) -> None:
        self.system, self.optimizer = system, optimizer
        self.gradient_bytes = sum(p.nbytes for p in system.model.parameters() if p.requires_grad)

    def lap(self, index: int) -> Lap:
        """Runs one step on every rank; collective."""
        world = dist.get_world_size()
        dist.barrier()
        before = wire_log.total_bytes()
        start_s, begun_s = time.perf_counter(), time.process_time()
        loss = self.system.run(index)
        self.optimizer.step()
        self.optimizer.zero_grad()
        spent = (time.perf_counter() - start_s, time.process_time() - begun_s)
        took = torch.tensor(spent, dtype=torch.float64)
        sent = torch.tensor([wire_log.total_bytes() - before])
        dist.all_reduce(took, dist.ReduceOp.MAX)
        dist.all_reduce(sent)
        wire_bytes = int(sent) + 2 * (world - 1) * self.gradient_bytes
        return Lap(self.system.name, index, *took.tolist(), wire_bytes, loss)

    def peak_bytes(self, index: int) -> int:
        """Returns the most bytes a rank needs in a step, by the allocator; changes no weights.

        Parameters and the optimizer's state count as they are, and the step's activations and
        gradients as allocated.
        """
        self.optimizer.zero_grad()
        peak = torch.tensor([measured_peak_bytes(lambda: self.system.run(index))])
        self.optimizer.zero_grad()
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        resident = sum(p.nbytes for p in self.system.model.parameters())
        states = self.optimizer.state.values()
        state = sum(v.nbytes for s in states for v in s.values() if torch.is_tensor(v))
        return int(peak) + resident + state


def race(
    entrants: Sequence[Entrant], indices: Iterable[int], goes_on: Callable[[], bool]
) -> list[Lap]:
    """Returns the laps of all entrants over the steps, taken in turn.

    Who begins changes with each step, so that a noisy minute of the machine hits all of them.

    Args:
        entrants: with their steps loaded.
        indices: of the steps.
        goes_on: asked before each step; the same answer on every rank.
    """
    laps = []
    for turn, index in enumerate(indices):
        if not goes_on():
            break
        first = turn % len(entrants)
        laps += [e.lap(index) for e in [*entrants[first:], *entrants[:first]]]
    return laps


def repeats(
    entrants: Sequence[Entrant], steps: int, most: int, end_s: float, least: int = 1
) -> list[Lap]:
    """Returns the laps of the same steps again and again, in one race: who begins goes on changing.

    Args:
        entrants: with their steps loaded.
        steps: how many.
        most: repeats at most.
        end_s: no repeat after the least begins later than this, by `time.monotonic()`.
        least: repeats at least.
    """
    asked = count()

    def goes_on() -> bool:
        turn = next(asked)
        return turn < least * steps or turn % steps > 0 or rank0_decides(time.monotonic() < end_s)

    return race(entrants, list(range(steps)) * most, goes_on)


def rank0_decides(answer: bool) -> bool:
    """Returns rank 0's answer on every rank: two clocks that differ would part the ranks."""
    flag = torch.tensor([answer], dtype=torch.uint8)
    dist.broadcast(flag, 0)
    return bool(flag)


def replica(model: nn.Module) -> nn.Module:
    """Returns a model of the same weights."""
    return copy.deepcopy(model)
