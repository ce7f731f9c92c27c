"""Rewrites a program to compute on valid rows alone: values `[batch, seq]` become `[1, rows]`.

    rows      [rows]     index of each valid row: sample * seq + position
    sample    [rows]     index of its sample
    position  [rows]     its position in the sample
    sequence  [1, rows]  `sample` again, as the segments of attention

These are additional inputs of the program, so the graph has one more dim and no size that depends
on data. Its other values stay the same.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import sympy
import torch
from torch import fx

from dcpc.fx.graphs import without_unused
from dcpc.fx.integers import Emitter
from dcpc.ir import Factor, Program, TensorInfo, UnpadPlan, call_of, is_tuple, tensor_operands
from dcpc.ops.attention import ROWS_OP

aten = torch.ops.aten

INDICES = ("rows", "sample", "position", "sequence")  # inputs besides the program's own

_RESIZED = (aten.reshape.default, aten.view.default, aten.expand.default)
Shape = tuple[sympy.Expr, ...]


def rows_name(number: int) -> str:
    """Returns the name of the dim of valid rows: of the first padded length, or a later one."""
    return f"valid_rows_{number}" if number else "valid_rows"


def index_name(which: str, number: int = 0) -> str:
    """Returns the name of one of `INDICES` among a program's inputs, see `rows_name`."""
    return f"unpad.{which}.{number}" if number else f"unpad.{which}"


def apply_unpad(program: Program, plan: UnpadPlan) -> Program:
    """Returns a program that computes the plan's values for valid rows alone."""
    assert not plan.reason, plan.reason
    return _Unpadding(program, plan).run()


def _device(node: fx.Node) -> torch.device:
    """Returns the device of a value: in its meta, if the node was made here."""
    found: torch.device = node.meta["device"] if "device" in node.meta else node.meta["val"].device
    return found


