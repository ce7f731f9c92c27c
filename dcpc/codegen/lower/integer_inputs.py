"""The integer inputs of a lowered graph: sizes, and the position of a rank's piece of a factor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
from torch import fx

from dcpc.fx.integers import Emitter
from dcpc.ir import Factor, Placement, Program, tensor_operands
from dcpc.ops.pieces import Run, runs

COMMON = ("dim", "quotient", "seed")  # roles of integers that all ranks have alike


@dataclass(frozen=True, slots=True)
class IntegerInput:
    """An integer input of the lowered graph: a dim, or a number that describes this rank's piece.

    A zigzag piece is two runs: "turn" is the length of the first, "second" the start of the other.
    "before" is the number of elements of all earlier ranks, "skip" the number of elements of this
    rank's piece of the parent that precede the factor.

    Attributes:
        name: placeholder name.
        symbol: symbol of the integer in size expressions.
        role: "dim", "quotient" (of dims, rounded), "seed" (of the call's random numbers), or of a
            piece "length", "start", "turn", "second", "before", "skip", "shared".
        size: global length of the dim or factor.
        parent: length that is split evenly.
        shift: position of the factor's first element in the parent.
        zigzag: whether a rank's piece is two chunks, one from either end.
        across: number of ranks that share their pieces.
    """

    name: str
    symbol: sympy.Symbol
    role: str
    size: sympy.Expr
    parent: sympy.Expr
    shift: int = 0
    zigzag: bool = False
    across: int = 1

    def value(self, dims: Mapping[sympy.Symbol, int], p: int, rank: int) -> int:
        """Returns the integer of one rank out of p, given the length of every dim."""
        if self.role == "seed":
            return 0
        size = _evaluated(self.size, dims)
        if self.role in ("dim", "quotient"):
            return size
        parent = _evaluated(self.parent, dims)
        if self.role == "before" and self.zigzag:
            return sum(_length(self._runs(size, parent, p, r)) for r in range(rank))
        if self.role == "shared":
            first = rank // self.across * self.across
            ranks = range(first, first + self.across)
            return sum(_length(self._runs(size, parent, p, r)) for r in ranks)
        if self.role == "skip":
            whole = runs(parent, parent, 0, p, rank, self.zigzag)
            return sum(min(max(self.shift - start, 0), length) for start, length in whole)
        mine = self._runs(size, parent, p, rank)
        found = {"length": _length(mine), "start": mine[0][0], "turn": mine[0][1]}
        return found[self.role] if self.role in found else mine[-1][0]

    def shortest(self, dims: Mapping[sympy.Symbol, int], p: int) -> int:
        """Returns the length of the shortest piece of any rank, or the length of the dim."""
        if self.role == "seed":
            return 1
        if self.role in ("dim", "quotient"):
            return self.value(dims, p, 0)
        size, parent = _evaluated(self.size, dims), _evaluated(self.parent, dims)
        return min(_length(self._runs(size, parent, p, r)) for r in (0, p - 1))

    def _runs(self, size: int, parent: int, p: int, rank: int) -> tuple[Run, ...]:
        return runs(size, parent, self.shift, p, rank, self.zigzag)


def _evaluated(size: sympy.Expr, dims: Mapping[sympy.Symbol, int]) -> int:
    if size.is_Symbol and size in dims:
        return int(dims[size])
    return int(size if size.is_Integer else size.subs(dims))


def _length(mine: tuple[Run, ...]) -> int:
    return sum(length for _, length in mine)


def quotients_in(program: Program) -> list[sympy.Expr]:
    """Returns each quotient in a program's sizes, such as (height + 1) // 2, in a fixed order."""
    quotients = {q for size in program.sizes for q in size.atoms(sympy.floor, sympy.ceiling)}
    return sorted(quotients, key=sympy.default_sort_key)


class IntegerNodes:
    """The integer inputs of a graph under construction, and the nodes computed from them.

    Args:
        program: traced model.
        placement: placement of the program.
        graph: graph that has the program's placeholders; the integers' placeholders follow.
        any_degree: whether pieces of constant dims are integers, too.

    Attributes:
        pieces: (factor key, role) -> symbol of that integer of a piece.
        seed: placeholder of the random seed.
    """

    def __init__(
        self, program: Program, placement: Placement, graph: fx.Graph, any_degree: bool
    ) -> None:
        self.any_degree = any_degree
        self.pieces: dict[tuple[int, str], sympy.Symbol] = {}
        self._program, self._placement, self._graph = program, placement, graph
        self._inputs: list[IntegerInput] = []
        self._nodes: dict[sympy.Symbol, fx.Node] = {}
        self._emitter = Emitter(graph, self._nodes)
        for name, symbol in program.symbols.items():
            self._add(IntegerInput(name, symbol, "dim", symbol, symbol))
        self._add_quotients()
        self._add_pieces()
        seed = sympy.Symbol("seed", integer=True, nonnegative=True)
        self.seed = self._add(IntegerInput("seed", seed, "seed", seed, seed))

    def _add(self, integer: IntegerInput) -> fx.Node:
        self._inputs.append(integer)
        node = self._nodes[integer.symbol] = self._graph.placeholder(integer.name)
        return node

    def _add_quotients(self) -> None:
        """Adds one integer for each quotient in the program's sizes, such as (height + 1) // 2.

        All sizes are then sums and products of symbols, which torch handles in a third of the time.
        """
        for position, quotient in enumerate(quotients_in(self._program)):
            symbol = sympy.Symbol(f"quotient{position}", integer=True, nonnegative=True)
            node = self._add(IntegerInput(symbol.name, symbol, "quotient", quotient, quotient))
            self._emitter.know(quotient, node)

    def _add_pieces(self) -> None:
        """Adds the integers of a piece for every factor along which a value is split."""
        bases: dict[int, str] = {}
        for node in self._program.gm.graph.nodes:
            chosen = self._placement.nodes.get(node.name)
            if chosen is None:
                continue
            sources = tensor_operands(node, self._program.info) if chosen.operands else []
            wanted = zip((*sources, node), (*chosen.operands, chosen.output), strict=True)
            for tensor, label in wanted:
                if label.sharded:
                    factor = self._placement.factors[tensor.name][label.dim][label.index]
                    self._add_piece(factor, bases, chosen.across)

    def _add_piece(self, factor: Factor, bases: dict[int, str], across: int) -> None:
        """Adds the integers of a factor's piece, and of the piece that `across` ranks share."""
        zigzag = self._placement.is_zigzag(factor)

        def add(role: str, across: int = 1) -> None:
            key = f"{role}{across}" if across > 1 else role
            symbol = sympy.Symbol(f"{bases[factor.key]}_{key}", integer=True, nonnegative=True)
            where = (factor.size, self.parent(factor), factor.shift, zigzag, across)
            self._add(IntegerInput(symbol.name, symbol, role, *where))
            self.pieces[factor.key, key] = symbol

        if factor.key not in bases:
            base = str(factor.size) if factor.size.is_Symbol else f"factor{factor.key}"
            taken = f"{base}_start" in {i.name for i in self._inputs}
            bases[factor.key] = f"{base}{factor.key}" if taken else base
            if not self._even(factor):
                add("length")
            for role in ("start", "before", *("turn", "second") * zigzag):
                add(role)
            if factor.parent >= 0:
                add("skip")
        if across > 1 and (factor.key, f"shared{across}") not in self.pieces:
            add("shared", across)

    def used(self) -> tuple[IntegerInput, ...]:
        """Returns the inputs that a node reads, and the dims; erases the other placeholders."""
        kept = []
        for integer in self._inputs:
            node = self._nodes[integer.symbol]
            if node.users or integer.role == "dim":
                kept.append(integer)
            else:
                self._graph.erase_node(node)
        return tuple(kept)

    def _even(self, factor: Factor) -> bool:
        if not factor.size.is_Integer or factor.parent >= 0:
            return False
        piece, rest = divmod(int(factor.size), self._placement.sp)
        return not rest and (piece == 1 or not self.any_degree)

    def parent(self, factor: Factor) -> sympy.Expr:
        """Returns the length that is split evenly when a factor is split."""
        return factor.size if factor.parent < 0 else self._placement.parents[factor.parent].size

    def length(self, factor: Factor) -> sympy.Expr:
        """Returns the length of this rank's piece of a factor."""
        if self._even(factor):
            return factor.size / self._placement.sp
        return self.pieces[factor.key, "length"]

    def piece(self, factor: Factor, *roles: str) -> list[int | fx.Node]:
        """Returns the integers of these roles that describe this rank's piece of a factor."""
        return [self.emit(self.pieces[factor.key, role]) for role in roles]

    def split(self, factor: Factor) -> tuple[int | fx.Node, int, bool]:
        """Returns the split of a factor for a collective: parent, shift and zigzag."""
        zigzag = self._placement.is_zigzag(factor)
        return self.emit(self.parent(factor)), factor.shift, zigzag

    def emit(self, expr: sympy.Expr) -> int | fx.Node:
        """Returns an integer expression as a number or a node of the graph."""
        value: int | fx.Node = self._emitter.emit(expr)
        return value
