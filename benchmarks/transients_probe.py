"""Transients read off kernels that run: a polynomial through a few small sizes.

What tables of formulas in `dcpc/symbolic_profile/ops/` say could be measured instead. A call runs
on tensors of ones at a few sizes of its symbols, and its transient is interpolated in the products
of the distinct sizes of its dims. `by_probes` is the switch: in its block every profile asks
probes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import process_time
from typing import Any
from unittest.mock import patch

import numpy as np
import sympy
import torch
from torch import Tensor, fx

from dcpc.ops.attention import Capability
from dcpc.symbolic_profile import profile as profiling
from dcpc.symbolic_profile.ops.facts import Facts, op_name, tensors
from dcpc.symbolic_profile.ops.transients import TRANSIENTS, transient_bytes
from dcpc.symbolic_profile.polynomials import FUNCTIONS
from examples.allocator import allocated

Values = Mapping[str, int]

SMALL = (4, 6, 10, 8, 14)  # of any symbol; even, so that halves of them are whole
MOST_POINTS = 200
SCALARS_BYTES = 64  # an op turns a Python scalar into tensors of 8 + 4 bytes
OTHERS, ATTENTION = "other ranks", "attention"
# Ops of several ranks: alone there is nobody to send to.
COLLECTIVES = frozenset(
    f"dcpc::{name}"
    for name in (
        *("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "swap"),
        *("ring_attention_forward", "ring_attention_backward"),
    )
)


class ProbeError(Exception):
    """A call cannot be probed, or the polynomial does not hold at one more size."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a graph, which can run at any sizes.

    Attributes:
        node: the call.
        facts: reads its values.
    """

    node: fx.Node
    facts: Facts

    def sizes(self) -> list[sympy.Expr]:
        """Returns the distinct sizes of its tensors' dims that are not constant."""
        found = [t for n in (*self.node.all_input_nodes, self.node) for t in self.facts.of(n)]
        every = (sympy.expand(s) for t in found for s in (*t.shape, *t.strides))
        dims = {sympy.expand(s) for t in found for s in t.shape}
        return [s for s in dict.fromkeys(every) if s in dims and not s.is_Integer]

    def symbols(self) -> list[sympy.Symbol]:
        """Returns what all its sizes are expressions of."""
        found: set[sympy.Symbol] = set()
        for n in (*self.node.all_input_nodes, self.node):
            for t in self.facts.of(n):
                found |= {s for size in (*t.shape, *t.strides) for s in size.free_symbols}
            if isinstance(n.meta.get("val"), torch.SymInt):
                found |= self.facts.size(n).free_symbols
        return sorted(found, key=str)

    def transient_bytes(self, at: Values) -> int:
        """Returns what it allocates and frees again, by the allocator's events.

        Args:
            at: symbol's name -> size.
        """
        made: dict[fx.Node, Any] = {}

        def real(n: fx.Node) -> Any:
            if n not in made:
                made[n] = self._value(n, at)
            return made[n]

        args, kwargs = (fx.map_arg(x, real) for x in (self.node.args, self.node.kwargs))
        with torch.no_grad():
            found = allocated(lambda: self.node.target(*args, **kwargs))  # type: ignore[operator]
        return found.peak_bytes - found.live_bytes

    def _value(self, n: fx.Node, at: Values) -> Any:
        value = n.meta["val"]
        if isinstance(value, Tensor):
            (found,) = self.facts.of(n)
            shape = [_at(s, at) for s in found.shape]
            strides = [_at(s, at) for s in found.strides]
            last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            numel = 0 if 0 in shape else 1 + last
            fill = torch.zeros if _counts(found.dtype) else torch.ones
            return fill(numel, dtype=found.dtype).as_strided(shape, strides)
        if isinstance(value, int | torch.SymInt):
            return _at(self.facts.size(n), at)
        if next(tensors(value), None) is not None:
            raise ProbeError("reads several results at once")
        return value


