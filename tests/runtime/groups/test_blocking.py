"""Process groups that block as NCCL's do: what hangs there is seen to hang, what runs runs."""

import pytest
import torch
import torch.distributed as dist

from tests.cases.blocking import HangError, run_blocking


def receive_first(rank: int, late: bool) -> float:
    """Both ranks receive before they send, on queues of their own."""
    there, back = dist.new_group([0, 1]), dist.new_group([0, 1])
    x = torch.zeros(1)
    mine, theirs = (there, back) if rank == 0 else (back, there)
    if late:
        dist.all_reduce(x, group=there)
        dist.all_reduce(x, group=back)
    work = dist.irecv(x, src=1 - rank, group=theirs)
    dist.send(torch.tensor([rank + 1.0]), dst=1 - rank, group=mine)
    work.wait()
    return float(x)


def test_a_receive_before_a_send_hangs_at_the_pairs_first_call():
    with pytest.raises(HangError) as error:
        run_blocking(receive_first, 2, False)
    assert "rank 0 waits for the communicator of ranks (0, 1)" in str(error.value)
    assert "rank 1 waits for the communicator of ranks (0, 1)" in str(error.value)


def test_it_runs_where_communicators_are_made_with_their_groups():
    assert run_blocking(receive_first, 2, False, eager=True)[0] == [2.0, 1.0]


def test_an_all_reduce_makes_no_communicator_of_a_pair():
    with pytest.raises(HangError, match="made no call in it"):
        run_blocking(receive_first, 2, True)


def two_orders(rank: int) -> None:
    """Ranks use two groups in different orders."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for pg in groups if rank == 0 else groups[::-1]:
        dist.all_reduce(torch.ones(1), group=pg)


def test_two_groups_in_different_orders_hang():
    with pytest.raises(HangError, match=r"rank 0 waits for .* rank 1 waits for"):
        run_blocking(two_orders, 2, eager=True)


def unlike(rank: int) -> None:
    x = torch.ones(2 + rank)
    dist.all_reduce(x)


def test_calls_that_differ_are_named():
    with pytest.raises(HangError, match=r"calls differ: rank 0: all_reduce .*2.*rank 1"):
        run_blocking(unlike, 2)


def collectives(rank: int) -> list[list[float]]:
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    every = torch.empty(3)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(every, torch.tensor([float(rank)]))
    taken = torch.empty(3)
    dist.all_to_all_single(taken, torch.arange(3.0) + 10 * rank)
    first = torch.tensor([float(rank)])
    dist.broadcast(first, 2)
    right, left = (rank + 1) % 3, (rank - 1) % 3
    came = torch.empty(1)
    ops = [dist.P2POp(dist.irecv, came, left), dist.P2POp(dist.isend, total + rank, right)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return [x.tolist() for x in (total, every, taken, first, came)]


@pytest.mark.parametrize("eager", [False, True])
def test_numbers_are_those_of_the_collectives(eager):
    found, room = run_blocking(collectives, 3, eager=eager)
    for rank, (total, every, taken, first, came) in enumerate(found):
        assert (total, every, first) == ([6.0], [0.0, 1.0, 2.0], [2.0])
        assert taken == [rank, rank + 10.0, rank + 20.0]
        assert came == [6.0 + (rank - 1) % 3]
    kinds = [[call.kind for call in room.calls[r]] for r in range(3)]
    assert kinds[0] == kinds[1] == kinds[2]
    assert kinds[0] == ["all_reduce", "all_gather", "all_to_all", "broadcast", "batch"]
