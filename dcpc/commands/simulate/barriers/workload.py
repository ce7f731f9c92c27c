"""A global batch as numbers: its sequences by kind, with what each kind costs at every degree."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcpc.commands.simulate.barriers.costs import FloatArray, GroupCost, IntArray
from dcpc.errors import PlanError
from dcpc.runtime.planner.speeds import Speeds, least_slowness, power


@dataclass(frozen=True, slots=True)
class Workload:
    """A global batch against a cost; kinds are sorted by work, the most first.

    Attributes:
        cost: where the numbers come from.
        keys: one a kind (a length, or a bucket), [kind].
        counts: sequences of the kind, [kind].
        members: positions in the batch, by kind.
        seconds: one sequence's, [setting, degree, kind]; inf if it does not fit.
        weights: what it takes of a group's capacity, [kind].
        capacities: [setting, degree].
        degrees: [degree].
        area: rank-seconds at the cheapest feasible degree, [kind]; a slower rank does fewer of them
            in a second.
        slowness: how often the fastest group takes these seconds, [degree]; 1: ranks are equal.
        power: rank-seconds that all ranks do in a second.
    """

    cost: GroupCost
    keys: IntArray
    counts: IntArray
    members: tuple[tuple[int, ...], ...]
    seconds: FloatArray
    weights: FloatArray
    capacities: FloatArray
    degrees: IntArray
    area: FloatArray
    slowness: FloatArray
    power: float

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return self.cost.ranks

    @property
    def rank_capacity(self) -> float:
        """The most that a rank's share of a group can hold, in the unit of `weights`."""
        return float((self.capacities / self.degrees).max())

    @property
    def min_steps(self) -> int:
        """Micro-steps that memory alone forces."""
        total = float(self.weights @ self.counts)
        return max(1, int(np.ceil(total / (self.rank_capacity * self.ranks) - 1e-12)))


def only(work: Workload, setting: int) -> Workload | None:
    """Returns the batch with one setting alone; None if some sequence then fits nowhere."""
    others = np.arange(work.seconds.shape[0]) != setting
    seconds, capacities = work.seconds.copy(), work.capacities.copy()
    seconds[others] = np.inf
    capacities[others] = 0.0
    area = (seconds[setting] * work.degrees[:, None]).min(axis=0)
    if not np.isfinite(area).all():
        return None
    return replace(work, seconds=seconds, capacities=capacities, area=area)


def tabulate(keys: Sequence[int], cost: GroupCost, speeds: Speeds = ()) -> Workload:
    """Returns the batch as a `Workload`.

    Args:
        keys: one a sequence: its length in tokens, or its bucket.
        cost: what it costs.
        speeds: of the ranks; none: equal.

    Raises:
        PlanError: a sequence fits at no degree, or there is none.
    """
    batch = np.asarray(keys, dtype=np.int64)
    if not len(batch):
        raise PlanError("the global batch: got 0 sequences, expected at least 1; fill the batch")
    kinds, inverse, counts = np.unique(batch, return_inverse=True, return_counts=True)
    seconds = cost.seconds(kinds)
    degrees = np.array(cost.degrees, dtype=np.int64)
    area = (seconds * degrees[None, :, None]).min(axis=(0, 1))
    if not np.isfinite(area).all():
        bad = int(kinds[~np.isfinite(area)][-1])
        raise PlanError(
            f"sequence of key {bad} (length or bucket): it fits at no degree up to "
            f"{cost.degrees[-1]} with any setting of {cost.settings}; "
            "allow a larger degree or more recompute, or split the sequence"
        )
    by_kind = np.argsort(inverse, kind="stable")
    members = np.split(by_kind, np.cumsum(counts)[:-1])
    order = np.lexsort((-kinds, -area))
    return Workload(
        cost=cost,
        keys=kinds[order],
        counts=counts[order].astype(np.int64),
        members=tuple(tuple(members[k].tolist()) for k in order),
        seconds=np.ascontiguousarray(seconds[:, :, order]),
        weights=cost.weights(kinds)[order],
        capacities=cost.capacities(),
        degrees=degrees,
        area=area[order],
        slowness=np.array([least_slowness(speeds, d) for d in cost.degrees]),
        power=power(speeds, cost.ranks),
    )
