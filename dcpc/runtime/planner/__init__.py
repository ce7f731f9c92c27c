"""The global-batch planner: micro-steps of SP groups, near the least predicted seconds.

plan = plan_batch(lengths, cost)          # cost: LinearCost (formula) or TableCost (rows)
print(plan.seconds_s, plan.bound_s, plan.gap, plan.binds)

What to compare with, each of the same arguments and result:

    fixed_sp(..., pad_to=)     padded buckets at one SP degree
    fixed_sp                   packing at one SP degree
    best_homogeneous           the best of these for each batch
    random_fill                VideoSys: groups of random classes, accumulated to equal time
    first_fit                  longest first, the first group with memory
"""

from .baselines import BASELINES, best_homogeneous, first_fit, fixed_sp, random_fill
from .bound import lower_bound, simple_bound
from .costs import GroupCost, LinearCost, Recompute, Row, Run, TableCost
from .microbatch import MicroBatches, PaddedCost, microbatch
from .plan import BatchPlan, Group, MicroStep
from .search import Effort, plan_batch
from .workload import Workload, tabulate

__all__ = [
    "BASELINES",
    "BatchPlan",
    "Effort",
    "Group",
    "GroupCost",
    "LinearCost",
    "MicroBatches",
    "MicroStep",
    "PaddedCost",
    "Recompute",
    "Row",
    "Run",
    "TableCost",
    "Workload",
    "best_homogeneous",
    "first_fit",
    "fixed_sp",
    "lower_bound",
    "microbatch",
    "plan_batch",
    "random_fill",
    "simple_bound",
    "tabulate",
]
