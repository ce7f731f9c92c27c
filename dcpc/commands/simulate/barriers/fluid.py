"""The fluid model: long sequences (heads) one by one, the many short ones (bulk) as a liquid.

A micro-step of load T has ranks that each take up bulk: as much as T or memory allows. A head in it
takes the fewest ranks at which it ends by T, and leaves part of their time and memory to the bulk.
Its *loss* is the bulk it displaces. So the batch fits into loads T1..TM if what all ranks take up,
less the sum of the heads' losses, is no less than the bulk.

Bulk is measured in rank-seconds at the base degree, where a short sequence is cheapest.
"""

from dataclasses import dataclass

import numpy as np

from dcpc.commands.simulate.barriers.costs import FloatArray, IntArray
from dcpc.commands.simulate.barriers.workload import Workload

HEAD_SHARE = 0.12  # of a rank's mean load: a larger sequence is a head
MAX_HEADS = 80

Stack = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fluid:
    """A batch as heads and bulk.

    Attributes:
        work: the batch.
        stacks: the kinds of each head, [head]; more than one: they run in one group in turn.
        counts: copies of each head.
        seconds: [head, setting, degree].
        fastest: least seconds at any degree up to this one, [head][setting], descending.
        weights: [head].
        bulk: rank-seconds of all bulk.
        bulk_kinds: the kinds that are bulk.
        pace: seconds that a unit of bulk takes, [setting, degree].
        density: weight of a unit of bulk.
        base: index of the bulk's cheapest degree.
    """

    work: Workload
    stacks: tuple[Stack, ...]
    counts: IntArray
    seconds: FloatArray
    weights: FloatArray
    bulk: float
    bulk_kinds: IntArray
    pace: FloatArray
    density: float
    base: int

    def absorbed(self, loads_s: FloatArray) -> tuple[FloatArray, IntArray]:
        """Returns bulk a rank takes up in each load, and the setting that takes up most."""
        degree = self.work.degrees[self.base]
        share = self.work.capacities[:, self.base] / degree
        held = share / self.density if self.density > 0 else np.full(len(share), np.inf)
        pace = self.pace[:, self.base] * degree
        by_setting = np.minimum(loads_s[None, :] / pace[:, None], held[:, None])
        by_setting[~np.isfinite(by_setting)] = 0.0
        return by_setting.max(axis=0), by_setting.argmax(axis=0)


@dataclass(frozen=True, slots=True)
class Losses:
    """What each head costs in each load, [head, load]: bulk displaced, degree index, setting."""

    absorbed: FloatArray
    loss: FloatArray
    degree: IntArray
    setting: IntArray


def fluid(work: Workload, stacks: tuple[Stack, ...] = ()) -> Fluid:
    """Returns the fluid model of a batch, `stacks` of long sequences each in one group."""
    mean_s = float(work.area @ work.counts) / work.ranks / work.min_steps
    one = np.ones(len(work.keys), dtype=bool)
    base = _base_degree(work)
    heads = one & ((work.area > HEAD_SHARE * mean_s) | ~np.isfinite(work.seconds[:, base]).any(0))
    if not heads.any():
        heads[0] = True
    heads[np.nonzero(heads)[0][MAX_HEADS:]] = False
    heads |= ~np.isfinite(work.seconds[:, base]).any(axis=0)
    heads[[k for stack in stacks for k in stack]] = True
    bulk = np.nonzero(~heads)[0]
    units = work.area[bulk] * work.counts[bulk]
    total = float(units.sum())
    if total > 0:
        pace = (work.seconds[:, :, bulk] * work.counts[bulk]).sum(axis=2) / total
        density = float(work.weights[bulk] @ work.counts[bulk]) / total
    else:
        pace = np.broadcast_to(1.0 / work.degrees, work.seconds.shape[:2]).copy()
        density = 0.0
    left = {int(k): int(work.counts[k]) for k in np.nonzero(heads)[0]}
    for kind in (k for stack in stacks for k in stack):
        left[kind] -= 1
    every = [*stacks, *((k,) for k, n in left.items() if n > 0)]
    counts = [1] * len(stacks) + [n for n in left.values() if n > 0]
    seconds, weights = _stack_costs(work, every)
    order = np.argsort(-weights if weights.any() else -seconds.min(axis=(1, 2)), kind="stable")
    return Fluid(
        work=work, stacks=tuple(every[i] for i in order), counts=np.array(counts)[order],
        seconds=seconds[order], weights=weights[order], bulk=total, bulk_kinds=bulk, pace=pace,
        density=density, base=base,
    )  # fmt: skip


def losses(model: Fluid, loads_s: FloatArray) -> Losses:
    """Returns what each head displaces in micro-steps of these loads."""
    work = model.work
    absorbed, _ = model.absorbed(loads_s)
    shape = (len(model.stacks), len(loads_s))
    loss = np.full(shape, np.inf)
    degree = np.zeros(shape, dtype=np.int64)
    setting = np.zeros(shape, dtype=np.int64)
    last = len(work.degrees) - 1
    rows = np.arange(len(model.stacks))[:, None]
    for i in range(work.seconds.shape[0]):
        seconds = model.seconds[:, i]
        if not np.isfinite(seconds).any():
            continue
        least = np.minimum.accumulate(seconds, axis=1)[:, ::-1]
        index = np.stack([last + 1 - np.searchsorted(x, loads_s, side="right") for x in least])
        fits = index <= last
        at = np.minimum(index, last)
        spare_s = loads_s - seconds[rows, at]
        held = work.capacities[i, at] - model.weights[:, None]
        held = held / model.density if model.density > 0 else np.full(shape, np.inf)
        pace = model.pace[i, at]
        spare = np.where(fits, spare_s, 0.0) / np.where(np.isfinite(pace), pace, np.inf)
        left = np.minimum(spare, held)
        this = np.where(fits, work.degrees[at] * absorbed - left, np.inf)
        better = this < loss
        loss = np.where(better, this, loss)
        degree = np.where(better, at, degree)
        setting = np.where(better, i, setting)
    return Losses(absorbed, loss, degree, setting)


def _base_degree(work: Workload) -> int:
    """Index of the degree at which the shorter half of the batch is cheapest."""
    short = np.cumsum(work.counts[::-1])[::-1] <= max(1, work.counts.sum() // 2)
    short[-1] = True
    area = (work.seconds[:, :, short] * work.degrees[None, :, None]).min(axis=0)
    return int((area @ work.counts[short]).argmin())


def _stack_costs(work: Workload, stacks: list[Stack]) -> tuple[FloatArray, FloatArray]:
    """Returns seconds [head, setting, degree] and weight [head]; inf where memory is short."""
    seconds = np.stack([work.seconds[:, :, list(stack)].sum(axis=2) for stack in stacks])
    weights = np.array([work.weights[list(stack)].sum() for stack in stacks])
    seconds[weights[:, None, None] > work.capacities[None]] = np.inf
    return seconds, weights
