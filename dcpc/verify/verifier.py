"""Holds what dcpc is about to run against the model itself, and refuses what differs.

`Verifier.start` runs at compile: each trace, then the graphs of the chosen plans, but those that
only run or are only traced in whole later (Inductor's, and those of a model planned as a few of its
blocks).
`Verifier.built` runs when a variant is first built, before it returns a number to anybody. Both
compare loss and every gradient with the plain model's, in float64 where the model can do that, on
inputs drawn at small sizes; the ranks of a group are run in this process, one step at a time.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from dcpc.buckets import BATCH, Buckets
from dcpc.codegen import Lowering, Variant, broken_guards, integers_of
from dcpc.errors import DcpcError, PlanError, VerifyError
from dcpc.garbage import without_collection
from dcpc.ir import Partition, Placement, Program
from dcpc.planning import Planned
from dcpc.variants import Variants
from dcpc.verify.calls import called
from dcpc.verify.compare import LIMIT, ROUNDINGS, Error, Given, dims_of, error_of
from dcpc.verify.culprit import first_difference, reader
from dcpc.verify.inputs import KINDS, draw
from dcpc.verify.points import Point, points
from dcpc.verify.reference import Outcome, plain

MODES = ("auto", "full", "off")

# "auto" takes at most this share of what compiling took before, or so many seconds.
SHARE = 0.1
LEAST_S = 2.0
LEAST_ROOM_BYTES = 1 << 26
# Below what devices do, so that a guess of the seconds is on the safe side.
FLOPS_PER_S = {"cpu": 1e10}
GPU_FLOPS_PER_S = 1e12
# What makes both sides the same in float64 may not be had in the model: constants rounded on the
# way. Such differences are small; a larger one is held against the model in its own dtype.
LIFTED = 1e-3
# A gradient smaller than this share of the largest one is compared with that share of it: what is
# left of sums that cancel is rounding.
_FINELY, _ROUGHLY = 1e-3, 0.1


@dataclass(frozen=True, slots=True)
class Reference:
    """The plain model's outcome at one point.

    Attributes:
        point: where.
        inputs: what it was given.
        outcome: loss and gradients.
        wide: whether in float64 throughout.
        alike: whether random numbers were all alike.
    """

    point: Point
    inputs: Mapping[str, Tensor]
    outcome: Outcome
    wide: bool
    alike: bool


class Verifier:
    """Compares traces and variants of one model with it.

    Args:
        model: the user's.
        buckets: what it is compiled for.
        planned: its traces and plans.
        mode: one of `MODES`.

    Raises:
        PlanError: an unknown mode.
    """

    def __init__(self, model: nn.Module, buckets: Buckets, planned: Planned, mode: str) -> None:
        """Keeps what to compare."""
        check_mode(mode)
        self.model, self.planned, self.mode = model, planned, mode
        each = buckets.by_ones().values()
        self.groups = [(mine, planned.by_bucket[next(iter(mine))]) for mine in each]
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu") if parameter is None else parameter.device
        self.points = [points(mine, v.program.hints) for mine, v in self.groups]
        self.lines: list[str] = []
        self.spent_s = 0.0
        self._until_s = self._spare_s = 0.0
        self._room_bytes = 0
        self._known: dict[tuple[int, Point, bool], Reference | str] = {}
        self._called = False
        self._done: set[int] = set()
        self._kept: list[Partition] = []  # what `_done` has the ids of
        if mode != "off":
            for _, variants in self.groups:
                variants.inspect = self.built

    # ------------------------------------------------------------------------------------- when

    @without_collection()
    def start(self, compile_s: float) -> None:
        """Compares the traces, and the graphs of the chosen plans as far as there is time.

        Args:
            compile_s: what tracing and planning took.

        Raises:
            VerifyError: one of them does not compute what the model computes.
        """
        if self.mode == "off":
            return
        held = sum(p.nbytes for p in self.model.parameters())
        room_bytes = (self.planned.memory_bytes - held) // 2
        with self._within(max(SHARE * compile_s, LEAST_S), SHARE * compile_s, room_bytes):
            for number, (_, variants) in enumerate(self.groups):
                self._trace(number, variants)
            for bucket, plan in self.planned.plans.items():
                variants = self.planned.by_bucket[bucket]
                soon = self.mode == "auto" and variants.runs_what_was_priced
                soon = soon and time.perf_counter() < self._spare_s
                if soon:
                    self._variant(variants, self.planned.placement(bucket), plan.recompute)
            if self.mode == "full":
                self._rows()
                self._compiled()

    def built(
        self,
        variants: Variants,
        placement: Placement,
        lowering: Lowering,
        parts: Partition,
        sizes: Mapping[str, int],
    ) -> None:
        """Compares graphs that are about to run for the first time.

        Args:
            variants: of the trace.
            placement: of the graphs.
            lowering: what they are parts of.
            parts: the graphs.
            sizes: what they will run at, and may be for alone.

        Raises:
            VerifyError: they do not compute what the model computes.
        """
        # Gradients and the optimizer's state may be there by now.
        with self._within(LEAST_S, 0.0, int(0.1 * self.planned.memory_bytes)):
            point = Point({n: s for n, s in sizes.items() if n in variants.program.symbols})
            self._graphs(variants, placement, lowering, parts, [point])

    def _rows(self) -> None:
        """Compares every row that a step may use."""
        for bucket, rows in self.planned.tables.items():
            variants = self.planned.by_bucket[bucket]
            for row in (r for r in rows if r.fits):
                sizes = {**bucket.sizes, BATCH: row.micro_batch}
                self._variant(variants, variants.placement(sizes, row.sp), row.recompute)

    def _compiled(self) -> None:
        """Compares what the backend made of the chosen plans of one rank, in their own dtypes."""
        for bucket, plan in self.planned.plans.items():
            variants = self.planned.by_bucket[bucket]
            if plan.sp > 1 or variants.backend == "eager":
                continue
            number = self._number(variants)
            for reference in self._references(number, alike=False):
                sizes = {BATCH: 1, **reference.point.sizes}
                if reference.outcome.draws:
                    continue
                at = variants.variant(self.planned.placement(bucket), plan.recompute, sizes, 0)
                own = self._rounded(reference)
                given = self._given(variants.program, own)
                error = error_of(given.of_variant(*at), own.outcome, _ROUGHLY)
                if error.worst > self._limit(variants.program, own):
                    raise VerifyError(
                        f"what {variants.backend} compiled for {bucket} does not compute what the "
                        f"model computes at {own.point}: {_gap(error)}; take backend='eager'"
                    )
                self.lines.append(f"{variants.backend} of {bucket}: {_how_far(error, own)}")

    @contextmanager
    def _within(self, budget_s: float, spare_s: float, room_bytes: int) -> Iterator[None]:
        """Sets until when comparisons may start, and adds up what they take.

        What the plain model makes is kept as long: then its parameters are others.

        Args:
            budget_s: seconds for comparisons.
            spare_s: seconds in which extra points may be begun.
            room_bytes: for copies of parameters and for gradients.
        """
        self._known.clear()
        start_s = time.perf_counter()
        full = self.mode == "full"
        self._until_s = math.inf if full else start_s + budget_s
        self._spare_s = math.inf if full else start_s + spare_s
        self._room_bytes = max(room_bytes, LEAST_ROOM_BYTES)
        try:
            yield
        finally:
            self.spent_s += time.perf_counter() - start_s

    # --------------------------------------------------------------------------------- what: trace

    def _trace(self, number: int, variants: Variants) -> None:
        """Compares the forward graph of a trace with the model, at each point there is time for."""
        program, done = variants.program, list[str]()
        for reference in self._references(number, alike=False):
            given = self._given(program, reference)
            found = _made(partial(given.of_program), "the captured graph", reference)
            if found is None:
                continue
            error = error_of(found, reference.outcome, _floor(reference))
            error = self._in_own_dtype(number, reference, error, None)
            if error.worst > self._limit(program, reference):
                if not reference.point.promised:
                    continue
                raise VerifyError(self._trace_text(program, reference, error))
            if not done and reference.wide:
                self._own_dtype(program, reference)
            done.append(_how_far(error, reference))
        name = f"trace {number + 1}" if len(self.groups) > 1 else "the trace"
        if done:
            self.lines.append(f"{name}: loss and every gradient at {', '.join(done)}")
        else:
            why = self._why_not(number)
            self.lines.append(f"{name}: NOT compared with the model: {why}")

    def _trace_text(self, program: Program, reference: Reference, error: Error) -> str:
        return (
            f"the captured graph does not compute what the model computes at {reference.point}: "
            f"{_gap(error)}{reader(program, error.where)}; report this with the model, it is a "
            "defect of dcpc; verify='off' trains on all the same"
        )

    def _own_dtype(self, program: Program, reference: Reference) -> None:
        """Compares a trace in the model's own dtypes, where it rounds and wraps as it will."""
        own = self._rounded(reference)
        error = error_of(self._given(program, own).of_program(), own.outcome, _ROUGHLY)
        if own.outcome.finite and error.worst > self._limit(program, own):
            raise VerifyError(self._trace_text(program, own, error))

    def _rounded(self, reference: Reference) -> Reference:
        """Returns the plain model's outcome at the same point in its own dtypes."""
        outcome = self._plain(reference.inputs, False, reference.alike)
        return replace(reference, outcome=outcome, wide=False)

    # ------------------------------------------------------------------------------ what: variants

    def _variant(self, variants: Variants, placement: Placement, recompute: int) -> None:
        lowering = variants.lowering(placement)
        self._graphs(variants, placement, lowering, variants.partition(placement, recompute))
        if placement.sp == 1 and lowering.backend == "eager" and not self._called:
            self._called = True  # what is between the graphs and a user is the same for all
            self._call(variants, lowering.variant(variants.partition(placement, recompute)))

    def _call(self, variants: Variants, variant: Variant) -> None:
        """Compares what a call of a variant and its backward give, where there is time."""
        if variant.draws:
            return
        number = self._number(variants)
        for reference in self._references(number, alike=False):
            dims = dims_of(variants.program, reference.point.sizes)
            values, broken = variant.integer_values(dims, 0)
            if broken or not reference.point.promised:
                continue
            own = self._rounded(reference)
            error = error_of(
                called(self._given(variants.program, own), variant, values), own.outcome, _ROUGHLY
            )
            if own.outcome.finite and error.worst > self._limit(variants.program, own):
                raise VerifyError(
                    f"a call of the compiled model does not give what the model gives at "
                    f"{own.point}: {_gap(error)}, though its graphs do; report this with the "
                    "model, it is a defect of dcpc; verify='off' trains on all the same"
                )
            return

    def _graphs(
        self,
        variants: Variants,
        placement: Placement,
        lowering: Lowering,
        parts: Partition,
        own: Sequence[Point] = (),
    ) -> None:
        """Compares forward and backward of all ranks of a group, at the first point they take.

        Args:
            variants: of the trace.
            placement: of the graphs.
            lowering: what they are parts of.
            parts: the graphs.
            own: points besides those of the trace.
        """
        if id(parts) in self._done:
            return
        self._done.add(id(parts))
        self._kept.append(parts)
        if lowering.lowered.sp != placement.sp:
            raise VerifyError(
                f"got graphs that are lowered for sp {lowering.lowered.sp}; expected sp "
                f"{placement.sp}; report this with the model, it is a defect of dcpc; verify='off' "
                "trains on all the same"
            )
        number = self._number(variants)
        name = f"sp {placement.sp}, {len(parts.saved)} values saved"
        if not self._fits(wide=False):
            self.lines.append(f"{name}: NOT compared with the model: no room for two gradients")
            return
        done: list[str] = []
        for reference in self._references(number, placement.sp > 1, own):
            error = self._compared(variants, lowering, parts, reference)
            if error is None:
                continue
            done.append(_how_far(error, reference))
            if self.mode == "auto":
                break
        if done:
            self.lines.append(f"{name}: loss and every gradient at {', '.join(done)}")
        else:
            why = self._why_not(number)
            self.lines.append(f"{name}: NOT compared with the model: {why}")

    def _compared(
        self, variants: Variants, lowering: Lowering, parts: Partition, reference: Reference
    ) -> Error | None:
        """Returns how far graphs are from the plain model; None where that says nothing.

        Raises:
            VerifyError: they are too far off.
        """
        program, number = variants.program, self._number(variants)
        integers = integers_of(lowering.lowered, dims_of(program, reference.point.sizes))
        if any(self._broken(lowering, each) for each in integers):
            return None
        run = partial(self._given(program, reference).of_partition, lowering, parts, integers)
        found = _made(run, f"forward and backward at sp {lowering.lowered.sp}", reference)
        if found is None:
            return None
        error = error_of(found, reference.outcome, _floor(reference))
        error = self._in_own_dtype(number, reference, error, (lowering, parts, integers))
        if error.worst <= self._limit(program, reference):
            return error
        if reference.point.promised:
            raise VerifyError(self._graphs_text(program, reference, error, lowering, parts))
        return None

    def _number(self, variants: Variants) -> int:
        return next(i for i, (_, v) in enumerate(self.groups) if v is variants)

    def _broken(self, lowering: Lowering, integers: Mapping[str, int]) -> bool:
        sizes = {i.symbol: integers[i.name] for i in lowering.lowered.integers}
        return bool(broken_guards(lowering.joint.guards, sizes))

    def _graphs_text(
        self,
        program: Program,
        reference: Reference,
        error: Error,
        lowering: Lowering,
        parts: Partition,
    ) -> str:
        where = reader(program, error.where)
        if lowering.lowered.sp == 1:
            given = self._given(program, reference)
            (own,) = integers_of(lowering.lowered, dims_of(program, reference.point.sizes))
            where = first_difference(program, given, lowering, parts, own) or where
        return (
            f"forward and backward at sp {lowering.lowered.sp} do not compute what the model "
            f"computes at {reference.point}: {_gap(error)}{where}; report this with the model, it "
            "is a defect of dcpc; verify='off' trains on all the same"
        )

    # ----------------------------------------------------------------------------------- references

    def _references(
        self, number: int, alike: bool, more: Sequence[Point] = ()
    ) -> Iterator[Reference]:
        """Yields the plain model's outcomes, as long as there is time."""
        seen = False
        for point in (*self.points[number], *more):
            key = (number, point, alike)
            if seen and not point.promised:
                continue
            if key not in self._known:
                guess_s = self._guess_s(number, point)
                late = time.perf_counter() + guess_s > (
                    self._spare_s if point.extra else self._until_s
                )
                if late and (seen or guess_s > LEAST_S):  # each trace is compared once, if it can
                    self._known[key] = "it would take too long; verify='full' does it"
                    continue
                self._known[key] = self._reference(number, point, alike)
            found = self._known[key]
            if isinstance(found, Reference):
                seen = True
                yield found

    def _why_not(self, number: int) -> str:
        said = [v for (n, *_), v in self._known.items() if n == number and isinstance(v, str)]
        return "; ".join(dict.fromkeys(said)) or "sizes it takes were not tried"

    def _guess_s(self, number: int, point: Point) -> float:
        """Returns the seconds that plain model and graphs take at a point, roughly."""
        mine, variants = self.groups[number]
        bucket = next(b for b in mine if self.planned.by_bucket[b] is variants)
        placement, plan = self.planned.placement(bucket), self.planned.plans[bucket]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a graph whose costs are those of one size
            flops = variants.predict(placement, plan.recompute, point.sizes).flops * placement.sp
        rate = FLOPS_PER_S.get(self.device.type, GPU_FLOPS_PER_S)
        return 3 * flops / rate

    def _reference(self, number: int, point: Point, alike: bool) -> Reference | str:
        """Returns what the plain model makes of the first inputs that it takes, or why of none."""
        mine, variants = self.groups[number]
        said = ""
        for kind in KINDS:
            inputs = draw(variants.program, mine, point.sizes, kind, self.device)
            for wide in (True, False)[not self._fits(wide=True) :]:
                try:
                    outcome = self._plain(inputs, wide, alike)
                except Exception as error:  # the model's own, or float64 that it cannot do
                    first = (str(error).strip() or type(error).__name__).splitlines()[0]
                    said = f"the model itself says {type(error).__name__}: {first}"
                    continue
                if outcome.finite:
                    alike = alike or not outcome.draws
                    return Reference(point, inputs, outcome, wide, alike)
                said = "the model's own loss or gradients are no numbers"
                break
        return said

    def _plain(self, inputs: Mapping[str, Tensor], wide: bool, alike: bool) -> Outcome:
        autocast = self.planned.autocast
        wanted = self._wanted(wide)
        return plain(self.model, inputs, wide=wide, alike=alike, autocast=autocast, wanted=wanted)

    def _fits(self, wide: bool) -> bool:
        """Whether there is room for two sets of all gradients, and for copies of parameters."""
        sets = 3 if wide else 2
        sizes = (p.numel() * 8 if wide else p.nbytes for p in self.model.parameters())
        return sets * sum(sizes) <= self._room_bytes

    def _wanted(self, wide: bool) -> tuple[str, ...]:
        """Returns the parameters whose gradients are compared: all there is room for, spread."""
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if wide or self._fits(wide=False):
            return tuple(trained)
        every = 2 * sum(p.nbytes for p in trained.values())
        return tuple(trained)[:: -(-every // self._room_bytes)]

    def _given(self, program: Program, reference: Reference) -> Given:
        return Given(
            program,
            self.model,
            reference.inputs,
            wide=reference.wide,
            alike=reference.alike,
            wanted=tuple(reference.outcome.gradients),
        )

    # --------------------------------------------------------------------------------- how far off

    def _limit(self, program: Program, reference: Reference) -> float:
        if reference.wide:
            return LIMIT
        return ROUNDINGS * max(
            torch.finfo(info.dtype).eps
            for info in program.info.values()
            if info.dtype.is_floating_point
        )

    def _in_own_dtype(
        self,
        number: int,
        reference: Reference,
        error: Error,
        graphs: tuple[Lowering, Partition, Sequence[Mapping[str, int]]] | None,
    ) -> Error:
        """Returns the error, or one of 0 where the model's own rounding explains a small one.

        In float64 throughout a constant that the trace rounded to the model's dtype is another
        number than the plain model's, which never rounded it.
        """
        if not reference.wide or not LIMIT < error.worst < LIFTED:
            return error
        program = self.groups[number][1].program
        own = self._rounded(reference)
        given = self._given(program, own)
        found = given.of_program() if graphs is None else given.of_partition(*graphs)
        again = error_of(found, own.outcome, _ROUGHLY)
        return replace(error, worst=0.0) if again.worst <= self._limit(program, own) else error

    # -------------------------------------------------------------------------------------- report

    def report(self) -> str:
        """Returns what was compared with the model, where, and how far it was off."""
        if self.mode == "off":
            return "not verified: verify='off'\n"
        head = f"verified against the model itself (verify='{self.mode}', {self.spent_s:.1f} s)\n"
        return head + "".join(f"  {line}\n" for line in self.lines)


def _made(run: partial[Outcome], what: str, reference: Reference) -> Outcome | None:
    """Returns what a graph makes; None where it fails at lengths that it was not made for.

    Raises:
        VerifyError: it fails where the model itself does not.
    """
    try:
        return run()
    except (DcpcError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not reference.point.promised:
            return None
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise VerifyError(
            f"{what}: {type(error).__name__} at {reference.point}, where the model itself runs: "
            f"{first}; report this with the model, it is a defect of dcpc; verify='off' trains on "
            "all the same"
        ) from error


def _floor(reference: Reference) -> float:
    return _FINELY if reference.wide else _ROUGHLY


def check_mode(mode: str) -> None:
    """Refuses an unknown mode.

    Raises:
        PlanError: it is none of `MODES`.
    """
    if mode not in MODES:
        raise PlanError(f"got verify={mode!r}; expected one of {', '.join(MODES)}; choose one")


def _gap(error: Error) -> str:
    what = "largest difference" if error.where != "loss" else "got"
    beside = "largest element" if error.where != "loss" else "expected"
    return f"{error.where}: {what} {error.got:.6g}, {beside} {error.expected:.6g}"


def _how_far(error: Error, reference: Reference) -> str:
    return f"{reference.point} to {error.worst:.0e}{'' if reference.wide else ' (own dtype)'}"
