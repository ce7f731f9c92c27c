"""Predicted bytes against measured ones: `python -m benchmarks.memory [--quick] [--json FILE]`.

Each model is traced once with symbolic dims. At sizes the trace never saw, on one rank and on two,
with nothing, half and all of the menu made again, the prediction for a rank is compared with what
that rank does: its peak by torch.profiler's allocator events (gloo's buffers among them), and the
bytes it saves by the real storages that its autograd node holds. Shares of two ranks are uneven;
of both the worse one counts.

`--quick` has every model, of one layer, by the eager backend, on one rank with nothing made again
and on two with half and all; and Inductor for GPT on one rank with nothing made again.
Without it there are all settings of both backends, at all sizes. Inductor's compilations are
minutes of C++, once a machine.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import Tensor

import dcpc
from benchmarks import harness
from dcpc.codegen import bind_group
from dcpc.commands.check import SplitModel
from dcpc.plan.traced import group_name
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.symbolic_profile import evaluator
from examples.allocator import measured_peak_bytes
from tests.cases.memory_models import SUBJECTS, Sizes

BACKENDS = ("eager", "inductor")
RECOMPUTE = {"none": 0.0, "half": 0.5, "all": 1.0}
RANKS = 2
MODELS_AT_A_TIME = 2
TIME_LIMIT_S = 1500.0


@dataclass(frozen=True, slots=True)
class Setting:
    """What runs.

    Attributes:
        backend: "eager" or "inductor".
        sp: ranks that share a sample.
        recompute: a key of `RECOMPUTE`.
        sizes: batch and lengths.
    """

    backend: str
    sp: int
    recompute: str
    sizes: Sizes


@dataclass(frozen=True, slots=True)
class Point:
    """One comparison on one rank.

    Attributes:
        model: its name.
        setting: what ran.
        rank: of the group.
        predicted_bytes: peak, above parameters and inputs.
        measured_bytes: the same.
        saved_off_bytes: predicted bytes kept between forward and backward less the measured.
        saved_bytes: as measured.
    """

    model: str
    setting: Setting
    rank: int
    predicted_bytes: int
    measured_bytes: int
    saved_off_bytes: int
    saved_bytes: int

    @property
    def error(self) -> float:
        """Of the peak, relative; below 0 where the prediction is too small."""
        return self.predicted_bytes / self.measured_bytes - 1

    def row(self) -> tuple[harness.Cell, ...]:
        """A line of the table."""
        s = self.setting
        sizes = " x ".join(map(str, s.sizes.values()))
        return (
            f"{self.model}, {s.backend}, sp {s.sp}, recompute {s.recompute}, {sizes}",
            self.predicted_bytes / 1e6, self.measured_bytes / 1e6, 100 * self.error,
            self.saved_bytes / 1e6, self.saved_off_bytes,
        )  # fmt: skip


def settings(name: str, quick: bool) -> list[Setting]:
    """Returns what is measured of a model, in the order in which it runs."""
    sizes = SUBJECTS[name].sizes
    every = [
        Setting(backend, sp, recompute, s)
        for backend in BACKENDS
        for sp in (1, RANKS)
        for recompute in RECOMPUTE
        for s in sizes
    ]
    if not quick:
        return every
    compiled = Setting("inductor", 1, "none", sizes[0])
    return [
        s
        for s in every
        if (name == "GPT" and s == compiled)
        or (s.backend == "eager" and (s.sp == 1) == (s.recompute == "none"))
    ]


class Model:
    """One model traced once, split for one rank and for two.

    Args:
        name: a key of `SUBJECTS`.
        found: what is measured of it.
        layers: of the model.
    """

    def __init__(self, name: str, found: Sequence[Setting], layers: int) -> None:
        self.name, self.subject = name, SUBJECTS[name]
        torch.manual_seed(0)
        buckets = dcpc.Buckets(self.subject.inputs, list(self.subject.sizes))
        first = SplitModel(
            self.subject.make(layers), buckets, self.subject.placed_for, "eager", sp=1
        )
        hints = first.program.hints
        assert hints not in self.subject.sizes, f"the trace saw {hints}: choose another point"
        kinds = dict.fromkeys((s.backend, s.sp) for s in found)
        self.splits = {(backend, sp): first.of(backend, sp) for backend, sp in kinds}

    def prepare(self, found: Sequence[Setting]) -> None:
        """Makes the graphs that all ranks share; only Inductor's code is made by the ranks."""
        for s in found:
            split = self.splits[s.backend, s.sp]
            split.study.profile(self.steps(s))
            if s.backend == "eager":
                for rank in range(s.sp):
                    split.runnable.variant(split.placement, self.steps(s), s.sizes, rank)

    def steps(self, setting: Setting) -> int:
        """Returns the steps of recompute that a setting takes."""
        split = self.splits[setting.backend, setting.sp]
        return int(RECOMPUTE[setting.recompute] * split.study.steps)

    def measure(self, setting: Setting, rank: int) -> Point:
        """Returns the point of this rank; collective over the ranks of the setting."""
        split, steps = self.splits[setting.backend, setting.sp], self.steps(setting)
        variant, integers = split.runnable.variant(split.placement, steps, setting.sizes, rank)
        inputs = self.subject.example(setting.sizes)
        named = {**split.held(), **{p: inputs[n] for p, n in split.program.inputs.items()}}
        tensors = [named[p] for p in variant.placeholders]
        split.model.zero_grad()
        saved_bytes = _saved_bytes(variant(tensors, integers), tensors)

        def run() -> Tensor:
            loss = variant(tensors, integers)
            loss.backward()
            return loss

        measured_bytes = measured_peak_bytes(run)
        split.model.zero_grad()
        at = evaluator(split.study.profile(steps))
        local = split.study.local_sizes(setting.sizes, rank)
        return Point(
            model=self.name, setting=setting, rank=rank, predicted_bytes=at.peak_bytes(local),
            measured_bytes=measured_bytes, saved_off_bytes=at.saved_bytes(local) - saved_bytes,
            saved_bytes=saved_bytes,
        )  # fmt: skip


