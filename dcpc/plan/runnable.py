"""The graphs of a whole program that run: partitions, and variants compiled on first use."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import sympy
from torch import Tensor

from dcpc.buckets import BATCH, Sizes
from dcpc.codegen import LoweredPair, Variant, with_quotients
from dcpc.errors import CodegenError
from dcpc.ir import Partition, Placement, Program
from dcpc.plan.folding import lift_of
from dcpc.plan.priced import Priced
from dcpc.plan.traced import Hints, PlacementId, Traced


@dataclass(frozen=True, slots=True)
class RewrittenCall:
    """A call of a program that computes another one's numbers.

    Attributes:
        program: what runs.
        sizes: of the call.
        inputs: of the model, by name.
        others: inputs that the program has besides.
        runs: what runs it: on one rank a variant and the call's integers, else graphs of any rank.
        name: for a report.
    """

    program: Program
    sizes: Sizes
    inputs: Mapping[str, Tensor]
    others: Mapping[str, Tensor]
    runs: tuple[Variant, tuple[int, ...]] | tuple[LoweredPair, Partition]
    name: str


class Inspector(Protocol):
    """Looks at what is about to run for the first time, and raises where it must not."""

    def built(
        self,
        traced: Traced,
        placement: Placement,
        lowering: LoweredPair,
        parts: Partition,
        sizes: Sizes,
    ) -> None:
        """Looks at graphs that are about to be compiled for these sizes."""

    def runs(self, traced: Traced, variant: Variant) -> None:
        """Looks at a variant once it is compiled."""

    def rewritten(self, traced: Traced, call: RewrittenCall) -> None:
        """Looks at the first call of a program that was made of a traced one."""


@dataclass(frozen=True, slots=True)
class _GraphsKey:
    placement: PlacementId
    menu_step: int
    backend: str
    hints: Hints = None
    gathers: bool = True
    gathers_again: frozenset[int] | None = None


class Runnable:
    """What runs of a program.

    Args:
        traced: the program.

    Attributes:
        traced: the same.
        priced: what it costs, and what a step of recompute makes again.
        inspector: looks at each variant before it runs; None: nobody does.
    """

    def __init__(self, traced: Traced) -> None:
        self.traced, self.priced = traced, Priced(lift_of(traced))
        self._partitions: dict[_GraphsKey, Partition] = {}
        self._variants: dict[_GraphsKey, list[Variant]] = {}
        self.inspector: Inspector | None = None

    @property
    def runs_what_was_priced(self) -> bool:
        """Whether the graphs that are priced are those that run: no fold, no trace for Inductor."""
        return self.traced.backend == "eager" and not self.priced.lift.folds

    def partition(
        self,
        placement: Placement,
        menu_step: int,
        hints: Hints = None,
        backend: str = "",
        *,
        gathers: bool = True,
        gathers_again: frozenset[int] | None = None,
    ) -> Partition:
        """Returns forward and backward in which `menu_step` steps of the menu are taken.

        Args:
            placement: of the program.
            menu_step: how many.
            hints: as for `Traced.lowering`.
            backend: as for it.
            gathers: as for it.
            gathers_again: as for `Priced.made_again`.
        """
        backend = backend or self.traced.backend
        of = self.traced.id_of(placement)
        gathers = gathers and self.traced.units is not None
        key = _GraphsKey(of, menu_step, backend, hints, gathers, gathers_again)
        if key not in self._partitions:
            lowering = self.traced.lowering(placement, hints, backend, gathers=gathers)
            again = self.priced.made_again(
                placement, menu_step, backend, gathers_again=gathers_again
            )
            self._partitions[key] = lowering.partition(again)
        return self._partitions[key]

    def variant(
        self,
        placement: Placement,
        menu_step: int,
        sizes: Sizes,
        rank: int,
        gathers_again: frozenset[int] | None = None,
    ) -> tuple[Variant, tuple[int, ...]]:
        """Returns a runnable variant that is right at these sizes, and the integers for the call.

        A variant is right wherever the sizes that torch looked at while compiling compare the same
        way; where they do not, another one is compiled for these sizes.

        Args:
            placement: of the program.
            menu_step: steps of recompute that are taken.
            sizes: lengths of the dims.
            rank: place in the group.
            gathers_again: as for `Priced.made_again`.

        Raises:
            CodegenError: no graph that torch traces is right at these sizes.
        """
        dims = self.traced.program.dims(sizes)
        backend = self._backend(placement, dims)
        of = self.traced.id_of(placement)
        key = _GraphsKey(of, menu_step, backend, gathers_again=gathers_again)
        known = self._variants.setdefault(key, [])
        for variant in known:
            values, broken = variant.integer_values(dims, rank)
            if not broken:
                return variant, values
        # Inductor adds guards of its own to what it compiles: such a graph is traced alone.
        hints: list[Hints] = [None if backend == "eager" else ()] * (not known)
        got = ""
        for chosen in itertools.chain(hints, self.hints(placement, backend, dims, rank)):
            try:
                lowering = self.traced.lowering(placement, chosen, backend)
                parts = self.partition(
                    placement, menu_step, chosen, backend, gathers_again=gathers_again
                )
                if self.inspector is not None:
                    self._inspected(placement, menu_step, chosen, backend, sizes)
                variant = lowering.variant(parts)
                if self.inspector is not None:
                    self.inspector.runs(self.traced, variant)
            except CodegenError as error:
                if not chosen:
                    raise
                got = got or str(error)
                continue
            values, broken = variant.integer_values(dims, rank)
            known.append(variant)
            if not broken:
                return variant, values
            got = f"a graph that assumes {' and '.join(map(str, broken))}"
        at = ", ".join(f"{s} = {n}" for s, n in dims.items())
        raise CodegenError(
            f"rank {rank} of {placement.sp} at {at}: got {got}; expected a graph that is right at "
            "these sizes, and tracing it again at them gave none; take another size or sp, or look "
            "for an op that treats a size as a number"
        )

    def _inspected(
        self, placement: Placement, menu_step: int, hints: Hints, backend: str, sizes: Sizes
    ) -> None:
        """Shows graphs to the inspector; where they gather parameters, those that take them."""
        assert self.inspector is not None, "somebody looks"
        whole = self.traced.lowering(placement, hints, backend, gathers=False)
        parts = self.partition(placement, menu_step, hints, backend, gathers=False)
        self.inspector.built(self.traced, placement, whole, parts, sizes)

    def hints(
        self, placement: Placement, backend: str, dims: Mapping[sympy.Symbol, int], rank: int
    ) -> Iterator[tuple[int, ...]]:
        """Yields sizes to trace at, where the usual ones break a guard.

        They are those of the call; for 0 and 1, which torch would take for numbers, 2 or, lest they
        seem to be equal to something that they are not, other primes.
        """
        integers = self.traced.lowering(placement, None, backend).lowered.integers
        tried: set[tuple[int, ...]] = set()
        for first in (1, 2, 7):
            primes = map(sympy.prime, itertools.count(first))
            larger = {s: n if n > 1 else next(primes) for s, n in dims.items()}
            larger = with_quotients(self.traced.program, larger)
            values = [
                i.value(larger if i.role in ("dim", "quotient") else dims, placement.sp, rank)
                for i in integers
            ]
            small = itertools.repeat(2) if first == 1 else primes
            found = tuple(v if v > 1 else next(small) for v in values)
            if found not in tried:
                tried.add(found)
                yield found

    def _backend(self, placement: Placement, dims: Mapping[sympy.Symbol, int]) -> str:
        """Returns "eager" where a rank of the group would have an empty piece.

        Inductor calls kernels that cannot take one. Decided from global sizes, so alike on all
        ranks.
        """
        backend = self.traced.backend
        if backend == "eager" or placement.sp == 1:
            return backend
        integers = self.traced.lowering(placement).lowered.integers
        if all(i.shortest(dims, placement.sp) > 0 for i in integers):
            return backend
        sizes = ", ".join(f"{s} = {n}" for s, n in dims.items())
        warnings.warn(
            f"sp {placement.sp} leaves a rank without elements at {sizes}: run by the eager "
            "backend; choose a smaller sp for this bucket",
            stacklevel=2,
        )
        return "eager"

    def sharded_batch_is_idle(self, placement: Placement, sizes: Sizes) -> bool:
        """Whether a placement made for more samples would leave ranks without any at this batch."""
        if placement.sp == 1 or sizes.get(BATCH, 1) >= placement.sp:
            return False
        symbol, factors = self.traced.program.symbols.get(BATCH), placement.factors
        labels = ((name, chosen.output) for name, chosen in placement.nodes.items())
        return any(w.sharded and factors[n][w.dim][w.index].size == symbol for n, w in labels)

    @property
    def compiled_count(self) -> int:
        """Variants compiled so far."""
        return sum(map(len, self._variants.values()))
