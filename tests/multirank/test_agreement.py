import os
import time

import pytest
import torch.distributed as dist

from dcpc.errors import GroupError
from dcpc.runtime import agreement
from dcpc.runtime.agreement import agree
from dcpc.runtime.groups import Groups
from tests.multirank.launch import run_ranks

pytestmark = pytest.mark.multirank


def refused(groups: Groups, sp: int, what: str, value: str) -> tuple[str, float]:
    start = time.monotonic()
    try:
        agree(groups, sp, what, value)
    except GroupError as e:
        return str(e), time.monotonic() - start
    return "agreed", time.monotonic() - start


def mixed(rank: int):
    groups = Groups.default(timeout_s=20)
    texts = [refused(groups, 4, "step", "3")[0]]
    texts += [refused(groups, 4, "bucket", "{seq: 2048}" if rank == 2 else "{seq: 512}")[0]]
    # After a mismatch everyone is still there.
    texts += [refused(groups, 4, "step", "4")[0]]
    texts += [refused(groups, 2, "bucket", str(max(rank, 1)))[0]]
    # Different checks on the same group.
    texts += [refused(groups, 2, *(("bucket", "x") if rank % 2 else ("step", "x")))[0]]
    return texts


def late(rank: int, look_s: float):
    agreement.LOOK_S = look_s
    groups = Groups.default(timeout_s=3)
    if rank == 2:
        time.sleep(7)
    elif rank == 1 and look_s < 1:
        time.sleep(2)  # its own time would be up much later than rank 0's; it looks for trouble
    return refused(groups, 4, "step", str(rank // 4))


def dead(rank: int):
    groups = Groups.default(timeout_s=5)
    agree(groups, 2, "step", "0")
    if rank == 1:
        os._exit(1)
    return refused(groups, 2, "step", "1")


def timed(rank: int):
    groups = Groups.default(timeout_s=240)
    dist.barrier()
    start = time.perf_counter()
    for i in range(200):
        agree(groups, 2, "step", str(i))
    return (time.perf_counter() - start) / 200


def test_ranks_that_disagree_are_named_on_every_rank():
    found = run_ranks(mixed, 4)
    for rank, (first, wrong, after, pair, kinds) in enumerate(found):
        assert first == after == "agreed"
        assert "got ranks 0,1,3: bucket {seq: 512}; rank 2: bucket {seq: 2048}; expected" in wrong
        if rank < 2:
            assert pair == "agreed"
            assert "got rank 0: step x; rank 1: bucket x" in kinds
        else:
            assert "got rank 2: bucket 2; rank 3: bucket 3" in pair
            assert "got rank 2: step x; rank 3: bucket x" in kinds


@pytest.mark.parametrize("look_s", [0.25, pytest.param(10.0, id="gloo stops waiting first")])
def test_missing_rank_is_named_on_every_rank_also_on_itself(look_s):
    found = run_ranks(late, 4, look_s, timeout_s=240)
    for text, waited_s in found:
        assert "rank 2 did not arrive (waited 3 s); got ranks 0,1,3: step 0" in text
        assert waited_s < 3 + 4


def test_dead_rank_is_named():
    (text, waited_s), nothing = run_ranks(dead, 2, timeout_s=240, may_die=[1])
    assert "rank 1 did not arrive (a connection broke" in text
    assert waited_s < 5 + 4
    assert nothing is None


def test_check_is_cheap():
    assert max(run_ranks(timed, 2)) < 0.02


def test_alone_everything_agrees():
    agree(Groups(), 1, "step", "1")
