"""Applies a placement to a copy of the forward graph: local sizes, collectives, positions.

The result is a graph of plain ATen calls and dcpc's collectives that one rank runs. Its
placeholders are the program's, then integers: the length of every named dim, and for each factor
that is split
the length (and start) of this rank's piece. The same graph serves every rank and every length.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

import dcpc.codegen.collectives.collectives
import dcpc.ops.attention  # registers the op
import dcpc.ops.random  # noqa: F401 - as these two do
from dcpc.codegen.collectives.pieces import Run, runs
from dcpc.codegen.lower.local_attention import local_attention
from dcpc.fx.graphs import LazyGraphModule, without_unused
from dcpc.fx.integers import Emitter
from dcpc.ir import (
    REPLICATED,
    Factor,
    Label,
    Placement,
    Program,
    call_of,
    is_tuple,
    tensor_operands,
)

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class IntegerInput:
    """An integer the lowered graph takes: a dim, or where this rank's piece of a factor is.

    Of a zigzag piece, which is two runs, "turn" is the length of the first and "second" the start
    of the other. "before" counts the elements that all earlier ranks have, "skip" those of this
    rank's piece of the parent that come before the factor.

    Attributes:
        name: placeholder name.
        symbol: what stands for it in size expressions.
        role: "dim", "quotient" (of dims, rounded), "seed" (of the call's random numbers), or
            of a piece "length", "start", "turn", "second", "before", "skip", "shared".
        size: global length (of the dim, or of the factor).
        parent: length that is split evenly.
        shift: position of the factor's first element in the parent.
        zigzag: whether a rank's piece is a chunk from either end.
        across: ranks that share their pieces.
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
        """Returns the integer for one rank, given the length of every dim."""
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
        """Returns the length of the shortest piece any rank has, or the length of the dim."""
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


@dataclass(frozen=True, slots=True)
class Lowered:
    """A forward graph for one rank of an SP group.

    Attributes:
        gm: placeholders: the program's, then `integers`; output: the loss.
        integers: what the last placeholders are.
        group: name of the process group its collectives use.
        sp: its size.
    """

    gm: fx.GraphModule
    integers: tuple[IntegerInput, ...]
    group: str
    sp: int

    @property
    def fixes_sizes(self) -> bool:
        """Whether some op takes an integer as a number, so that a trace would be of one alone."""
        calls = [n for n in self.gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
        return any(
            isinstance(value, fx.Node)
            for call in calls
            for of, value in zip(call.target._schema.arguments, call.args, strict=False)
            if of.real_type.kind() == "IntType"
        )


def lower(
    program: Program, placement: Placement, group: str, *, any_degree: bool = False
) -> Lowered:
    """Returns the program as one rank of an SP group runs it.

    Args:
        program: the traced model; not changed.
        placement: made for this program.
        group: name of the process group for collectives.
        any_degree: whether pieces of constants are integers as those of dims are, so that the graph
            is that of every degree; a piece of one element is a constant always.
    """
    assert placement.graph_hash == program.graph_hash, "the placement is of another program"
    return _Lowering(program, placement, group, any_degree).run()


def quotients_in(program: Program) -> list[sympy.Expr]:
    """Returns each quotient in a program's sizes, such as (height + 1) // 2, in a fixed order."""
    sizes = {size for info in program.info.values() for size in info.shape}
    sizes |= {*program.scalars.values()}
    quotients = {q for size in sizes for q in size.atoms(sympy.floor, sympy.ceiling)}
    return sorted(quotients, key=sympy.default_sort_key)


class _Lowering:
    def __init__(
        self, program: Program, placement: Placement, group: str, any_degree: bool
    ) -> None:
        self.program, self.placement, self.group = program, placement, group
        self.any_degree = any_degree
        self.graph = fx.Graph()
        self.values: dict[tuple[str, Label], fx.Node] = {}
        self.others: dict[str, fx.Node] = {}  # nodes whose value is no tensor
        self.tuples: dict[tuple[str, tuple[fx.Node, ...]], fx.Node] = {}  # by call and operands
        self.integers: list[IntegerInput] = []
        self.integer_nodes: dict[sympy.Symbol, fx.Node] = {}
        self.pieces: dict[tuple[int, str], sympy.Symbol] = {}  # of (factor key, role)
        self.emitter = Emitter(self.graph, self.integer_nodes)

    def run(self) -> Lowered:
        for node in self.program.gm.graph.nodes:
            if node.op == "placeholder":
                self.values[node.name, REPLICATED] = self.graph.placeholder(node.name)
        for name, symbol in self.program.symbols.items():
            self._integer(IntegerInput(name, symbol, "dim", symbol, symbol))
        self._quotient_integers()
        self._piece_integers()
        seed = sympy.Symbol("seed", integer=True, nonnegative=True)
        self._integer(IntegerInput("seed", seed, "seed", seed, seed))
        for node in self.program.gm.graph.nodes:
            if node.op == "call_function":
                self._node(node)
                self._tag(node.name)
        loss = self.value(self.program.loss, REPLICATED)
        self.graph.output(loss)
        without_unused(self.graph)
        used = tuple(i for i in self.integers if self._keep(i))
        self.graph.lint()
        gm = LazyGraphModule(torch.nn.Module(), self.graph)
        return Lowered(gm, used, self.group, self.placement.sp)

    # -------------------------------------------------------------------------------- integers

    def _integer(self, integer: IntegerInput) -> None:
        self.integers.append(integer)
        self.integer_nodes[integer.symbol] = self.graph.placeholder(integer.name)

    def _keep(self, integer: IntegerInput) -> bool:
        node = self.integer_nodes[integer.symbol]
        if node.users or integer.role == "dim":
            return True
        self.graph.erase_node(node)
        return False

    def _quotient_integers(self) -> None:
        """One integer for each quotient in the program's sizes, such as (height + 1) // 2.

        With these as symbols all sizes are sums and products, on which torch spends a third of the
        time.
        """
        for position, quotient in enumerate(quotients_in(self.program)):
            symbol = sympy.Symbol(f"quotient{position}", integer=True, nonnegative=True)
            self._integer(IntegerInput(symbol.name, symbol, "quotient", quotient, quotient))
            self.emitter.know(quotient, self.integer_nodes[symbol])

    def _piece_integers(self) -> None:
        """The integers of a piece for every factor that some value is split along."""
        seen: dict[int, str] = {}
        for node in self.program.gm.graph.nodes:
            chosen = self.placement.nodes.get(node.name)
            if chosen is None:
                continue
            sources = tensor_operands(node, self.program.info) if chosen.operands else []
            wanted = zip((*sources, node), (*chosen.operands, chosen.output), strict=True)
            for tensor, label in wanted:
                if label.sharded:
                    self._piece_integer(self.factor(tensor.name, label), seen, chosen.across)

    def _piece_integer(self, factor: Factor, seen: dict[int, str], across: int) -> None:
        """Makes the integers of a factor's piece, those that ranks share with some for these."""
        parent, zigzag = self.parent(factor), self.placement.is_zigzag(factor)
        if across > 1 and (factor.key, f"shared{across}") not in self.pieces:
            self._piece_integer(factor, seen, 1)
            name = f"{seen[factor.key]}_shared{across}"
            symbol = sympy.Symbol(name, integer=True, nonnegative=True)
            where = (factor.size, parent, factor.shift, zigzag, across)
            self._integer(IntegerInput(name, symbol, "shared", *where))
            self.pieces[factor.key, f"shared{across}"] = symbol
        if factor.key in seen:
            return
        base = str(factor.size) if factor.size.is_Symbol else f"factor{factor.key}"
        taken = {i.name for i in self.integers}
        if f"{base}_start" in taken:
            base = f"{base}{factor.key}"
        seen[factor.key] = base
        for role in ("length", "start", "before", *("turn", "second") * zigzag, "skip"):
            if (role == "length" and self._even(factor)) or (role == "skip" and factor.parent < 0):
                continue
            name = f"{base}_{role}"
            symbol = sympy.Symbol(name, integer=True, nonnegative=True)
            self._integer(
                IntegerInput(name, symbol, role, factor.size, parent, factor.shift, zigzag)
            )
            self.pieces[factor.key, role] = symbol

    def _even(self, factor: Factor) -> bool:
        if not factor.size.is_Integer or factor.parent >= 0:
            return False
        piece, rest = divmod(int(factor.size), self.placement.sp)
        return not rest and (piece == 1 or not self.any_degree)

    def parent(self, factor: Factor) -> sympy.Expr:
        """Returns the length that is split evenly where a factor is split."""
        return factor.size if factor.parent < 0 else self.placement.parents[factor.parent].size

    def length(self, factor: Factor) -> sympy.Expr:
        """Returns the length of this rank's piece of a factor."""
        if self._even(factor):
            return factor.size / self.placement.sp
        return self.pieces[factor.key, "length"]

    def piece(self, factor: Factor, *roles: str) -> list[int | fx.Node]:
        """Returns the integers that say where this rank's piece of a factor is."""
        return [self.emit(self.pieces[factor.key, role]) for role in roles]

    def emit(self, expr: sympy.Expr) -> int | fx.Node:
        """Returns an integer expression as a number or as nodes of the graph."""
        value: int | fx.Node = self.emitter.emit(expr)
        return value

    # ---------------------------------------------------------------------------------- values

    def factor(self, name: str, label: Label) -> Factor:
        """Returns the factor a sharded label is along."""
        return self.placement.factors[name][label.dim][label.index]

    def dim_size(self, name: str, dim: int, label: Label) -> sympy.Expr:
        """Returns the local length of one dim under a label."""
        if label.sharded and label.dim == dim:
            sizes = [f.size for f in self.placement.factors[name][dim]]
            sizes[label.index] = self.length(self.factor(name, label))
            return sympy.Mul(*sizes)
        return self.program.info[name].shape[dim]

    def shape(self, name: str, label: Label) -> list[int | fx.Node]:
        """Returns the local shape of a value under a label."""
        return [
            self.emit(self.dim_size(name, d, label))
            for d in range(len(self.program.info[name].shape))
        ]

    def value(self, name: str, want: Label) -> fx.Node:
        """Returns a value under the label a consumer wants; a change is made once."""
        if (name, want) not in self.values:
            have = self.placement.nodes[name].output
            changed = self._change(name, have, want)
            self.values[name, want] = changed
        return self.values[name, want]

    def _change(self, name: str, have: Label, want: Label) -> fx.Node:
        x = self.values[name, have]
        dims = [d for d in {have.dim, want.dim} if d >= 0]
        composite = any(len(self.placement.factors[name][d]) > 1 for d in dims)
        if composite:
            x = self.reshape(x, self._split_shape(name, dims, have))
        at = {label: self._position(name, dims, label) for label in (have, want) if label.sharded}
        x = self._collective(x, name, have, want, at)
        return self.reshape(x, self.shape(name, want)) if composite else x

    def reshape(self, x: fx.Node, shape: list[int | fx.Node]) -> fx.Node:
        """Returns a value of this rank in another shape."""
        return self.graph.call_function(aten.reshape.default, (x, shape))

    def _split_shape(self, name: str, dims: list[int], label: Label) -> list[int | fx.Node]:
        """The local shape with the given dims taken apart into their factors."""
        shape: list[int | fx.Node] = []
        for d in range(len(self.program.info[name].shape)):
            if d not in dims:
                shape.append(self.emit(self.dim_size(name, d, label)))
                continue
            for i, factor in enumerate(self.placement.factors[name][d]):
                split = label.sharded and (label.dim, label.index) == (d, i)
                shape.append(self.emit(self.length(factor) if split else factor.size))
        return shape

    def _position(self, name: str, dims: list[int], label: Label) -> int:
        """The dim of a label's factor once `dims` are taken apart."""
        before = [
            len(self.placement.factors[name][d]) if d in dims else 1 for d in range(label.dim)
        ]
        return sum(before) + label.index

    def _collective(
        self, x: fx.Node, name: str, have: Label, want: Label, at: Mapping[Label, int]
    ) -> fx.Node:
        ops, call = torch.ops.dcpc, self.graph.call_function
        source = self.factor(name, have) if have.sharded else None
        target = self.factor(name, want) if want.sharded else None
        if have.partial and target is None:
            return call(ops.all_reduce.default, (x, self.group))
        if have.partial and target is not None:
            args = (x, at[want], self.emit(self.length(target)), *self._origin(target))
            return call(ops.reduce_scatter.default, (*args, self.group))
        if source is None and target is not None:
            return self.narrowed(x, at[want], target)
        assert source is not None, f"no way from {have} to {want} for {name}"
        gathered = (at[have], self.emit(source.size), *self._origin(source))
        if target is None:
            return call(ops.all_gather.default, (x, *gathered, self.group))
        scattered = (at[want], self.emit(self.length(target)), *self._origin(target))
        return call(ops.all_to_all.default, (x, *gathered, *scattered, self.group))

    def narrowed(self, x: fx.Node, dim: int, factor: Factor) -> fx.Node:
        """Returns this rank's piece of what is whole."""
        length, call = self.emit(self.length(factor)), self.graph.call_function
        if not self.placement.is_zigzag(factor):
            (start,) = self.piece(factor, "start")
            return call(torch.ops.dcpc.narrow.default, (x, dim, start, length))
        where = self.piece(factor, "start", "turn", "second")
        return call(torch.ops.dcpc.pick.default, (x, dim, *where, length))

    def _origin(self, factor: Factor) -> tuple[int | fx.Node, int, bool]:
        zigzag = self.placement.is_zigzag(factor)
        return self.emit(self.parent(factor)), factor.shift, zigzag

    # ----------------------------------------------------------------------------------- nodes

    def _node(self, node: fx.Node) -> None:
        if node.name in self.program.scalars:
            return  # made from its expression where it is used
        if node.name not in self.placement.nodes:
            if not is_tuple(node, self.program.info):  # those are made for each of their tensors
                self.others[node.name] = self.copy(node, None)
            return
        chosen = self.placement.nodes[node.name]
        sources = tensor_operands(node, self.program.info)
        operands = [self.value(s.name, w) for s, w in zip(sources, chosen.operands, strict=True)]
        if node.target is operator.getitem:
            self.values[node.name, chosen.output] = self._item(node, operands)
            return
        special = _SPECIAL.get(node.target)  # type: ignore[call-overload]
        made = special(self, node, operands) if special is not None else None
        if made is None:
            made = self.copy(node, operands)
        self.values[node.name, chosen.output] = made

    def _tag(self, name: str) -> None:
        """Notes for which node of the program the newest calls are, collectives among them."""
        made = next(iter(reversed(self.graph.nodes)), None)
        while made is not None and made.op == "call_function" and "dcpc" not in made.meta:
            made.meta["dcpc"] = name
            made = made.prev

    def _item(self, node: fx.Node, operands: list[fx.Node]) -> fx.Node:
        """One of several results; the call is made once for all that want the same operands."""
        key = (call_of(node).name, tuple(operands))
        if key not in self.tuples:
            self.tuples[key] = self.copy(call_of(node), operands)
        return self.graph.call_function(operator.getitem, (self.tuples[key], node.args[1]))

    def copy(self, node: fx.Node, operands: list[fx.Node] | None) -> fx.Node:
        """Returns the same call of a rank's operands, or of whole ones where none are given."""
        queue = list(operands or [])

        def argument(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            if leaf.name in self.program.scalars:
                return self.emit(self.program.scalars[leaf.name])
            if leaf.name in self.program.info:
                return queue.pop(0) if operands is not None else self.value(leaf.name, REPLICATED)
            return self.others[leaf.name]

        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), argument)
        assert callable(node.target)
        return self.graph.call_function(node.target, args, kwargs)

    def label(self, node: fx.Node) -> Label:
        """Returns where a node's value is as it makes it."""
        return self.placement.nodes[node.name].output

    def resize(self, node: fx.Node, operands: list[fx.Node]) -> fx.Node:
        """reshape, expand: the size argument becomes the local shape."""
        assert callable(node.target)
        shape = self.shape(node.name, self.label(node))
        return self.graph.call_function(node.target, (operands[0], shape), dict(node.kwargs))

    def fill(self, node: fx.Node, operands: list[fx.Node]) -> fx.Node:
        """full, zeros, new_ones, ...: the size argument becomes the local shape."""
        copied = self.copy(node, operands)
        position = 1 if operands else 0
        args = list(copied.args)
        args[position] = self.shape(node.name, self.label(node))
        copied.args = tuple(args)
        return copied

    def arange(self, node: fx.Node, operands: list[fx.Node]) -> fx.Node | None:
        """Positions: this rank's piece of them, of one factor where they have several."""
        label = self.label(node)
        if not label.sharded:
            return None
        self.values[node.name, REPLICATED] = self.copy(node, operands)
        return self._change(node.name, REPLICATED, label)

    def random(self, node: fx.Node, operands: list[fx.Node]) -> fx.Node:
        """Random numbers: of the call's seed, each rank's piece its own."""
        label = self.label(node)
        salt = self.piece(self.factor(node.name, label), "before")[0] if label.sharded else 0
        size, seed = self.shape(node.name, label), self.integer_nodes[self.integers[-1].symbol]
        assert callable(node.target)
        return self.graph.call_function(node.target, (size, seed, salt, *node.args[3:]))

    def cut(self, node: fx.Node, operands: list[fx.Node]) -> fx.Node | None:
        """A slice of a sharded dim: what this rank's piece has of it."""
        chosen = self.placement.nodes[node.name]
        if chosen.name != "cut":
            info, source = self.program.info, operands_name(node, 0)
            whole = info[node.name].shape == info[source].shape
            # A slice of all there is: its end, a whole length, says nothing of a piece.
            return operands[0] if whole and chosen.operands[0] == chosen.output else None
        kept = self.factor(node.name, chosen.output)
        (skipped,) = self.piece(kept, "skip")
        args = (operands[0], chosen.output.dim, skipped, self.emit(self.length(kept)))
        return self.graph.call_function(torch.ops.dcpc.narrow.default, args)

    def grouped(self, node: fx.Node, operands: list[fx.Node]) -> fx.Node | None:
        """Convolution and norm in groups: of a piece of them a rank has so many."""
        chosen = self.placement.nodes[node.name]
        if chosen.name != "g":
            return None
        local = self.emit(self.length(self.factor(node.name, chosen.output)))
        fixed = self.any_degree or isinstance(local, int)
        if node.target is aten.group_norm.default and not fixed:
            return self._groups_as_samples(node, operands, local)
        copied = self.copy(node, operands)
        names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        at = next(i for i, name in enumerate(names) if name in ("groups", "num_groups"))
        if at < len(copied.args):
            copied.args = (*copied.args[:at], local, *copied.args[at + 1 :])
        else:
            copied.kwargs = {**copied.kwargs, names[at]: local}
        return copied

    def _groups_as_samples(
        self, node: fx.Node, operands: list[fx.Node], groups: int | fx.Node
    ) -> fx.Node:
        """A norm of as many groups as a rank happens to have: each is a sample of one group.

        The kernel takes their number as a number, which is another one on another rank.
        """
        label = self.label(node)
        kept, shape = self.factor(node.name, label), self.shape(node.name, label)
        samples = self.emit(self.dim_size(node.name, 0, label) * self.length(kept))
        channels = self.program.info[node.name].shape[1] / kept.size
        copied = self.copy(node, operands)
        names = [a.name for a in aten.group_norm.default._schema.arguments]
        given = {**dict(zip(names, copied.args, strict=False)), **copied.kwargs}
        self.graph.erase_node(copied)
        x = self.reshape(operands[0], [samples, self.emit(channels), *shape[2:]])
        args = (x, 1, None, None, given.get("eps", 1e-5))
        x = self.reshape(self.graph.call_function(aten.group_norm.default, args), shape)
        ones = [1] * (len(shape) - 2)
        for name, op in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
            each = given.get(name)
            if isinstance(each, fx.Node):
                each = self.reshape(each, [shape[1], *ones])
                x = self.graph.call_function(op, (x, each))
        return x


def operands_name(node: fx.Node, position: int) -> str:
    """Returns the name of a call's positional tensor argument."""
    operand = node.args[position]
    assert isinstance(operand, fx.Node)
    return operand.name


_FILLS = (
    aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format,
    aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default,
)  # fmt: skip
_GROUPED = (
    aten.group_norm.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
    aten.convolution.default, aten._convolution.default, aten._convolution_mode.default,
)  # fmt: skip
_SPECIAL = {
    aten.reshape.default: _Lowering.resize,
    aten.view.default: _Lowering.resize,
    aten.expand.default: _Lowering.resize,
    **dict.fromkeys(_FILLS, _Lowering.fill),
    **dict.fromkeys(_GROUPED, _Lowering.grouped),
    aten.arange.default: _Lowering.arange,
    aten.arange.start: _Lowering.arange,
    aten.arange.start_step: _Lowering.arange,
    aten.slice.Tensor: _Lowering.cut,
    torch.ops.dcpc.uniform.default: _Lowering.random,
    torch.ops.dcpc.normal.default: _Lowering.random,
    torch.ops.dcpc.attention.default: local_attention,
}
