"""Decides whether rows of a model may hold several sequences, each with the loss it has alone.

Three things have to hold, and each is looked up in the graph:

* every attention along the sequence has a `segment`, made of one input, that tells sequences apart
  as they are: it is computed for a few rows;
* nothing else joins positions: by its sharding rule an op has the sequence free, except for what
  adds up the loss at the end, and nothing counts positions in the row;
* what is computed of one input alone (shifted labels, masks of them) stays at its place, or a fixed
  number of places before it: each element is changed in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, fx

from dcpc.buckets import BATCH
from dcpc.fx.large_graphs import op_name
from dcpc.ir import Packable, Program
from dcpc.passes.masks.row_graph import MixedError, RowGraph, segment_of
from dcpc.passes.masks.row_inputs import InputAlone
from dcpc.passes.masks.row_ops import check_ops
from dcpc.passes.sharding.op_kinds import arguments
from dcpc.passes.sharding.rule_types import OpSharding

# Lengths of the sequences in each test row for which segments are computed.
_ROWS = ((3, 1, 1, 4, 2), (1, 6, 4), (11,), (5, 6), (2, 2, 2, 2, 3), (1,) * 11)
# Sequence numbers that must make no difference outside of the attentions.
_NUMBERS = (1, 2, 3, 5, 9, 17)


def packable(program: Program, rules: Mapping[str, OpSharding]) -> Packable:
    """Returns whether and how a model takes several sequences in one row."""
    names = [name for name in program.symbols if name != BATCH]
    if len(names) != 1:
        return Packable((), {}, "its buckets have not one named dim besides the batch")
    if any(name == names[0] and size > 1 for name, size in program.fixed):
        return Packable((), {}, f"'{names[0]}' is static, so its graphs are for whole rows alone")
    row, found = RowGraph(program, rules, names[0]), Packable((), {})
    try:
        found = replace(found, marks=_marks(row))
        check_ops(row)
        found = replace(found, dropped=_dropped(row))
        by_positions, by_numbers = _kinds(row, *found.marks)
        return replace(found, by_positions=by_positions, by_numbers=by_numbers)
    except MixedError as reason:
        return replace(found, reason=str(reason))


def _marks(row: RowGraph) -> tuple[str, ...]:
    """Returns the input from which every attention distinguishes sequences."""
    if not row.attentions:
        raise MixedError(_without_attention(row))
    found: set[str] = set()
    for node in row.attentions:
        if segment_of(node) is None:
            raise MixedError(f"{row.where(node)} {_without_segment(row, node)}")
        if row.program.info[node.all_input_nodes[0].name].shape[2] != row.length:
            raise MixedError(f"{row.where(node)} has queries of a part of the row")
        found |= row.sources[_named(segment_of(node))]
    inputs = tuple(sorted(row.program.inputs[p] for p in found if p in row.program.inputs))
    if len(inputs) != len(found) or len(inputs) != 1:
        told = ", ".join(sorted(found)) or "nothing that is an input"
        raise MixedError(f"its attentions tell sequences apart by {told}, not by one input")
    return inputs


def _without_attention(row: RowGraph) -> str:
    """Returns why no attention is known; a softmax over pairs of positions is named."""
    for node in row.nodes:
        shape = row.program.info[node.name].shape if node.name in row.program.info else ()
        if "softmax" in op_name(node) and sum(map(row.along, shape)) > 1:
            return (
                f"{row.where(node)} is a softmax over pairs of positions that is no "
                "attention which dcpc knows: its scores may be scaled and masked, and here "
                "something else is done with them, such as a bias or tanh; without it, or by "
                "F.scaled_dot_product_attention with a mask of truth values, rows may be packed"
            )
    return "it has no attention that dcpc knows, and so nothing to keep apart"


def _without_segment(row: RowGraph, node: fx.Node) -> str:
    """Returns why an attention does not separate sequences: no mask, or an unrecognised one."""
    mask = arguments(node)["mask"]
    if not isinstance(mask, fx.Node):
        return "sees all of a row, whatever sequence it is of"
    notes = (n for n in row.program.notes if n.startswith(f"mask {mask.name} of "))
    why = next(notes, "").partition("stays a tensor: ")[2] or "it has other limits as well"
    return (
        f"has a mask of which dcpc cannot tell that it keeps sequences apart: {why}; "
        "make it of truth values, `segment[:, :, None] == segment[:, None]` and comparisons of "
        "positions in the row (torch.arange, not a slice of a buffer)"
    )


def _dropped(row: RowGraph) -> dict[str, int]:
    """Returns, by input, the number of first elements of a row that the loss does not read.

    Raises:
        MixedError: a value computed from one input alone joins positions.
    """
    return {
        name: InputAlone(row, placeholder).shift()
        for placeholder, name in row.program.inputs.items()
        if row.length in row.program.info[placeholder].shape
    }


def _kinds(row: RowGraph, name: str) -> tuple[bool, bool]:
    """Returns whether the input may hold restarting positions, and whether sequence numbers."""
    alone = InputAlone(row, next(p for p, n in row.program.inputs.items() if n == name))
    by_positions = _tells_apart(row, alone, positions_of)
    by_numbers = _tells_apart(row, alone, numbers_of)
    # A number says which sequence it is: beside the attentions nothing may depend on it.
    by_numbers = by_numbers and not alone.changed(_NUMBERS)
    if not by_positions and not by_numbers:
        raise MixedError(
            f"neither positions that restart in each sequence nor its number, given as {name}, "
            "make its attentions keep sequences apart"
        )
    return by_positions, by_numbers


def _tells_apart(row: RowGraph, alone: InputAlone, made: Callable[[Sequence[int]], Tensor]) -> bool:
    """Whether all segments are equal exactly for positions of one sequence.

    Two rows with different sequences are tested together: a segment may be computed from the first
    row of a micro-batch for all rows.
    """
    segments = {_named(segment_of(node)) for node in row.attentions}
    for both in itertools.pairwise((*_ROWS, _ROWS[0])):
        own = torch.stack([numbers_of(lengths) for lengths in both])
        expected = own.unsqueeze(2) == own.unsqueeze(1)
        values = alone.values(alone.holding(*map(made, both)), segments)
        for x in values.values():
            if not torch.equal((x.unsqueeze(2) == x.unsqueeze(1)).expand_as(expected), expected):
                return False
    return True


def positions_of(lengths: Sequence[int]) -> Tensor:
    """Returns 0, 1, 2, ... for each sequence, one after the other."""
    return torch.cat([torch.arange(n) for n in lengths])


def numbers_of(lengths: Sequence[int]) -> Tensor:
    """Returns the number of the sequence at each position, from 1."""
    return torch.arange(1, len(lengths) + 1).repeat_interleave(torch.tensor(lengths))


def _named(node: fx.Node | None) -> str:
    assert node is not None, "an attention without segments is refused before"
    return node.name
