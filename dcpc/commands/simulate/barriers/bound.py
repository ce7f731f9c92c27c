"""Lower bounds: no plan under the same cost is faster, whatever its micro-steps and degrees.

With T1 >= T2 the loads of the two longest of M micro-steps and S the loads of all but the longest,
a plan lasts M*fixed + T1 + S. A sequence in a micro-step of load T takes at least a(s, T)
rank-seconds, the least degree*seconds over degrees at which it fits and takes at most T. Hence

    ranks*(T1 + S) >= sum a(s, T1)
    ranks*S        >= sum min(a(s, T2), price*weight) - price*ranks*capacity          (any price)
    ranks*T1       >= sum min(a(s, T1), price*weight) - price*ranks*capacity*(M - 1)

Where ranks have speeds, `ranks` on the left is their sum. A micro-batch keeps d ranks for its
seconds over the least speed among them, so their speeds times that time add up to at least
d*seconds. And "takes at most T" is of the fastest group of a degree.

The first alone, with T1 unbounded, is `simple_bound`. The others are Lagrangian: what the longest
micro-step cannot hold, others must run.
"""

import numpy as np

from dcpc.commands.simulate.barriers.costs import FloatArray
from dcpc.commands.simulate.barriers.workload import Workload

GRID = 160
PRICES = (0.7, 0.85, 1.0, 1.15, 1.4, 2.0, 3.0, 5.0)
MORE_STEPS = 6


def lower_bound(work: Workload) -> float:
    """Returns seconds that every plan of this batch takes at least."""
    grid = _grid(work)
    floor_s = float((work.area @ work.counts) / work.power)
    # on [grid[j], grid[j + 1]) a sequence may use what takes less than grid[j + 1]
    area = _least_area(work, np.append(grid[1:], np.inf))
    total_s = work.counts @ area / work.power
    fixed_s = work.cost.fixed_s
    best = np.inf
    for steps in range(work.min_steps, work.min_steps + MORE_STEPS):
        rest_s = np.maximum(grid, _rest_s(work, area, 1)) if steps > 1 else np.zeros_like(grid)
        first_s = np.maximum(grid, _rest_s(work, area, steps - 1))
        # T1 on interval i, T2 on any interval up to i
        both = np.maximum(first_s + np.minimum.accumulate(rest_s), total_s)
        best = min(best, max(float(both.min()), floor_s) + steps * fixed_s)
    beyond = work.min_steps + MORE_STEPS
    return min(best, floor_s + beyond * fixed_s)


def simple_bound(work: Workload) -> float:
    """Returns the seconds of the fewest micro-steps, every sequence at its cheapest degree."""
    area_s = float((work.area @ work.counts) / work.power)
    return work.min_steps * work.cost.fixed_s + area_s


def _grid(work: Workload) -> FloatArray:
    """Loads at which to look, ascending from 0: below a longest sequence's least time is none."""
    seconds = work.seconds.min(axis=0) * work.slowness[:, None]
    least_s = float(seconds.min(axis=0).max())
    widest_s = float(np.where(np.isfinite(seconds), seconds, 0.0).max())
    top = max(least_s, widest_s, float(work.area @ work.counts) / work.power) * 1.01 + 1e-9
    bottom = max(top * 1e-4, 1e-12)
    head = seconds[:, :4].ravel()
    points = np.concatenate([np.geomspace(bottom, top, GRID), head[np.isfinite(head)], [0.0]])
    return np.unique(points)


def _least_area(work: Workload, below_s: FloatArray) -> FloatArray:
    """a(s, T) for T just under each point, [kind, point]; inf where nothing is that fast."""
    seconds = work.seconds.min(axis=0) * work.slowness[:, None]
    area = (work.seconds * work.degrees[None, :, None]).min(axis=0)
    out = np.empty((len(work.keys), len(below_s)))
    for k in range(len(work.keys)):
        order = np.argsort(seconds[:, k], kind="stable")
        least = np.append(np.inf, np.minimum.accumulate(area[order, k]))
        out[k] = least[np.searchsorted(seconds[order, k], below_s, side="left")]
    return out


def _rest_s(work: Workload, area: FloatArray, others: int) -> FloatArray:
    """Least load outside `others` micro-steps, if no load exceeds each point's interval."""
    capacity = work.rank_capacity * others * work.ranks
    total = float(work.weights @ work.counts)
    if total <= 0:
        return np.zeros(area.shape[1])
    unit = float(work.area @ work.counts) / total
    best = np.zeros(area.shape[1])
    for price in PRICES:
        cost = (unit * price) * work.weights
        kept = work.counts @ np.minimum(area, cost[:, None])
        best = np.maximum(best, (kept - unit * price * capacity) / work.power)
    return best
