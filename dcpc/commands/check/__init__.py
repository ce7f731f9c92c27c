"""Checks a model: symbolic dims, split nodes, numbers equal to the plain model's.

Used by `dcpc check`, by `benchmarks.zoo` and by the tests. Placements are made for `SPLITTING`, a
device on which splitting always pays, because a real one would replicate nearly everything at the
short lengths that can be checked.
"""

from dcpc.commands.check.coverage import coverage
from dcpc.commands.check.split import SPLITTING, SplitModel
from dcpc.commands.check.verdict import Prepared, Verdict, compare, prepare

__all__ = ["SPLITTING", "Prepared", "SplitModel", "Verdict", "compare", "coverage", "prepare"]
