"""Which piece of an output a rank returns, where outputs stay split as the ranks make them."""

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
    """What a rank has of an output that its group computes together.

    The pieces of a group make up the whole output, each element once. They may differ in length,
    and be several runs: under causal attention by a ring a rank has a part from either end.

    Attributes:
        tensor: the piece.
        dim: of the output that is split; None: this rank, like every other one, has all of it.
        positions: of the piece's elements along that dim, int64; None likewise.
        length: of the whole dim; 0 where none is split.
    """

    tensor: Tensor
    dim: int | None = None
    positions: Tensor | None = None
    length: int = 0

    def of(self, whole: Tensor) -> Tensor:
        """Returns the same piece of another tensor, such as of the labels.

        Args:
            whole: on every rank, with the output's dims up to the one that is split.
        """
        if self.dim is None or self.positions is None:
            return whole
        return whole.index_select(self.dim, self.positions.to(whole.device))


@dataclass(frozen=True, slots=True, eq=False)
class OutputPlace:
    """Where a rank's piece of an output is in the whole one.

    Attributes:
        dim: that is split.
        positions: of the piece's elements along it, int64.
        length: of the whole dim.
    """

    dim: int
    positions: Tensor
    length: int


def returned_label(program: Program, placement: Placement, name: str) -> Label:
    """Returns the label under which ranks return an output.

    Args:
        program: the traced model.
        placement: made for it.
        name: of the output.
    """
    if name in program.whole_outputs:
        return REPLICATED
    made = placement.nodes[name].output
    return made if made.sharded else REPLICATED


def output_place(
    program: Program,
    placement: Placement,
    name: str,
    dims: Mapping[sympy.Symbol, int],
    rank: int,
) -> OutputPlace | None:
    """Returns where a rank's piece of an output is; None: it has all of it.

    Args:
        program: the traced model.
        placement: made for it.
        name: of the output.
        dims: length of every dim.
        rank: place in the group.
    """
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
    """Returns the whole outputs of what each rank of a group returned.

    Args:
        program: the traced model.
        placement: made for it.
        ranks: the outputs of each.
        dims: length of every dim.
    """
    found = []
    for number, name in enumerate(program.outputs):
        places = [output_place(program, placement, name, dims, r) for r in range(len(ranks))]
        first = ranks[0][number]
        if places[0] is None:
            found.append(first)
            continue
        shape = list(first.shape)
        shape[places[0].dim] = places[0].length
        whole = first.new_full(shape, -1)  # what no rank has differs from the plain model's
        for place, mine in zip(places, ranks, strict=True):
            assert place is not None, "all ranks of a group return an output alike"
            whole.index_copy_(place.dim, place.positions.to(whole.device), mine[number])
        found.append(whole)
    return tuple(found)
