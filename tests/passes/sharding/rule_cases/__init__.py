"""A strategy for every line of the rule table, by family."""

from tests.passes.sharding.rule_cases import (
    elementwise,
    movement,
    positions,
    products,
    rows,
    several,
)
from tests.passes.sharding.rule_cases.source import CASES, Source

__all__ = ["CASES", "Source", "elementwise", "movement", "positions", "products", "rows", "several"]
