"""Costs of regions that run a few rows at a time: those of one tile, times the tiles.

FLOPs and bytes of a tile are affine in its rows: over all tiles `a rows + b tiles`. Of its live
bytes the largest tile's count. Gradients of operands without rows are summed beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from torch import fx

from dcpc.ir import Work
from dcpc.ops.tiled import Tiling, summed_in, tiling_of
from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.polynomials import TileCount, TileRows, larger

ZERO = sympy.Integer(0)


@dataclass(frozen=True, slots=True)
class TileCosts:
    """Costs of one tile as expressions of its rows.

    Attributes:
        rows: symbol of the rows.
        forward: calls of forward.
        backward: calls of backward, which runs forward again before it.
        forward_bytes: sums of live bytes in forward of which the largest is its peak.
        backward_bytes: the same in backward.
    """

    rows: sympy.Symbol
    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    forward_bytes: tuple[sympy.Expr, ...]
    backward_bytes: tuple[sympy.Expr, ...]


def tile_work(node: fx.Node, facts: Facts) -> tuple[Work, ...] | None:
    """Returns the calls of a region's forward or backward; None: the node is another op."""
    made = tiling_of(node.target)
    if made is None or made.costs is None:
        return None
    costs: TileCosts = made.costs
    rows = _rows(node, facts, made)
    tiles = TileCount(rows, sympy.Integer(made.most))

    def over_all(size: sympy.Expr) -> sympy.Expr:
        fixed = size.xreplace({costs.rows: ZERO})
        return sympy.expand((size - fixed).xreplace({costs.rows: rows})) + tiles * fixed

    backward = node.target is made.back_op
    found = [
        replace(w, flops=over_all(w.flops), bytes_moved=over_all(w.bytes_moved))
        for w in (costs.backward if backward else costs.forward)
    ]
    if backward:
        dtype, elements = _sums(node, facts, made)
        moved = 3 * elements * dtype.itemsize * tiles
        found.append(Work("pointwise", False, dtype, 1, 1, elements * tiles, moved, ZERO))
    return tuple(found)


def tile_bytes(node: fx.Node, facts: Facts) -> sympy.Expr | None:
    """Returns the bytes alive beside a region's results while it runs; None: another op."""
    made = tiling_of(node.target)
    if made is None or made.costs is None:
        return None
    costs: TileCosts = made.costs
    rows = TileRows(_rows(node, facts, made), sympy.Integer(made.most))
    backward = node.target is made.back_op
    each = costs.backward_bytes if backward else costs.forward_bytes
    peak = larger(*(sympy.expand(size).xreplace({costs.rows: rows}) for size in each))
    if not backward:
        return peak
    # Sums in a wider dtype lie beside the tile's values; the gradients are made of them at the end.
    own = [given for given, dim in _learning(node, made) if dim < 0]
    narrow = [t for t in (facts.of(n)[0] for n in own) if summed_in(t.dtype) != t.dtype]
    return peak + sum(
        (t.numel * (summed_in(t.dtype).itemsize - t.dtype.itemsize) for t in narrow), ZERO
    )


def _rows(node: fx.Node, facts: Facts, made: Tiling) -> sympy.Expr:
    given = zip(node.args, made.rows, strict=False)
    x, dim = next((x, d) for x, d in given if d >= 0)
    assert isinstance(x, fx.Node), "an operand with rows is a tensor"
    return facts.of(x)[0].shape[dim]


def _learning(node: fx.Node, made: Tiling) -> Sequence[tuple[fx.Node, int]]:
    found = []
    for i in made.learns:
        x = node.args[i]
        assert isinstance(x, fx.Node), "an operand with a gradient is a tensor"
        found.append((x, made.rows[i]))
    return found


def _sums(node: fx.Node, facts: Facts, made: Tiling) -> tuple[torch.dtype, sympy.Expr]:
    """Returns dtype and number of elements of the gradients that are summed over tiles."""
    whole = [facts.of(x)[0] for x, dim in _learning(node, made) if dim < 0]
    dtype = summed_in(whole[0].dtype) if whole else torch.float32
    return dtype, sum((t.numel for t in whole), ZERO)