class _Unpadding:
    def __init__(self, program: Program, plan: UnpadPlan) -> None:
        self.program, self.plan = program, plan
        self.number = next(i for i in count() if rows_name(i) not in program.symbols)
        self.rows = sympy.Symbol(rows_name(self.number), integer=True, positive=True)
        self.graph = fx.Graph()
        self.info: dict[str, TensorInfo] = {}
        self.scalars: dict[str, sympy.Expr] = {}
        self.padded: dict[str, fx.Node] = {}  # by name in the program
        self.packed: dict[str, fx.Node] = {}
        self.made = frozenset(plan.packed)
        nodes = program.gm.graph.nodes
        self.devices = {n.name: _device(n) for n in nodes if n.name in program.info}
        self.entered: dict[tuple[str, tuple[int, int] | None], fx.Node] = {}
        self.tuples: dict[tuple[str, tuple[fx.Node, ...]], fx.Node] = {}
        self.indices: dict[str, fx.Node] = {}
        self._placeholders()
        self.emitter = Emitter(self.graph, self._symbols())

    def _placeholders(self) -> None:
        for node in self.program.gm.graph.nodes:
            if node.op == "placeholder":
                made = self.graph.placeholder(node.name)
                assert made.name == node.name, f"{node.name} became {made.name}"
                made.meta = dict(node.meta)
                self.padded[node.name] = made
                self.info[made.name] = self.program.info[node.name]
        for which in INDICES:
            name = index_name(which, self.number).replace(".", "_")
            made = self.indices[which] = self.graph.placeholder(name)
            one = (sympy.Integer(1),) if which == "sequence" else ()
            self.info[made.name] = TensorInfo((*one, self.rows), torch.int64, False)
            made.meta["device"] = self.devices[next(iter(self.padded))]

    def _symbols(self) -> dict[sympy.Symbol, fx.Node]:
        """Returns a node for the length of each dim."""
        found: dict[sympy.Symbol, fx.Node] = {}
        for node in [n for n in self.graph.nodes if n.op == "placeholder"]:
            for dim, size in enumerate(self.info[node.name].shape):
                if size.is_Symbol and size not in found:
                    made = self.graph.call_function(aten.sym_size.int, (node, dim))
                    found[size], self.scalars[made.name] = made, size
        return found

    def run(self) -> Program:
        """Returns the rewritten program."""
        info, scalars = self.program.info, self.program.scalars
        for node in self.program.gm.graph.nodes:
            if node.op != "call_function" or node.name in scalars:
                continue
            if node.name in info:
                self._call(node)
            elif not is_tuple(node, info):
                self.padded[node.name] = self._copy(node, None)
        outputs = tuple(self._value(name) for name in self.program.outputs)
        self.graph.output((outputs,))
        without_unused(self.graph)
        used = {w: node for w, node in self.indices.items() if node.users}
        for which, node in self.indices.items():
            if which not in used:
                self.graph.erase_node(node)
                del self.info[node.name]
        self.graph.lint()
        names = {n.name for n in self.graph.nodes}
        hints, dim = self.program.hints, rows_name(self.number)
        given = {n.name: index_name(w, self.number) for w, n in used.items()}
        return dataclasses.replace(
            self.program,
            gm=fx.GraphModule(self.program.gm, self.graph),
            inputs={**self.program.inputs, **given},
            symbols={**self.program.symbols, dim: self.rows},
            info={n: info for n, info in self.info.items() if n in names},
            scalars={n: size for n, size in self.scalars.items() if n in names},
            outputs=tuple(n.name for n in outputs),
            hints={**hints, dim: int(sympy.nextprime(max(hints.values(), default=2)))},
            graph_hash=f"{self.program.graph_hash} without padding",
        )

    # ----------------------------------------------------------------------------------- calls

    def _call(self, node: fx.Node) -> None:
        """Adds a call, for all rows or for the valid ones."""
        operands = tensor_operands(node, self.program.info)
        if node.name not in self.made and node.name not in self.plan.summed:
            given = [self._value(n.name) for n in operands]
            self.padded[node.name] = self._made(node, given, self.program.info[node.name].shape)
            return
        if node.name in self.plan.attentions:
            self.packed[node.name] = self._attention(node)
            return
        given = [self._entered(n.name, node.name) for n in operands]
        shape = self._shape(node.name)
        if node.name in self.plan.summed:
            self.padded[node.name] = self._made(node, given, shape)
        else:
            self.packed[node.name] = self._made(node, given, shape)

    def _made(self, node: fx.Node, given: list[fx.Node], shape: Shape) -> fx.Node:
        """Returns the same call on other operands, or a getitem of it."""
        if node.target is operator.getitem:
            key = (call_of(node).name, tuple(given))
            if key not in self.tuples:
                self.tuples[key] = self._copy(call_of(node), given)
            made = self.graph.call_function(operator.getitem, (self.tuples[key], node.args[1]))
        elif node.target in _RESIZED:
            sizes = [self.emitter.emit(size) for size in shape]
            made = self.graph.call_function(node.target, (given[0], sizes), dict(node.kwargs))
        else:
            made = self._copy(node, given)
        made.meta = {k: v for k, v in node.meta.items() if k != "val"}
        return self._known(made, node.name, shape)

    def _copy(self, node: fx.Node, operands: list[fx.Node] | None) -> fx.Node:
        queue = list(operands or [])

        def argument(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            if leaf.name in self.program.scalars:
                return self.emitter.emit(self.program.scalars[leaf.name])
            if leaf.name in self.program.info:
                return queue.pop(0) if operands is not None else self._value(leaf.name)
            return self.padded[leaf.name]

        args, kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), argument)
        assert callable(node.target)
        return self.graph.call_function(node.target, args, kwargs)

    def _attention(self, node: fx.Node) -> fx.Node:
        given = [self._entered(n.name, node.name) for n in node.args[:3] if isinstance(n, fx.Node)]
        kwargs = {k: v for k, v in node.kwargs.items() if k != "empty"}
        if node.name in self.plan.biased:
            mask = node.args[3]
            assert isinstance(mask, fx.Node), "a bias is a tensor"
            args = (*given, self._value(mask.name), None, self.indices["rows"])
            made = self.graph.call_function(ROWS_OP, args, kwargs)
        else:
            args = (*given, None, None, self.indices["sequence"])
            made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta = {k: v for k, v in node.meta.items() if k != "val"}
        return self._known(made, node.name, self._shape(node.name))

    def _known(self, made: fx.Node, name: str, shape: Shape) -> fx.Node:
        """Records the facts of a new node: those of a program's node, with another shape."""
        made.meta["device"] = self.devices[name]
        self.info[made.name] = dataclasses.replace(self.program.info[name], shape=shape)
        return made

    # ---------------------------------------------------------------------------------- shapes

    def _size(self, factor: Factor) -> sympy.Expr:
        """Returns the size of a factor for values of valid rows."""
        if factor.key == self.plan.batch:
            return sympy.Integer(1)
        return self.rows if factor.key == self.plan.seq else factor.size

    def _shape(self, name: str) -> Shape:
        """Returns the shape of a value of valid rows."""
        dims = self.plan.factors[name]
        return tuple(sympy.Mul(*(self._size(f) for f in dim)) for dim in dims)

    def _op(self, like: str, shape: Sequence[sympy.Expr], op: Callable[..., Any], *args: Any,
            **kwargs: Any) -> fx.Node:  # fmt: skip
        return self._known(self.graph.call_function(op, args, kwargs), like, tuple(shape))

    def _reshaped(self, x: fx.Node, like: str, shape: Sequence[sympy.Expr]) -> fx.Node:
        if tuple(shape) == self.info[x.name].shape:
            return x
        sizes = [self.emitter.emit(size) for size in shape]
        return self._op(like, shape, aten.reshape.default, x, sizes)

    def _permuted(self, x: fx.Node, like: str, order: Sequence[int]) -> fx.Node:
        if list(order) == sorted(order):
            return x
        shape = [self.info[x.name].shape[d] for d in order]
        return self._op(like, shape, aten.permute.default, x, list(order))

    # ---------------------------------------------------------------------- valid rows, all rows

    def _entered(self, name: str, reader: str) -> fx.Node:
        """Returns a value for valid rows, or unchanged if it has no rows."""
        if name in self.packed:
            return self.packed[name]
        factors = [f for dim in self.plan.factors[name] for f in dim]
        keys = [f.key for f in factors]
        batch, seq = self.plan.batch in keys, self.plan.seq in keys
        if not batch and not seq:
            return self._value(name)
        swap = None if seq else self._swapped(name, reader)
        if (name, swap) not in self.entered:
            found = self._value(name)
            if swap is not None:
                found = self._of_samples(found, name, *swap)
            elif not batch:
                found = self._of_positions(found, name, keys.index(self.plan.seq))
            else:
                found = self._of_rows(found, name)
            self.entered[name, swap] = found
        return self.entered[name, swap]

    def _swapped(self, name: str, reader: str) -> tuple[int, int]:
        """Returns the dims of samples and of positions (size 1), aligned with the reader."""

        def dim(of: str, key: int) -> int:
            alone = [[f.key for f in dim] == [key] for dim in self.plan.factors[of]]
            return alone.index(True)

        before = len(self.plan.factors[reader]) - len(self.plan.factors[name])
        return dim(name, self.plan.batch), dim(reader, self.plan.seq) - before

    def _of_samples(self, x: fx.Node, name: str, batch: int, seq: int) -> fx.Node:
        """Selects a per-sample value for each valid row."""
        shape = list(self.info[x.name].shape)
        shape[batch] = self.rows
        args = (x, batch, self.indices["sample"])
        x = self._op(name, shape, aten.index_select.default, *args)
        shape[batch], shape[seq] = shape[seq], shape[batch]
        return self._op(name, shape, aten.transpose.int, x, batch, seq)

    def _of_positions(self, x: fx.Node, name: str, at: int) -> fx.Node:
        """Selects a per-position value for each valid row."""
        sizes = [f.size for dim in self.plan.factors[name] for f in dim]
        x = self._reshaped(x, name, sizes)
        sizes[at] = self.rows
        x = self._op(name, sizes, aten.index_select.default, x, at, self.indices["position"])
        return self._reshaped(x, name, self._shape(name))

    def _of_rows(self, x: fx.Node, name: str) -> fx.Node:
        """Selects the valid rows of a value."""
        sizes, order, at = self._row_major(name)
        x = self._permuted(self._reshaped(x, name, sizes), name, order)
        moved = [sizes[d] for d in order]
        joined = [*moved[:at], moved[at] * moved[at + 1], *moved[at + 2 :]]
        x = self._reshaped(x, name, joined)
        joined[at] = self.rows
        x = self._op(name, joined, aten.index_select.default, x, at, self.indices["rows"])
        return self._restored(x, name, order, at, [sympy.Integer(1), self.rows], self._shape(name))

    def _value(self, name: str) -> fx.Node:
        """Returns a value for all rows; one that is made for valid rows is 0 at padding."""
        if name not in self.padded:
            self.padded[name] = self._left(name)
        return self.padded[name]

    def _left(self, name: str) -> fx.Node:
        x, info = self.packed[name], self.program.info[name]
        sizes, order, at = self._row_major(name)
        factors = [f for dim in self.plan.factors[name] for f in dim]
        x = self._reshaped(x, name, [self._size(f) for f in factors])
        x = self._permuted(x, name, order)
        moved = [sizes[d] for d in order]
        joined = [*moved[:at], self.rows, *moved[at + 2 :]]
        x = self._reshaped(x, name, joined)
        joined[at] = moved[at] * moved[at + 1]
        zeros = self._op(
            name, joined, aten.zeros.default, [self.emitter.emit(s) for s in joined],
            dtype=info.dtype, device=self.devices[name],
        )  # fmt: skip
        self.info[zeros.name] = dataclasses.replace(self.info[zeros.name], requires_grad=False)
        args = (zeros, at, self.indices["rows"], x)
        x = self._op(name, joined, aten.index_copy.default, *args)
        return self._restored(x, name, order, at, moved[at : at + 2], info.shape)

    def _row_major(self, name: str) -> tuple[list[sympy.Expr], list[int], int]:
        """Returns factor sizes of a value, an order with positions after samples, and its place."""
        factors = [f for dim in self.plan.factors[name] for f in dim]
        keys, sizes = [f.key for f in factors], [f.size for f in factors]
        batch, seq = keys.index(self.plan.batch), keys.index(self.plan.seq)
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
            x = self._reshaped(x, name, [*joined[:at], *rows, *joined[at + 1 :]])
            x = self._permuted(x, name, [order.index(d) for d in range(len(order))])
        return self._reshaped(x, name, shape)
