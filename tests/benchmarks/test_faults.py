"""What `benchmarks.faults` counts: samples lost and trained twice, other losses, growth."""

import pytest

from tests.faults.injections import Outcome, compare
from tests.faults.soak import HELD, grows, growth

STRAIGHT = {1: (3.0, [0, 1]), 2: (2.0, [2, 3]), 3: (1.0, [4, 5])}


@pytest.mark.parametrize(
    ("found", "lost", "repeated", "survived"),
    [
        ({2: (2.0, [2, 3]), 3: (1.0, [4, 5])}, 0, 0, True),
        ({3: (1.0, [4, 5])}, 2, 0, False),
        ({2: (2.0, [1, 3]), 3: (1.0, [4, 5])}, 1, 1, False),
        ({2: (2.0 + 1e-8, [2, 3]), 3: (1.0, [4, 5])}, 0, 0, False),
    ],
)
def test_what_goes_on_otherwise_is_not_survived(found, lost, repeated, survived):
    outcome = Outcome("a kind", 0)
    compare(outcome, STRAIGHT, 1, found)
    assert (outcome.lost, outcome.repeated, not outcome.problem) == (lost, repeated, survived)


def test_growth_is_counted_after_the_first_third():
    resident = 10**8
    settled = [(resident + 10**7 * (i < 2), 5 + (i > 0), 4, 3, 20) for i in range(6)]
    assert grows(growth(settled), resident) == 0
    leaks = [(resident, 5 + i, 4, 3, 20 + i // 4) for i in range(6)]
    assert growth(leaks) == dict(zip(HELD, (0, 2, 0, 0, 1), strict=True))
    assert grows(growth(leaks), resident) == 2
