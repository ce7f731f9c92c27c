"""Recompute at equal measured peak: `python -m benchmarks.recompute [--quick] [--json FILE]`.

torch's `activation_memory_budget` (solvers dp and ilp, several ratios) is run on each model and
length; its peaks are measured by the allocator's events. Such a peak is then dcpc's budget in
bytes. dcpc plans under it, runs, and is measured as well: a peak above its budget is a budget
missed. A ratio is dcpc's FLOPs of recompute over those of torch's cheapest setting with at most
that peak, counted by the same formulas on both sides: matmuls, convolutions and attention (all
pairs of query and key, as torch counts). Both sides minimise FLOPs: torch's runtime estimator is
"flops", and dcpc plans for a device on which nothing else takes time. Recompute of less than a
ten-thousandth of forward and backward counts as that much on both sides: 0 over 0 is 1.

Rotor's dynamic programme (`rotor_oracle.py`) is the optimum for whole blocks. It gets six budgets
between the smallest peak that takes no FLOPs of recompute and dcpc's smallest, and each block's
bytes and FLOPs as dcpc counts them, with what recompute without FLOPs saves already taken; memory
of forward alone is not held against it.

`plan_s_stdit_25_buckets` (not with --quick or --no-planning) is the seconds of planning
STDiT3-XL/2 on the 25 video buckets for 8, 16, ... 1,024 ranks, all together, after the trace;
`plan_s_stdit_8_ranks` those of 8 alone. --quick has smaller models, one length each, two settings
of torch and one budget against Rotor.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import dcpc
from benchmarks import harness
from benchmarks.stdit_costs import priced_of
from benchmarks.video import shapes
from dcpc.api import plan
from dcpc.buckets import Bucket
from dcpc.codegen import Library
from dcpc.ir import Placement
from dcpc.passes.recompute.menu import Menu
from dcpc.plan.options import degrees
from dcpc.plan.planning import PlanRequest, plan_buckets
from dcpc.plan.runnable import Runnable
from dcpc.symbolic_profile import find
from examples.allocator import measured_peak_bytes
from models.stdit import XL
from tests.cases.recompute_models import QUICK_SUBJECTS, SUBJECTS, Sizes, Subject
from tests.cases.recompute_torch import register_attention, torch_joint, torch_partition
from tests.cases.rotor_oracle import Stage, least_recompute

# A device on which nothing but FLOPs takes time: what torch's estimator "flops" assumes.
FLOPS_ALONE = replace(
    find("a100-80gb"),
    name="flops alone",
    vector_flops_per_s=1e30,
    memory_bytes_per_s=1e30,
    launch_s=0.0,
    gpu=False,  # memory is the CPU's: peaks are measured here
)
# (solver, ratio) of torch's settings.
SETTINGS = tuple((s, r) for s in ("dp", "ilp") for r in (0.9, 0.75, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1))
QUICK_SETTINGS = (("dp", 0.5), ("ilp", 0.4))
WORKERS = 2
BUDGETS = 6
# Against Rotor: how far from the peak of no recompute to the smallest.
SHARES = tuple((i + 1) / BUDGETS for i in range(BUDGETS))
QUICK_SHARES = (0.5,)
NOTHING = 10_000  # FLOPs of recompute below base / NOTHING are none


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of forward and backward.

    Attributes:
        peak_bytes: above parameters and inputs, gradients included.
        flops: of matmuls, convolutions and attention.
    """

    peak_bytes: int
    flops: int


def measure(run: Any) -> Measured:
    """Returns peak and FLOPs of a function; it is called twice."""
    with FlopCounterMode(display=False) as counted:
        run()
    return Measured(measured_peak_bytes(run), counted.get_total_flops())


@dataclass(frozen=True, slots=True)
class TorchPoint:
    """What torch does at one setting."""

    solver: str
    ratio: float
    peak_bytes: int
    again_flops: int


