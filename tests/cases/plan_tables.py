"""Plan tables drawn at random: costs that fall with the degree and rise with the samples."""

from itertools import product

from hypothesis import strategies as st

from dcpc.buckets import Bucket
from dcpc.ir import PlanRow
from dcpc.runtime.planner.table import PlanTable

BUCKETS = tuple(Bucket.of({"seq": n}) for n in (4, 16, 64))


@st.composite
def tables(draw, worlds=(1, 2, 3, 4, 8)):
    """A table of costs that fall with the degree and rise with the samples."""
    world = draw(st.sampled_from(worlds))
    rows = []
    for bucket in BUCKETS:
        degrees = draw(st.sets(st.integers(1, world), min_size=1, max_size=3))
        launch_s = draw(st.sampled_from([0.0, 0.5, 3.0]))
        waste = draw(st.sampled_from([0.6, 0.9, 1.0]))
        own = [
            PlanRow(d, m, draw(st.integers(0, 3)), launch_s + m * bucket["seq"] / d**waste)
            for d, m in product(sorted(degrees), (1, 2, 4))
        ]
        rows.append(tuple(own))
    return PlanTable(BUCKETS, tuple(rows), world, node_ranks=4)
