"""Finds the dims of samples and positions in values, and the ops that mix rows.

An op is row-wise if ranks could have pieces of the samples, and as well of the positions, without
any word to each other: then its value at (sample, position) depends on nothing but its operands
there. The sharding rules say which ops these are.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import fx

from dcpc.ir import Factor, Program, tensor_operands
from dcpc.passes.sharding.sharding import Alternative, Sharding

aten = torch.ops.aten

# Ops whose size argument is the shape of the result.
RESIZED = (aten.reshape.default, aten.view.default, aten.expand.default)


class RowKind(Enum):
    """The dims of (sample, position) that a value has."""

    ROWS = "both"
    SEQ = "positions"
    BATCH = "samples"
    NONE = "neither"
    SEVERAL = "one of them more than once"


class RowDims:
    """The places of the rows in a program's values.

    Args:
        program: the traced model.
        sharding: factors and alternatives of the program.
        batch: factor that counts samples; of a program of one sample `seq` again.
        seq: factor that counts positions.
    """

    def __init__(self, program: Program, sharding: Sharding, batch: Factor, seq: Factor) -> None:
        self.program, self.sharding = program, sharding
        self.rows = batch, seq
        self.batch, self.seq = batch.key, seq.key
        self._symbols = batch.size.free_symbols | seq.size.free_symbols

    def keys(self, name: str) -> list[int]:
        """Returns the keys of all factors of a value, in order."""
        return [f.key for dim in self.sharding.factors[name] for f in dim]

    def kind(self, name: str) -> RowKind:
        """Returns which of the dims of rows a value has."""
        keys = self.keys(name)
        batch, seq = keys.count(self.batch), keys.count(self.seq)
        if max(batch, seq) > 1:
            return RowKind.SEVERAL
        if batch and seq:
            return RowKind.ROWS
        return RowKind.BATCH if batch else RowKind.SEQ if seq else RowKind.NONE

    def dim(self, name: str, key: int) -> int | None:
        """Returns the dim of a value that consists of this factor alone; None: there is none."""
        found = [d for d, dim in enumerate(self.sharding.factors[name]) if self._alone(dim, key)]
        return found[0] if len(found) == 1 else None

    def _alone(self, dim: tuple[object, ...], key: int) -> bool:
        return [getattr(f, "key", -1) for f in dim] == [key]

    def is_row_wise(self, node: fx.Node) -> bool:
        """Returns whether each row of a value depends on the same row of its operands alone."""
        if node.name not in self.sharding.rules or self.kind(node.name) is not RowKind.ROWS:
            return False
        if node.target not in RESIZED and self._takes_lengths(node):
            return False
        operands = [n.name for n in tensor_operands(node, self.program.info)]
        if any(self.kind(n) is RowKind.SEVERAL for n in operands):
            return False
        if not all(self._is_free(node.name, operands, key) for key in (self.batch, self.seq)):
            return False
        samples = [n for n in operands if self.kind(n) is RowKind.BATCH]
        return all(self.swapped(n, node.name) is not None for n in samples)

    def swapped(self, operand: str, name: str) -> tuple[int, int] | None:
        """Returns (dim of samples, dim of positions) of an operand with one position for all.

        Both are right-aligned with the result, as in an elementwise op; None: they are not.
        """
        own, made = self.dim(operand, self.batch), self.dim(name, self.batch)
        seq = self.dim(name, self.seq)
        shape, rank = self.program.info[operand].shape, len(self.program.info[name].shape)
        before = rank - len(shape)
        if own is None or made is None or seq is None or own + before != made or seq < before:
            return None
        return (own, seq - before) if shape[seq - before] == 1 else None

    def _takes_lengths(self, node: fx.Node) -> bool:
        """Whether an argument is a number that depends on the number of samples or positions."""
        found: list[fx.Node] = []
        fx.node.map_arg((node.args, node.kwargs), found.append)
        sizes = [self.program.scalars[n.name] for n in found if n.name in self.program.scalars]
        return any(size.free_symbols & self._symbols for size in sizes)

    def _is_free(self, name: str, operands: list[str], key: int) -> bool:
        """Whether ranks could have pieces of one factor without communication."""
        rule = self.sharding.rules[name]
        mixing = {*rule.windows, *rule.averages, *rule.slices, "ring", ""}
        return any(
            a.factor == key and a.name not in mixing and self._follows(name, operands, a)
            for a in self.sharding.alternatives[name]
        )

    def _follows(self, name: str, operands: list[str], way: Alternative) -> bool:
        """Whether the output and all operands that have the factor are split along it."""
        factors = self.sharding.factors
        for tensor, label in zip((*operands, name), (*way.operands, way.output), strict=True):
            if label.partial:
                return False
            if label.sharded:
                if factors[tensor][label.dim][label.index].key != way.factor:
                    return False
            elif way.factor in self.keys(tensor):
                return False
        return way.output.sharded
