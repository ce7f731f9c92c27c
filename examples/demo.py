"""The main job: `python -m examples.demo [--world 2] [--seconds 240] [--out out]`.

Compiles a small GPT once for buckets of up to 8,192 bytes, trains it over gloo ranks on every
function and class of the interpreter's standard library, then runs the same steps as one would have
to without dcpc, and compares.

A run is bounded by time, not by steps: about half of what is left after compiling goes to training,
the rest to the comparison. What each step computes does not depend on the clock.
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

import dcpc
from dcpc.runtime.step import StepResult
from examples.baselines import Dcpc, FixedSp, PlainDdp, System
from examples.launch import launch
from examples.plots import plot_loss, plot_memory
from examples.race import Entrant, Lap, race, rank0_decides, replica
from examples.stdlib_source import StdlibSource
from examples.workload import DEMO, Workload

MB = 1e6
DDP_BATCH = 4
# Shares of the time limit at which training ends and no further step of the comparison begins; the
# rest is for the memory measurements and the plots.
TRAINED, COMPARED = 0.5, 0.75
LEAST_TRAINING = 0.1
MAX_COMPARED = 16


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


class Job:
    """One rank's part of the demo."""

    def __init__(self, workload: Workload, limit_s: float, out: Path) -> None:
        self.start_s = time.monotonic()
        self.workload, self.limit_s, self.out = workload, limit_s, out
        width = None if Console().is_terminal else 120
        self.console = Console(quiet=dist.get_rank() != 0, width=width)
        self.say = self.console.print

    def elapsed_share(self) -> float:
        """Share of the time limit that is gone."""
        return (time.monotonic() - self.start_s) / self.limit_s

    def run(self) -> None:
        """Compiles, trains, compares, draws."""
        dataset = StdlibSource(max(self.workload.lengths))
        self.say(f"[bold]data[/]: {dataset.counts}; {len(dataset):,} samples")
        model = self.workload.make_model()
        self.say(
            f"[bold]model[/]: GPT, {self.workload.model.n_layers} layers, "
            f"{sum(p.numel() for p in model.parameters()):,} parameters; {dist.get_world_size()} "
            f"ranks of {self.workload.memory_bytes / MB:,.0f} MB each"
        )
        begin_s = time.monotonic()
        compiled = self.workload.compile(model)
        self.say(f"[bold]compiled[/] in {time.monotonic() - begin_s:.1f} s\n")
        self.say(compiled.report(), markup=False, highlight=False)
        ours = Dcpc(compiled, self.workload.loader(dataset, compiled))
        optimizer = self.workload.make_optimizer(model)
        history = self.train(compiled, ours.loader, optimizer)
        self.compare(ours, optimizer, dataset, len(history.losses))
        if dist.get_rank() == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            plot_loss(history.losses, history.tokens, self.out / "demo_loss.png")
            plot_memory(compiled, self.out / "demo_memory.png")
        self.say(f"wrote {self.out / 'demo_loss.png'} and {self.out / 'demo_memory.png'}")

    def train(
        self,
        compiled: dcpc.CompiledModel,
        loader: dcpc.DataLoader,
        optimizer: torch.optim.Optimizer,
    ) -> History:
        """Trains until its share of the time is gone; at least one step."""
        history = History()
        begin = self.elapsed_share()
        # Compiling alone may have taken all the time there was.
        end = max(TRAINED, begin + LEAST_TRAINING)
        self.say("[bold]training[/]")
        with self._progress() as (progress, task):
            for step in loader:
                history.add(compiled.train_step(step), step.tokens)
                optimizer.step()
                optimizer.zero_grad()
                done = (self.elapsed_share() - begin) / (end - begin)
                progress.update(task, completed=done, description=history.line())
                if not self.console.is_terminal and len(history.losses) % 8 == 1:
                    self.say(history.line(), highlight=False)
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
        self, ours: Dcpc, optimizer: torch.optim.Optimizer, dataset: StdlibSource, trained: int
    ) -> None:
        """Runs the steps that come next by dcpc and by the baselines, all from the same weights."""
        self.say("[bold]the same samples without dcpc[/]")
        world = dist.get_world_size()
        systems: list[System] = [
            ours,
            FixedSp(ours.compiled, replica(ours.model), self.workload, dataset, world),
            PlainDdp(replica(ours.model), dataset, ours, DDP_BATCH),
            PlainDdp(replica(ours.model), dataset, ours, 1),
        ]
        entrants = []
        for system in systems:
            system.load(MAX_COMPARED, skip=trained)
            own = optimizer
            if system is not ours:
                own = self.workload.make_optimizer(system.model)
                # It keeps the tensors it is given.
                own.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            entrants.append(Entrant(system, own))
        begun = False

        def goes_on() -> bool:
            nonlocal begun
            answer = rank0_decides(not begun or self.elapsed_share() < COMPARED)
            begun = True
            return answer

        # Memory is measured in the first step raced: the next one that has a longest sample.
        first = max(range(len(ours.steps)), key=lambda i: _longest(ours, i))
        laps = race(entrants, range(first, len(ours.steps)), goes_on)
        peaks = [e.peak_bytes(first) for e in entrants]
        raced = ours.steps[first : 1 + max(lap.index for lap in laps)]
        self.say(self._table(systems, laps, peaks, sum(step.tokens for step in raced)))
        self.say(
            f"{len(raced)} steps, padding not counted as tokens; wire: all ranks, gradients "
            "included; peak: parameters, Adam's state and what torch.profiler saw allocated on a "
            f"rank in the first of these steps, whose longest bucket is {_longest(ours, first):,}; "
            f"a rank may use {self.workload.memory_bytes / MB:,.0f} MB (! more than that)\n",
            highlight=False,
        )

    def _table(
        self, systems: Sequence[System], laps: Sequence[Lap], peaks: Sequence[int], tokens: int
    ) -> Table:
        table = Table()
        table.add_column("")
        for column in ("seconds", "tokens/s", "MB on the wire", "peak MB", "final loss"):
            table.add_column(column, justify="right")
        for system, peak in zip(systems, peaks, strict=True):
            mine = [lap for lap in laps if lap.system == system.name]
            seconds_s = sum(lap.seconds_s for lap in mine)
            table.add_row(
                system.name,
                f"{seconds_s:.1f}",
                f"{tokens / seconds_s:,.0f}",
                f"{sum(lap.wire_bytes for lap in mine) / MB:,.0f}",
                f"{peak / MB:,.0f}" + (" !" if peak > self.workload.memory_bytes else ""),
                f"{mine[-1].loss:.4f}",
            )
        return table

    @contextmanager
    def _progress(self) -> Iterator[tuple[Progress, TaskID]]:
        columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        with Progress(*columns, console=self.console) as progress:
            yield progress, progress.add_task("", total=1.0)


def _longest(system: Dcpc, index: int) -> int:
    return max(mb.bucket["seq"] for mb in system.steps[index].plan.micro_batches)


def on_rank(workload: Workload, limit_s: float, out: Path) -> None:
    """Runs the demo on one rank of the group."""
    warnings.simplefilter("ignore")
    Job(workload, limit_s, out).run()


def main(arguments: Sequence[str] | None = None) -> None:
    """Launches the ranks."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--world", type=int, default=2, help="gloo ranks (default 2)")
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit, about")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the plots")
    args = parser.parse_args(arguments)
    launch(on_rank, args.world, DEMO, args.seconds, args.out)


if __name__ == "__main__":
    main()
