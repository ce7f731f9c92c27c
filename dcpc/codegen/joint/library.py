"""The pieces of lowered graphs, each traced once, and in other names once for all.

Two calls are alike if their operands are equal but for the names of the symbols in their sizes. The
piece of one is that of the other, with the names changed, wherever the trace's questions of sizes
have the same answers. So what splits frames and what splits rows of pixels is traced once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.sym_node import SymNode
from torch.utils._pytree import tree_leaves

from dcpc.codegen.joint.asking import Answers, AskingEnv, again_of
from dcpc.codegen.joint.memories import Ref
from dcpc.codegen.joint.tape import Derivative, Op, Piece
from dcpc.errors import CodegenError
from dcpc.fx.fakes import Layout, layout_of
from dcpc.fx.leaves import Symbolic, is_symbolic, leaf_key, renamed_key, tree_key

Names: TypeAlias = Mapping[sympy.Symbol, sympy.Symbol]


class Library:
    """Traces calls; keeps the pieces, and the fake tensors of each layout.

    Args:
        table: op -> decomposition, for a backend that wants smaller ops.
        gpu: whether calls are those of a GPU, whatever device the tensors are on, see `gpu_ops`.

    Attributes:
        env: of all sizes.
        mode: of all fake tensors.
    """

    def __init__(self, table: Mapping[Any, Any], gpu: bool = False) -> None:
        self._gpu = gpu
        self.env = AskingEnv()
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        self.mode.cache_enabled = False  # a hit compares symbols, and no call is traced twice here
        self._table = table
        self._pieces: dict[Any, Piece | Renamed] = {}
        self._alike: dict[Any, list[tuple[Piece, tuple[sympy.Symbol, ...]]]] = {}
        self._assumed: dict[sympy.Basic, None] = {}  # besides what `env` guards
        self._fakes: dict[Layout, Tensor] = {}
        self._numbers: dict[tuple[type, sympy.Basic], Symbolic] = {}

    # ------------------------------------------------------------------------------------ values

    def fake(self, layout: Layout) -> Tensor:
        """Returns a fake tensor of a layout; one stands for all."""
        if layout not in self._fakes:
            self._fakes[layout] = again_of(layout, self.size, self.mode)
        return self._fakes[layout]

    def size(self, size: Any) -> Any:
        """Returns a size of the trace: an expression as a SymInt, a number as it is."""
        return self.number(torch.SymInt, size) if isinstance(size, sympy.Expr) else size

    def number(self, kind: type[Symbolic], expr: sympy.Basic) -> Symbolic:
        """Returns an expression of sizes as an integer, a float or a bool of the trace."""
        key = (kind, expr)
        if key not in self._numbers:
            at = {s: sympy.Integer(self.env.hint(s)) for s in expr.free_symbols}
            assert at, f"{expr} was fixed"
            plain = _PLAIN[kind]
            self._numbers[key] = kind(SymNode(expr, self.env, plain, plain(expr.xreplace(at))))
        return self._numbers[key]

    # ------------------------------------------------------------------------------------ pieces

    def piece(
        self, call: Any, args: Any, kwargs: Any, trained: AbstractSet[fx.Node]
    ) -> Piece | Renamed:
        """Returns a call traced on fake tensors.

        Args:
            call: the op.
            args: arguments, with nodes of a joint graph for tensors.
            kwargs: the same.
            trained: nodes with a gradient.
        """

        def of_leaf(leaf: Any) -> Hashable:
            if isinstance(leaf, fx.Node):
                return "tensor", layout_of(leaf.meta["val"]), leaf in trained
            return leaf_key(leaf)

        key = (call, tree_key((args, kwargs), of_leaf))
        if key not in self._pieces:
            self._pieces[key] = self._new(call, args, kwargs, trained)
        return self._pieces[key]

    @property
    def pieces(self) -> tuple[Piece | Renamed, ...]:
        """All that were asked for."""
        return tuple(self._pieces.values())

    def derivative(
        self, piece: Piece | Renamed, tangents: Mapping[Ref, Tensor], sums: Mapping[int, Tensor]
    ) -> Derivative:
        """Returns the backward of a piece for gradients of some results.

        Args:
            piece: of this library.
            tangents: result -> a fake tensor like its gradient.
            sums: number of an operand that wants a gradient -> a fake tensor like its gradient.
        """
        taken = tuple((ref, layout_of(t)) for ref, t in tangents.items())
        added = tuple((i, layout_of(t)) for i, t in sums.items())
        with _named(f"the backward of {piece.call}", [*tangents.values()]):
            return piece.derivative((taken, added), tangents, sums)

    def _new(
        self, call: Any, args: Any, kwargs: Any, trained: AbstractSet[fx.Node]
    ) -> Piece | Renamed:
        wants = [n in trained for n in tree_leaves((args, kwargs)) if isinstance(n, fx.Node)]
        values = fx.node.map_aggregate((args, kwargs), _value)

        def traced() -> Piece:
            with _named(call, values):
                return Piece(self.mode, self._table, call, *values, wants, self._gpu)

        pattern = _Pattern()
        alike = self._alike.setdefault((call, pattern.of(values), *wants), [])
        for piece, symbols in alike:
            names = dict(zip(symbols, pattern.symbols, strict=True))
            if not self.fixed(symbols) and self.holds(piece.asked, names):
                return Renamed(piece, names, self, traced)
        made = traced()
        alike.append((made, pattern.symbols))
        return made

    # ----------------------------------------------------------------------------------- answers

    def fixed(self, symbols: Iterable[sympy.Symbol]) -> bool:
        """Whether torch has put another size or a number in the place of a symbol.

        What is traced from then on says so, and what was traced before reads so: with the number in
        it, it is no other call's in other names.
        """
        return any(s in self.env.replacements for s in symbols)

    def holds(self, answers: Answers, names: Names) -> bool:
        """Whether questions have the same answers where their symbols are others."""
        hint = self.env.hint
        at = {s: sympy.Integer(hint(names[s])) for q in answers for s in q.free_symbols}
        return all(question.xreplace(at) == answer for question, answer in answers.items())

    def assume(self, answers: Answers, names: Names) -> None:
        """Notes that a piece in other names depends on these answers."""
        for question, answer in answers.items():
            own = question.xreplace(names)
            self._assumed[own if answer == sympy.true else _contrary(own, answer)] = None

    def guards(self, names: Mapping[sympy.Symbol, sympy.Expr]) -> tuple[sympy.Basic, ...]:
        """Returns what was assumed of these symbols, in other names for them."""
        assumed = [*(g.expr for g in self.env.guards), *self._assumed]
        assumed += [sympy.Eq(s, e) for s, e in self.env.replacements.items() if s in names]
        known = names.keys()
        found = dict.fromkeys(e.subs(names) for e in assumed if e.free_symbols <= known)
        return tuple(e for e in found if e != sympy.true)


_PLAIN: Mapping[type[Symbolic], type] = {
    torch.SymInt: int,
    torch.SymFloat: float,
    torch.SymBool: bool,
}


def _contrary(question: sympy.Basic, answer: sympy.Basic) -> sympy.Basic:
    return sympy.Not(question) if answer == sympy.false else sympy.Eq(question, answer)


@contextmanager
def _named(call: Any, values: Any) -> Iterator[None]:
    """Has torch's errors of its block say which call they are of."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        shapes = [tuple(x.shape) for x in tree_leaves(values) if isinstance(x, Tensor)]
        raise CodegenError(
            f"{call} on shapes {shapes}: torch refuses what forward was traced with "
            f"({said}); expected a call that holds at all sizes of "
            "the buckets; replace it in the model's code, or keep to larger sizes"
        ) from error


