"""What plans say of peaks and seconds, and what a device does.

    peaks      a model at several lengths, nothing, half and all made again: predicted bytes against
               the allocator's, predicted seconds against measured ones, after a calibration on
               this device at other lengths
    pyramid    recompute chosen for each length under one memory, against all and none made again,
               each with its own best micro-batch: tokens a second
    compiled   the variant that Inductor compiled against `torch.compile` of the plain model, both
               of fewer layers of the same width: 18 take minutes to compile

A peak is what lies above parameters and inputs, gradients included. `allocated` are blocks as the
allocator cuts them (a prediction rounds to 512 bytes; a block is up to 1 MiB larger where it is not
split), `requested` is what was asked of it. Runs that are predicted not to fit are not run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

import dcpc
from benchmarks.gpu_checks.exact import AMPLE, inputs_on
from benchmarks.gpu_checks.machine import Machine, Peak
from benchmarks.gpu_checks.rows import Row, Setting, not_run, tried
from benchmarks.gpu_checks.subjects import Sizes, Subject, compared, full, tiny
from dcpc.buckets import BATCH
from dcpc.commands.calibrate import calibrate
from dcpc.ir import BucketPlan
from dcpc.plan.planning import PlanRequest, plan_buckets
from examples.forced import ForcedVariant

SHARES = (0.0, 0.5, 1.0)
RECOMPUTE = ("auto", "all", "none")
STATES = 4  # tensors of a parameter's size: itself, its gradient, Adam's moments
PEAK_OFF = 0.03  # a larger share of a peak that is not predicted is a fault


class OnDevice:
    """One model on the device, calibrated and compiled by the eager backend.

    Args:
        subject: the model.
        setting: where it is.
    """

    def __init__(self, subject: Subject, setting: Setting) -> None:
        self.subject, self.machine = subject, Machine(setting.device)
        torch.cuda.caching_allocator_enable()  # a stub's is off, and its bytes are to be seen here
        with setting.device:
            self.model = subject.make()
        found = calibrate(
            self.model, subject.calibration_buckets, backend="eager", example=subject.example,
            budget_s=15.0 if setting.card else 1.0,
        )  # fmt: skip
        self.calibration_s = found.seconds_s
        self.compiled = dcpc.compile(
            self.model, subject.buckets, backend="eager", recompute="none", memory=AMPLE,
            device=self.machine.target, calibration=found, verify="off",
        )  # fmt: skip
        self.runnable = self.compiled.runnable

    def inputs(self, sizes: Sizes) -> dict[str, Tensor]:
        """Returns the model's inputs of a shape, on the device."""
        return inputs_on(self.machine.device, self.subject, sizes)

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
        return plan_buckets({bucket: self.runnable.priced}, request).plans.get(bucket)


def step(call: Callable[..., Tensor], inputs: Mapping[str, Tensor]) -> Callable[[], Tensor]:
    """Returns a function that runs forward and backward."""

    def run() -> Tensor:
        loss = call(**inputs)
        loss.backward()
        return loss.detach()

    return run


def text(sizes: Sizes) -> str:
    """Returns sizes as a row has them."""
    return " x ".join(map(str, sizes.values()))


def rounds(setting: Setting) -> int:
    """Returns how often everything is timed."""
    return 7 if setting.card and not setting.quick else 3 if setting.card else 1


def peaks(setting: Setting) -> Iterator[Row]:
    """Yields peaks and seconds of a GPT; a stub's allocator has room for the full one, too."""
    gpu = setting.device.type == "cuda"
    subject = (full() if gpu else tiny(setting.dtypes[-1]))[0]
    yield from tried(subject.name, lambda: peaks_of(OnDevice(subject, setting), setting))


def pyramid(setting: Setting) -> Iterator[Row]:
    """Yields peaks, seconds and the pyramid of an STDiT."""
    subject = (full() if setting.card else tiny(setting.dtypes[-1]))[1]

    def run() -> Iterator[Row]:
        mine = OnDevice(subject, setting)
        yield from peaks_of(mine, setting, (0.0, 1.0))
        mine.machine.clear()
        yield from pyramid_of(mine, setting)

    yield from tried(subject.name, run)


