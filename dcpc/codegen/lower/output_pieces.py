"""Describes the piece of an output that a rank returns when outputs stay split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import sympy
import torch
from torch import Tensor

from dcpc.ir import REPLICATED, Label, Placement, Program
from dcpc.ops.pieces import runs


@dataclass(frozen=True, slots=True, eq=False)
class OutputPiece:
    """A rank's piece of an output that its group computes together.

    The pieces of a group form the whole output, with each element once. They may differ in length
    and consist of several runs: under causal ring attention a rank has a part from either end.

    Attributes:
        tensor: the piece.
        dim: dim of the output that is split; None: this rank, like every other one, has all of it.
        positions: positions of the piece's elements along that dim, int64; None if not split.
        length: length of the whole dim; 0 if not split.
    """

    tensor: Tensor
    dim: int | None = None
    positions: Tensor | None = None
    length: int = 0

    def of(self, whole: Tensor) -> Tensor:
        """Returns the same piece of another tensor, such as the labels."""
        if self.dim is None or self.positions is None:
            return whole
        return whole.index_select(self.dim, self.positions.to(whole.device))


@dataclass(frozen=True, slots=True, eq=False)
class OutputPlace:
    """The position of a rank's piece in the whole output.

    Attributes:
        dim: dim that is split.
        positions: positions of the piece's elements along that dim, int64.
        length: length of the whole dim.
    """

    dim: int
    positions: Tensor
    length: int


def returned_label(program: Program, placement: Placement, name: str) -> Label:
    """Returns the label under which ranks return an output."""
    if name in program.whole_outputs:
        return REPLICATED
    made = placement.nodes[name].output
    return made if made.sharded else REPLICATED


def output_place(
    program: Program, placement: Placement, name: str, dims: Mapping[sympy.Symbol, int], rank: int
) -> OutputPlace | None:
    """Returns the position of a rank's piece in an output; None: the rank has all of it."""
    label = returned_label(program, placement, name)
    if not label.sharded:
        return None
    factors = placement.factors[name][label.dim]
    sizes = [int(factor.size.subs(dims)) for factor in factors]
    split = factors[label.index]
    parent = split.size if split.parent < 0 else placement.parents[split.parent].size
    where = (sizes[label.index], int(parent.subs(dims)), split.shift, placement.sp, rank)
    mine = runs(*where, placement.is_zigzag(split))
    every = torch.arange(prod(sizes)).reshape(sizes)
    found = torch.cat([every.narrow(label.index, *run) for run in mine], label.index)
    return OutputPlace(label.dim, found.flatten(), prod(sizes))


def joined_outputs(
    program: Program,
    placement: Placement,
    ranks: Sequence[Sequence[Tensor]],
    dims: Mapping[sympy.Symbol, int],
) -> tuple[Tensor, ...]:
    """Returns the whole outputs, from the pieces that each rank of a group returned."""
    found = []
    for number, name in enumerate(program.outputs):
        places = [output_place(program, placement, name, dims, r) for r in range(len(ranks))]
        first = ranks[0][number]
        if places[0] is None:
            found.append(first)
            continue
        shape = list(first.shape)
        shape[places[0].dim] = places[0].length
        whole = first.new_full(shape, -1)  # shows where no rank has an element
        for place, mine in zip(places, ranks, strict=True):
            assert place is not None, "all ranks of a group return an output alike"
            whole.index_copy_(place.dim, place.positions.to(whole.device), mine[number])
        found.append(whole)
    return tuple(found)
