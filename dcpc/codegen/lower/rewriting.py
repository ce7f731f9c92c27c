"""Rewrites a program in which some values have rows, `[1, rows]`, in place of `[batch, seq]`."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from dcpc.fx.integers import Emitter
from dcpc.fx.large_graphs import without_unused
from dcpc.ir import Factor, Program, TensorInfo, call_of, is_tuple

aten = torch.ops.aten

RESIZED = (aten.reshape.default, aten.view.default, aten.expand.default)
Shape = tuple[sympy.Expr, ...]
Factors = Mapping[str, tuple[tuple[Factor, ...], ...]]


def device_of(node: fx.Node) -> torch.device:
    """Returns the device of a value: in its meta, if the node was made by a rewriting."""
    found: torch.device = node.meta["device"] if "device" in node.meta else node.meta["val"].device
    return found


class RowRewriting:
    """A graph that is made of a program's.

    Args:
        program: program to rewrite.
        factors: node name -> the factors of each dim of its value.
        batch: key of the factor that counts samples.
        seq: key of the factor that counts positions.
        rows: number of rows.
    """

    def __init__(
        self, program: Program, factors: Factors, batch: int, seq: int, rows: sympy.Expr
    ) -> None:
        self.program, self.factors = program, factors
        self.batch, self.seq, self.rows = batch, seq, rows
        self.graph = fx.Graph()
        self.info: dict[str, TensorInfo] = {}
        self.scalars: dict[str, sympy.Expr] = {}
        self.padded: dict[str, fx.Node] = {}  # [batch, seq], by name in the program
        self.packed: dict[str, fx.Node] = {}  # [1, rows]
        nodes = program.gm.graph.nodes
        self.devices = {n.name: device_of(n) for n in nodes if n.name in program.info}
        self.tuples: dict[tuple[str, tuple[fx.Node, ...]], fx.Node] = {}
        for node in nodes:
            if node.op == "placeholder":
                made = self.graph.placeholder(node.name)
                assert made.name == node.name, f"{node.name} became {made.name}"
                made.meta = dict(node.meta)
                self.padded[node.name] = made
                self.info[made.name] = program.info[node.name]
        self.placeholders()
        self.emitter = Emitter(self.graph, self._symbols())

    def placeholders(self) -> None:
        """Adds placeholders of its own; there are none."""

    def call(self, node: fx.Node) -> None:
        """Adds a call of the program whose value is a tensor."""
        raise NotImplementedError

    def removed(self, x: fx.Node, name: str, joined: Shape, at: int) -> fx.Node:
        """Returns the rows of a value whose dim `at` has all positions of all samples: these."""
        return x

    def restored(self, x: fx.Node, name: str, joined: Shape, at: int) -> fx.Node:
        """Returns a value with all positions of all samples in its dim of rows, `at`: itself."""
        return x

    def _symbols(self) -> dict[sympy.Symbol, fx.Node]:
        """Returns a node for the length of each dim."""
        found: dict[sympy.Symbol, fx.Node] = {}
        for node in [n for n in self.graph.nodes if n.op == "placeholder"]:
            for dim, size in enumerate(self.info[node.name].shape):
                if size.is_Symbol and size not in found:
                    made = self.graph.call_function(aten.sym_size.int, (node, dim))
                    found[size], self.scalars[made.name] = made, size
        return found

    def rewritten(self, **changes: Any) -> Program:
        """Returns the program, rewritten call by call.

        Args:
            **changes: fields of the program that are other ones.
        """
        info, scalars = self.program.info, self.program.scalars
        for node in self.program.gm.graph.nodes:
            if node.op != "call_function" or node.name in scalars:
                continue
            if node.name in info:
                self.call(node)
            elif not is_tuple(node, info):
                self.padded[node.name] = self._copy(node, None)
        outputs = tuple(self.value(name) for name in self.program.outputs)
        self.graph.output(outputs)
        without_unused(self.graph)
        self.unused()
        self.graph.lint()
        names = {n.name for n in self.graph.nodes}
        return dataclasses.replace(
            self.program,
            gm=fx.GraphModule(self.program.gm, self.graph),
            info={n: info for n, info in self.info.items() if n in names},
            scalars={n: size for n, size in self.scalars.items() if n in names},
            outputs=tuple(n.name for n in outputs),
            **changes,
        )

    def unused(self) -> None:
        """Removes placeholders of its own that nothing reads."""

    def value(self, name: str) -> fx.Node:
        """Returns a value `[batch, seq]`, made of one of rows if there is only that."""
        if name not in self.padded:
            self.padded[name] = self._left(name)
        return self.padded[name]

    def made_of(self, node: fx.Node, given: list[fx.Node], shape: Shape) -> fx.Node:
        """Returns the same call on other operands, or a getitem of it."""
        if node.target is operator.getitem:
            key = (call_of(node).name, tuple(given))
            if key not in self.tuples:
                self.tuples[key] = self._copy(call_of(node), given)
            made = self.graph.call_function(operator.getitem, (self.tuples[key], node.args[1]))
        elif node.target in RESIZED:
            sizes = [self.emitter.emit(size) for size in shape]
            made = self.graph.call_function(node.target, (given[0], sizes), dict(node.kwargs))
        else:
            made = self._copy(node, given)
        made.meta = {k: v for k, v in node.meta.items() if k != "val"}
        return self.known(made, node.name, shape)

    def _copy(self, node: fx.Node, operands: list[fx.Node] | None) -> fx.Node:
        queue = list(operands or [])

        def argument(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            if leaf.name in self.program.scalars:
                return self.emitter.emit(self.program.scalars[leaf.name])
            if leaf.name in self.program.info:
                return queue.pop(0) if operands is not None else self.value(leaf.name)
            return self.padded[leaf.name]

        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), argument)
        assert callable(node.target)
        return self.graph.call_function(node.target, args, kwargs)

    def known(self, made: fx.Node, name: str, shape: Shape) -> fx.Node:
        """Records the facts of a new node: those of a program's node, with another shape."""
        made.meta["device"] = self.devices[name]
        self.info[made.name] = dataclasses.replace(self.program.info[name], shape=shape)
        return made

    # ---------------------------------------------------------------------------------- shapes

    def _size(self, factor: Factor, rows: sympy.Expr) -> sympy.Expr:
        """Returns the size of a factor for values of so many rows, which are of one sample."""
        if factor.key == self.seq:
            return rows
        return sympy.Integer(1) if factor.key == self.batch else factor.size

    def shape(self, name: str, rows: sympy.Expr | None = None) -> Shape:
        """Returns the shape of a value of rows; default: of all."""
        dims, rows = self.factors[name], self.rows if rows is None else rows
        return tuple(sympy.Mul(*(self._size(f, rows) for f in dim)) for dim in dims)

    def op(self, like: str, shape: Sequence[sympy.Expr], op: Callable[..., Any], *args: Any,
            **kwargs: Any) -> fx.Node:  # fmt: skip
        """Adds a call whose value has the dtype of a value of the program."""
        return self.known(self.graph.call_function(op, args, kwargs), like, tuple(shape))

    def reshaped(self, x: fx.Node, like: str, shape: Sequence[sympy.Expr]) -> fx.Node:
        """Returns a value in another shape, the value itself if that is its shape."""
        if tuple(shape) == self.info[x.name].shape:
            return x
        sizes = [self.emitter.emit(size) for size in shape]
        return self.op(like, shape, aten.reshape.default, x, sizes)

    def _permuted(self, x: fx.Node, like: str, order: Sequence[int]) -> fx.Node:
        if list(order) == sorted(order):
            return x
        shape = [self.info[x.name].shape[d] for d in order]
        return self.op(like, shape, aten.permute.default, x, list(order))

    def of_rows(self, x: fx.Node, name: str) -> fx.Node:
        """Returns a value `[batch, seq]` as one of rows."""
        sizes, order, at = self._row_major(name)
        x = self._permuted(self.reshaped(x, name, sizes), name, order)
        moved = [sizes[d] for d in order]
        joined = [*moved[:at], moved[at] * moved[at + 1], *moved[at + 2 :]]
        x = self.reshaped(x, name, joined)
        x = self.removed(x, name, tuple(joined), at)
        return self._restored(x, name, order, at, [sympy.Integer(1), self.rows], self.shape(name))

    def _left(self, name: str) -> fx.Node:
        x, shape = self.packed[name], self.program.info[name].shape
        sizes, order, at = self._row_major(name)
        factors = [f for dim in self.factors[name] for f in dim]
        x = self.reshaped(x, name, [self._size(f, self.rows) for f in factors])
        x = self._permuted(x, name, order)
        moved = [sizes[d] for d in order]
        joined = (*moved[:at], self.rows, *moved[at + 2 :])
        x = self.reshaped(x, name, joined)
        whole = (*moved[:at], moved[at] * moved[at + 1], *moved[at + 2 :])
        x = self.restored(x, name, whole, at)
        return self._restored(x, name, order, at, moved[at : at + 2], shape)

    def _row_major(self, name: str) -> tuple[list[sympy.Expr], list[int], int]:
        """Returns factor sizes of a value, an order with positions after samples, and its place."""
        factors = [f for dim in self.factors[name] for f in dim]
        keys, sizes = [f.key for f in factors], [f.size for f in factors]
        batch, seq = keys.index(self.batch), keys.index(self.seq)
        order = [d for d in range(len(keys)) if d != seq]
        at = order.index(batch)
        order.insert(at + 1, seq)
        return sizes, order, at

    def _restored(
        self, x: fx.Node, name: str, order: list[int], at: int, rows: list[sympy.Expr], shape: Shape
    ) -> fx.Node:
        """Returns a value of joined rows with its dims in the program's order."""
        if order != sorted(order):
            joined = self.info[x.name].shape
            x = self.reshaped(x, name, [*joined[:at], *rows, *joined[at + 1 :]])
            x = self._permuted(x, name, [order.index(d) for d in range(len(order))])
        return self.reshaped(x, name, shape)