def peaks_of(mine: OnDevice, setting: Setting, shares: tuple[float, ...] = SHARES) -> Iterator[Row]:
    """Yields the peak and the seconds of each length and share of recompute."""
    kept = []
    yield setting.measured(f"{mine.subject.name}, calibration", seconds_s=mine.calibration_s)
    for sizes, share in itertools.product(mine.subject.shapes, shares):
        steps = mine.runnable.priced.at(mine.runnable.priced.placement(sizes, 1)).steps
        forced = mine.forced(sizes, round(share * steps))
        predicted = forced.predict(sizes)
        check = f"{mine.subject.name}, {text(sizes)}, {share:.0%} made again"
        needed = predicted.peak_bytes + predicted.input_bytes
        if not mine.machine.has_room(needed):
            yield not_run(check, f"needs {needed / 1e9:.1f} GB of memory")
            continue
        run = step(forced, mine.inputs(sizes))
        peak = mine.peak(run)
        over = peak.allocated_bytes / predicted.peak_bytes - 1
        yield setting.judged(
            f"{check}, peak", abs(over) < PEAK_OFF, of_bytes=True,
            predicted_bytes=predicted.peak_bytes, allocated_bytes=peak.allocated_bytes,
            requested_bytes=peak.requested_bytes, over=over, limit=PEAK_OFF,
            of=mine.machine.allocator,
        )  # fmt: skip
        kept.append((check, predicted.seconds_s, run))
    spent = mine.machine.medians_s([run for *_, run in kept], rounds(setting), mine.clear)
    mine.clear()
    for (check, predicted_s, _), measured_s in zip(kept, spent, strict=True):
        told = {"predicted_s": predicted_s, "measured_s": measured_s}
        yield setting.measured(f"{check}, seconds", **told, off=predicted_s / measured_s - 1)


def pyramid_of(mine: OnDevice, setting: Setting) -> Iterator[Row]:
    """Yields tokens a second of each length with recompute chosen, of all, and of none."""
    runs, whose = [], []
    for sizes, recompute in itertools.product(mine.subject.shapes, RECOMPUTE):
        plan = mine.plan(sizes, recompute)
        if plan is not None:
            batch = {**sizes, BATCH: plan.micro_batch}
            runs.append(step(mine.forced(batch, plan.menu_step), mine.inputs(batch)))
            whose.append((text(sizes), recompute, plan.micro_batch * mine.subject.tokens(sizes)))
    spent = mine.machine.medians_s(runs, rounds(setting), mine.clear)
    mine.clear()
    rates = {
        (sizes, recompute): tokens / spent_s
        for (sizes, recompute, tokens), spent_s in zip(whose, spent, strict=True)
    }
    for sizes in map(text, mine.subject.shapes):
        own = {f"{r}_tokens_per_s": rates.get((sizes, r)) for r in RECOMPUTE}
        yield setting.measured(f"{mine.subject.name}, {sizes}, pyramid", **own)


def compiled(setting: Setting) -> Iterator[Row]:
    """Yields tokens a second of Inductor's variants and of `torch.compile` of the plain model."""
    if setting.card:
        subjects, shapes = full(shallow=True), 2
    else:
        subjects, shapes = (compared("gpt", setting.dtypes[-1], layers=1),), 1
    for subject in subjects:
        few = subject.shapes[:: -(-len(subject.shapes) // shapes)]
        yield from tried(subject.name, partial(_compiled_of, subject, few, setting))


def _compiled_of(subject: Subject, shapes: tuple[Sizes, ...], setting: Setting) -> Iterator[Row]:
    machine = Machine(setting.device)
    with setting.device:
        model = subject.make()
    lengths = [{n: size for n, size in s.items() if n != BATCH} for s in shapes]
    buckets = dcpc.Buckets(dict(subject.inputs), lengths)
    ours = dcpc.compile(
        model, buckets, backend="inductor", recompute="none", memory=AMPLE,
        device=machine.target, verify="off",
    )  # fmt: skip
    ways = {"dcpc": ours, "torch_compile": torch.compile(model), "eager": model}
    for sizes in shapes:
        inputs = inputs_on(setting.device, subject, sizes)
        runs = [step(call, inputs) for call in ways.values()]
        spent = machine.medians_s(runs, rounds(setting), partial(model.zero_grad, True))
        tokens = sizes[BATCH] * subject.tokens(sizes)
        rates = {f"{n}_tokens_per_s": tokens / s for n, s in zip(ways, spent, strict=True)}
        yield setting.measured(f"{subject.name}, {text(sizes)}, compiled", **rates)
    torch.compiler.reset()
    machine.clear()
