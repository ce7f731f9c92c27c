"""What dcpc makes of a model: what stays symbolic, what is split, whether the numbers are its own.

Used by `dcpc check`, by `benchmarks.zoo` and by the tests. Placements are made for `SPLITTING`, a
device on which splitting always pays, because a real one would replicate nearly everything at the
short lengths that can be checked.
"""

from dcpc.acceptance.coverage import Coverage, Unsplit, coverage
from dcpc.acceptance.exactness import (
    Difference,
    Gradients,
    gradient_errors,
    loss_error,
    nan_as_infinite,
    plain,
)
from dcpc.acceptance.split import SPLITTING, Split
from dcpc.acceptance.verdict import Prepared, Verdict, compare, examine, prepare, shapes_of

__all__ = [
    "SPLITTING",
    "Coverage",
    "Difference",
    "Gradients",
    "Prepared",
    "Split",
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