def _counts(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool


def _at(size: sympy.Expr, at: Values) -> int:
    return int(size.subs({s: at[s.name] for s in size.free_symbols}).doit())


@dataclass(slots=True)
class Probes:
    """What was probed.

    Attributes:
        values: symbol's name -> sizes to run at; `SMALL` where it has none.
        seconds: of processor time that probes took.
        table_s: that tables took.
        calls: calls that were asked for.
        runs: kernels that ran.
        refused: calls whose table is kept, by why.
        attention: whether attention is probed, too.
        listed: whether only ops are probed that a table has a line for.
    """

    values: Mapping[str, Sequence[int]] = field(default_factory=dict)
    attention: bool = False
    listed: bool = False
    seconds: float = 0.0
    table_s: float = 0.0
    calls: int = 0
    runs: int = 0
    refused: dict[str, int] = field(default_factory=dict)

    def transient(
        self, node: fx.Node, facts: Facts, threads: int, gpu: Capability | None = None
    ) -> sympy.Expr:
        """Returns what `transient_bytes` of the tables does, by probing where it can be."""
        start_s = process_time()
        table = transient_bytes(node, facts, threads, gpu)
        self.table_s += process_time() - start_s
        if not isinstance(node.target, torch._ops.OpOverload) or node.target.is_view:
            return table
        if self.listed and op_name(node) not in TRANSIENTS:
            return table
        self.calls += 1
        start_s = process_time()
        try:
            name = op_name(node)
            if name in COLLECTIVES:
                raise ProbeError(OTHERS)
            if "attention" in name and not self.attention:
                raise ProbeError(ATTENTION)
            return self.fit(Call(node, facts))
        except ProbeError as e:
            self.refused[str(e)] = self.refused.get(str(e), 0) + 1
            return table
        finally:
            self.seconds += process_time() - start_s

    def fit(self, call: Call) -> sympy.Expr:
        """Returns a call's transient as a polynomial of its sizes.

        Raises:
            ProbeError: it does not run, or one more size has another transient.
        """
        sizes, symbols = call.sizes(), call.symbols()
        terms = [sympy.expand(sympy.Mul(*map(sympy.Pow, sizes, e))) for e in _exponents(len(sizes))]
        points = [*itertools.islice(self._points(symbols), MOST_POINTS)]
        function = sympy.lambdify(symbols, terms, modules=[FUNCTIONS, "math"])
        rows = np.array([function(*at.values()) for at in points], dtype=float)
        rows /= (scales := np.abs(rows).max(axis=0))
        chosen: list[int] = []
        for i in range(len(points)):
            if len(chosen) == len(terms):
                break
            if np.linalg.matrix_rank(rows[[*chosen, i]], tol=1e-9) > len(chosen):
                chosen.append(i)
        found = np.array([self._run(call, points[i]) for i in chosen], dtype=float)
        solved = np.linalg.lstsq(rows[chosen], found, rcond=None)[0]
        held_out = len(points) - 1
        if held_out not in chosen:
            gap = self._run(call, points[held_out]) - float(rows[held_out] @ solved)
            if abs(gap) > SCALARS_BYTES:
                raise ProbeError("no polynomial")
        pairs = zip(solved / scales, terms, strict=True)
        return sympy.Add(*(sympy.Rational(round(1e4 * c), 10_000) * t for c, t in pairs))

    def _run(self, call: Call, at: Values) -> int:
        self.runs += 1
        try:
            return call.transient_bytes(at)
        except (RuntimeError, ValueError, IndexError, NotImplementedError) as e:
            raise ProbeError(f"does not run: {str(e).splitlines()[0][:60]}") from e

    def _points(self, symbols: Sequence[sympy.Symbol]) -> Iterator[Values]:
        """Yields points, those of small numbers first."""
        names = [s.name for s in symbols]
        choices = [self.values.get(name, SMALL) for name in names]
        numbers = itertools.product(*(range(len(c)) for c in choices))
        for i in sorted(numbers, key=sum):
            yield {n: c[k] for n, c, k in zip(names, choices, i, strict=True)}


def _exponents(count: int) -> list[tuple[int, ...]]:
    """Up to the square of each size; of more than two sizes no more than three factors."""
    every = itertools.product(range(3), repeat=count)
    return [e for e in every if count < 3 or sum(e) <= 3]


@contextmanager
def by_probes(attention: bool = False, listed: bool = False) -> Iterator[Probes]:
    """Has every profile that is made in the block ask probes instead of tables."""
    probes = Probes(attention=attention, listed=listed)
    with patch.object(profiling, "transient_bytes", probes.transient):
        yield probes
