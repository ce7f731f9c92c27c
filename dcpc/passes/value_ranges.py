"""Finds the valid values of a model's integer inputs: rows of a table, classes of a loss.

An input is followed through ops that keep its elements (views, slices, padding) to the ops that
read it as numbers of rows or classes. Whatever else is done with it (`where`, `clamp`) ends the
way, as values out of range may be put right there: then nothing is known, and nothing is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from dcpc.ir import Extent, Program, ValueRange
from dcpc.passes.sharding.op_kinds import arguments

aten = torch.ops.aten

_KEEPS = {
    aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.flatten.using_ints,
    aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.expand.default, aten.transpose.int, aten.permute.default, aten.t.default,
    aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default,
    aten._to_copy.default, aten.to.dtype,
}  # fmt: skip
# Ops that keep the order of dims and the elements of each.
_IN_PLACE = {
    aten.contiguous.default, aten.clone.default, aten.alias.default, aten.detach.default,
    aten._to_copy.default, aten.to.dtype,
}  # fmt: skip
_CLASSES = {aten.cross_entropy_loss.default, aten.nll_loss_nd.default}
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_INTEGERS = (*_SIGNED, torch.uint8)


@dataclass(frozen=True, slots=True)
class _InputPart:
    """A part of an input: all of its elements within these extents of its dims."""

    name: str
    extents: tuple[Extent, ...] = ()
    in_place: bool = True


def value_ranges(program: Program) -> dict[str, tuple[ValueRange, ...]]:
    """Returns input -> ranges that the ops which read its values require; others are left out."""
    parts: dict[fx.Node, _InputPart] = {}
    found: dict[str, dict[ValueRange, None]] = {}
    for node in program.gm.graph.nodes:
        name = program.inputs.get(node.name) if node.op == "placeholder" else None
        if name is not None and program.info[node.name].dtype in _INTEGERS:
            parts[node] = _InputPart(name)
        if node.op != "call_function" or not parts.keys() & set(node.all_input_nodes):
            continue
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source in parts:
            part = _followed(program, node, source, parts[source])
            if part is not None:
                parts[node] = part
        for read, made in _reads(program, node):
            if read in parts:
                part = parts[read]
                own = replace(made, extents=part.extents)
                found.setdefault(part.name, {})[own] = None
    return {name: tuple(ranges) for name, ranges in found.items()}


def _followed(
    program: Program, node: fx.Node, source: fx.Node, part: _InputPart
) -> _InputPart | None:
    """Returns the part of an input that an op's result contains; None: unknown."""
    if node.target in _KEEPS:
        before, after = program.info[source.name].dtype, program.info[node.name].dtype
        kept = after == before or (after in _SIGNED and after.itemsize > before.itemsize)
        in_place = part.in_place and node.target in _IN_PLACE
        return replace(part, in_place=in_place) if kept else None
    cut = _CUTS.get(node.target)
    extents = cut(program, node, source) if cut is not None and part.in_place else None
    if extents is None:
        return None
    merged = {w.dim: w for w in part.extents}
    for w in extents:
        old = merged.get(w.dim, Extent(w.dim, 0, 0))
        merged[w.dim] = Extent(w.dim, old.first + w.first, old.last + w.last)
    return replace(part, extents=tuple(merged.values()))


def _sliced(program: Program, node: fx.Node, source: fx.Node) -> list[Extent] | None:
    given = arguments(node)
    dim, start, step = given.get("dim", 0), given.get("start") or 0, given.get("step", 1)
    if step != 1 or not isinstance(start, int) or start < 0 or not isinstance(dim, int):
        return None
    before, after = program.info[source.name].shape, program.info[node.name].shape
    left = before[dim] - start - after[dim]
    return [Extent(dim % len(before), start, int(left))] if left.is_Integer else None


def _padded(program: Program, node: fx.Node, source: fx.Node) -> list[Extent] | None:
    given = arguments(node)
    pads, mode = given["pad"], given.get("mode", "constant")
    if mode != "constant" or not all(isinstance(n, int) for n in pads):
        return None
    ndim = len(program.info[source.name].shape)
    pairs = zip(pads[::2], pads[1::2], strict=True)
    return [Extent(ndim - 1 - i, -left, -right) for i, (left, right) in enumerate(pairs)]


_CUTS: dict[Any, Callable[[Program, fx.Node, fx.Node], list[Extent] | None]] = {
    aten.slice.Tensor: _sliced,
    aten.pad.default: _padded,
    aten.constant_pad_nd.default: _padded,
}


def _reads(program: Program, node: fx.Node) -> list[tuple[fx.Node, ValueRange]]:
    """Returns the operands of an op that are row or class numbers, and their valid ranges."""
    given = arguments(node)
    if node.target == aten.embedding.default:
        return _below(program, node, given["weight"], 0, given["indices"], "rows of an embedding")
    if node.target == aten.gather.default:
        return _below(program, node, given["self"], given["dim"], given["index"], "a gathered dim")
    if node.target not in _CLASSES:
        return []
    logits, target = given["self"], given["target"]
    shape = program.info[logits.name].shape
    if len(program.info[target.name].shape) != len(shape) - 1:
        return []  # probabilities
    dim = min(1, len(shape) - 1)
    ignored = given.get("ignore_index", -100)
    return _below(program, node, logits, dim, target, "classes of the loss", ignored)


def _below(
    program: Program,
    node: fx.Node,
    table: fx.Node,
    dim: int,
    index: fx.Node,
    what: str,
    ignored: int | None = None,
) -> list[tuple[fx.Node, ValueRange]]:
    size = program.info[table.name].shape[dim]
    if not size.is_Integer:
        return []
    return [(index, ValueRange(int(size), ignored, f"{what} ({node.name})", ()))]
