"""The global-batch planner: micro-steps of SP groups, near the least predicted seconds.

plan = plan_batch(lengths, cost)          # cost: LinearCost (formula) or TableCost (rows)
print(plan.seconds_s, plan.bound_s, plan.gap, plan.binds)
"""

from .bound import lower_bound, simple_bound
from .costs import GroupCost, LinearCost, Recompute, Row, Run, TableCost
from .microbatch import MicroBatches, PaddedCost, microbatch
from .plan import BatchPlan, Group, MicroStep
from .search import Effort, plan_batch
from .workload import Workload, tabulate

__all__ = [
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
    "lower_bound",
    "microbatch",
    "plan_batch",
    "simple_bound",
    "tabulate",
]
