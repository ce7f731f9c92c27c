"""Finds values that are zero at padded rows, and the conditions on a call's inputs for that."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from dcpc.ir import Program, RowCheck, tensor_operands
from dcpc.passes.unpad.row_dims import RowDims, RowKind

aten = torch.ops.aten

Checks = frozenset[RowCheck]

# Elementwise ops that map 0 to 0, though they are not linear.
_KEEPING = (aten.abs.default, aten.relu.default, aten.tanh.default)


class ZeroRows:
    """Finds values that are zero at padded rows.

    Args:
        program: the traced model.
        dims: dims of rows in the program's values.
        learned: names of the values that depend on parameters or trainable inputs.
        drawn: names of values that depend on random numbers.
    """

    def __init__(
        self, program: Program, dims: RowDims, learned: Collection[str], drawn: Collection[str]
    ) -> None:
        self._program, self._dims = program, dims
        self._learned, self._drawn = learned, drawn
        self._found: dict[str, Checks | None] = {}

    def checked(self, name: object, number: float) -> Checks | None:
        """Returns the check that an input-only value equals a number at padded rows, or None."""
        if not isinstance(name, str) or name not in self._program.info:
            return None
        if name in self._learned or name in self._drawn:
            return None
        dims = self._dims
        ordered = dims.keys(name)[:2] == [dims.batch, dims.seq]
        if dims.kind(name) is not RowKind.ROWS or not ordered:
            return None
        return frozenset({RowCheck(name, number)})

    def of(self, node: fx.Node) -> Checks | None:
        """Returns the checks under which a value is zero at padded rows; None: it may not be."""
        if node.name not in self._found:
            self._found[node.name] = self._of(node)
        return self._found[node.name]

    def _of(self, node: fx.Node) -> Checks | None:
        if node.name not in self._learned:
            return self.checked(node.name, 0)
        if node.op != "call_function" or not self._dims.is_row_wise(node):
            return None
        filled = self._filled(node)
        if filled is not None:
            return filled
        operands = [self.of(n) for n in tensor_operands(node, self._program.info)]
        linear = self._dims.sharding.rules[node.name].linear
        power = node.args[1] if node.target is aten.pow.Tensor_Scalar else 0
        if node.target in _KEEPING or (isinstance(power, int | float) and power > 0):
            linear = "first"
        if linear == "one":
            return next((checks for checks in operands if checks is not None), None)
        if linear == "first":
            return operands[0]
        if linear == "all" and all(checks is not None for checks in operands):
            return frozenset().union(*(checks for checks in operands if checks is not None))
        return None

    def _filled(self, node: fx.Node) -> Checks | None:
        """Returns the checks under which a mask sets padded rows to zero, or None."""
        fills = {
            aten.masked_fill.Scalar: (1, 2, 1.0),  # mask, number, where the mask is this
            aten.where.ScalarOther: (0, 2, 0.0),
            aten.where.ScalarSelf: (0, 1, 1.0),
        }
        if node.target not in fills:
            return None
        mask, number, where = fills[node.target]
        given = node.args[mask]
        if node.args[number] != 0 or not isinstance(given, fx.Node):
            return None
        return self.checked(given.name, where)
