"""Compares dcpc's graphs with the model itself before they run, and refuses those that differ.

`Verifier.start` runs at compile: each trace, then the graphs of the chosen plans while there is
time to spare, but those that only run or are only traced in whole later (Inductor's, and those of a
model planned as a few of its blocks). `Verifier.built` runs when a variant is first built, and
`Verifier.runs` when it can be called, before it returns a number to anybody. All compare loss and
every gradient with the plain model's, in float64 where the model can do that, on inputs drawn at
small sizes; the ranks of a group are run in this process, one step at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from dcpc.buckets import BATCH, Buckets
from dcpc.codegen import LoweredPair, Variant
from dcpc.errors import DispatchError, VerifyError
from dcpc.fx.garbage import without_collection
from dcpc.ir import Partition, Placement
from dcpc.plan.planning import Planned
from dcpc.plan.runnable import RewrittenCall, Runnable
from dcpc.plan.traced import Traced
from dcpc.trace.statistics import running_names
from dcpc.verify.compare import Make
from dcpc.verify.comparisons import Comparisons
from dcpc.verify.inputs import counts, lowest
from dcpc.verify.points import Point
from dcpc.verify.references import LEAST_S, Inputs, PlainOutcomes

# What "auto" has begun when this share of what compiling took before is spent ends within a tenth
# of it, or within `LEAST_S`.
SHARE = 0.07

_PACKED_NORMS = (
    "packing= and batch norms in train() ({}), whose statistics are over all sequences of a "
    "micro-batch's rows and what fills these up; expected norms of a sequence; take GroupNorm or "
    "LayerNorm, or call eval() on these; a loss of such rows"
)


def _longest(buckets: Buckets) -> int:
    return max(math.prod(size for _, size in bucket.shape_key) for bucket in buckets)


def _mean(losses: Sequence[float], weights: Sequence[float]) -> float:
    """Returns the mean of losses by weight; 0.0 where nothing counts."""
    total = sum(weights)
    return sum(w * x for w, x in zip(weights, losses, strict=True)) / (total or 1.0)


class Verifier:
    """Compares traces and variants of one model with it.

    Attributes:
        lines: a text for each comparison, for the report.
        postponed_s: seconds of tracing and planning, where `start` waits for the model's values.
    """

    def __init__(self, model: nn.Module, buckets: Buckets, planned: Planned, mode: str) -> None:
        """Stores the model and its plans; compares nothing yet."""
        self.model, self.planned, self.mode = model, planned, mode
        self.references = PlainOutcomes(model, buckets, planned, unbounded=mode == "full")
        self._compared = Comparisons(self.references, thorough=mode == "full")
        self.lines = self._compared.lines
        self.postponed_s: float | None = None
        self._called = False
        self._padded: set[object] = set()  # what was found to change no loss
        if mode != "off":
            for runnable in planned.traces:
                runnable.inspector = self

    @property
    def spent_s(self) -> float:
        """Seconds that comparisons took."""
        return self.references.budget.spent_s

    @without_collection()
    def start(self, compile_s: float) -> None:
        """Compares the traces, and the graphs of the chosen plans as far as there is time.

        Raises:
            VerifyError: one of them differs from the model.
        """
        if self.mode == "off":
            return
        held = sum(p.nbytes for p in self.model.parameters())
        room_bytes = (self.planned.memory_bytes - held) // 2
        spare_s = SHARE * compile_s
        with self.references.within(max(spare_s, LEAST_S), spare_s, room_bytes):
            for number, runnable in enumerate(self.planned.traces):
                # Extra points of one trace leave time for what has to be compared of the next.
                self.references.budget.spare((number + 1) / len(self.planned.traces) * spare_s)
                self._compared.trace(runnable.traced)
            if self.mode == "full":
                self._rows()
                self._compiled()
                return
            for bucket, plan in self.planned.plans.items():
                runnable = self.planned.by_bucket[bucket]
                if runnable.runs_what_was_priced and self.references.budget.has_spare_time:
                    self._variant(runnable, self.planned.placement(bucket), plan.menu_step)

    def problem(self, compile_s: float) -> VerifyError | None:
        """Returns the error of `start`; not raised, as ranks have to tell each other first."""
        try:
            self.start(compile_s)
        except VerifyError as error:
            return error
        return None

    def composed_problem(
        self, traced: Traced, make: Make, name: str, *, alike: bool = False
    ) -> VerifyError | None:
        """Returns how a model's parts, run in turn, differ from it; None: they do not."""
        if self.mode == "off":
            return None
        try:
            with self.references.within(LEAST_S, 0.0, int(0.1 * self.planned.memory_bytes)):
                self._compared.composed(traced, make, name, alike)
        except VerifyError as error:
            return error
        return None

    def postponed_problem(self) -> VerifyError | None:
        """Returns the error of `start` where it has waited for the model's values; once."""
        compile_s, self.postponed_s = self.postponed_s, None
        return None if compile_s is None else self.problem(compile_s)

    def padding_problem(
        self, traced: Traced, names: tuple[str, ...], pad: Mapping[str, int | float]
    ) -> DispatchError | None:
        """Returns an error if filling up inputs changes the model's loss.

        Looked up once for the same values, at small lengths, with the plain model.
        """
        key = (self.references.number(traced), names, tuple(sorted(pad.items())))
        if self.mode == "off" or key in self._padded:
            return None
        found = self.references.padded(traced, names, pad)
        if isinstance(found, str):
            return DispatchError(
                f"evaluate: got pad={dict(pad)}; expected values that change no number, and the "
                f"model cannot be asked: {found}; take between='compile', or verify='off' if you "
                "know that they are"
            )
        short, filled = found.losses
        if found.apart(short, filled):
            return DispatchError(
                f"evaluate: got pad={dict(pad)}, which changes the loss at {found.point} from "
                f"{short:g} "
                f"to {filled:g} where {', '.join(names)} is padded to twice that; expected values "
                "that the model and its loss ignore (-100 for labels, a mask of 0); take others, "
                "or between='compile'"
            )
        self._padded.add(key)
        self.lines.append(f"padding of {', '.join(names)} with {dict(pad)} changes no loss")
        return None

    def division_problems(
        self, weigh: Callable[[Mapping[str, Tensor]], float] | None, pad: Mapping[str, int | float]
    ) -> Mapping[str, str]:
        """Returns each thing besides the sample that a sample's loss depends on, with the reason.

        "micro_batch": on who shares its micro-batch, "padding": on its bucket. Looked up with the
        plain model, on a few drawn samples. Where it cannot be asked nothing is said.
        """
        mine, traced = self.references.groups[0]
        if self.mode == "off" or BATCH not in mine.names or not self.references.fits():
            return {}
        halves = self._of_halves(traced, weigh, pad)
        found = {"micro_batch": halves, "padding": self._of_padding(traced, mine, pad)}
        return {name: text for name, text in found.items() if text}

    def _of_halves(
        self,
        traced: Traced,
        weigh: Callable[[Mapping[str, Tensor]], float] | None,
        pad: Mapping[str, int | float],
    ) -> str:
        found = self.references.halves(traced, pad)
        if isinstance(found, str):
            return ""
        whole, *halves = found.losses
        try:
            weights = [1.0 if weigh is None else float(weigh(x)) for x in found.inputs[1:]]
        except Exception:  # a user's function may be for real samples alone
            return ""
        mean = _mean(halves, weights)
        apart = found.apart(whole, mean)
        if not any(weights) or not apart:
            return ""
        of_halves = [{"'samples'": 1.0, **counts(x)} for x in found.inputs[1:]]
        named = {w: _mean(halves, [own[w] for own in of_halves]) for w in of_halves[0]}
        right = next((w for w, other in named.items() if not found.apart(whole, other)), "")
        advice = (
            f"pass weight={right}, which is what it is a mean over there"
            if right
            else "pass the weight that the loss is a mean over, or make a sum a mean"
        )
        return (
            f"got a loss of {whole:g} of drawn samples at {found.point}, and {mean:g} as the mean "
            f"of their halves by weight= (relative difference {apart:.1e}); expected the same, as "
            "a step adds up its micro-batches by weight, and the plan says which samples share "
            f"one; {advice}; a loss that joins samples (contrastive, a batch norm)"
        )

    def packing_problem(
        self, cases: Callable[[Inputs], list[Inputs]], weigh: Callable[[Inputs], float]
    ) -> str:
        """Returns the difference of packed rows' loss from their sequences'; "": there is none.

        Looked up with the plain model, on a few drawn sequences. Where it cannot be asked nothing
        is said.
        """
        _, traced = max(self.references.groups, key=lambda group: _longest(group[0]))
        if self.mode == "off" or not self.references.fits():
            return ""
        weights: list[float] = []

        def counted(rows: Inputs) -> list[Inputs]:
            every = cases(rows)
            weights[:] = [float(weigh(x)) for x in every]
            return [x for x, weight in zip(every, weights, strict=True) if weight]

        try:
            found = self.references.packed(traced, counted)
        except Exception:  # a user's function may be for real samples alone
            return ""
        if isinstance(found, str) or not weights[0]:
            return ""
        (of_rows, whole), *alone = zip(filter(None, weights), found.losses, strict=True)
        total = sum(weight for weight, _ in alone)
        mean = _mean([loss for _, loss in alone], [weight for weight, _ in alone])
        apart = found.apart(whole, mean)
        if abs(of_rows - total) <= 1e-6 * total and not apart:
            norms = running_names(self.model, training=True)
            return f"got {_PACKED_NORMS.format(', '.join(norms[:2]))}" if norms else ""
        return (
            f"got a loss of {whole:g} and a weight of {of_rows:g} of two drawn packed rows at "
            f"{found.point}, and a mean of {mean:g} and a weight of {total:g} of their sequences, "
            f"each alone (relative difference of the losses {apart:.1e}); expected the same for "
            "all ways to share out sequences over rows; make the loss a mean over all that weight= "
            "counts in a micro-batch and over nothing else (no padding, no ignored labels, no "
            "means of rows), or leave packing= out; a loss that is something else"
        )

    def _of_padding(self, traced: Traced, mine: Buckets, pad: Mapping[str, int | float]) -> str:
        have: dict[str, set[str]] = {}
        for name, spec in mine.inputs.items():
            for dim in spec.dims:
                have.setdefault(dim.name or "", set()).add(name)
        names = [d for d, inputs in have.items() if d not in ("", BATCH) and inputs <= pad.keys()]
        found = self.references.padded(traced, names, pad) if names else ""
        if isinstance(found, str):
            return ""
        short, filled = found.losses
        apart = found.apart(short, filled)
        if not apart:
            return self._of_norms(traced, names, pad)
        return (
            f"got pad={dict(pad)}, which changes the loss of drawn samples at {found.point} from "
            f"{short:g} to {filled:g} where {', '.join(names)} is padded to twice that (relative "
            f"difference {apart:.1e}); expected values that the model and its loss ignore (a mask "
            "of 0, -100 for labels), so that a sample's loss is the same in all buckets; pass "
            "these, or leave pad= out for samples of the buckets' own lengths; a loss that changes"
        )

    def _of_norms(
        self, traced: Traced, names: Sequence[str], pad: Mapping[str, int | float]
    ) -> str:
        norms = running_names(self.model, training=True)
        found = self.references.padded(traced, names, pad, norms=True) if norms and names else ""
        if isinstance(found, str) or not found.apart(*found.losses):
            return ""
        return (
            f"got pad={dict(pad)} and batch norms in train() ({', '.join(norms[:2])}), whose "
            "statistics are over padding, too, where samples of several lengths share a "
            "micro-batch, as in the plain model on a padded batch; expected samples without "
            "padding; leave pad= out where each has its bucket's length, or call eval() on these "
            "norms; a model that counts padding"
        )

    def built(
        self,
        traced: Traced,
        placement: Placement,
        lowering: LoweredPair,
        parts: Partition,
        sizes: Mapping[str, int],
    ) -> None:
        """Compares graphs that are about to run for the first time.

        Raises:
            VerifyError: they differ from the model.
        """
        # Gradients and the optimizer's state may be there by now.
        with self.references.within(LEAST_S, 0.0, int(0.1 * self.planned.memory_bytes)):
            point = Point({n: s for n, s in sizes.items() if n in traced.program.symbols})
            self._compared.graphs(traced, placement, lowering, parts, [point])

    def runs(self, traced: Traced, variant: Variant) -> None:
        """Compares the first variant of one rank as it is called: autograd, boxes, own dtypes.

        The layers between the graphs and a user are the same for all variants. In half precision
        Inductor's kernels are compared here, too: they run in that precision alone.

        Raises:
            VerifyError: it differs from the model.
        """
        gathers = traced.units is not None
        compiled = variant.backend != "eager"
        if self._called or gathers or variant.sp > 1:
            return
        if compiled and lowest(traced.program).itemsize > 2:
            return  # in half precision alone kernels round where the graphs do not
        self._called = True
        name = f"what {variant.backend} made of a plan's graphs" if compiled else ""
        with self.references.within(LEAST_S, 0.0, int(0.1 * self.planned.memory_bytes)):
            self._compared.call(traced, variant, name)

    def rewritten(self, traced: Traced, call: RewrittenCall) -> None:
        """Compares a call of a program that was made of a trace, such as one without padding.

        Raises:
            VerifyError: it differs from the model.
        """
        with self.references.within(LEAST_S, 0.0, int(0.1 * self.planned.memory_bytes)):
            self._compared.rewritten(traced, call)

    def _rows(self) -> None:
        """Compares every row that a step may use."""
        for bucket, rows in self.planned.tables.items():
            runnable = self.planned.by_bucket[bucket]
            for row in (r for r in rows if r.fits):
                sizes = {**bucket.sizes, BATCH: row.micro_batch}
                self._variant(runnable, runnable.priced.placement(sizes, row.sp), row.menu_step)

    def _compiled(self) -> None:
        """Compares the backend's code for the chosen plans of one rank."""
        for bucket, plan in self.planned.plans.items():
            runnable = self.planned.by_bucket[bucket]
            alone = plan.sp == 1 and runnable.traced.units is None
            if not alone or runnable.traced.backend == "eager":
                continue
            placement = self.planned.placement(bucket)
            for point in self.references.points[self.references.number(runnable.traced)]:
                if point.promised:
                    sizes = {BATCH: 1, **point.sizes}
                    variant, _ = runnable.variant(placement, plan.menu_step, sizes, 0)
                    name = f"{runnable.traced.backend} of {bucket}"
                    self._compared.call(runnable.traced, variant, name)

    def _variant(self, runnable: Runnable, placement: Placement, menu_step: int) -> None:
        # Graphs that gather parameters are compared as those that take them whole.
        lowering = runnable.traced.lowering(placement, gathers=False)
        parts = runnable.partition(placement, menu_step, gathers=False)
        self._compared.graphs(runnable.traced, placement, lowering, parts)

    def report(self) -> str:
        """Returns each comparison with the model: its graphs, its points, and the difference."""
        if self.mode == "off":
            return "not verified: verify='off'\n"
        if self.postponed_s is not None:
            return "not verified yet: the model has no values (dcpc.materialize)\n"
        head = f"verified against the model itself (verify='{self.mode}', {self.spent_s:.1f} s)\n"
        return head + "".join(f"  {line}\n" for line in self.lines)
