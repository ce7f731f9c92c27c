"""The plain model's outcomes at some points, as long as there is time and room for them."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dcpc.buckets import Buckets
from dcpc.errors import DcpcError, VerifyError
from dcpc.ir import Program
from dcpc.plan.planning import Planned
from dcpc.plan.traced import Traced
from dcpc.verify.compare import LIMIT, ROUNDINGS, Error, Given, error_of
from dcpc.verify.inputs import KINDS, draw
from dcpc.verify.points import Point, points
from dcpc.verify.reference import LossAndGradients, plain

LEAST_S = 2.0  # a trace is compared once where that takes no longer, whatever was spent on others
LEAST_ROOM_BYTES = 1 << 26
# Below what devices do, so that a guess of the seconds is on the safe side.
FLOPS_PER_S = {"cpu": 1e10}
GPU_FLOPS_PER_S = 1e12
# In float64 throughout a constant that the trace rounded to the model's dtype is another number
# than the plain model's, which never rounded it. Such differences are smaller than this.
LIFTED = 1e-3
# A gradient smaller than this share of the largest one is compared with that share of it: what is
# left of sums that cancel is rounding.
FINELY, ROUGHLY = 1e-3, 0.1

Make = Callable[[Given], LossAndGradients]


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
    outcome: LossAndGradients
    wide: bool
    alike: bool


@dataclass(frozen=True, slots=True)
class Compared:
    """How far something is from the plain model.

    Attributes:
        reference: what it was compared with.
        error: the largest difference.
        right: whether that is within what rounding does.
    """

    reference: Reference
    error: Error
    right: bool

    def __str__(self) -> str:
        own = "" if self.reference.wide else " (own dtype)"
        return f"{self.reference.point} to {self.error.worst:.0e}{own}"

    @property
    def gap(self) -> str:
        """Got and expected, as text."""
        e = self.error
        if e.where == "loss":
            return f"loss: got {e.got:.6g}, expected {e.expected:.6g}"
        return f"{e.where}: largest difference {e.got:.6g}, largest element {e.expected:.6g}"


class References:
    """What the plain model computes, and what others are compared with.

    Args:
        model: the user's.
        buckets: what it is compiled for.
        planned: its traces and plans.
        unbounded: whether time does not matter.

    Attributes:
        groups: buckets that share a trace, and what is made from it.
        spent_s: seconds in `within`.
    """

    def __init__(
        self, model: nn.Module, buckets: Buckets, planned: Planned, unbounded: bool
    ) -> None:
        self.model, self.planned, self.unbounded = model, planned, unbounded
        each = buckets.by_ones().values()
        self.groups = [(mine, planned.by_bucket[next(iter(mine))].traced) for mine in each]
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu")
        if parameter is not None and not parameter.is_meta:  # else it gets values on the CPU
            self.device = parameter.device
        self.points = [points(mine, v.program.hints) for mine, v in self.groups]
        self.spent_s = 0.0
        self._start_s = self._until_s = self._spare_s = 0.0
        self._longest_s = 0.0  # that a point took
        self._kinds: tuple[str, ...] = KINDS  # of inputs, from the first on that the model took
        self._room_bytes = 0
        self._known: dict[tuple[int, Point, bool], Reference | str] = {}

    @contextmanager
    def within(self, budget_s: float, spare_s: float, room_bytes: int) -> Iterator[None]:
        """Sets until when comparisons may start, and adds up what they take.

        What the plain model makes is kept as long: then its parameters are others.

        Args:
            budget_s: seconds for comparisons.
            spare_s: seconds in which extra points may be begun.
            room_bytes: for copies of parameters and for gradients.
        """
        self._known.clear()
        self._start_s = time.perf_counter()
        self._until_s = math.inf if self.unbounded else self._start_s + budget_s
        self.spare(spare_s)
        self._room_bytes = max(room_bytes, LEAST_ROOM_BYTES)
        try:
            yield
        finally:
            self.spent_s += time.perf_counter() - self._start_s

    def spare(self, spare_s: float) -> None:
        """Sets in how many seconds of `within` extra points may be begun."""
        self._spare_s = math.inf if self.unbounded else self._start_s + spare_s

    @property
    def has_spare_time(self) -> bool:
        """Whether more than what has to be compared may be begun."""
        return time.perf_counter() < self._spare_s

    def number(self, traced: Traced) -> int:
        """Returns which trace these are made from."""
        return next(i for i, (_, v) in enumerate(self.groups) if v is traced)

    def of(self, traced: Traced, alike: bool, more: Sequence[Point] = ()) -> Iterator[Reference]:
        """Yields the plain model's outcomes at the points of a trace, as long as there is time.

        Args:
            traced: the trace.
            alike: see `draws.KnownDraws`.
            more: points besides.
        """
        seen, number = False, self.number(traced)
        for point in (*self.points[number], *more):
            key, begin_s = (number, point, alike), time.perf_counter()
            if seen and not point.promised:
                continue
            if key not in self._known:
                guess_s = self._guess_s(number, point)
                until_s = self._spare_s if point.extra else self._until_s
                late = (
                    begin_s + (max(guess_s, self._longest_s) if point.extra else guess_s) > until_s
                )
                if late and (seen or guess_s > LEAST_S):
                    self._known[key] = "it would take too long; verify='full' does it"
                    continue
                self._known[key] = self._reference(number, point, alike)
            found = self._known[key]
            if isinstance(found, Reference):
                seen = True
                yield found
                self._longest_s = max(self._longest_s, time.perf_counter() - begin_s)

    def why_not(self, traced: Traced) -> str:
        """Returns why there is no outcome for a trace."""
        mine = self.number(traced)
        said = [v for (n, *_), v in self._known.items() if n == mine and isinstance(v, str)]
        return "; ".join(dict.fromkeys(said)) or "sizes it takes were not tried"

    def rounded(self, reference: Reference) -> Reference:
        """Returns the plain model's outcome at the same point in its own dtypes."""
        outcome = self._plain(reference.inputs, False, reference.alike)
        return replace(reference, outcome=outcome, wide=False)

    def compare(self, program: Program, make: Make, reference: Reference) -> Compared | None:
        """Returns how far something is from the plain model; None where that says nothing.

        What float64 cannot do in a graph, or does a little otherwise as the graph has constants
        that were rounded, is compared in the model's own dtypes.

        Args:
            program: of the trace.
            make: computes loss and gradients.
            reference: the plain model's.

        Raises:
            VerifyError: it cannot be run where the plain model can.
        """
        found = self._compare(program, make, reference)
        if isinstance(found, Compared):
            small = LIMIT < found.error.worst < LIFTED
            if not (reference.wide and small):
                return found
            again = self._compare(program, make, self.rounded(reference))
            return again if isinstance(again, Compared) and again.right else found
        if reference.wide and _lowest(program) != torch.float64:
            again = self._compare(program, make, self.rounded(reference))
            if isinstance(again, Compared):
                return again
        if not reference.point.promised:
            return None
        first = (str(found).strip() or type(found).__name__).splitlines()[0]
        raise VerifyError(
            f"{type(found).__name__} at {reference.point}, where the model itself runs: {first}; "
            "report this with the model, it is a defect of dcpc; verify='off' trains on all the "
            "same"
        ) from found

    def _compare(self, program: Program, make: Make, reference: Reference) -> Compared | Exception:
        given = self.given(program, reference)
        try:
            found = make(given)
        except (DcpcError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as failed:
            return failed
        error = error_of(found, reference.outcome, FINELY if reference.wide else ROUGHLY)
        limit = LIMIT if reference.wide else ROUNDINGS * torch.finfo(_lowest(program)).eps
        return Compared(reference, error, error.worst <= limit)

    def given(self, program: Program, reference: Reference) -> Given:
        """Returns what a program's graphs take to be compared with an outcome."""
        return Given(
            program,
            self.model,
            reference.inputs,
            wide=reference.wide,
            alike=reference.alike,
            wanted=tuple(reference.outcome.gradients),
        )

    def fits(self, wide: bool = False) -> bool:
        """Whether there is room for two sets of all gradients, and for copies of parameters."""
        sets = 3 if wide or self._draws_parameters else 2
        sizes = (p.numel() * 8 if wide else p.nbytes for p in self.model.parameters())
        return sets * sum(sizes) <= self._room_bytes

    @property
    def _draws_parameters(self) -> bool:
        """Whether values are drawn, as this rank has its rows alone."""
        return any(p.is_meta for p in self.model.parameters())

    def _guess_s(self, number: int, point: Point) -> float:
        """Returns the seconds that plain model and graphs take at a point, roughly."""
        bucket = next(iter(self.groups[number][0]))
        plan = self.planned.plans[bucket]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a graph whose costs are those of one size
            cost = self.planned.study(bucket).predict(plan.menu_step, point.sizes)
        rate = FLOPS_PER_S.get(self.device.type, GPU_FLOPS_PER_S)
        return 3 * cost.flops * plan.sp / rate

    def _reference(self, number: int, point: Point, alike: bool) -> Reference | str:
        """Returns what the plain model makes of the first inputs that it takes, or why of none."""
        mine, traced = self.groups[number]
        said = ""
        if self._draws_parameters and not self.fits():
            return "ranks share out its parameters, and there is no room for whole ones"
        for i, kind in enumerate(self._kinds):
            inputs = draw(traced.program, mine, point.sizes, kind, self.device)
            for wide in (True, False)[not self.fits(wide=True) :]:
                try:
                    outcome = self._plain(inputs, wide, alike)
                except Exception as error:  # the model's own, or float64 that it cannot do
                    first = (str(error).strip() or type(error).__name__).splitlines()[0]
                    said = f"the model itself says {type(error).__name__}: {first}"
                    continue
                if outcome.finite:
                    alike = alike or not outcome.draws
                    self._kinds = self._kinds[i:]
                    return Reference(point, inputs, outcome, wide, alike)
                said = "the model's own loss or gradients are no numbers"
                break
        return said

    def _plain(self, inputs: Mapping[str, Tensor], wide: bool, alike: bool) -> LossAndGradients:
        autocast = self.planned.autocast
        wanted = self._wanted(wide)
        return plain(self.model, inputs, wide=wide, alike=alike, autocast=autocast, wanted=wanted)

    def _wanted(self, wide: bool) -> tuple[str, ...]:
        """Returns the parameters whose gradients are compared: all there is room for, spread."""
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if wide or self.fits():
            return tuple(trained)
        every = 2 * sum(p.nbytes for p in trained.values())
        return tuple(trained)[:: -(-every // self._room_bytes)]


def _lowest(program: Program) -> torch.dtype:
    """Returns the floating dtype of a program that rounds most."""
    found = {i.dtype for i in program.info.values() if i.dtype.is_floating_point}
    return max(found, key=lambda dtype: torch.finfo(dtype).eps)
