"""What `choose` says of the row that it took."""

import pytest

from dcpc.buckets import Bucket
from dcpc.plan.choose import TriedRow, choose


def row(sp: int, batch: int, seconds_s: float, fits: bool = True) -> TriedRow:
    return TriedRow(sp, batch, 0, seconds_s, lambda: 4, 10, 20, fits=fits)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([row(1, 1, 1.0)], "the only setting tried"),
        ([row(1, 1, 1.0), row(2, 1, 1.0, fits=False)], "the only setting that fits"),
        (
            [row(1, 1, 1.0), row(1, 2, 1.5)],
            "the largest micro-batch tried",
        ),
        ([row(1, 1, 1.0), row(2, 1, 0.6)], "a larger sp saves less than 5%"),
        (
            [row(1, n, 0.5 + 0.1 * n) for n in range(1, 7)] + [row(2, 1, 1.0)],
            "the largest micro-batch tried; a larger sp saves less than 5%",
        ),
    ],
)
def test_reason_is_what_the_other_rows_lack(rows, reason):
    assert choose(Bucket.of({"seq": 8}), rows, 100, 2).reason == reason