def _value(leaf: Any) -> Any:
    return leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf


class _Pattern:
    """What calls have in common that are equal but for the names of symbols."""

    def __init__(self) -> None:
        self._places: dict[sympy.Symbol, sympy.Symbol] = {}

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """Those of the call, in the order in which the pattern has them."""
        return tuple(self._places)

    def of(self, value: Any) -> Any:
        """Returns what an argument has in common with that of another call."""
        return renamed_key(tree_key(value, _kind_of), self._placed)

    def _placed(self, expr: sympy.Basic) -> sympy.Basic:
        for s in sorted(expr.free_symbols - self._places.keys(), key=lambda s: s.name):
            self._places[s] = sympy.Symbol(f"#{len(self._places)}", integer=True, positive=True)
        return expr.xreplace(self._places)


def _kind_of(leaf: Any) -> Hashable:
    return ("tensor", *layout_of(leaf)) if isinstance(leaf, Tensor) else leaf_key(leaf)


@dataclass(frozen=True, slots=True)
class _Translation:
    """Values in other names.

    Attributes:
        names: symbols -> those instead.
        library: makes values.
    """

    names: Names
    library: Library

    def layout(self, tensor: Tensor) -> Layout:
        """Returns the layout of a tensor in the other names."""
        return tuple(
            x.xreplace(self.names) if isinstance(x, sympy.Expr) else x for x in layout_of(tensor)
        )

    def value(self, leaf: Any) -> Any:
        """Returns a fake tensor or an expression in the other names, a constant as it is.

        Raises:
            CodegenError: it is of no kind that is known to be one of these.
        """
        if isinstance(leaf, Tensor):
            return self.library.fake(self.layout(leaf))
        if is_symbolic(leaf):
            return self.library.number(type(leaf), leaf.node.expr.xreplace(self.names))
        if not isinstance(leaf, Ref):
            leaf_key(leaf)  # refuses what it does not know
        return leaf

    def ops(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """Returns calls in the other names."""
        every = ((op.args, dict(op.kwargs), op.value) for op in ops)
        parts = [fx.node.map_aggregate(part, self.value) for part in every]
        return tuple(
            replace(op, args=args, kwargs=kwargs, value=value)
            for op, (args, kwargs, value) in zip(ops, parts, strict=True)
        )


class Renamed:
    """A piece in other names.

    Args:
        piece: what was traced.
        names: symbols of its sizes -> those of this call, different ones for different ones.
        library: makes values.
        traced: traces the call itself, where a derivative cannot be renamed.

    Attributes:
        call: the op.
        ops: the calls of forward.
        result: what the call returns: Refs for tensors.
        flows: Refs of the results that gradients flow through.
    """

    def __init__(
        self, piece: Piece, names: Names, library: Library, traced: Callable[[], Piece]
    ) -> None:
        self._piece, self._library, self._traced = piece, library, traced
        self.call = piece.call
        self._here = _Translation(names, library)
        self._there = _Translation({own: other for other, own in names.items()}, library)
        self._derivatives: dict[Any, Derivative] = {}
        library.assume(piece.asked, names)
        self.ops = self._here.ops(piece.ops)
        self.result, self.flows = piece.result, piece.flows

    def derivative(
        self, key: Any, tangents: Mapping[Ref, Tensor], sums: Mapping[int, Tensor]
    ) -> Derivative:
        """Returns the backward for gradients of some results; see `Piece.derivative`."""
        if key not in self._derivatives:
            found = self._renamed(tangents, sums)
            self._derivatives[key] = found or self._traced().derivative(key, tangents, sums)
        return self._derivatives[key]

    def _renamed(
        self, tangents: Mapping[Ref, Tensor], sums: Mapping[int, Tensor]
    ) -> Derivative | None:
        """Returns the other call's backward in these names, None where that is not this one's."""
        given = [*tangents.values(), *sums.values()]
        names = self._here.names
        if self._library.fixed([*names, *names.values()]):
            return None
        if not all(self._there.names.keys() >= s for t in given for s in _symbols(t)):
            return None
        theirs = [self._there.value(t) for t in given]
        flowing = dict(zip(tangents, theirs, strict=False))
        added = dict(zip(sums, theirs[len(tangents) :], strict=True))
        found = self._library.derivative(self._piece, flowing, added)
        if self._library.fixed(names):  # by that derivative
            return None
        if not self._library.holds(found.asked, names):
            return None
        self._library.assume(found.asked, names)
        return replace(found, ops=self._here.ops(found.ops))


def _symbols(tensor: Tensor) -> Iterator[AbstractSet[sympy.Symbol]]:
    return (x.free_symbols for x in layout_of(tensor) if isinstance(x, sympy.Expr))
