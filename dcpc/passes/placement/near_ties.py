"""Reuses a placement of another bucket where this bucket's best is hardly better.

Neighbouring lengths and degrees often differ in near ties alone: a rotary table cut here or there,
one small value gathered before an op or after. Each other placement is another graph to
differentiate and to price. So of the placements that there are the cheapest is taken where it costs
at most a named share more than the exact optimum of the bucket, which is solved for every time.
"""

from __future__ import annotations

import numpy as np

from dcpc.ir import Fold
from dcpc.passes.placement.alike_copies import AlikeCopies
from dcpc.passes.placement.choices import PlacementChoice, choice_of
from dcpc.passes.placement.label_costs import Costs, Prices
from dcpc.passes.placement.node_options import PlacementModel


class NearTies:
    """The placements chosen so far for one model.

    Args:
        model: placement model of the program.
        fold: counts of the copies that each block stands for; None: no fold.
        tolerance: largest share by which a known choice may cost more than the best.

    Attributes:
        copies: copies of the fold's blocks, None without a fold.
        taken: number of times that a choice other than the best was taken.
    """

    def __init__(self, model: PlacementModel, fold: Fold | None, tolerance: float) -> None:
        self._model, self._fold, self.tolerance = model, fold, tolerance
        self.copies = None if fold is None else AlikeCopies(model, fold)
        self._known: dict[tuple[int, ...], PlacementChoice] = {}
        self.taken = 0

    def know(self, options: tuple[int, ...]) -> PlacementChoice:
        """Returns a choice with its indices, and records it for reuse.

        Prices that cover its changes must be made afterwards.
        """
        if options not in self._known:
            self._known[options] = choice_of(self._model, self._fold, options)
        return self._known[options]

    def instead(
        self,
        options: tuple[int, ...],
        best_s: float,
        least_s: float,
        prices: Prices,
        shares: Costs,
        sp: int,
    ) -> tuple[tuple[int, ...], float]:
        """Returns the choice to take and its cost in seconds.

        It is a known one that costs hardly more than `least_s`, or the one of the bucket itself,
        whose cost is `best_s`.
        """
        costs = [choice.cost(prices, shares, sp) for choice in self._known.values()]
        found = int(np.argmin(costs)) if costs else -1
        if found >= 0 and costs[found] <= least_s * (1 + self.tolerance):
            instead = [*self._known][found]
            self.taken += instead != options
            return instead, costs[found]
        self.know(options)
        return options, best_s
