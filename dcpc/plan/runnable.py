"""Builds the graphs of a whole program that run: partitions, and variants compiled on first use."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

import sympy
from torch import Tensor

from dcpc.buckets import BATCH, Sizes
from dcpc.codegen import LoweredPair, Variant, with_quotients
from dcpc.errors import CodegenError
from dcpc.ir import Partition, Placement, Program
from dcpc.plan.folding import lift_of
from dcpc.plan.prices.priced import Priced
from dcpc.plan.traced import Hints, Traced


@dataclass(frozen=True, slots=True)
class RewrittenCall:
    """A call of a rewritten program that computes the same numbers as the traced one.

    Attributes:
        program: rewritten program.
        sizes: length of each dim in the call, batch included.
        inputs: input name -> tensor, for the inputs of the model.
        others: input name -> tensor, for inputs that only the rewritten program has.
        runs: compiled variant and its integer inputs on one rank, else the lowered graphs of all
            ranks.
        name: name of the call in a report.
    """

    program: Program
    sizes: Sizes
    inputs: Mapping[str, Tensor]
    others: Mapping[str, Tensor]
    runs: tuple[Variant, tuple[int, ...]] | tuple[LoweredPair, Partition]
    name: str


class Inspector(Protocol):
    """Checks each graph or variant before its first run, and raises if it must not run."""

    def built(
        self,
        traced: Traced,
        placement: Placement,
        lowering: LoweredPair,
        parts: Partition,
        sizes: Sizes,
    ) -> None:
        """Checks graphs that are about to be compiled for these sizes."""

    def runs(self, traced: Traced, variant: Variant) -> None:
        """Checks a variant after it is compiled."""

    def rewritten(self, traced: Traced, call: RewrittenCall) -> None:
        """Checks the first call of a program rewritten from a traced one."""


class Runnable:
    """Partitions and variants of one traced program, cached.

    Attributes:
        traced: traced program.
        priced: prices of the program, and the values that each recompute step recomputes.
        inspector: checker of each variant before its first run; None: no check.
        in_tiles: the program in tiles, by the arguments of `tiled` in `tiling.py`.
        whole: the program of these numbers that is not in tiles; itself, if it is not.
        tiles: most rows of a tile and least width of a region; None: it is not in tiles.
    """

    def __init__(self, traced: Traced) -> None:
        self.traced, self.priced = traced, Priced(lift_of(traced))
        self._partitions: dict[tuple[object, ...], Partition] = {}
        self._variants: dict[tuple[object, ...], list[Variant]] = {}
        self.inspector: Inspector | None = None
        self.in_tiles: dict[tuple[int, float], Runnable | None] = {}
        self.whole, self.tiles = self, cast(tuple[int, float] | None, None)

    @property
    def runs_what_was_priced(self) -> bool:
        """Whether the priced graphs themselves run: nothing is folded, and not Inductor."""
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
        """Returns forward and backward graphs with `menu_step` recompute steps taken.

        Args:
            placement: placement of the whole program.
            menu_step: number of recompute steps taken.
            hints: sizes to trace at, as for `Traced.lowering`.
            backend: backend of the graph, as for `Traced.lowering`.
            gathers: whether the graph gathers sharded parameters, as for `Traced.lowering`.
            gathers_again: units that backward gathers again, as for `Priced.made_again`.
        """
        backend = backend or self.traced.backend
        of = self.traced.id_of(placement)
        gathers = gathers and self.traced.units is not None
        key = of, menu_step, backend, hints, gathers, gathers_again
        if key not in self._partitions:
            lowering = self.traced.lowering(placement, hints, backend, gathers=gathers)
            again = self.priced.made_again(
                placement, menu_step, backend, gathers_again=gathers_again
            )
            away = self.priced.away(placement, menu_step, backend)
            self._partitions[key] = lowering.partition(again, away)
        return self._partitions[key]

    def variant(
        self,
        placement: Placement,
        menu_step: int,
        sizes: Sizes,
        rank: int,
        gathers_again: frozenset[int] | None = None,
    ) -> tuple[Variant, tuple[int, ...]]:
        """Returns a compiled variant that is right at these sizes, and its integer inputs.

        A variant is right wherever its guards on sizes hold; where they do not, another one is
        compiled for these sizes.

        Raises:
            CodegenError: no graph that torch traces is right at these sizes.
        """
        dims = self.traced.program.dims(sizes)
        backend = self._backend(placement, dims)
        key = self.traced.id_of(placement), menu_step, backend, gathers_again
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
        raise _never_right(f"rank {rank} of {placement.sp}", dims, got)

    def _inspected(
        self, placement: Placement, menu_step: int, hints: Hints, backend: str, sizes: Sizes
    ) -> None:
        """Passes new graphs to the inspector, in the form that takes parameters whole."""
        assert self.inspector is not None, "somebody looks"
        whole = self.traced.lowering(placement, hints, backend, gathers=False)
        parts = self.partition(placement, menu_step, hints, backend, gathers=False)
        self.inspector.built(self.traced, placement, whole, parts, sizes)

    def hints(
        self, placement: Placement, backend: str, dims: Mapping[sympy.Symbol, int], rank: int
    ) -> Iterator[tuple[int, ...]]:
        """Yields sizes to trace at, where the usual ones break a guard.

        These are the sizes of the call; torch would specialize on 0 and 1, so they are replaced by
        2, or by other primes, which no two sizes share by chance.
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
        """Whether a placement that shards the batch leaves ranks without samples at this batch."""
        if placement.sp == 1 or sizes.get(BATCH, 1) >= placement.sp:
            return False
        symbol, factors = self.traced.program.symbols.get(BATCH), placement.factors
        labels = ((name, chosen.output) for name, chosen in placement.nodes.items())
        return any(w.sharded and factors[n][w.dim][w.index].size == symbol for n, w in labels)

    @property
    def compiled_count(self) -> int:
        """Number of variants compiled so far."""
        return sum(map(len, self._variants.values()))


def _never_right(where: str, dims: Mapping[sympy.Symbol, int], got: str) -> CodegenError:
    """Returns the error of a program of which no graph is right at some sizes."""
    at = ", ".join(f"{s} = {n}" for s, n in dims.items())
    return CodegenError(
        f"{where} at {at}: got {got}; expected a graph that is right at these sizes, and tracing "
        "it again at them gave none; take another size or sp, or look for an op that treats a "
        "size as a number"
    )
