"""Ranks that torchrun starts again meet in a store of their own, whatever the dead have written."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from dcpc.runtime.groups.attempt import fresh_store


def meet(store, world, ranks=None):
    with ThreadPoolExecutor(world) as threads:
        made = [threads.submit(fresh_store, store, r, world, 5.0) for r in ranks or range(world)]
        return [each.result() for each in made]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_each_attempt_has_a_store_of_its_own(world):
    store = dist.HashStore()
    for attempt in range(3):
        found = meet(store, world)
        assert not any(each.check(["address"]) for each in found), "of an attempt before"
        found[-1].set("address", str(attempt))
        assert all(each.get("address") == str(attempt).encode() for each in found)


@pytest.mark.parametrize("first", [[0], [1], [1, 2]])
def test_ranks_that_died_while_they_met_are_not_waited_for(first):
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as threads:
        lost = [threads.submit(fresh_store, store, r, 3, 0.2) for r in first]
        for each in lost:
            with pytest.raises(RuntimeError, match="not all of 3 ranks arrived"):
                each.result()
    found = meet(store, 3)
    found[1].set("who", "rank 1")
    assert [each.get("who") for each in found] == [b"rank 1"] * 3


def test_ranks_that_do_not_come_are_named_while_they_are_waited_for(monkeypatch, caplog):
    monkeypatch.setattr("dcpc.runtime.groups.attempt.TOLD_S", 0.05)
    with pytest.raises(RuntimeError, match=r"not all of 4 ranks arrived, no rank 1, 2, 3$"):
        fresh_store(dist.HashStore(), 0, 4, 0.2)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert told[0].startswith("rank 0 waits up to 0.2 s for rank 1, 2, 3 to call dcpc")
