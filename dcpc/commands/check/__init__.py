"""Checks a model: symbolic dims, split nodes, numbers equal to the plain model's.

Used by `dcpc check`, by `benchmarks.zoo` and by the tests. Placements are made for `SPLITTING`, a
device on which splitting always pays, because a real one would replicate nearly everything at the
short lengths that can be checked.
"""

from dcpc.commands.check.coverage import Coverage, Unsplit, coverage
from dcpc.commands.check.split import SPLITTING, SplitModel
from dcpc.commands.check.verdict import Prepared, Verdict, compare, examine, prepare, shapes_of
from dcpc.verify.exactness import (
    Difference,
    Gradients,
    gradient_errors,
    loss_error,
    nan_as_infinite,
)
from dcpc.verify.reference import plain

__all__ = [
    "SPLITTING",
    "Coverage",
    "Difference",
    "Gradients",
    "Prepared",
    "SplitModel",
    "Unsplit",
    "Verdict",
    "compare",
    "coverage",
    "examine",
    "gradient_errors",
    "loss_error",
    "nan_as_infinite",
    "plain",
    "prepare",
    "shapes_of",
]
