import pytest
import torch
import torch.distributed as dist

from dcpc.errors import GroupError
from dcpc.runtime.groups.groups import Groups
from tests.cases.launch import run_ranks

pytestmark = pytest.mark.multirank


def sums(groups: Groups) -> dict[int, tuple[tuple[int, ...], int, int]]:
    """degree -> ranks of the block, sum of global ranks over its data and its control group."""
    found = {}
    for sp in groups.degrees:
        x = [torch.tensor(dist.get_rank()) for _ in range(2)]
        for value, pg in zip(x, (groups.of(sp), groups.control(sp)), strict=True):
            if pg is not None:
                dist.all_reduce(value, group=pg)
        found[sp] = (groups.ranks(sp), x[0].item(), x[1].item())
    return found


def all_degrees(rank: int):
    groups = Groups.default(timeout_s=60)
    with pytest.raises(GroupError, match=r"degree 3: got a world of 4 ranks.*1, 2, 4"):
        groups.of(3)
    return sums(groups)


def parents(rank: int):
    odd = dist.new_group([1, 3])
    even = dist.new_group([0, 2])
    groups = Groups.default(group=odd if rank % 2 else even, timeout_s=60)
    found = (groups.world, groups.rank, groups.global_ranks, sums(groups))
    if rank % 2 == 0:
        with pytest.raises(GroupError, match="got a group that it is not in"):
            Groups.default(group=odd)
    # A second set in the same process, and one of a block of the whole world.
    assert sums(Groups.default(timeout_s=60))[4][1] == 6
    return found


def from_environment(rank: int):
    groups = Groups.default(timeout_s=60)
    return dist.is_initialized(), dist.get_backend(), sums(groups)[2]


def absent(rank: int):
    if rank == 0:
        with pytest.raises(GroupError, match=r"rank\(s\) 1 did not arrive within 0.5 s"):
            Groups.default(timeout_s=0.5)
    dist.barrier()  # rank 1 stays until the other has given it up
    return rank


def test_blocks_of_every_degree_reduce_over_their_ranks():
    found = run_ranks(all_degrees, 4)
    for rank in range(4):
        pair = rank // 2 * 2
        assert found[rank] == {
            1: ((rank,), rank, rank),
            2: ((pair, pair + 1), 2 * pair + 1, 2 * pair + 1),
            4: ((0, 1, 2, 3), 6, 6),
        }


def test_parent_group_is_respected():
    for rank, (world, own, ranks, found) in enumerate(run_ranks(parents, 4)):
        odd = rank % 2
        assert (world, own, ranks) == (2, rank // 2, (odd, odd + 2))
        assert found == {1: ((own,), rank, rank), 2: ((0, 1), 2 + 2 * odd, 2 + 2 * odd)}


def test_launchers_environment_is_used():
    assert run_ranks(from_environment, 2, init=False) == [(True, "gloo", ((0, 1), 1, 1))] * 2


def test_rank_that_does_not_come_is_named():
    assert run_ranks(absent, 2) == [0, 1]


def test_alone_there_are_no_groups():
    groups = Groups.default(device="cpu")
    assert (groups.world, groups.rank, groups.ranks(1)) == (1, 0, (0,))
    assert groups.of(1) is None
    assert groups.control(1) is None


def test_half_a_launchers_environment_is_warned_of(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.warns(UserWarning, match="WORLD_SIZE=2 is set, but not RANK.*start it by torchrun"):
        assert Groups.default(device="cpu").world == 1


RANGES = ((1, 3), (0, 3), (1, 2), (2, 2), (0, 1))


def any_ranges(rank: int):
    """Sums over groups of any consecutive ranks, prepared in turn, some forgotten in between."""
    groups = Groups.default(timeout_s=60)
    with pytest.raises(GroupError, match="ranks 1 to 2: got none on rank"):
        groups.over((1, 2))
    found = {}
    for turn in range(3):
        # A bound of 64 is out of reach for 4 ranks: see that what is forgotten is made again.
        order = RANGES if turn < 2 else RANGES[::-1]
        groups.prepare(order)
        for first, degree in order:
            ranks = tuple(range(first, first + degree))
            if rank in ranks:
                x = torch.tensor(10**rank)
                pg = groups.over(ranks)
                if pg is not None:
                    dist.all_reduce(x, group=pg)
                found[turn, first, degree] = x.item()
        if turn == 1:
            groups.forget(1)
    with pytest.raises(GroupError, match="ranks 3 to 5: got a world of 4 ranks"):
        groups.prepare([(3, 3)])
    return found


def test_groups_of_any_consecutive_ranks_reduce_over_them():
    for rank, found in enumerate(run_ranks(any_ranges, 4)):
        assert found == {
            (turn, first, degree): sum(10**r for r in range(first, first + degree))
            for turn in range(3)
            for first, degree in RANGES
            if first <= rank < first + degree
        }
