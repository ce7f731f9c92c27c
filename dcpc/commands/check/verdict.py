"""The acceptance of one model: traced, split and exact, or the reason why not."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.distributed as dist
from torch import nn

from dcpc.buckets import BATCH, Buckets, Sizes
from dcpc.commands.check.coverage import Coverage, coverage
from dcpc.commands.check.split import NORMS, SplitModel
from dcpc.errors import BucketError, DcpcError, TraceError
from dcpc.fx.garbage import without_collection
from dcpc.trace.static import static_notes, trace_all
from dcpc.verify.exactness import EXACT, ROUNDINGS, Difference
from dcpc.verify.float64 import LOW, InFloat64
from dcpc.verify.inputs import Example, example_inputs, float64_specs
from dcpc.verify.reference import plain

LEAST_SHARE = 0.95
MOST_SHAPES = 6  # that an error shows


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of checking a model on the buckets that share one trace.

    Attributes:
        sp: ranks.
        trace_s: seconds of the trace and its analysis.
        nodes: values in the graph.
        symbolic: named dims that stayed symbolic.
        fixed: named dims that the trace fixed.
        coverage: split nodes and their share of the FLOPs; None on one rank.
        differences: difference from the plain model at each shape.
        low: the lowest floating dtype that the model computes in although its parameters are
            float64, as a text; "" if there is none.
        limit: maximum of `differences`.
        lifted: differences with every cast to a lower dtype left out, where `differences` exceed
            1e-10; these must not.
        skipped: shapes that the plain model refuses, with its error.
        error: error of dcpc or of the model; "" if there is none.
        lowerings: differences by each further lowering of attention.
        static: the report's line about each static dim.
    """

    sp: int
    trace_s: float = 0.0
    nodes: int = 0
    symbolic: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    coverage: Coverage | None = None
    differences: tuple[Difference, ...] = ()
    low: str = ""
    limit: float = EXACT
    lifted: tuple[Difference, ...] = ()
    skipped: tuple[str, ...] = ()
    error: str = ""
    lowerings: Mapping[str, tuple[Difference, ...]] = field(default_factory=dict)
    static: tuple[str, ...] = ()

    @property
    def worst(self) -> float:
        """The largest relative difference of all shapes, as the model is."""
        return _worst(self.differences)

    @property
    def worst_in_float64(self) -> float:
        """The same, without casts to lower dtypes where those made a difference."""
        return _worst(self.lifted or self.differences)

    @property
    def worst_by_lowering(self) -> float:
        """The largest of all lowerings of attention that were tried besides."""
        return _worst([d for found in self.lowerings.values() for d in found])

    @property
    def may_be_rounding(self) -> bool:
        """Whether the difference may be of a lower dtype, and was not yet measured without."""
        return bool(self.low) and not self.lifted and not self.worst <= EXACT

    def problems(self) -> Iterator[str]:
        """Yields each reason why the model is not accepted."""
        if self.error:
            yield self.error
            return
        if self.fixed:
            yield f"dims fixed by the trace: {', '.join(self.fixed)}"
        if not self.differences:
            yield "no shape was run: the model itself refuses all of them"
        elif not self.worst <= self.limit:
            yield f"differs from the plain model by {self.worst:.1e}, more than {self.limit:.1e}"
        if not self.worst_in_float64 <= EXACT:
            yield f"differs by {self.worst_in_float64:.1e} in float64, more than {EXACT:.0e}"
        yield from self._wrong_lowerings()
        if self.coverage is not None:
            for unsplit in self.coverage.blocked:
                yield f"replicated: {unsplit}"
            if self.coverage.sharded_share < LEAST_SHARE:
                yield (
                    f"{self.coverage.sharded_share:.1%} of its FLOPs are split, expected at least "
                    f"{LEAST_SHARE:.0%}"
                )

    def _wrong_lowerings(self) -> Iterator[str]:
        limit = EXACT if self.lifted else self.limit
        for way, found in self.lowerings.items():
            if not _worst(found) <= limit:
                yield f"attention by {way}: differs by {_worst(found):.1e}, more than {limit:.1e}"

    @property
    def accepted(self) -> bool:
        """Whether there is no problem."""
        return not any(self.problems())


def _worst(differences: Sequence[Difference]) -> float:
    found = [d.worst for d in differences]
    return float("nan") if any(map(math.isnan, found)) else max(found, default=0.0)


