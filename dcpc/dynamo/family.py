"""Compiles and caches the variants of one captured graph, for all its lengths."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import tracing

from dcpc.api import plan_with
from dcpc.buckets import Buckets
from dcpc.codegen import Variant, resolved
from dcpc.dynamo.arguments import Arguments, arguments_of
from dcpc.dynamo.graph import Captured, refuse_reads_of_memory
from dcpc.errors import DcpcError, PlanError, TraceError
from dcpc.plan.options import CompileOptions
from dcpc.plan.planning import Planned
from dcpc.trace import casting
from dcpc.verify import Verifier

# A trace is for lengths up to this one, or so many times those of the call if that is more; where
# it cannot be, for the latter. Longer ones have another trace.
FAR = 2048
REACH = 4
UNBOUNDED = 1 << 24  # no length of a bucket: Dynamo knows of no limit

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class FamilyCall:
    """A compiled call of the captured graph at some lengths.

    Attributes:
        module: captured graph.
        variant: compiled forward and backward.
        integers: integer inputs of the variant.
        constants: tensors that the variant takes besides the arguments.
        take: function that picks the variant's tensors from arguments and constants.
        checked: positions among these of tensors that may not be contiguous or have conj bits.
        numbers: outputs of the captured graph that are no tensors, at these lengths.
        strides: strides of each output tensor; None: any.
    """

    module: Captured
    variant: Variant
    integers: tuple[int, ...]
    constants: tuple[Tensor, ...]
    take: Callable[[Sequence[Any]], Sequence[Any]]
    checked: tuple[int, ...]
    numbers: tuple[Any, ...]
    strides: tuple[tuple[int, ...] | None, ...]


class Family:
    """Runs one captured graph at all lengths.

    Args:
        gm: graph module from Dynamo.
        examples: arguments of the first call.
        options: options of `dcpc.compile`.
        buckets: buckets for forward's arguments, for which to plan recompute; or None.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        examples: Sequence[Any],
        options: CompileOptions,
        buckets: Buckets | None,
    ) -> None:
        refuse_reads_of_memory(gm)
        tensors = [x for x in examples if isinstance(x, Tensor)]
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        self._arguments: Arguments = arguments_of(gm, examples, learns)
        # If a graph for all values of an integer is refused, each value gets a separate graph.
        self._without_counts = self._arguments
        if self._arguments.counts:
            self._without_counts = arguments_of(gm, examples, learns, counts=False)
        self._gm, self._learns = gm, learns
        self._options, self._buckets = options, buckets
        self._kind = tensors[0].device.type if tensors else "cpu"
        # By whether integers are dims, and the numbers in a graph.
        self._modules: dict[tuple[int | float, ...], Captured] = {}
        self._traces: dict[tuple[int | float, ...], list[_RangeTrace]] = {}
        self._calls: dict[tuple[int | float, ...], FamilyCall | DcpcError] = {}

    def call(self, given: Sequence[Any]) -> FamilyCall:
        """Returns the compiled call for some arguments, traced and compiled if it is new.

        Raises:
            DcpcError: the graph is refused at these lengths; the error is cached.
        """
        key = (*self._arguments.numbers(given), *self._arguments.shape(given))
        if key not in self._calls:
            try:
                with tracing(None):  # Dynamo's own capture is not over yet
                    self._calls[key] = self._found(given)
            except DcpcError as error:
                self._calls[key] = error
        found = self._calls[key]
        if isinstance(found, DcpcError):
            raise found
        return found

    def run(self, call: FamilyCall, given: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the outputs of the captured graph."""
        tensors = [*call.take((*given, *call.constants))]
        for i in call.checked:
            tensors[i] = resolved(tensors[i].contiguous())
        variant, integers = call.variant, call.integers
        if variant.draws:
            integers = (*integers[:-1], int(torch.randint(1 << 62, ())))
        with casting(self._kind, None):
            found = variant.run(tensors, integers, call.strides)
        return call.module.returned(found, call.numbers)

    def _found(self, given: Sequence[Any]) -> FamilyCall:
        if not self._arguments.countable(given):
            return self._call_at(given, self._without_counts)
        try:
            return self._call_at(given, self._arguments)
        except DcpcError as error:
            if not self._arguments.counts:
                raise
            refused = error
        counts = ", ".join(f"'{self._arguments.given_names[i]}'" for i in self._arguments.counts)
        self._arguments = self._without_counts
        self._calls.clear()  # by keys of other arguments
        found = self._call_at(given, self._arguments)
        warnings.warn(
            f"torch.compile(backend='dcpc'): each value of argument {counts} takes a trace of its "
            f"own, as one for all values is refused ({refused}); pass a tensor",
            stacklevel=2,
        )
        return found

    def _call_at(self, given: Sequence[Any], arguments: Arguments) -> FamilyCall:
        numbers, lengths = arguments.numbers(given), arguments.lengths(given)
        key = (len(arguments.counts), *numbers)
        if key not in self._modules:
            module = Captured(self._gm, arguments, given, self._learns)
            self._modules[key], self._traces[key] = module, []
        module, traces = self._modules[key], self._traces[key]
        trace = next((t for t in traces if t.reaches(lengths)), None)
        if trace is None:
            trace = self._traced(module, lengths)
            traces.append(trace)
        return trace.call(lengths, arguments.shape(given))

    def _traced(self, module: Captured, lengths: Mapping[str, int]) -> _RangeTrace:
        """Returns a trace for all lengths that Dynamo allows, or else for lengths near these.

        Where dims must be equal, dims of equal length here become one; other calls get another
        trace.
        """
        ranges = module.arguments.ranges
        far = {
            n: (low, min(high, max(FAR, REACH * lengths[n]))) for n, (low, high) in ranges.items()
        }
        near = {n: (low, min(high, REACH * lengths[n])) for n, (low, high) in ranges.items()}
        exact = {n: (size, size) for n, size in lengths.items()}
        apart = {n: n for n in lengths}
        equal = {n: next(m for m in lengths if lengths[m] == size) for n, size in lengths.items()}
        ways = ((equal, far), (equal, near), (apart, far), (apart, near), (apart, exact))
        if not module.arguments.related:
            ways = ways[2:4] + ways[:2] + ways[4:]
        first: DcpcError | None = None
        for names, allowed in ways:
            if not _within(lengths, allowed):
                continue
            for wanted in ([lengths, *self._planned_for(module, lengths)], [lengths]):
                try:
                    return _RangeTrace(module, self._options, names, allowed, wanted)
                except PlanError as error:
                    first = first or error
                except TraceError as error:
                    first = first or error
                    break
        assert first is not None, "each try ends in a trace or an error"
        raise first

    def _planned_for(self, module: Captured, lengths: Mapping[str, int]) -> list[dict[str, int]]:
        """Returns more lengths to plan for: the user's buckets, or the largest if bounded."""
        if self._buckets is not None:
            return module.arguments.renamed(self._buckets, lengths)
        ranges = module.arguments.ranges.items()
        return [{n: lengths[n] if high >= UNBOUNDED else high for n, (_, high) in ranges}]


class _RangeTrace:
    """A trace for ranges of lengths, planned, and verified against the captured graph.

    Args:
        module: captured graph.
        options: options of `dcpc.compile`.
        names: name of each dim -> its name in the trace; dims with one name are equal.
        ranges: name of each dim -> smallest and largest length.
        wanted: lengths to plan for, the call's first; those outside the ranges are left out.

    Raises:
        DcpcError: there is no such trace or plan, or its results differ from the module's.
    """

    def __init__(
        self,
        module: Captured,
        options: CompileOptions,
        names: Mapping[str, str],
        ranges: Mapping[str, Range],
        wanted: Sequence[Mapping[str, int]],
    ) -> None:
        start_s = time.perf_counter()
        self._module, self._names, self._ranges = module, names, ranges
        inputs = {n: str(spec.renamed(names)) for n, spec in module.arguments.specs.items()}
        least = {n: max(ranges[m][0] for m in names if names[m] == n) for n in names.values()}
        most = {n: min(ranges[m][1] for m in names if names[m] == n) for n in names.values()}
        self._buckets = buckets = Buckets(
            inputs, _distinct([self._own(w) for w in wanted if self.reaches(w)])
        )
        self._planned: Planned = plan_with(
            module,
            buckets,
            options.planned_for(1),
            ranges=Buckets(inputs, _distinct([least, most])),
        )
        verifier = Verifier(module, buckets, self._planned, options.verify)
        verifier.start(time.perf_counter() - start_s)

    def reaches(self, lengths: Mapping[str, int]) -> bool:
        """Whether the trace is valid at these lengths."""
        alike = all(lengths[n] == lengths[m] for n, m in self._names.items())
        return alike and _within(lengths, self._ranges)

    def call(self, lengths: Mapping[str, int], shape: Sequence[int]) -> FamilyCall:
        """Returns the compiled call at these lengths, with the smallest fitting bucket's plan."""
        own = self._own(lengths)
        largest = max(self._buckets, key=lambda b: b.shape_key)
        bucket = self._buckets.holding(own) or largest
        runnable = self._planned.by_bucket[bucket]
        placement = self._planned.placement(bucket)
        step = self._planned.plans[bucket].menu_step
        variant, integers = runnable.variant(placement, step, own, 0)
        program, of = runnable.traced.program, self._module.arguments
        named = {n: i for i, n in (*of.parameters.items(), *of.inputs.items())}
        names = {**program.parameters, **program.inputs}
        sources: dict[str, int | Tensor] = {p: named[n] for p, n in names.items()}
        sources |= program.constants
        stand_ins = {of.inputs[i]: of.specs[of.inputs[i]] for i in of.counts}
        sources |= {
            p: torch.empty(stand_ins[n].renamed(self._names).shape(own), dtype=torch.bool)
            for p, n in program.inputs.items()
            if n in stand_ins
        }
        taken = [sources[p] for p in variant.placeholders]
        constants = tuple(x for x in taken if isinstance(x, Tensor))
        after = iter(range(self._module.count, self._module.count + len(constants)))
        places = [next(after) if isinstance(x, Tensor) else x for x in taken]
        checked = tuple(i for i, place in enumerate(places) if place in self._module.checked)
        numbers, strides = self._module.numbers_at(shape), self._module.strides_at(shape)
        return FamilyCall(
            self._module, variant, integers, constants, _taking(places), checked, numbers, strides
        )

    def _own(self, lengths: Mapping[str, int]) -> dict[str, int]:
        return {n: lengths[n] for n in self._names.values()}


def _taking(places: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a function that picks some elements of a sequence."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda given: [given[i] for i in places]


def _within(lengths: Mapping[str, int], ranges: Mapping[str, Range]) -> bool:
    return all(low <= lengths[n] <= high for n, (low, high) in ranges.items())


def _distinct(sizes: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    return [*{tuple(sorted(s.items())): dict(s) for s in sizes}.values()]
