"""How many micro-steps, and how long each: search of the fluid model over loads T1 >= T2 >= ...

Two loads are free and all further micro-steps share a third. For every (T1, T2) on a grid that has
the exact seconds of the longest heads at every degree, the least third load is found by bisection,
all grid points at a time.
"""

from dataclasses import dataclass

import numpy as np

from dcpc.commands.simulate.barriers.costs import FloatArray, IntArray
from dcpc.commands.simulate.barriers.fluid import Fluid, Losses, losses

GIANTS = 14  # heads placed one by one under the limit of ranks; the others by least loss
SPARE = 1.004  # bulk is not quite a liquid
SLACK = 1.01  # how much slower than the best a candidate may be
PAIR_POINTS = 80


@dataclass(frozen=True, slots=True)
class Candidate:
    """Loads that hold the batch by the fluid model.

    Attributes:
        seconds_s: of the step, fixed costs included.
        loads_s: of each micro-step.
        choice: which micro-step and degree each giant has; alike: much the same plan.
    """

    seconds_s: float
    loads_s: tuple[float, ...]
    choice: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """The fluid model on a grid of loads."""

    model: Fluid
    loads_s: FloatArray
    table: Losses
    giants: IntArray
    others: IntArray
    other_counts: IntArray


def grid(model: Fluid, finest_s: tuple[float, ...] = ()) -> Grid:
    """Returns the model tabulated at loads that matter, and near those in `finest_s`."""
    work = model.work
    mean_s = float(work.area @ work.counts) / work.ranks / work.min_steps
    head_s = model.seconds.min(axis=(1, 2)).max()
    top = max(3.0 * mean_s, 1.1 * float(head_s))
    exact = model.seconds[:6].ravel()
    exact = np.unique(exact[np.isfinite(exact) & (exact <= 4 * top)] * (1 + 1e-9))
    even = np.geomspace(0.1 * mean_s, top, 130)
    fine = np.outer(finest_s, np.linspace(0.95, 1.05, 15)).ravel()
    loads_s = np.unique(np.concatenate([exact, even, fine, [head_s * (1 + 1e-9)]]))
    keep = np.append(np.diff(loads_s) > 0.003 * loads_s[:-1], True)
    keep |= np.isin(loads_s, exact) & np.append(np.diff(loads_s) > 1e-6 * loads_s[:-1], True)
    loads_s = loads_s[keep]
    giants = np.repeat(np.arange(len(model.stacks)), model.counts)[:GIANTS]
    counts = model.counts.copy()
    np.subtract.at(counts, giants, 1)
    others = np.nonzero(counts > 0)[0]
    return Grid(model, loads_s, losses(model, loads_s), giants, others, counts[others])


def search_levels(g: Grid, steps: int, limit_s: float) -> list[Candidate]:
    """Returns candidates of `steps` micro-steps under `limit_s`, best first.

    Args:
        g: the model.
        steps: how many micro-steps.
        limit_s: seconds of the step that are not worth looking at.
    """
    loads_s = g.loads_s
    times = np.array([1, 1, steps - 2] if steps > 2 else [1] * steps)
    budget_s = limit_s - steps * g.model.work.cost.fixed_s
    first = _prefixes(g, steps, budget_s)
    spent_s = loads_s[first].sum(axis=1)
    high = np.searchsorted(loads_s, (budget_s - spent_s) / times[-1], side="right") - 1
    if steps > 1:
        high = np.minimum(high, first[:, -1])
    first, high = first[high >= 0], high[high >= 0]
    if not len(high):
        return []
    good = _room(g, np.column_stack([first, high]), times)[0] >= 0
    first, high = first[good], high[good]
    low = np.full(len(high), -1)
    while (high - low > 1).any():
        middle = (low + high) // 2
        try_ = np.where(high - low > 1, middle, high)
        fits = _room(g, np.column_stack([first, try_]), times)[0] >= 0
        high = np.where(fits, try_, high)
        low = np.where(fits, low, try_)
    points = np.column_stack([first, high])
    return _candidates(g, points, times, steps)


def _prefixes(g: Grid, steps: int, budget_s: float) -> IntArray:
    """Grid indices of all loads but the last, [prefix, load]."""
    loads_s = g.loads_s
    if steps == 1:
        return np.empty((1, 0), dtype=np.int64)
    slowest_s = g.model.seconds.min(axis=(1, 2)).max()
    first = np.nonzero((loads_s >= slowest_s) & (loads_s <= budget_s))[0]
    if steps == 2:
        return first[:, None]
    second = np.unique(np.linspace(0, len(loads_s) - 1, PAIR_POINTS).astype(np.int64))
    i, j = (x.ravel() for x in np.meshgrid(first, second, indexing="ij"))
    fits = (i >= j) & (loads_s[i] + loads_s[j] <= budget_s)
    return np.column_stack([i[fits], j[fits]])


def _room(g: Grid, points: IntArray, times: IntArray) -> tuple[FloatArray, IntArray]:
    """Returns bulk that could still be taken up [point] (-inf: not at all), and giants' steps."""
    work, table = g.model.work, g.table
    room = work.ranks * (table.absorbed[points] @ times) - g.model.bulk * SPARE
    chosen = np.zeros((len(points), len(g.giants)), dtype=np.int64)
    for x in g.giants:  # a necessary condition first: ranks without limit
        room = room - table.loss[x][points].min(axis=1)
    alive = np.nonzero(room >= 0)[0]
    out = np.full(len(points), -np.inf)
    if not len(alive):
        return out, chosen
    sub = points[alive]
    room = work.ranks * (table.absorbed[sub] @ times) - g.model.bulk * SPARE
    for x, n in zip(g.others.tolist(), g.other_counts.tolist(), strict=True):
        room -= n * table.loss[x][sub].min(axis=1)
    free = np.tile(work.ranks * times, (len(sub), 1))
    row = np.arange(len(sub))
    for z, x in enumerate(g.giants.tolist()):
        need = work.degrees[table.degree[x][sub]]
        loss = np.where(need <= free, table.loss[x][sub], np.inf)
        at = loss.argmin(axis=1)
        room = room - loss[row, at]
        free[row, at] -= need[row, at]
        chosen[alive, z] = at
    out[alive] = room
    return out, chosen


def _candidates(g: Grid, points: IntArray, times: IntArray, steps: int) -> list[Candidate]:
    """The points as candidates, one for each choice of the giants, best first."""
    if not len(points):
        return []
    fixed_s = steps * g.model.work.cost.fixed_s
    seconds_s = g.loads_s[points] @ times + fixed_s
    order = np.argsort(seconds_s, kind="stable")
    order = order[seconds_s[order] <= seconds_s.min() * SLACK][:400]
    points = points[order]
    _, chosen = _room(g, points, times)
    found: dict[tuple[int, ...], Candidate] = {}
    for point, at, s in zip(points, chosen, seconds_s[order].tolist(), strict=True):
        degree = g.table.degree[g.giants, point[at]]
        choice = (*at.tolist(), *degree.tolist())
        loads_s = tuple(np.repeat(g.loads_s[point], times).tolist())
        found.setdefault(choice, Candidate(s, loads_s, choice))
    return list(found.values())