@dataclass(slots=True)
class Prepared:
    """A model traced, placed and lowered for a group, before there is one.

    Attributes:
        model: the model, in float64 and in eval().
        buckets: buckets of the trace, floating inputs in float64.
        split: trace and placement of the model.
        large: the shape the placement was made for.
        shapes: shapes to compare.
        skipped: shapes that the model itself refuses, with its error.
        example: function that makes inputs, see `verify.inputs.example_inputs`.
        recomputes: "none" and "all", or one of them.
        wide: the model without casts to lower dtypes, traced and placed too; None if not (yet).
        others: lowering of attention -> the same trace with it.
    """

    model: nn.Module
    buckets: Buckets
    split: SplitModel
    large: Sizes
    shapes: list[Sizes]
    skipped: list[str]
    example: Example | None
    recomputes: tuple[str, ...]
    wide: SplitModel | None = None
    others: Mapping[str, SplitModel] = field(default_factory=dict)

    @without_collection()
    def lift(self) -> SplitModel:
        """Returns `wide`, traced and lowered now if it was not."""
        if self.wide is None:
            sp, attention = self.split.sp, self.split.sharding.attention
            model = InFloat64(self.model)
            self.wide = SplitModel(model, self.buckets, self.large, sp=sp, attention=attention)
            self.others = {way: self.wide.of("eager", sp, way) for way in self.others}
            self.ready()
        return self.wide

    def ready(self) -> Prepared:
        """Returns itself, with the variants compiled of the trace that is compared next."""
        every = (self.wide or self.split, *self.others.values())
        for sizes, recompute, split in product(self.shapes, self.recomputes, every):
            split.ready(sizes, recompute)
        return self


@without_collection()
def prepare(
    make: Callable[[], nn.Module],
    buckets: Buckets,
    shapes: Sequence[Sizes],
    sp: int,
    *,
    large: Sizes | None = None,
    example: Example | None = None,
    recomputes: Sequence[str] = ("none",),
    attention: Sequence[str] = ("auto",),
) -> list[Prepared | Verdict]:
    """Returns a model ready to be compared, or the verdict that it cannot be, for each trace.

    Args:
        make: function that returns the model; it is brought to float64 and put into eval().
        buckets: inputs and sizes.
        shapes: shapes at which loss and gradients are compared; (): those of `shapes_of`. A trace
            that is for none of them is left out, or compared at `large`.
        sp: ranks of the group.
        large: the shape whose placement is used and whose FLOPs are counted; default, and in
            traces that are not for it: the largest of `shapes`.
        example: function that makes inputs, see `verify.inputs.example_inputs`.
        recomputes: "none" and "all", or one of them.
        attention: way to split attention, see `attention_ways.py`; after it others to compare.
    """
    start_s = time.perf_counter()
    try:
        torch.manual_seed(0)
        model = make().double().eval()
        every, programs = trace_all(model, float64_specs(buckets), None, NORMS)
        refuse_untraced(every, shapes)
    except DcpcError as error:
        return [Verdict(sp, error=f"{type(error).__name__}: {error}")]
    each_s = (time.perf_counter() - start_s) / len(programs)
    found: list[Prepared | Verdict] = []
    for mine, program in zip(every.by_trace().values(), programs, strict=True):
        own, at = _within(mine, shapes or shapes_of(mine, sp), large)
        if not own:
            continue
        try:
            taken = _taken(model, mine, own, example)
            split = SplitModel(model, mine, at, sp=sp, attention=attention[0], program=program)
            split.trace_s += each_s
            ways = {w: split.of("eager", sp, w) for w in split.lowerings() if w in attention[1:]}
            done = Prepared(model, mine, split, at, *taken, example, tuple(recomputes), others=ways)
            found.append(done.ready())
        except DcpcError as error:
            found.append(Verdict(sp, error=f"{type(error).__name__}: {error}"))
    return found


def _within(
    mine: Buckets, shapes: Sequence[Sizes], large: Sizes | None
) -> tuple[list[Sizes], Sizes]:
    """Returns the shapes that a trace is for, and the one to place for."""
    one = {BATCH: 1} if BATCH in mine.static else {}
    at: list[Sizes] = [{**large, **one}] if large and mine.traces(large) else []
    own: list[Sizes] = [{**s, **one} for s in shapes if mine.traces(s)]
    return own or at, at[0] if at else _largest(own or shapes)


def refuse_untraced(buckets: Buckets, shapes: Sequence[Sizes]) -> None:
    """Raises a BucketError where no trace is for a shape's lengths."""
    traces = buckets.by_trace().values()
    for sizes in shapes:
        if not any(mine.traces(sizes) for mine in traces):
            known = [dict(b.sizes) for b in buckets][:MOST_SHAPES]
            raise BucketError(
                f"got the shape {dict(sizes)} to compare at; expected lengths within the buckets' "
                f"of one of {len(traces)} traces; compare at another ({known}), or add a bucket"
            )


