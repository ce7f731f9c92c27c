"""What `choose` says where no row fits."""

import pytest

from dcpc.buckets import Bucket
from dcpc.errors import PlanError
from dcpc.plan.choose import TriedRow, choose


def row(sp: int, batch: int, needed_bytes: int) -> TriedRow:
    return TriedRow(sp, batch, 2, 1.0, lambda: 4, needed_bytes // 2, needed_bytes, fits=False)


def test_names_the_smallest_micro_batch_though_a_larger_one_looks_smaller():
    """On a GPU the segments of a choice that does not fit are counted, those of others are not."""
    rows = [row(1, 1, 40_000_000), row(1, 2, 36_000_000)]
    with pytest.raises(PlanError, match=r"needs 40 MB on a rank at sp=1, micro-batch 1, .* 10 MB"):
        choose(Bucket.of({"seq": 8}), rows, 30_000_000, 1)


def test_names_the_degree_that_needs_least():
    rows = [row(1, 1, 40_000_000), row(2, 1, 35_000_000), row(2, 2, 70_000_000)]
    with pytest.raises(PlanError, match=r"needs 35 MB on a rank at sp=2, micro-batch 1"):
        choose(Bucket.of({"seq": 8}), rows, 30_000_000, 2)
