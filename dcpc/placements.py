"""How the values of one program are split: solved once for lengths and degrees, and kept."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from dcpc.folding import Folded
from dcpc.ir import Fold, Placement, Program
from dcpc.passes.near_ties import NearTies
from dcpc.passes.placement import Best, PlacementModel, Rates, placed, solve
from dcpc.passes.sharding import Sharding
from dcpc.symbolic_profile import Device

Sizes = Mapping[str, int]

_PRODUCTS = (
    torch.ops.aten.linear.default,
    torch.ops.aten.matmul.default,
    torch.ops.aten.convolution.default,
)
# A plan's placement may be one made for another bucket or degree: at these sizes it costs at most
# this share more than the best.
NEAR = 0.02
TIE_BREAK_S = 1e-9  # of two placements that send the same bytes, the one with fewer collectives


class Placements(ABC):
    """The placements of one program, each made once."""

    def __init__(self) -> None:
        """None yet."""
        self._made: dict[tuple[object, ...], Placement] = {}
        self._supposed: dict[tuple[object, ...], Placement] = {}  # near ones, after the plan
        self._settled = False
        self._keys: dict[tuple[int, int], tuple[Placement, int]] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._splits: dict[int, int] = {}  # number of a placement -> of how it splits

    def at(self, sizes: Sizes, sp: int, *, near: bool = False) -> Placement:
        """Returns the placement of least predicted time at these sizes, batch included.

        One that was returned for these sizes before is returned again.

        Args:
            sizes: length of every dim.
            sp: ranks of the group.
            near: whether it may be one made for other sizes, at most `NEAR` from the best. What
                those are depends on what was asked for before.
        """
        key = _key(sizes, sp)
        supposed = near and self._settled
        known = self._supposed if supposed and key not in self._made else self._made
        if key not in known:
            known[key] = self._make(sizes, sp, near)
        return known[key]

    def settle(self) -> None:
        """Says that the plan, which all ranks make alike, is made.

        What one rank asks for from now on with `near`, as for a report, no other call returns.
        """
        self._settled = True

    def number(self, placement: Placement) -> int:
        """Returns a number that equal placements share; their keys are long."""
        known = (placement.sp, id(placement.nodes))
        if known not in self._keys:
            sp, *splits = placement.key()
            split = self._numbers.setdefault(tuple(splits), len(self._numbers))
            number = self._numbers.setdefault((sp, split), len(self._numbers))
            self._splits[number] = split
            self._keys[known] = placement, number
        return self._keys[known][1]

    def split(self, number: int) -> int:
        """Returns a number that placements share which split alike, at any degree."""
        return self._splits[number]

    def origin(self, placement: Placement) -> Placement:
        """Returns the placement that one of these was lifted from: here itself."""
        return placement

    @abstractmethod
    def foresee(self, sizes: Sequence[Sizes], sp: int) -> None:
        """Solves for what may be asked for next, all at once, which takes little longer than one.

        Args:
            sizes: length of every dim, of each placement that may be asked for.
            sp: ranks of the group.
        """

    @property
    @abstractmethod
    def near_count(self) -> int:
        """Placements of a plan that were made for other lengths or degrees and are not the best."""

    @abstractmethod
    def _make(self, sizes: Sizes, sp: int, near: bool) -> Placement: ...


class Solved(Placements):
    """Placements of a program that are solved for.

    Args:
        program: the traced model.
        sharding: its factors and alternatives.
        device: what costs are predicted for.
        fold: which copies of blocks stand for more, None where each node stands for itself.
    """

    def __init__(
        self, program: Program, sharding: Sharding, device: Device, fold: Fold | None
    ) -> None:
        super().__init__()
        self._program, self._device, self._fold = program, device, fold
        self._model = PlacementModel(program, sharding)
        self._near = NearTies(self._model, fold, NEAR)
        self._best: dict[tuple[object, ...], Best] = {}
        self._dtype = compute_dtype(program)

    def foresee(self, sizes: Sequence[Sizes], sp: int) -> None:
        """Solves for what may be asked for next; see `Placements.foresee`."""
        at = {_key(each, sp): each for each in sizes}
        new = [k for k in at if k not in self._made and k not in self._best]
        if sp > 1 and len(new) > 1:
            self._best |= dict(zip(new, self._solve([at[k] for k in new], sp), strict=True))

    @property
    def near_count(self) -> int:
        """Placements of a plan that are not the best; see `Placements.near_count`."""
        return self._near.taken

    def _make(self, sizes: Sizes, sp: int, near: bool) -> Placement:
        best = self._best.get(_key(sizes, sp)) if near else None
        known = self._near if near else None
        return placed(best or self._solve([sizes], sp)[0], self._model, known)

    def _solve(self, sizes: Sequence[Sizes], sp: int) -> list[Best]:
        rates = rates_of(self._device, sp, self._dtype)
        copies = self._near.copies
        return solve(self._program, sizes, sp, rates, self._model, self._fold, copies)


class Lifted(Placements):
    """Placements of a deep program: those of a folded one, for all its blocks.

    Args:
        small: of the folded program.
        folded: what it stands for.
        program: the deep one.
        sharding: its factors and alternatives.
    """

    def __init__(
        self, small: Placements, folded: Folded, program: Program, sharding: Sharding
    ) -> None:
        super().__init__()
        self._small, self._folded = small, folded
        self._program, self._sharding = program, sharding
        self._lifted: dict[int, Placement] = {}  # by the number of the small one
        self._origin: dict[int, Placement] = {}  # by the number of the lifted one

    def foresee(self, sizes: Sequence[Sizes], sp: int) -> None:
        """Solves for what may be asked for next; see `Placements.foresee`."""
        self._small.foresee(sizes, sp)

    @property
    def near_count(self) -> int:
        """Placements of a plan that are not the best; see `Placements.near_count`."""
        return self._small.near_count

    def settle(self) -> None:
        """Says that the plan is made; see `Placements.settle`."""
        super().settle()
        self._small.settle()

    def origin(self, placement: Placement) -> Placement:
        """Returns the folded program's own placement; see `Placements.origin`."""
        return self._origin[self.number(placement)]

    def _make(self, sizes: Sizes, sp: int, near: bool) -> Placement:
        small = self._small.at(sizes, sp, near=near)
        number = self._small.number(small)
        if number not in self._lifted:
            self._lifted[number] = self._folded.lift(small, self._program, self._sharding)
            self._origin[self.number(self._lifted[number])] = small
        return replace(self._lifted[number], cost_s=small.cost_s, width=small.width)


