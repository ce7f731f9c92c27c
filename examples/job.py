"""What both demos do on a rank: train for a share of the time, then race the same samples."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from math import prod
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

import dcpc
from dcpc.runtime.data.steps import Step
from dcpc.runtime.step.result import StepResult
from examples.baselines import Dcpc, System
from examples.race import Entrant, Lap, race, rank0_decides

MB = 1e6
LEAST_TRAINING = 0.1
MAX_COMPARED = 24


@dataclass(slots=True)
class History:
    """Training so far.

    Attributes:
        losses: of each step.
        tokens: trained on after each step.
        seconds_s: of each step.
        imbalances: measured mean idle share of the ranks, of each step.
    """

    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds_s: list[float] = field(default_factory=list)
    imbalances: list[float] = field(default_factory=list)

    def add(self, result: StepResult, tokens: int) -> None:
        """Adds a step of so many tokens."""
        self.losses.append(float(result.loss))
        self.tokens.append(tokens + (self.tokens[-1] if self.tokens else 0))
        self.seconds_s.append(result.seconds_s)
        self.imbalances.append(result.imbalance)

    def line(self) -> str:
        """The last 8 steps in one line."""
        n = min(8, len(self.losses))
        begin = self.tokens[-n - 1] if len(self.tokens) > n else 0
        rate = (self.tokens[-1] - begin) / sum(self.seconds_s[-n:])
        return (
            f"step {len(self.losses)}  loss {sum(self.losses[-n:]) / n:.3f}  {rate:,.0f} tokens/s  "
            f"imbalance {100 * sum(self.imbalances[-n:]) / n:.1f}%"
        )


@dataclass(frozen=True, slots=True)
class Compared:
    """What a system took for the steps of the comparison.

    Attributes:
        name: of the system.
        seconds_s: of a step, median.
        busy_s: processor seconds of the busiest rank in a step, median.
        speed: of dcpc beside it: median over the steps of the ratio of these processor seconds.
        tokens: trained on in all steps, the same for every system; padding does not count.
        wire_bytes: sent by all ranks, gradients included.
        peak_bytes: the most that a rank needed.
        loss: of the last step.
    """

    name: str
    seconds_s: float
    busy_s: float
    speed: float
    tokens: int
    wire_bytes: int
    peak_bytes: int
    loss: float


class Job:
    """One rank's part of a demo that is bounded by time.

    Attributes:
        limit_s: about how long it may take.
        out: folder of its plots.
        memory_bytes: what a rank may use.
        trained: share of the time at which training ends.
        compared: share at which no further step of the comparison begins; the rest is for
            measurements and plots.
        say: prints on rank 0.
    """

    def __init__(
        self,
        limit_s: float,
        out: Path,
        memory_bytes: int,
        trained: float = 0.5,
        compared: float = 0.75,
    ) -> None:
        self.start_s = time.monotonic()
        self.limit_s, self.out, self.memory_bytes = limit_s, out, memory_bytes
        self.trained, self.compared = trained, compared
        width = None if Console().is_terminal else 120
        self.console = Console(quiet=dist.get_rank() != 0, width=width)
        self.say = self.console.print

    def elapsed_share(self) -> float:
        """Share of the time limit that is gone."""
        return (time.monotonic() - self.start_s) / self.limit_s

    def train(
        self,
        compiled: dcpc.CompiledModel,
        steps: Iterable[Step],
        optimizer: torch.optim.Optimizer,
        positions_of_token: int = 1,
        each: Callable[[History, float], None] | None = None,
    ) -> History:
        """Trains until its share of the time is gone; at least one step.

        Args:
            compiled: the model.
            steps: of the loader.
            optimizer: of its parameters.
            positions_of_token: how many of what the loader counts make a token.
            each: called after each step, with the history and how much of training is done.
        """
        history = History()
        begin = self.elapsed_share()
        # Compiling alone may have taken all the time there was.
        end = max(self.trained, begin + LEAST_TRAINING)
        self.say("[bold]training[/]")
        with self._progress() as (progress, task):
            for step in steps:
                history.add(compiled.train_step(step), step.tokens // positions_of_token)
                optimizer.step()
                optimizer.zero_grad()
                done = (self.elapsed_share() - begin) / (end - begin)
                progress.update(task, completed=done, description=history.line())
                if not self.console.is_terminal and len(history.losses) % 8 == 1:
                    self.say(history.line(), highlight=False)
                if each is not None:
                    each(history, done)
                if rank0_decides(done >= 1):
                    break
        first, last = history.losses[0], history.losses[-8:]
        self.say(
            f"{len(history.losses)} steps, {history.tokens[-1]:,} tokens: loss {first:.3f} -> "
            f"{sum(last) / len(last):.3f}; imbalance measured "
            f"{100 * compiled.stats().measured_imbalance:.1f}%, "
            f"planned {100 * compiled.stats().predicted_imbalance:.1f}%\n"
        )
        return history

    def compare(
        self,
        ours: Dcpc,
        others: Sequence[System],
        optimizer: torch.optim.Optimizer,
        make_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer],
        trained: int,
        positions_of_token: int = 1,
        least: int = 1,
    ) -> list[Compared]:
        """Runs the steps that come next by dcpc and by others, all from the same weights.

        Returns what each of them took, ours first.

        Args:
            ours: dcpc, trained so far by `optimizer`.
            others: with models of the same weights.
            optimizer: of `ours`.
            make_optimizer: makes the others'.
            trained: steps that are done.
            positions_of_token: how many of what the loader counts make a token.
            least: steps at least, whatever time is left.
        """
        entrants = []
        for system in (ours, *others):
            system.load(MAX_COMPARED, skip=trained)
            own = optimizer
            if system is not ours:
                own = make_optimizer(system.model)
                # It keeps the tensors it is given.
                own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            entrants.append(Entrant(system, own))
        asked = count()

        def goes_on() -> bool:
            return next(asked) < least or rank0_decides(self.elapsed_share() < self.compared)

        # Memory is measured in the first step raced: the next one that has a longest sample.
        every = range(len(ours.steps))
        first = max(every, key=lambda i: _size(_longest(ours, i)))
        laps = race(entrants, [first, *(i for i in every if i != first)], goes_on)
        peaks = [e.peak_bytes(first) for e in entrants]
        raced = {lap.index for lap in laps}
        tokens = sum(ours.steps[i].tokens for i in raced) // positions_of_token
        systems = zip((ours, *others), peaks, strict=True)
        compared = [_compared(system, ours, laps, tokens, peak) for system, peak in systems]
        self.say(self._table(compared))
        self.say(
            f"{len(raced)} steps, in turn; seconds of a step, processor seconds (of the busiest "
            "rank) and dcpc's speed beside each are medians over them; padding not counted as "
            "tokens; wire: all ranks, gradients included; peak: parameters, Adam's state and what "
            "torch.profiler saw allocated on a rank in the first of these steps, whose longest "
            f"bucket is {_longest(ours, first)}; a rank may use {self.memory_bytes / MB:,.0f} MB "
            "(! more than that)\n",
            highlight=False,
        )
        return compared

    def _table(self, compared: Sequence[Compared]) -> Table:
        table = Table()
        table.add_column("")
        for column in (
            "seconds", "processor", "dcpc's speed", "tokens", "MB on the wire", "peak MB", "loss"
        ):  # fmt: skip
            table.add_column(column, justify="right")
        for each in compared:
            table.add_row(
                each.name,
                f"{each.seconds_s:.2f}",
                f"{each.busy_s:.2f}",
                f"{each.speed:.2f}",
                f"{each.tokens:,}",
                f"{each.wire_bytes / MB:,.0f}",
                f"{each.peak_bytes / MB:,.0f}"
                + (" !" if each.peak_bytes > self.memory_bytes else ""),
                f"{each.loss:.4f}",
            )
        return table

    @contextmanager
    def _progress(self) -> Iterator[tuple[Progress, TaskID]]:
        columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=self.console) as progress:
            yield progress, progress.add_task("", total=1.0)


def _compared(
    system: System, ours: System, laps: Sequence[Lap], tokens: int, peak_bytes: int
) -> Compared:
    mine = [lap for lap in laps if lap.system == system.name]
    dcpcs = {lap.index: lap.busy_s for lap in laps if lap.system == ours.name}
    return Compared(
        name=system.name,
        seconds_s=median(lap.seconds_s for lap in mine),
        busy_s=median(lap.busy_s for lap in mine),
        speed=median(lap.busy_s / dcpcs[lap.index] for lap in mine),
        tokens=tokens,
        wire_bytes=sum(lap.wire_bytes for lap in mine),
        peak_bytes=peak_bytes,
        loss=mine[-1].loss,
    )


def _longest(system: Dcpc, index: int) -> dcpc.Bucket:
    return max((mb.bucket for mb in system.steps[index].plan.micro_batches), key=_size)


def _size(bucket: dcpc.Bucket) -> int:
    return prod(bucket.sizes.values())
