"""Caches the traced pieces of lowered graphs, and reuses each under other symbol names.

Two calls are alike if their operands are equal but for the symbols in their sizes. One piece then
serves both, with its symbols renamed, wherever torch's questions about sizes have the same answers.
So the call that splits frames and the one that splits rows of pixels are traced once.
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
    """Traces calls, and caches the pieces and the fake tensors of each layout.

    Args:
        table: op -> decomposition, for a backend that needs smaller ops.
        gpu: whether calls are traced as on a GPU, whatever the tensors' device, see `gpu_ops`.

    Attributes:
        env: ShapeEnv of all sizes.
        mode: fake mode of all tensors.
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
        """Returns the fake tensor of a layout, always the same one."""
        if layout not in self._fakes:
            self._fakes[layout] = again_of(layout, self.size, self.mode)
        return self._fakes[layout]

    def size(self, size: Any) -> Any:
        """Returns a size for the trace: an expression as a SymInt, a number as it is."""
        return self.number(torch.SymInt, size) if isinstance(size, sympy.Expr) else size

    def number(self, kind: type[Symbolic], expr: sympy.Basic) -> Symbolic:
        """Returns an expression of sizes as a symbolic integer, float or bool."""
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
            call: op to trace.
            args: positional arguments, with nodes of a joint graph in place of tensors.
            kwargs: keyword arguments, likewise.
            trained: nodes that have a gradient.
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
        """All pieces that were requested."""
        return tuple(self._pieces.values())

    def derivative(
        self, piece: Piece | Renamed, tangents: Mapping[Ref, Tensor], sums: Mapping[int, Tensor]
    ) -> Derivative:
        """Returns the backward of a piece for gradients of some results."""
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

        pattern = _CallShape()
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
        """Whether torch has replaced a symbol by another size or a number.

        Later traces contain the replacement, and earlier ones are read with it. A trace with the
        number in it cannot be renamed for another call.
        """
        return any(s in self.env.replacements for s in symbols)

    def holds(self, answers: Answers, names: Names) -> bool:
        """Whether questions have the same answers for the renamed symbols."""
        hint = self.env.hint
        at = {s: sympy.Integer(hint(names[s])) for q in answers for s in q.free_symbols}
        return all(question.xreplace(at) == answer for question, answer in answers.items())

    def assume(self, answers: Answers, names: Names) -> None:
        """Records that a renamed piece depends on these answers."""
        for question, answer in answers.items():
            own = question.xreplace(names)
            self._assumed[own if answer == sympy.true else _contrary(own, answer)] = None

    def guards(self, names: Mapping[sympy.Symbol, sympy.Expr]) -> tuple[sympy.Basic, ...]:
        """Returns the assumptions about these symbols, rewritten in their new names."""
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
    """Adds the op and its operands' shapes to torch's errors within its block."""
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


class _CallShape:
    """The structure of a call, equal for calls that differ only in the names of symbols."""

    def __init__(self) -> None:
        self._places: dict[sympy.Symbol, sympy.Symbol] = {}

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """The symbols of the call, in the order of the pattern."""
        return tuple(self._places)

    def of(self, value: Any) -> Any:
        """Returns the structure of an argument, with symbols numbered by appearance."""
        return renamed_key(tree_key(value, _kind_of), self._placed)

    def _placed(self, expr: sympy.Basic) -> sympy.Basic:
        for s in sorted(expr.free_symbols - self._places.keys(), key=lambda s: s.name):
            self._places[s] = sympy.Symbol(f"#{len(self._places)}", integer=True, positive=True)
        return expr.xreplace(self._places)


def _kind_of(leaf: Any) -> Hashable:
    return ("tensor", *layout_of(leaf)) if isinstance(leaf, Tensor) else leaf_key(leaf)


@dataclass(frozen=True, slots=True)
class _Translation:
    """Renames the symbols in values."""

    names: Names
    library: Library

    def layout(self, tensor: Tensor) -> Layout:
        """Returns the layout of a tensor with renamed symbols."""
        return tuple(
            x.xreplace(self.names) if isinstance(x, sympy.Expr) else x for x in layout_of(tensor)
        )

    def value(self, leaf: Any) -> Any:
        """Returns a fake tensor or expression with renamed symbols, and a constant as it is.

        Raises:
            CodegenError: the value is of an unknown kind.
        """
        if isinstance(leaf, Tensor):
            return self.library.fake(self.layout(leaf))
        if is_symbolic(leaf):
            return self.library.number(type(leaf), leaf.node.expr.xreplace(self.names))
        if not isinstance(leaf, Ref):
            leaf_key(leaf)  # refuses what it does not know
        return leaf

    def ops(self, ops: Sequence[Op]) -> tuple[Op, ...]:
        """Returns ops with renamed symbols."""
        every = ((op.args, dict(op.kwargs), op.value) for op in ops)
        parts = [fx.node.map_aggregate(part, self.value) for part in every]
        return tuple(
            replace(op, args=args, kwargs=kwargs, value=value)
            for op, (args, kwargs, value) in zip(ops, parts, strict=True)
        )


class Renamed:
    """A piece with renamed symbols.

    Args:
        piece: piece that was traced.
        names: symbol of its sizes -> symbol of this call; one to one.
        library: library that makes values.
        traced: function that traces this call itself, if a derivative cannot be renamed.

    Attributes:
        call: op of the call.
        ops: ops of forward.
        result: result of the call, with Refs for tensors.
        flows: Refs of the results through which gradients flow.
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
        """Returns the other call's backward with renamed symbols, or None if it does not apply."""
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