def _saved_bytes(loss: Tensor, inputs: Sequence[Tensor]) -> int:
    """Returns the bytes of the distinct storages that wait for backward, inputs excepted."""
    resident = {_storage(t) for t in inputs}
    kept = [t for t in loss.grad_fn.call.kept if isinstance(t, Tensor)]
    found = {_storage(t): t.untyped_storage().nbytes() for t in kept}
    return sum(size for key, size in found.items() if key not in resident)


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _run_rank(rank: int, model: Model, found: Sequence[Setting]) -> list[Point]:
    """Returns the points of one rank. Those of one rank alone are shared out."""
    warnings.simplefilter("ignore")
    world = dist.group.WORLD
    assert world is not None
    bind_group(group_name(RANKS), world)
    points = []
    alone = itertools.count()
    for s in found:
        if s.sp == 1 and next(alone) % RANKS != rank:
            continue
        if s.backend == "inductor" and s.sp > 1 and rank > 0:
            dist.barrier()  # the first rank compiles, the others take its code from the cache
        split = model.splits[s.backend, s.sp]
        split.runnable.variant(split.placement, model.steps(s), s.sizes, rank % s.sp)
        if s.backend == "inductor" and s.sp > 1 and rank == 0:
            dist.barrier()
        points.append(model.measure(s, rank % s.sp))
    return points


def measure(name: str, found: Sequence[Setting], layers: int) -> list[Point]:
    """Returns the points of one model, of several ranks the worse one."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # the models are small: more threads only wait for each other
    model = Model(name, found, layers)
    model.prepare(found)
    ranks = run_ranks(_run_rank, RANKS, model, found, timeout_s=TIME_LIMIT_S, fork=True)
    worst: dict[str, Point] = {}
    for point in itertools.chain(*ranks):
        known = worst.setdefault(str(point.setting), point)
        if (abs(point.saved_off_bytes), abs(point.error)) > (
            abs(known.saved_off_bytes),
            abs(known.error),
        ):
            worst[str(point.setting)] = point
    return list(worst.values())


def figures(points: Sequence[Point]) -> dict[str, harness.Cell]:
    """Returns the figures of the report; None where nothing was measured."""

    def largest(backend: str, below: bool = False) -> float | None:
        errors = [p.error for p in points if p.setting.backend == backend]
        return max((max(0.0, -e) if below else abs(e) for e in errors), default=None)

    return {
        "points": len(points),
        "points_inductor": sum(p.setting.backend == "inductor" for p in points),
        "max_error_peak_eager": largest("eager"), "max_error_peak_inductor": largest("inductor"),
        "max_underestimate": max(max(0.0, -p.error) for p in points),
        "max_underestimate_eager": largest("eager", below=True),
        "max_underestimate_inductor": largest("inductor", below=True),
        "saved_bytes_off": max(abs(p.saved_off_bytes) for p in points),
    }  # fmt: skip


def arguments() -> argparse.Namespace:
    """Returns what the command line asks for."""
    p = harness.parser("memory", __doc__.partition("\n")[0])
    p.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    p.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    p.add_argument("--sp", nargs="+", type=int, choices=(1, RANKS), default=[1, RANKS])
    return p.parse_args()


def main() -> None:
    """Runs the benchmark."""
    args = arguments()
    wanted = {
        name: [
            s for s in settings(name, args.quick) if s.backend in args.backends and s.sp in args.sp
        ]
        for name in reversed(args.models)  # the last take longest
    }
    # Forked workers have what this process imported, seconds of it.
    with (
        harness.timed() as watch,
        ProcessPoolExecutor(MODELS_AT_A_TIME, mp_context=get_context("fork")) as pool,
    ):
        layers = 1 if args.quick else 2
        running = {name: pool.submit(measure, name, wanted[name], layers) for name in wanted}
        points = [point for name in args.models for point in running[name].result()]
    header = ("point", "peak MB", "measured", "off %", "saved MB", "saved off B")
    harness.print_table("predicted against measured", header, [p.row() for p in points], digits=4)
    found = {**figures(points), "seconds": watch.elapsed_s}
    harness.finish("memory", found, args.json, digits=6)


if __name__ == "__main__":
    main()
