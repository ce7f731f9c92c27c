"""`compile`: the phases in order; `plan`: as far as they go without running anything."""

from dcpc.api.compiling import compile, materialize
from dcpc.api.plan_model import cut_with, plan, plan_with
from dcpc.api.requests import rank_memory_bytes
from dcpc.api.search import calibration_key

__all__ = [
    "calibration_key",
    "compile",
    "cut_with",
    "materialize",
    "plan",
    "plan_with",
    "rank_memory_bytes",
]