def compute_dtype(program: Program) -> torch.dtype:
    """Returns what most of the products are computed in: under autocast not the weights'."""
    info, graph = program.info, program.gm.graph
    made = [info[n.name].dtype for n in graph.nodes if n.target in _PRODUCTS]
    made = made or [info[n].dtype for n in (*program.parameters, program.loss)]
    return max(sorted(set(made), key=str), key=made.count)


def rates_of(device: Device, sp: int, dtype: torch.dtype) -> Rates:
    """Returns what the placement needs to know of a device, for groups of `sp` ranks.

    A group is formed to split memory, so a byte kept for backward has the price of sending it once
    (what offloading it would cost), and the start of a collective none that matters: whether the
    group pays at all is the bucket's plan to decide, with all costs in it.

    Args:
        device: one rank's.
        sp: ranks of the group.
        dtype: what products are computed in.
    """
    link = device.link(sp)
    return Rates(
        flops_per_s=device.matmul_flops_per_s(dtype),
        bytes_per_s=device.memory_bytes_per_s,
        link_bytes_per_s=link.bytes_per_s,
        link_latency_s=TIE_BREAK_S,
        overhead_s=device.launch_s,
        held_s_per_byte=1.0 / link.bytes_per_s,
        overlaps=device.overlaps,
        near_ranks=device.node_ranks,
        near_bytes_per_s=device.inside.bytes_per_s,
    )


def _key(sizes: Sizes, sp: int) -> tuple[object, ...]:
    """Returns what sizes share that have one placement: where nothing is split, all."""
    return sp, tuple(sorted(sizes.items())) if sp > 1 else ()
