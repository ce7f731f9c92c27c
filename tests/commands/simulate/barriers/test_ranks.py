"""Consecutive ranks of nodes."""

from dcpc.commands.simulate.barriers.packing.ranks import FreeRanks


def test_a_node_of_any_number_of_ranks_has_those_there_are():
    """A CPU's node has no end; looking through its rooms one by one would not come to one."""
    free = FreeRanks.all(5, 1 << 60)
    assert [free.take(degree) for degree in (2, 2, 2, 1, 1)] == [0, 2, None, 4, None]
    assert free.take(8) is None