def torch_points(
    model: nn.Module, inputs: Mapping[str, Tensor], settings: Sequence[tuple[str, float]]
) -> list[TorchPoint]:
    """Returns torch's settings; the first has a ratio of 1 and makes nothing again that counts."""
    joint = torch_joint(model, inputs)
    found = []
    for solver, ratio in (("dp", 1.0), *settings):
        m = measure(torch_partition(joint, ratio, solver).run)
        found.append(TorchPoint(solver, ratio, m.peak_bytes, m.flops))
    least = min(p.again_flops for p in found)
    return [replace(p, again_flops=p.again_flops - least) for p in found]


class OnTrial:
    """dcpc at one model and length: plans under budgets, runs what it planned."""

    def __init__(self, model: nn.Module, subject: Subject, sizes: Sizes) -> None:
        self.model, self.sizes = model, dict(sizes)
        self.inputs = subject.example(sizes)
        buckets = dcpc.Buckets(dict(subject.inputs), [self.sizes])
        planned = plan(
            model, buckets, memory=1e15, device=FLOPS_ALONE, recompute="none", backend="eager"
        )
        self.bucket = Bucket.of(self.sizes)
        self.runnable: Runnable = planned.by_bucket[self.bucket]
        self.placement: Placement = self.runnable.priced.placement(self.sizes, 1)
        self.study = self.runnable.priced.at(self.placement)
        self.input_bytes = self.study.predict(0, self.sizes).input_bytes
        self._runs: dict[int, Measured] = {}

    def recompute(self, budget_bytes: int) -> int | None:
        """Returns the steps that the planner takes for a budget, None where none fit it."""
        request = PlanRequest((1,), "auto", budget_bytes + self.input_bytes, 0, 1)
        plan = plan_buckets({self.bucket: self.runnable.priced}, request).plans.get(self.bucket)
        return None if plan is None else plan.menu_step

    def predicted_peak(self, recompute: int) -> int:
        """Returns the peak that the profile says."""
        return self.study.predict(recompute, self.sizes).peak_bytes

    def measured(self, recompute: int) -> Measured:
        """Returns the peak and the FLOPs of a real run."""
        if recompute not in self._runs:
            variant, integers = self.runnable.variant(self.placement, recompute, self.sizes, 0)
            program = self.runnable.traced.program
            held = {**self.runnable.traced.tensors()}
            held |= {p: self.inputs[n] for p, n in program.inputs.items()}

            def run() -> Tensor:
                loss = variant([held[p] for p in variant.placeholders], integers)
                loss.backward()
                return loss

            def clean() -> Tensor:
                self.model.zero_grad()
                return run()

            with FlopCounterMode(display=False) as counted:
                clean()
            self.model.zero_grad()
            self._runs[recompute] = Measured(measured_peak_bytes(run), counted.get_total_flops())
            self.model.zero_grad()
        return self._runs[recompute]


@dataclass(frozen=True, slots=True)
class Comparison:
    """dcpc under one budget.

    Attributes:
        model: its name.
        length: the sizes.
        budget_bytes: a peak that torch was measured at.
        peak_bytes: dcpc's, measured; None where its planner found nothing that fits.
        again_flops: dcpc's recompute.
        torch_flops: the least recompute of torch with at most this peak.
        base_flops: of one forward and backward, to compare with.
    """

    model: str
    length: str
    budget_bytes: int
    peak_bytes: int | None
    again_flops: int
    torch_flops: int
    base_flops: int

    @property
    def ratio(self) -> float:
        """dcpc's recompute over torch's."""
        return ratio(self.again_flops, self.torch_flops, self.base_flops)

    def row(self) -> tuple[harness.Cell, ...]:
        """A line of the table."""
        return (
            f"{self.model} {self.length}", self.budget_bytes / 1e6,
            None if self.peak_bytes is None else self.peak_bytes / 1e6,
            100 * self.again_flops / self.base_flops, 100 * self.torch_flops / self.base_flops,
            self.ratio,
        )  # fmt: skip


def ratio(ours: int, theirs: int, base: int) -> float:
    """Returns ours over theirs; what is less than a ten-thousandth of `base` counts as that."""
    least = base / NOTHING
    return max(ours, least) / max(theirs, least)


