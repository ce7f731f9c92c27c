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
from itertools import count

import sympy
import torch
from torch import fx

from dcpc.codegen.lower.rewriting import RowRewriting, Shape
from dcpc.ir import Program, TensorInfo, UnpadPlan, tensor_operands
from dcpc.ops.attention import ROWS_OP

aten = torch.ops.aten

INDICES = ("rows", "sample", "position", "sequence")  # inputs besides the program's own


def rows_name(number: int) -> str:
    """Returns the name of the dim of valid rows: of the first padded length, or a later one."""
    return f"valid_rows_{number}" if number else "valid_rows"


def index_name(which: str, number: int = 0) -> str:
    """Returns the name of one of `INDICES` among a program's inputs, see `rows_name`."""
    return f"unpad.{which}.{number}" if number else f"unpad.{which}"


def apply_unpad(program: Program, plan: UnpadPlan) -> Program:
    """Returns a program that computes the plan's values for valid rows alone."""
    assert not plan.reason, plan.reason
    return _UnpadRewriting(program, plan).run()


class _UnpadRewriting(RowRewriting):
    def __init__(self, program: Program, plan: UnpadPlan) -> None:
        self.plan = plan
        self.number = next(i for i in count() if rows_name(i) not in program.symbols)
        self.made = frozenset(plan.packed)
        self.entered: dict[tuple[str, tuple[int, int] | None], fx.Node] = {}
        self.indices: dict[str, fx.Node] = {}
        rows = sympy.Symbol(rows_name(self.number), integer=True, positive=True)
        super().__init__(program, plan.factors, plan.batch, plan.seq, rows)

    def placeholders(self) -> None:
        """Adds the indices of the valid rows."""
        for which in INDICES:
            name = index_name(which, self.number).replace(".", "_")
            made = self.indices[which] = self.graph.placeholder(name)
            one = (sympy.Integer(1),) if which == "sequence" else ()
            self.info[made.name] = TensorInfo((*one, self.rows), torch.int64, False)
            made.meta["device"] = self.devices[next(iter(self.padded))]

    def run(self) -> Program:
        """Returns the rewritten program."""
        hints, dim = self.program.hints, rows_name(self.number)
        found = self.rewritten(
            symbols={**self.program.symbols, dim: self.rows},
            hints={**hints, dim: int(sympy.nextprime(max(hints.values(), default=2)))},
            graph_hash=f"{self.program.graph_hash} without padding",
        )
        given = {n.name: index_name(w, self.number) for w, n in self.indices.items()}
        return dataclasses.replace(found, inputs={**self.program.inputs, **given})

    def unused(self) -> None:
        """Removes the indices that nothing reads."""
        for which in [w for w, node in self.indices.items() if not node.users]:
            node = self.indices.pop(which)
            self.graph.erase_node(node)
            del self.info[node.name]

    # ----------------------------------------------------------------------------------- calls

    def call(self, node: fx.Node) -> None:
        """Adds a call, for all rows or for the valid ones."""
        operands = tensor_operands(node, self.program.info)
        if node.name not in self.made and node.name not in self.plan.summed:
            given = [self.value(n.name) for n in operands]
            self.padded[node.name] = self.made_of(node, given, self.program.info[node.name].shape)
            return
        if node.name in self.plan.attentions:
            self.packed[node.name] = self._attention(node)
            return
        given = [self._entered(n.name, node.name) for n in operands]
        shape = self.shape(node.name)
        if node.name in self.plan.summed:
            self.padded[node.name] = self.made_of(node, given, shape)
        else:
            self.packed[node.name] = self.made_of(node, given, shape)

    def _attention(self, node: fx.Node) -> fx.Node:
        given = [self._entered(n.name, node.name) for n in node.args[:3] if isinstance(n, fx.Node)]
        kwargs = {k: v for k, v in node.kwargs.items() if k != "empty"}
        if node.name in self.plan.biased:
            mask = node.args[3]
            assert isinstance(mask, fx.Node), "a bias is a tensor"
            args = (*given, self.value(mask.name), None, self.indices["rows"])
            made = self.graph.call_function(ROWS_OP, args, kwargs)
        else:
            args = (*given, None, None, self.indices["sequence"])
            made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta = {k: v for k, v in node.meta.items() if k != "val"}
        return self.known(made, node.name, self.shape(node.name))

    # ---------------------------------------------------------------------- valid rows, all rows

    def _entered(self, name: str, reader: str) -> fx.Node:
        """Returns a value for valid rows, or unchanged if it has no rows."""
        if name in self.packed:
            return self.packed[name]
        factors = [f for dim in self.plan.factors[name] for f in dim]
        keys = [f.key for f in factors]
        batch, seq = self.plan.batch in keys, self.plan.seq in keys
        if not batch and not seq:
            return self.value(name)
        swap = None if seq else self._swapped(name, reader)
        if (name, swap) not in self.entered:
            found = self.value(name)
            if swap is not None:
                found = self._of_samples(found, name, *swap)
            elif not batch:
                found = self._of_positions(found, name, keys.index(self.plan.seq))
            else:
                found = self.of_rows(found, name)
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
        x = self.op(name, shape, aten.index_select.default, *args)
        shape[batch], shape[seq] = shape[seq], shape[batch]
        return self.op(name, shape, aten.transpose.int, x, batch, seq)

    def _of_positions(self, x: fx.Node, name: str, at: int) -> fx.Node:
        """Selects a per-position value for each valid row."""
        sizes = [f.size for dim in self.plan.factors[name] for f in dim]
        x = self.reshaped(x, name, sizes)
        sizes[at] = self.rows
        x = self.op(name, sizes, aten.index_select.default, x, at, self.indices["position"])
        return self.reshaped(x, name, self.shape(name))

    def removed(self, x: fx.Node, name: str, joined: Shape, at: int) -> fx.Node:
        """Selects the valid rows."""
        shape = (*joined[:at], self.rows, *joined[at + 1 :])
        return self.op(name, shape, aten.index_select.default, x, at, self.indices["rows"])

    def restored(self, x: fx.Node, name: str, joined: Shape, at: int) -> fx.Node:
        """Sets the other rows to 0."""
        zeros = self.op(
            name, joined, aten.zeros.default, [self.emitter.emit(s) for s in joined],
            dtype=self.program.info[name].dtype, device=self.devices[name],
        )  # fmt: skip
        self.info[zeros.name] = dataclasses.replace(self.info[zeros.name], requires_grad=False)
        args = (zeros, at, self.indices["rows"], x)
        return self.op(name, joined, aten.index_copy.default, *args)