def compare(prepared: Prepared, lift: bool = True) -> Verdict:
    """Returns the verdict, after every rank of the group has run the model at every shape.

    Args:
        prepared: the model, the same on every rank.
        lift: whether to trace it again without casts to lower dtypes where these may be what makes
            a difference. A caller that forks its ranks does so itself (`Prepared.lift`), once.
    """
    split, buckets = prepared.split, prepared.buckets
    try:
        _same_everywhere(prepared.model)
        differences = tuple(_differences(split, prepared))
        low = _lowest(split)
        lifted: tuple[Difference, ...] = ()
        if (lift or prepared.wide) and low is not None and not _worst(differences) <= EXACT:
            lifted = tuple(_differences(prepared.lift(), prepared))
        ways = prepared.others.items()
        lowerings = {way: tuple(_differences(other, prepared)) for way, other in ways}
    except DcpcError as error:
        return Verdict(split.sp, error=f"{type(error).__name__}: {error}")
    dims = [n for n in buckets.names if n in split.program.symbols and n not in buckets.static]
    inputs = [split.program.info[n] for n in split.program.inputs]
    free = {str(s) for tensor in inputs for size in tensor.shape for s in size.free_symbols}
    return Verdict(
        sp=split.sp,
        trace_s=split.trace_s,
        nodes=len(split.program.info),
        symbolic=tuple(n for n in dims if n in free),
        fixed=tuple(n for n in dims if n not in free and buckets.range_of(n)[1] > 1),
        static=tuple(static_notes(buckets)),
        coverage=coverage(split) if split.sp > 1 else None,
        differences=differences,
        low="" if low is None else str(low).removeprefix("torch."),
        limit=EXACT if low is None else ROUNDINGS * torch.finfo(low).eps,
        lifted=lifted,
        skipped=tuple(prepared.skipped),
        lowerings=lowerings,
    )


def _same_everywhere(model: nn.Module) -> None:
    """Gives every rank the parameters and buffers of rank 0."""
    if dist.is_initialized():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, 0)


def _largest(shapes: Sequence[Sizes]) -> Sizes:
    return max(shapes, key=lambda s: math.prod(s.values()))


def _taken(
    model: nn.Module, buckets: Buckets, shapes: Sequence[Sizes], example: Example | None
) -> tuple[list[Sizes], list[str]]:
    """Returns the shapes that the plain model can run, and its errors for the others."""
    taken: list[Sizes] = []
    skipped: list[str] = []
    for sizes in shapes:
        try:
            plain(model, example_inputs(buckets, sizes, example))
        except TraceError:
            raise
        except (RuntimeError, ValueError, IndexError, AssertionError, NotImplementedError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            skipped.append(f"{dict(sizes)}: {type(error).__name__}: {first}")
        except Exception:
            taken.append(sizes)  # the trace fails as well, and says where
        else:
            taken.append(sizes)
    return taken, skipped


def _differences(split: SplitModel, prepared: Prepared) -> Iterator[Difference]:
    for sizes in prepared.shapes:
        inputs = example_inputs(prepared.buckets, sizes, prepared.example)
        for recompute in prepared.recomputes:
            yield split.difference(sizes, inputs, recompute)


def _lowest(split: SplitModel) -> torch.dtype | None:
    """Returns the lowest floating dtype below float64 that a gradient flows through."""
    found = {i.dtype for i in split.program.info.values() if i.requires_grad}
    return next((dtype for dtype in reversed(LOW) if dtype in found), None)


def shapes_of(buckets: Buckets, sp: int) -> list[Sizes]:
    """Returns shapes to compare at: the smallest bucket, and near it lengths `sp` does not divide.

    Batch is 1, so that the lengths are split.
    """
    smallest = min((b.sizes for b in buckets.buckets), key=lambda s: math.prod(s.values()))
    base = {n: 1 if n == BATCH else smallest[n] for n in buckets.names}
    odd = {n: _odd(n, size, buckets, sp) for n, size in base.items()}
    return [base] if odd == base else [base, odd]


def _odd(name: str, size: int, buckets: Buckets, sp: int) -> int:
    low, high = buckets.range_of(name)
    if name == BATCH or low == high or size == 1:
        return size
    return next((n for n in range(size, high + 1) if n % sp), size)
