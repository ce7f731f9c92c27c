"""The plain model's outcomes at some points, as long as there is time and room for them."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dcpc.buckets import BATCH, Bucket, Buckets
from dcpc.plan.planning import Planned
from dcpc.plan.traced import Traced
from dcpc.trace.statistics import settled
from dcpc.verify.exactness import LossAndGradients, gaps_of
from dcpc.verify.inputs import KINDS, draw, lowest
from dcpc.verify.points import Budget, Point, points
from dcpc.verify.reference import Asked, Nudged, input_name, plain, rounding_of, trainable

LEAST_S = 2.0  # a trace is compared once where that takes no longer, whatever was spent on others
# Below what devices do, so that a guess of the seconds is on the safe side.
FLOPS_PER_S = {"cpu": 1e10}
GPU_FLOPS_PER_S = 1e12
# Samples that are run together and in two halves: batch norms want two.
SAMPLES = 4

Inputs = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Reference:
    """The plain model's outcome at one point.

    Attributes:
        point: lengths of the inputs.
        inputs: input name -> tensor.
        outcome: loss and gradients.
        wide: whether in float64 throughout.
        alike: whether random numbers were all alike.
    """

    point: Point
    inputs: Mapping[str, Tensor]
    outcome: LossAndGradients
    wide: bool
    alike: bool


def _filled(x: Tensor, shape: tuple[int, ...], value: int | float) -> Tensor:
    """Returns a tensor filled up at its ends."""
    if tuple(x.shape) == shape:
        return x
    found = x.new_full(shape, value)
    found[tuple(slice(0, size) for size in x.shape)] = x
    return found


class PlainOutcomes:
    """Computes the plain model's outcomes at the points of each trace.

    Attributes:
        budget: limits of time and memory.
        groups: buckets that share a trace, and the trace.
    """

    def __init__(
        self, model: nn.Module, buckets: Buckets, planned: Planned, unbounded: bool
    ) -> None:
        self.model, self.planned = model, planned
        self.budget = Budget(unbounded)
        self._specs = buckets.inputs
        shared: dict[int, list[Bucket]] = {}
        for bucket in buckets:
            shared.setdefault(id(planned.by_bucket[bucket]), []).append(bucket)
        self.groups = [
            (buckets.like([b.sizes for b in mine]), planned.by_bucket[mine[0]].traced)
            for mine in shared.values()
        ]
        parameter = next(model.parameters(), None)
        self.device = torch.device("cpu")
        if parameter is not None and not parameter.is_meta:  # else it gets values on the CPU
            self.device = parameter.device
        self.points = [points(mine, v.program) for mine, v in self.groups]
        self._longest_s = 0.0  # that a point took
        self._kinds: tuple[str, ...] = KINDS  # of inputs, from the first on that the model took
        self._known: dict[tuple[int, Point, bool], Reference | str] = {}

    @contextmanager
    def within(self, budget_s: float, spare_s: float, room_bytes: int) -> Iterator[None]:
        """Allows comparisons (`Budget.within`), with the parameters' present values."""
        self._known.clear()
        with self.budget.within(budget_s, spare_s, room_bytes):
            yield

    def number(self, traced: Traced) -> int:
        """Returns which trace these are made from; of tiles made later, that of the same model."""
        program = traced.whole or traced.program
        own = [i for i, (_, v) in enumerate(self.groups) if v is traced]
        same = [i for i, (_, v) in enumerate(self.groups) if (v.whole or v.program) is program]
        return [*own, *same][0]

    def of(self, traced: Traced, alike: bool, more: Sequence[Point] = ()) -> Iterator[Reference]:
        """Yields the plain model's outcomes at the points of a trace, as long as there is time."""
        seen, number = False, self.number(traced)
        for point in (*self.points[number], *more):
            key, begin_s = (number, point, alike), time.perf_counter()
            if seen and not point.promised:
                continue
            if key not in self._known:
                guess_s = self._guess_s(number, point)
                likely_s = max(guess_s, self._longest_s) if point.extra else guess_s
                late = not self.budget.allows(likely_s, point.extra)
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

    def again(self, reference: Reference) -> LossAndGradients:
        """Returns the plain model's outcome for the same inputs, run another time."""
        wanted = tuple(reference.outcome.gradients)
        return self._plain(reference.inputs, reference.wide, reference.alike, wanted)

    def rounds(
        self,
        found: LossAndGradients,
        reference: Reference,
        over: Sequence[str],
        dtype: torch.dtype,
        times: float,
    ) -> bool:
        """Whether differences are within the plain model's own rounding, as in a full softmax."""
        wide, names = reference.wide or self.fits(wide=True), [n for n in over if n != "loss"]

        def run(nudged: Nudged | None) -> LossAndGradients:
            return self._plain(reference.inputs, wide, reference.alike, names, nudged)

        try:
            own = rounding_of(run, dtype)
        except Exception:  # float64 that it cannot do, or an index that was moved
            return False
        gaps = gaps_of(found, reference.outcome)
        return all(gaps[n] <= times * own.get(n, 0.0) for n in over)

    def of_inputs(self, sizes: Mapping[str, int], inputs: Inputs, alike: bool) -> Reference:
        """Returns the plain model's outcome for inputs of the user's, in its own dtypes."""
        return Reference(Point(sizes), inputs, self._plain(inputs, False, alike), False, alike)

    def padded(
        self,
        traced: Traced,
        names: Sequence[str],
        pad: Mapping[str, int | float],
        norms: bool = False,
    ) -> Asked | str:
        """Returns the plain model's loss at small lengths, and where these are padded to twice.

        Args:
            traced: trace to draw inputs for.
            names: names of the dims that are padded.
            pad: value that fills up each input.
            norms: whether batch norms in train() are asked as they are, their new running
                statistics beside the loss; else they use those that they have.

        Returns:
            The lengths and both losses; or why the model computes none.
        """
        specs = self.groups[self.number(traced)][0].inputs

        def cases(short: Inputs, sizes: Mapping[str, int]) -> list[Inputs]:
            longer = {n: s * 2 if n in names else s for n, s in sizes.items()}
            return [short, {n: _filled(x, specs[n].shape(longer), pad.get(n, 0))
                            for n, x in short.items()}]  # fmt: skip

        if norms:
            return self._asked(traced, KINDS, {}, cases)
        with settled(self.model):
            return self._asked(traced, KINDS, {}, cases)

    def halves(self, traced: Traced, pad: Mapping[str, int | float]) -> Asked | str:
        """Returns the plain model's losses of a few samples together, and of each half of them.

        The last sample is padded in the inputs that `pad` has.

        Returns:
            The lengths, the three losses and their inputs; or why the model computes none.
        """
        specs = self.groups[self.number(traced)][0].inputs

        def cases(whole: Inputs, sizes: Mapping[str, int]) -> list[Inputs]:
            parts = {}
            for n, x in whole.items():
                one = specs[n].shape({**sizes, BATCH: 1})
                batch = [d for d, (size, own) in enumerate(zip(x.shape, one, strict=True))
                         if size != own]  # fmt: skip
                if batch and n in pad:
                    rows = one[batch[0]]
                    last = x.narrow(batch[0], x.shape[batch[0]] - rows, rows)
                    for d, size in enumerate(last.shape):
                        if d != batch[0] and specs[n].dims[d].name is not None:
                            last.narrow(d, (size + 1) // 2, size // 2).fill_(pad[n])
                parts[n] = x.chunk(2, batch[0]) if batch else (x, x)
            return [whole, *({n: parts[n][i] for n in whole} for i in (0, 1))]

        # Without ignored labels, but those that padding has: the user's data may have none.
        with settled(self.model):
            return self._asked(traced, KINDS[::-1], {BATCH: SAMPLES}, cases)

    def packed(self, traced: Traced, cases: Callable[[Inputs], list[Inputs]]) -> Asked | str:
        """Returns the plain model's losses of two rows of several sequences, and of each sequence.

        Returns:
            The lengths, the losses and their inputs; or why the model computes none.
        """
        with settled(self.model):
            return self._asked(traced, KINDS[::-1], {BATCH: 2}, lambda rows, _: cases(rows))

    def _asked(
        self,
        traced: Traced,
        kinds: Sequence[str],
        changed: Mapping[str, int],
        cases: Callable[[Inputs, Mapping[str, int]], list[Inputs]],
    ) -> Asked | str:
        """Returns the plain model's losses for inputs made from drawn ones, or why it has none."""
        mine, _ = self.groups[self.number(traced)]
        said = ""
        for point in sorted(self.points[self.number(traced)], key=lambda p: not p.short):
            sizes = {**point.sizes, **changed}
            for kind, wide in [(k, w) for k in kinds for w in (True, False)]:
                given = cases(draw(traced.program, mine, sizes, kind, self.device), sizes)
                try:
                    losses = [self._loss(x, wide) for x in given]
                except Exception as error:  # the model's own, or float64 that it cannot do
                    said = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
                    continue
                if all(map(math.isfinite, losses)):
                    eps = None if wide else torch.finfo(lowest(traced.program)).eps
                    return Asked(Point(sizes), tuple(losses), tuple(given), eps)
        return said or "its loss is no number"

    def _loss(self, inputs: Mapping[str, Tensor], wide: bool) -> float:
        return float(self._plain(inputs, wide, True, ()).loss)

    def fits(self, wide: bool = False) -> bool:
        """Whether there is room for two sets of all gradients, and for copies of parameters."""
        sets = 3 if wide or self._draws_parameters else 2
        sizes = (p.numel() * 8 if wide else p.nbytes for p in self.model.parameters())
        return sets * sum(sizes) <= self.budget.room_bytes

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
        """Returns the plain model's outcome for the first inputs that it takes, or why none."""
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

    def _plain(
        self,
        inputs: Inputs,
        wide: bool,
        alike: bool,
        wanted: Collection[str] | None = None,
        nudged: Nudged | None = None,
    ) -> LossAndGradients:
        return plain(
            self.model,
            inputs,
            wide=wide,
            alike=alike,
            autocast=self.planned.autocast,
            wanted=self._wanted(wide) if wanted is None else wanted,
            loss=self.planned.loss,
            nudged=nudged,
        )

    def _wanted(self, wide: bool) -> tuple[str, ...]:
        """Returns the parameters whose gradients are compared: all there is room for, spread.

        And inputs that learn.
        """
        inputs = tuple(input_name(n) for n, spec in self._specs.items() if spec.learns)
        trained, held = trainable(self.model), dict(self.model.named_parameters())
        if wide or self.fits():
            return (*trained, *inputs)
        every = 2 * sum(held[n].nbytes for n in trained)
        return (*trained[:: -(-every // self.budget.room_bytes)], *inputs)
