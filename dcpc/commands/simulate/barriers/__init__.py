"""Planners of micro-steps with a barrier after each, on a formula of what lengths cost.

plan = plan_batch(lengths, cost)
print(plan.seconds_s, plan.bound_s, plan.gap, plan.binds)

What to compare with, each of the same arguments and result:

    fixed_sp(..., pad_to=)     padded buckets at one SP degree
    fixed_sp                   packing at one SP degree
    best_homogeneous           the best of these for each batch
    random_fill                VideoSys: groups of random classes, accumulated to equal time
    first_fit                  longest first, the first group with memory
"""

from dcpc.commands.simulate.barriers.baselines import (
    BASELINES,
    best_homogeneous,
    first_fit,
    fixed_sp,
    random_fill,
)
from dcpc.commands.simulate.barriers.formula import LinearCost, Recompute
from dcpc.commands.simulate.barriers.plan import BatchPlan, Group, MicroStep
from dcpc.commands.simulate.barriers.search import Effort, plan_batch

__all__ = [
    "BASELINES",
    "BatchPlan",
    "Effort",
    "Group",
    "LinearCost",
    "MicroStep",
    "Recompute",
    "best_homogeneous",
    "first_fit",
    "fixed_sp",
    "plan_batch",
    "random_fill",
]
