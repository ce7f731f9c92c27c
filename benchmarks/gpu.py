"""What dcpc says of one GPU, and what it does there: `python -m benchmarks.gpu [--quick] ...`.

    memory     predicted against `torch.cuda.max_memory_allocated`, for a GPT of 1e9 parameters and
               STDiT3-XL/2 in bfloat16, eight lengths each, nothing, half and all made again
    seconds    of the same runs, after calibration on this GPU at other lengths; CUDA events,
               medians of rounds in which all take turns
    pyramid    recompute chosen for each length under one memory, against all and none made again,
               each with its own best micro-batch: tokens a second
    compiled   the variant that Inductor compiled against `torch.compile` of the plain model
    attention  dcpc's op, flash-attn, and torch's kernels, forward and backward, TFLOP/s

A peak is what lies above parameters and inputs, gradients included. `max_error_peak` is of blocks
as the allocator cuts them (the prediction rounds to 512 bytes; up to 1 MiB more where one is not
split), `max_error_requested` of what was asked of it. Runs that are predicted not to fit are left
out and counted.

Without a GPU nothing is measured. `--device cpu` runs the same program on tiny models, which shows
that it works, and nothing of a GPU. Not seen by anyone yet: this on a GPU. What it leans on there
and no test covers: autograd on CUDA tensors in dcpc's trace, the fused kernels of
`dcpc/ops/attention/cuda.py`, their memory in `symbolic_profile/ops/gpu_transients.py`, Inductor's
Triton.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

import dcpc
from benchmarks import harness
from benchmarks.gpu_attention import Shape, Speed, speeds
from benchmarks.gpu_machine import Machine, Peak
from benchmarks.gpu_models import Sizes, Subject, full, quick, tiny
from dcpc.buckets import BATCH
from dcpc.commands.calibrate import calibrate
from dcpc.ir import BucketPlan
from dcpc.plan.planning import PlanRequest, plan_buckets
from examples.forced import ForcedVariant

SHARES = (0.0, 0.5, 1.0)
AMPLE = 1e15  # bytes: what every run of these plans fits
STATES = 4  # tensors of a parameter's size: itself, its gradient, Adam's moments
ATTENTIONS = tuple(Shape(16384 // n, 16, n, 128) for n in (1024, 4096, 16384))
TINY_ATTENTIONS = (Shape(1, 2, 128, 16),)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is run.

    Attributes:
        rounds: of timing.
        budget_s: of calibrating a model.
        compiled: lengths of each model to compile.
        attentions: shapes of attention.
        dtype: of attention.
    """

    rounds: int
    budget_s: float
    compiled: int
    attentions: tuple[Shape, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Point:
    """One length and share of recompute: what was said of it, and what it was."""

    model: str
    sizes: Sizes
    share: float
    predicted_bytes: int
    peak: Peak
    predicted_s: float
    measured_s: float

    @property
    def over(self) -> float:
        """Measured peak over the predicted one, less 1; above 0: more than was said."""
        return self.peak.allocated_bytes / self.predicted_bytes - 1

    def row(self) -> tuple[harness.Cell, ...]:
        """A line of the table."""
        off = self.predicted_s / self.measured_s - 1
        return (
            f"{self.model} {text(self.sizes)}, {self.share:.0%}",
            self.predicted_bytes / 1e6,
            self.peak.allocated_bytes / 1e6,
            self.peak.requested_bytes / 1e6,
            1e3 * self.predicted_s,
            1e3 * self.measured_s,
            100 * off,
        )


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens a second of one length by name of the way; None: it does not fit."""

    model: str
    sizes: Sizes
    tokens_per_s: Mapping[str, float | None]

    def row(self) -> tuple[harness.Cell, ...]:
        """A line of a table."""
        return (f"{self.model} {text(self.sizes)}", *self.tokens_per_s.values())


@dataclass(slots=True)
class Found:
    """All that was measured."""

    points: list[Point] = field(default_factory=list)
    left_out: int = 0
    calibration_s: float = 0.0
    pyramid: list[Speeds] = field(default_factory=list)
    compiled: list[Speeds] = field(default_factory=list)
    attention: list[Speed] = field(default_factory=list)


def text(sizes: Sizes) -> str:
    """Returns sizes as a table has them."""
    return " x ".join(map(str, sizes.values()))


class OnDevice:
    """One model on the device, calibrated and compiled by the eager backend.

    Args:
        subject: the model.
        machine: where it is.
        effort: how long to calibrate.
    """

    def __init__(self, subject: Subject, machine: Machine, effort: Effort) -> None:
        self.subject, self.machine = subject, machine
        with machine.device:
            self.model = subject.make()
        found = calibrate(
            self.model,
            subject.calibration_buckets,
            backend="eager",
            example=subject.example,
            budget_s=effort.budget_s,
        )
        self.calibration_s = found.seconds_s
        self.compiled = dcpc.compile(
            self.model, subject.buckets, backend="eager", recompute="none", memory=AMPLE,
            device=machine.target, calibration=found,
        )  # fmt: skip
        self.runnable = self.compiled.runnable

    def inputs(self, sizes: Sizes) -> dict[str, Tensor]:
        """Returns the model's inputs of a shape, on the device."""
        return {n: t.to(self.machine.device) for n, t in self.subject.example(sizes).items()}

    def forced(self, sizes: Sizes, recompute: int) -> ForcedVariant:
        """Returns what runs a shape with so much made again."""
        return ForcedVariant(self.compiled, self.runnable.priced.placement(sizes, 1), recompute)

    def clear(self) -> None:
        """Drops all gradients."""
        self.model.zero_grad(set_to_none=True)

    def peak(self, run: Callable[[], object]) -> Peak:
        """Returns a run's peak, gradients included; it runs twice."""
        self.clear()
        run()
        self.clear()
        found = self.machine.peak(run)
        self.clear()
        return found

    def plan(self, sizes: Sizes, recompute: str) -> BucketPlan | None:
        """Returns the setting of a length under the subject's memory, None where none fits."""
        lengths = {n: size for n, size in sizes.items() if n != BATCH}
        bucket = self.compiled.planned.find(lengths)
        resident = STATES * sum(p.nbytes for p in self.model.parameters())
        memory_bytes = min(self.subject.memory_bytes, self.machine.memory_bytes)
        request = PlanRequest((1,), recompute, memory_bytes, resident, 1)
        try:
            return plan_buckets({bucket: self.runnable.priced}, request)[0][bucket]
        except dcpc.PlanError:
            return None


def step(call: Callable[..., Tensor], inputs: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    """Returns a function that runs forward and backward."""

    def run() -> Tensor:
        loss = call(**inputs)
        loss.backward()
        return loss.detach()

    return run


def points_of(mine: OnDevice, effort: Effort, found: Found) -> None:
    """Adds the peaks and seconds of each length and share of recompute."""
    kept = []
    for sizes, share in itertools.product(mine.subject.shapes, SHARES):
        placement = mine.runnable.priced.placement(sizes, 1)
        forced = mine.forced(sizes, round(share * mine.runnable.priced.at(placement).steps))
        predicted = forced.predict(sizes)
        if not mine.machine.has_room(predicted.peak_bytes + predicted.input_bytes):
            found.left_out += 1
            continue
        inputs = mine.inputs(sizes)
        kept.append((sizes, share, forced, predicted, mine.peak(step(forced, inputs))))
    runs = [step(forced, mine.inputs(sizes)) for sizes, _, forced, _, _ in kept]
    seconds = mine.machine.medians_s(runs, effort.rounds, mine.clear)
    mine.clear()
    for (sizes, share, _, predicted, peak), measured_s in zip(kept, seconds, strict=True):
        told = predicted.peak_bytes, peak, predicted.seconds_s
        found.points.append(Point(mine.subject.name, sizes, share, *told, measured_s))


def pyramid_of(mine: OnDevice, effort: Effort, found: Found) -> None:
    """Adds tokens a second of each length with recompute chosen, of all, and of none."""
    runs, whose = [], []
    for sizes in mine.subject.shapes:
        for recompute in ("auto", "all", "none"):
            plan = mine.plan(sizes, recompute)
            if plan is None:
                continue
            full_batch = {**sizes, BATCH: plan.micro_batch}
            forced = mine.forced(full_batch, plan.menu_step)
            runs.append(step(forced, mine.inputs(full_batch)))
            whose.append((sizes, recompute, plan.micro_batch * mine.subject.tokens(sizes)))
    seconds = mine.machine.medians_s(runs, effort.rounds, mine.clear)
    mine.clear()
    rates = {
        (text(sizes), recompute): tokens / spent_s
        for (sizes, recompute, tokens), spent_s in zip(whose, seconds, strict=True)
    }
    for sizes in mine.subject.shapes:
        own = {r: rates.get((text(sizes), r)) for r in ("auto", "all", "none")}
        found.pyramid.append(Speeds(mine.subject.name, sizes, own))


def compiled_of(mine: OnDevice, effort: Effort, found: Found) -> None:
    """Adds tokens a second of Inductor's variant and of `torch.compile` of the plain model."""
    shapes = mine.subject.shapes[:: -(-len(mine.subject.shapes) // effort.compiled)]
    lengths = [{n: size for n, size in s.items() if n != BATCH} for s in shapes]
    ours = dcpc.compile(
        mine.model, dcpc.Buckets(dict(mine.subject.inputs), lengths), backend="inductor",
        recompute="none", memory=AMPLE, device=mine.machine.target,
    )  # fmt: skip
    torchs = torch.compile(mine.model)
    names = ("dcpc", "torch.compile", "eager")
    for sizes in shapes:
        inputs = mine.inputs(sizes)
        runs = [step(call, inputs) for call in (ours, torchs, mine.model)]
        seconds = mine.machine.medians_s(runs, effort.rounds, mine.clear)
        tokens = sizes[BATCH] * mine.subject.tokens(sizes)
        rates = {n: tokens / s for n, s in zip(names, seconds, strict=True)}
        found.compiled.append(Speeds(mine.subject.name, sizes, rates))
    mine.clear()
    torch.compiler.reset()


def measure(subjects: Sequence[Subject], machine: Machine, effort: Effort) -> Found:
    """Returns all of it, model by model."""
    found = Found()
    for subject in subjects:
        mine = OnDevice(subject, machine, effort)
        found.calibration_s = max(found.calibration_s, mine.calibration_s)
        points_of(mine, effort, found)
        machine.clear()
        pyramid_of(mine, effort, found)
        machine.clear()
        compiled_of(mine, effort, found)
        del mine
        machine.clear()
    found.attention = speeds(machine, effort.attentions, effort.dtype, effort.rounds)
    return found


def gain(speeds_: Sequence[Speeds], over: str, ours: str) -> float | None:
    """Returns seconds a token of one way over those of ours, both at all lengths; None: nowhere."""
    both = [(s.tokens_per_s[over], s.tokens_per_s[ours]) for s in speeds_]
    pairs = [(a, b) for a, b in both if a is not None and b is not None]
    return sum(1 / a for a, _ in pairs) / sum(1 / b for _, b in pairs) if pairs else None


def over_best(found: Sequence[Speed]) -> float:
    """Returns the seconds of dcpc's attention over those of the best way, the worst shape's."""
    worst = 0.0
    for shape in {s.shape for s in found}:
        spent = {
            s.name: 1 / s.forward + 2.5 / s.backward
            for s in found
            if s.shape == shape and s.forward and s.backward
        }
        worst = max(worst, spent["dcpc"] / min(spent.values()))
    return worst


def figures_of(found: Found) -> dict[str, harness.Cell]:
    """Returns the figures."""
    points = found.points
    requested = [p.peak.requested_bytes / p.predicted_bytes - 1 for p in points]
    return {
        "points": len(points),
        "points_left_out": found.left_out,
        "max_error_peak": max(abs(p.over) for p in points),
        "max_underestimate_peak": max(0.0, *(p.over for p in points)),
        "max_error_requested": max(map(abs, requested)),
        "median_time_error": median(abs(p.predicted_s / p.measured_s - 1) for p in points),
        "calibration_s": found.calibration_s,
        "pyramid_over_full": gain(found.pyramid, "all", "auto"),
        "pyramid_over_none": gain(found.pyramid, "none", "auto"),
        "compiled_over_torch_compile": gain(found.compiled, "torch.compile", "dcpc"),
        "attention_over_best": over_best(found.attention),
    }


def show(found: Found, figures: Mapping[str, harness.Cell], title: str) -> None:
    """Prints the tables."""
    header = ("length, made again", "said MB", "allocated", "requested", "said ms", "was", "off %")
    harness.print_table(f"{title}: peaks and seconds", header, [p.row() for p in found.points], 1)
    for name, rows in (("pyramid", found.pyramid), ("compiled", found.compiled)):
        ways = tuple(rows[0].tokens_per_s)
        header = ("tokens/s", *ways)
        harness.print_table(f"{title}: {name}", header, [r.row() for r in rows], 0)
    header = ("TFLOP/s", "forward", "backward")
    harness.print_table(f"{title}: attention", header, [s.row() for s in found.attention], 2)
    harness.print_table(title, ("figure", "value"), list(figures.items()), digits=4)


def device_of(asked: str) -> torch.device | None:
    """Returns where to measure; None: there is no GPU."""
    if asked == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


def main() -> None:
    """Runs the benchmark."""
    p = harness.parser("gpu", __doc__.partition("\n")[0])
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny models")
    args = p.parse_args()
    device = device_of(args.device)
    if device is None:
        print(
            "benchmarks.gpu: torch sees no GPU; nothing was measured and no figures are written. "
            "--device cpu runs the same program on tiny models, which says nothing of a GPU."
        )
        return
    warnings.simplefilter("ignore")
    machine = Machine(device)
    on_gpu = device.type == "cuda"
    subjects = full() if on_gpu else tiny()
    if on_gpu:
        effort = Effort(5 if args.quick else 15, 30.0, 2, ATTENTIONS, torch.bfloat16)
    else:
        torch.set_num_threads(1)
        effort = Effort(2 if args.quick else 5, 2.0, 1, TINY_ATTENTIONS, torch.float32)
    found = measure(quick(subjects) if args.quick else subjects, machine, effort)
    figures = figures_of(found)
    title = machine.name if on_gpu else "CPU, tiny: it runs, and nothing else is shown"
    show(found, figures, title)
    harness.write_report("gpu", {"device": machine.name, **figures}, args.json)


if __name__ == "__main__":
    main()
