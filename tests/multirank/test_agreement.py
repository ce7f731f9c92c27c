import os
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import PrefixStore

import dcpc
from dcpc.errors import GroupError, PlanError
from dcpc.runtime.groups import agreement, watch
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups
from tests.cases.launch import run_ranks

pytestmark = pytest.mark.multirank


def refused(groups: Groups, sp: int, what: str, value: str) -> str:
    try:
        agree(groups, sp, what, value)
    except GroupError as e:
        return str(e)
    return "agreed"


def why_it_stopped(groups: Groups, sp: int, check: int) -> str:
    """What ended this rank's wait in a check of its block, as it told its peers."""
    store = PrefixStore(f"dcpc/agree/{check}", groups.control(sp).get_group_store())
    return store.get(f"why/{dist.get_rank()}").decode()


def mixed(rank: int):
    groups = Groups.default(timeout_s=20)
    texts = [refused(groups, 4, "step", "3")]
    texts += [refused(groups, 4, "bucket", "{seq: 2048}" if rank == 2 else "{seq: 512}")]
    # After a mismatch everyone is still there.
    texts += [refused(groups, 4, "step", "4")]
    texts += [refused(groups, 2, "bucket", str(max(rank, 1)))]
    # Different checks on the same group.
    texts += [refused(groups, 2, *(("bucket", "x") if rank % 2 else ("step", "x")))]
    return texts


def late(rank: int, look_s: float):
    """Rank 2 comes once the others, who begin to wait together, have given it up."""
    for module, name, value in ((agreement, "LOOK_S", look_s), (watch, "_VERDICT_S", 0.5)):
        setattr(module, name, value)
    others = dist.new_group([0, 1, 3])
    dist.barrier()  # groups of a short limit are made of ranks that are all there
    groups = Groups.default(timeout_s=3)
    store = groups.control(4).get_group_store()
    if rank == 2:
        store.wait([f"given up by {r}" for r in (0, 1, 3)], timedelta(seconds=200))
    else:
        dist.barrier(others)
    if rank == 1 and look_s < 1:
        time.sleep(1.5)  # its own time would be up much later than rank 0's; it looks for trouble
    text = refused(groups, 4, "step", str(rank // 4))
    store.set(f"given up by {rank}", "")
    return text, why_it_stopped(groups, 4, 0)


def dead(rank: int):
    groups = Groups.default(timeout_s=5)
    agree(groups, 2, "step", "0")
    if rank == 1:
        os._exit(1)
    return refused(groups, 2, "step", "1")


def messages(rank: int):
    """Bytes of each reduction in three checks, and calls of the store."""
    groups = Groups.default(timeout_s=240)
    reductions = mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce)
    with reductions as reduced, mock.patch.object(agreement, "PrefixStore") as store:
        for i in range(3):
            agree(groups, 2, "step", str(i))
    return [call.args[0].nbytes for call in reduced.mock_calls], len(store.return_value.mock_calls)


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


@pytest.fixture(scope="module")
def lates():
    """What ranks say of a late one, by how often they look: both wait at the same time."""
    with ThreadPoolExecutor(2) as both:
        runs = {s: both.submit(run_ranks, late, 4, s, timeout_s=240) for s in (0.25, 10.0)}
    return {look_s: run.result() for look_s, run in runs.items()}


@pytest.mark.parametrize("look_s", [0.25, pytest.param(10.0, id="gloo stops waiting first")])
def test_missing_rank_is_named_on_every_rank_also_on_itself(lates, look_s):
    found = lates[look_s]
    for text, _ in found:
        assert "rank 2 did not arrive (waited 3 s); got ranks 0,1,3: step 0" in text
    if look_s < 1:
        assert not found[1][1].startswith("waited"), "it stops before its own time is up"


def test_dead_rank_is_named():
    text, nothing = run_ranks(dead, 2, timeout_s=240, may_die=[1])
    assert text.startswith("rank 1 is lost: got the end of its process")
    assert nothing is None


def test_check_is_one_reduction_of_32_bytes():
    assert run_ranks(messages, 2) == [([32] * 3, 0)] * 2


def test_alone_everything_agrees():
    agree(Groups(), 1, "step", "1")


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return (self.weight * x).square().mean()


def after_a_wrong_option(rank: int) -> list[str]:
    """What becomes of a compile with a wrong option on one rank, and of the next."""
    buckets, found = dcpc.Buckets({"x": "float32[batch, n, 4]"}, [{"n": 3}]), []
    for backend in ("egaer" if rank else "eager", "eager"):
        try:
            dcpc.compile(Squares(), buckets, backend=backend, verify="off")
            found.append("made")
        except PlanError as e:
            found.append(str(e).partition(";")[0])
    return found


def test_a_wrong_option_of_one_rank_is_all_ranks_and_the_next_compile_is_made():
    """Ranks count their sections: one that was refused before it began one fell behind for good."""
    told, made = ["rank 1: got backend='egaer'", "made"], run_ranks(after_a_wrong_option, 2)
    assert made == [told, told]
