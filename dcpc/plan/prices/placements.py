"""Solves for the placements of one program once for each lengths and degree, and caches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dcpc.buckets import Sizes
from dcpc.ir import Fold, Placement, Program
from dcpc.ir.thresholds import PLACEMENT_LOSS
from dcpc.passes.placement.near_ties import NearTies
from dcpc.passes.placement.placement import Best, Objective, PlacementModel, placed, solve
from dcpc.plan.traced import Traced

_PRODUCTS = (
    torch.ops.aten.linear.default,
    torch.ops.aten.matmul.default,
    torch.ops.aten.convolution.default,
)


class PlacementSolver:
    """The placements of one program, each solved for once.

    Args:
        traced: traced program.
        fold: copies that repeated blocks stand for; None: each node stands for itself.
    """

    def __init__(self, traced: Traced, fold: Fold | None) -> None:
        self._program, self._device, self._fold = traced.program, traced.device, fold
        self._model = PlacementModel(traced.program, traced.sharding)
        self._near = NearTies(self._model, fold, PLACEMENT_LOSS)
        self._best: dict[_PlacementKey, Best] = {}
        self._made: dict[_PlacementKey, Placement] = {}
        self._supposed: dict[_PlacementKey, Placement] = {}  # asked for with `near`, after the plan
        self._settled = False

    def at(self, sizes: Sizes, sp: int, *, near: bool = False) -> Placement:
        """Returns the placement of least predicted seconds at these sizes, batch included.

        The first result for given sizes is cached and returned again.

        Args:
            sizes: length of every dim.
            sp: ranks of the group.
            near: whether a placement made for other sizes may be returned, at most
                `PLACEMENT_LOSS` above the least cost. Which exist depends on earlier calls.
        """
        key = _asked(sizes, sp)
        supposed = near and self._settled
        known = self._supposed if supposed and key not in self._made else self._made
        if key not in known:
            best = (self._best.get(key) if near else None) or self._solve([sizes], sp)[0]
            known[key] = placed(best, self._model, self._near if near else None)
        return known[key]

    def settle(self) -> None:
        """Marks the plan, which all ranks make alike, as final.

        Later results of `near` are kept apart, as one rank may ask alone (for a report), and no
        other call returns them.
        """
        self._settled = True

    def foresee(self, sizes: Sequence[Sizes], sp: int) -> None:
        """Solves for placements that may be asked for next together, hardly slower than for one."""
        at = {_asked(each, sp): each for each in sizes}
        new = [k for k in at if k not in self._made and k not in self._best]
        if sp > 1 and len(new) > 1:
            self._best |= dict(zip(new, self._solve([at[k] for k in new], sp), strict=True))

    @property
    def near_count(self) -> int:
        """Number of the plan's placements that were made for other lengths and are not optimal."""
        return self._near.taken

    def _solve(self, sizes: Sequence[Sizes], sp: int) -> list[Best]:
        objective, copies = Objective.of_group(self._device, sp), self._near.copies
        return solve(self._program, sizes, sp, objective, self._model, self._fold, copies)


def compute_dtype(program: Program) -> torch.dtype:
    """Returns the dtype of most matrix products; under autocast it is not the weights' dtype."""
    info, graph = program.info, program.gm.graph
    made = [info[n.name].dtype for n in graph.nodes if n.target in _PRODUCTS]
    made = made or [info[n].dtype for n in (*program.parameters, *program.outputs)]
    return max(sorted(set(made), key=str), key=made.count)


@dataclass(frozen=True, slots=True)
class _PlacementKey:
    """Key of sizes that have the same placement."""

    sp: int
    sizes: tuple[tuple[str, int], ...]


def _asked(sizes: Sizes, sp: int) -> _PlacementKey:
    """Returns the key of sizes that have the same placement; at degree 1 all sizes have."""
    return _PlacementKey(sp, tuple(sorted(sizes.items())) if sp > 1 else ())