def budgets_of(points: Sequence[TorchPoint], count: int) -> list[tuple[int, int]]:
    """Returns (peak, least FLOPs of recompute at it), the hardest: torch's undominated settings.

    Where these are more than `count`, evenly spaced ones of them; where they are fewer, peaks of
    its other settings as well, with the least FLOPs that torch has for one.
    """
    ordered = sorted({(p.peak_bytes, p.again_flops) for p in points})
    front: list[tuple[int, int]] = []
    for peak, flops in ordered:
        if not front or flops < front[-1][1]:
            front.append((peak, flops))
    if len(front) <= count:
        others = sorted({peak for peak, _ in ordered} - {peak for peak, _ in front})
        least = [(p, min(f for peak, f in front if peak <= p)) for p in others]
        return sorted([*front, *_spread(least, count - len(front))])
    return _spread(front, count)


def _spread(found: Sequence[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """Returns so many of them, evenly spaced; all where they are fewer."""
    if len(found) <= count:
        return list(found)
    step = (len(found) - 1) / max(count - 1, 1)
    return [found[round(i * step)] for i in range(count)]


def compare(
    name: str,
    subject: Subject,
    sizes: Sizes,
    settings: Sequence[tuple[str, float]],
    shares: Sequence[float],
) -> tuple[list[Comparison], list[RotorComparison]]:
    """Returns dcpc against torch and against Rotor on one model and length.

    Args:
        name: of the model, for the table.
        subject: the model.
        sizes: its length, batch included.
        settings: torch's solvers and ratios.
        shares: Rotor's budgets, between no recompute (0) and the smallest peak (1).
    """
    torch.manual_seed(0)
    model = subject.make()
    trial = OnTrial(model, subject, sizes)
    points = torch_points(model, trial.inputs, settings)
    base = trial.measured(0).flops
    length = " x ".join(map(str, sizes.values()))
    found = []
    for budget, torch_flops in budgets_of(points, BUDGETS):
        k = trial.recompute(budget)
        m = None if k is None else trial.measured(k)
        found.append(
            Comparison(
                model=name, length=length, budget_bytes=budget, peak_bytes=m and m.peak_bytes,
                again_flops=0 if m is None else m.flops - base, torch_flops=torch_flops,
                base_flops=base,
            )
        )  # fmt: skip
    return found, rotor(trial, name, length, shares)


@dataclass(frozen=True, slots=True)
class RotorComparison:
    """dcpc and the optimum for whole blocks under one budget; shares of one forward."""

    model: str
    length: str
    budget_bytes: int
    peak_bytes: int | None
    again: float
    rotor: float

    @property
    def ratio(self) -> float:
        """dcpc's recompute over Rotor's; forward and backward are three forwards."""
        return max(self.again, 3 / NOTHING) / max(self.rotor, 3 / NOTHING)

    def row(self) -> tuple[harness.Cell, ...]:
        """A line of the table."""
        peak = None if self.peak_bytes is None else self.peak_bytes / 1e6
        shares = (100 * self.again / 3, 100 * self.rotor / 3)
        return (f"{self.model} {self.length}", self.budget_bytes / 1e6, peak, *shares, self.ratio)


def rotor(trial: OnTrial, name: str, length: str, shares: Sequence[float]) -> list[RotorComparison]:
    """Returns dcpc against Rotor at some budgets, each run and measured."""
    menu = trial.study.menu
    once = sum(block.forward_s for block in menu.blocks)
    free = max(k for k in range(menu.count) if menu.seconds(k) <= once / NOTHING)
    high, low = trial.predicted_peak(free), trial.predicted_peak(menu.count - 1)
    found = []
    for share in shares:
        budget = high + round((low - high) * share) + 16
        k = trial.recompute(budget)
        found.append(
            RotorComparison(
                model=name, length=length, budget_bytes=budget,
                peak_bytes=None if k is None else trial.measured(k).peak_bytes,
                again=0.0 if k is None else menu.seconds(k) / once,
                rotor=least_recompute(chain(menu, once), budget) / once,
            )
        )  # fmt: skip
    return found


def chain(menu: Menu, once: float) -> list[Stage]:
    """Returns a menu's blocks as Rotor's, each with the least it saves at no FLOPs."""
    stages = []
    for block in menu.blocks:
        free = [i for i, s in enumerate(block.seconds) if s <= once / NOTHING]
        c = min(free, key=lambda i: block.saved_bytes[i])
        stages.append(
            Stage(
                forward=block.forward_s, kept_bytes=float(block.saved_bytes[c]),
                output_bytes=block.crossing_bytes, alive_bytes=float(block.alive_bytes[c]),
            )
        )  # fmt: skip
    return stages


def plan_seconds() -> dict[int, float]:
    """Returns the seconds of planning STDiT3-XL/2 on 25 buckets for worlds of 8 to 1,024 ranks.

    One world after the other; what is known of the smaller ones is not done again.
    """
    libraries: dict[str, Library] = {}
    videos, images = (priced_of(XL, image, libraries=libraries) for image in (False, True))
    buckets = {s.bucket: images if s.frames == 1 else videos for s in shapes()}
    found = {}
    for world in (8, 16, 32, 64, 128, 256, 512, 1024):
        with harness.timed() as watch:
            sps = degrees("auto", world)
            plan_buckets(buckets, PlanRequest(sps, "auto", int(141e9), int(20e9), world))
        found[world] = watch.elapsed_s
    return found


def compare_all(
    names: Sequence[str], quick: bool, planning: bool
) -> tuple[list[Comparison], list[RotorComparison], dict[int, float]]:
    """Returns all comparisons, model by model, and the seconds of planning if asked for."""
    subjects = QUICK_SUBJECTS if quick else SUBJECTS
    settings, shares = (QUICK_SETTINGS, QUICK_SHARES) if quick else (SETTINGS, SHARES)
    found: list[Comparison] = []
    against_rotor: list[RotorComparison] = []
    # The longest jobs first; a process's allocator events are its own.
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("fork")) as pool:
        # Planning alone: two processes slow each other down.
        plan_s = pool.submit(plan_seconds).result() if planning else {}
        jobs = [
            pool.submit(compare, name, subjects[name], sizes, settings, shares)
            for name in reversed(names)
            for sizes in reversed(subjects[name].lengths)
        ]
        for job in reversed(jobs):
            one, other = job.result()
            found, against_rotor = found + one, against_rotor + other
        return found, against_rotor, plan_s


def main() -> None:
    """Runs the benchmark."""
    p = harness.parser("recompute", __doc__.partition("\n")[0])
    p.add_argument("--model", choices=SUBJECTS, action="append", help="only these")
    p.add_argument("--no-planning", action="store_true", help="no plan_s_stdit_25_buckets")
    args = p.parse_args()
    warnings.simplefilter("ignore")
    register_attention()
    torch.set_num_threads(1)  # the models are small: more threads only wait for each other
    names = args.model or list(SUBJECTS)
    planning = not (args.quick or args.no_planning)
    found, against_rotor, plan_s = compare_all(names, args.quick, planning)
    header = ("at torch's peak", "budget MB", "dcpc MB", "dcpc again %", "torch again %", "ratio")
    harness.print_table("recompute FLOPs", header, [c.row() for c in found], digits=3)
    header = ("budget", "budget MB", "dcpc MB", "dcpc again %", "rotor again %", "ratio")
    harness.print_table("against Rotor", header, [c.row() for c in against_rotor], digits=3)
    both = [*found, *against_rotor]
    figures: dict[str, harness.Cell] = {
        "worst_ratio_vs_torch": max(c.ratio for c in found if c.peak_bytes is not None),
        "best_ratio_vs_torch": min(c.ratio for c in found if c.peak_bytes is not None),
        "worst_ratio_vs_rotor": max(c.ratio for c in against_rotor if c.peak_bytes is not None),
        "budgets": len(both),
        "budgets_missed": sum(c.peak_bytes is None or c.peak_bytes > c.budget_bytes for c in both),
    }
    if plan_s:
        figures["plan_s_stdit_25_buckets"] = sum(plan_s.values())
        figures["plan_s_stdit_8_ranks"] = plan_s[8]
    harness.finish("recompute", figures, args.json, digits=4)


if __name__ == "__main__":
    main()
