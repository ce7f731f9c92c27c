"""The planner's result: micro-steps of groups on disjoint ranks, with bound, gap and what binds."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Group:
    """Consecutive ranks that share sequences.

    Attributes:
        first_rank: its ranks are `first_rank` to `first_rank + degree - 1`.
        degree: how many.
        setting: the row it chose.
        sequences: positions in the global batch.
        lengths: tokens of each of them.
        load_s: predicted seconds, the micro-step's fixed cost left out.
    """

    first_rank: int
    degree: int
    setting: str
    sequences: tuple[int, ...]
    lengths: tuple[int, ...]
    load_s: float

    @property
    def ranks(self) -> range:
        """The ranks of the group."""
        return range(self.first_rank, self.first_rank + self.degree)


@dataclass(frozen=True, slots=True)
class MicroStep:
    """Groups that run side by side; it lasts as long as the slowest."""

    groups: tuple[Group, ...]
    seconds_s: float


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """A plan for one global batch.

    Attributes:
        ranks: how many there are; a rank in no group of a micro-step idles.
        steps: micro-steps, longest first.
        seconds_s: predicted, the sum over micro-steps.
        bound_s: no plan is faster than this under the same cost.
        binds: a sentence: what keeps the plan from being faster.
    """

    ranks: int
    steps: tuple[MicroStep, ...]
    seconds_s: float
    bound_s: float
    binds: str

    @property
    def gap(self) -> float:
        """Distance from the lower bound, as a share of it."""
        return self.seconds_s / self.bound_s - 1.0 if self.bound_s > 0 else 0.0

    @property
    def busy(self) -> float:
        """Share of rank-seconds spent on groups' loads, the fixed costs left out."""
        used = sum(g.degree * g.load_s for step in self.steps for g in step.groups)
        longest = sum(max(g.load_s for g in step.groups) for step in self.steps)
        return used / (self.ranks * longest) if longest > 0 else 1.0
