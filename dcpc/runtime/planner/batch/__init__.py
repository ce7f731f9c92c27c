"""What bounds a global batch from below, and the exact split of a pipeline's micro-batches."""

from dcpc.runtime.planner.batch.bound import lower_bound, simple_bound
from dcpc.runtime.planner.batch.costs import GroupCost, TableCost
from dcpc.runtime.planner.batch.microbatch import MicroBatches, PaddedCost, microbatch
from dcpc.runtime.planner.batch.workload import Workload, tabulate

__all__ = [
    "GroupCost",
    "MicroBatches",
    "PaddedCost",
    "TableCost",
    "Workload",
    "lower_bound",
    "microbatch",
    "simple_bound",
    "tabulate",
]
