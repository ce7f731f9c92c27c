"""What ranks tell each other of those that will not come: ranks in threads over one store."""

import re
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

from dcpc.errors import DataError, DcpcError, GroupError
from dcpc.runtime.groups import watch as module
from dcpc.runtime.groups.breaking import aborts_of, run_all
from dcpc.runtime.groups.life import Processes, place_of_process
from dcpc.runtime.groups.watch import Watch

RANKS = (4, 5, 6)


@pytest.fixture
def watches(monkeypatch):
    """Three that beat fast; `_over` stops a heart."""
    monkeypatch.setattr(module, "BEAT_S", 0.02)
    monkeypatch.setattr(module, "_FAILED_GRACE_S", 0.0)
    monkeypatch.setattr(module, "_ENDED_GRACE_S", 0.0)
    store, made = dist.HashStore(), [Watch(RANKS, i) for i in range(3)]
    for rank in RANKS:
        dist.PrefixStore("dcpc/watch", store).set(f"place/{rank}", '{"pid": 1, "place": ""}')
    for each in made:
        each.start(store)
    yield made
    for each in made:
        each.leave()


def heard(watch: Watch) -> str:
    """What a rank raises soon, or nothing."""
    for _ in range(200):
        try:
            watch.look()
        except DcpcError as e:
            return f"{type(e).__name__}: {e}"
        time.sleep(0.02)
    return ""


def fails(watch: Watch, error: BaseException) -> None:
    with pytest.raises(type(error)), watch.section("step 3"):
        raise error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("bad"), GroupError, "rank 5 failed: got ValueError: bad in step 3; expected"),
        (DataError("sample 1"), DataError, "rank 5 failed: got sample 1 in step 3; expected all"),
        (KeyboardInterrupt(), GroupError, "rank 5 failed: got KeyboardInterrupt in step 3"),
    ],
)
def test_an_error_of_one_rank_is_told_to_those_in_the_same_section(watches, error, kind, text):
    first, second, third = watches
    fails(second, error)
    for each in (first, third):
        with each.section("step 3"):
            assert heard(each).startswith(f"{kind.__name__}: {text}")


def test_ranks_that_fail_alike_and_go_on_hear_nothing(watches):
    for each in watches:
        fails(each, ValueError("alike"))
    for each in watches:
        with each.section("step 4"):
            time.sleep(0.2)
            each.look()


def test_ranks_that_fail_alike_between_sections_and_go_on_hear_only_what_comes_after(watches):
    first, _, third = watches
    for each in watches:
        each.failed(ValueError("alike"), "the loader", ahead=True)
    time.sleep(0.2)
    for each in watches:
        each.look()
        with each.section("step 1"):
            time.sleep(0.2)
            each.look()
    first._lost(5, "the end of its process")
    for each in (first, third):
        assert heard(each).startswith("GroupError: rank 5 is lost: got the end of its process;")


def test_the_cause_is_named_not_those_who_followed(watches):
    first, second, third = watches
    second.ended(ValueError("bad"))
    assert "rank 5 failed: got ValueError: bad; expected" in heard(third)
    with pytest.raises(GroupError) as told:
        third.look()
    third.ended(told.value)
    time.sleep(0.2)
    assert "rank 5 failed: got ValueError: bad; expected" in heard(first)


def test_a_heart_that_stops_is_noticed_after_the_limit_and_a_slow_rank_is_not(watches):
    first, second, third = watches
    for each in watches:
        each.silence_s = 0.5
    time.sleep(0.8)  # it computes, and its heart beats on
    first.look()
    second._over = True
    found = re.compile("GroupError: rank 5 is lost: got no sign of life for 0.5 s; expected all of")
    assert found.match(heard(first))
    assert found.match(heard(third))


def test_a_rank_that_has_ended_early_is_named(watches):
    watches[2].leave()
    assert "rank 6 has ended: got its process has ended" in heard(watches[0])


def test_a_store_that_is_gone_is_named_where_a_connection_broke(watches):
    first = watches[0]
    first._gone = "Broken pipe"
    told = pytest.raises(GroupError, match="rendezvous store does not answer: got Broken pipe")
    with told, first.section("step"):
        raise RuntimeError("Connection closed by peer")


def test_a_rank_alone_watches_nobody():
    with pytest.raises(ValueError, match="own"), Watch().section("step"):
        raise ValueError("own")
    assert Watch().explained() is None


def test_a_process_that_ended_is_known_by_its_handle():

    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    seen = Processes({1: {**place_of_process(), "pid": process.pid}, 2: place_of_process()})
    assert seen.ended(0.0) == set()
    process.kill()
    assert seen.ended(30.0) == {1}  # nobody has collected its exit code
    process.communicate()
    seen.close()


class OnGpu:
    """The backend of a group for tensors of a GPU, as torch's ProcessGroupNCCL is asked."""

    def __init__(self, kind: str, names: tuple[str, ...]) -> None:
        self.kind, self.aborted = kind, threading.Event()
        for name in names:
            setattr(self, name, self.aborted.set)

    def name(self) -> str:
        return self.kind


class Grouped:
    """A group that is over gloo for the CPU, and over some backend for a GPU."""

    def __init__(self, backend: OnGpu | None) -> None:
        self.backend = backend

    def size(self) -> int:
        return 1

    def _get_backend(self, device: torch.device) -> OnGpu:
        assert device.type == "cuda"
        if self.backend is None:
            raise RuntimeError("No backend type associated with device type cuda")
        return self.backend


class Several:
    def __init__(self, *groups: Grouped) -> None:
        self.groups = groups

    def every(self):
        return self.groups


def test_communicators_on_a_gpu_are_aborted_where_a_rank_waits_in_vain(watches):
    first, second, _ = watches
    new, old, gloo = (
        OnGpu("nccl", ("abort",)),
        OnGpu("nccl", ("_abort",)),
        OnGpu("gloo", ("abort",)),
    )
    connected = Several(Grouped(new), Grouped(old), Grouped(gloo), Grouped(None))
    first.follow(connected)

    def step() -> bool:
        """Its kernels end without an error: what they wrote must not be taken for a result."""
        with first.section("step 3"):
            fails(second, ValueError("bad"))
            return new.aborted.wait(20.0) and old.aborted.wait(20.0)

    with pytest.raises(GroupError, match="rank 5 failed: got ValueError: bad"):
        step()
    assert new.aborted.is_set()
    assert old.aborted.is_set()
    assert not gloo.aborted.is_set()


def test_a_backend_that_cannot_abort_is_warned_of():
    with pytest.warns(UserWarning, match="over nccl cannot be aborted: got no abort"):
        assert not aborts_of([Grouped(OnGpu("nccl", ()))])


def test_one_abort_that_fails_leaves_the_others():
    backend = OnGpu("nccl", ("abort",))

    def fails_itself() -> None:
        raise RuntimeError("NCCL communicator was aborted")

    run_all([fails_itself, *aborts_of([Grouped(backend)])])
    assert backend.aborted.is_set()
