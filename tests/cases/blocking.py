"""Ranks as threads whose process groups block where NCCL's do: a hang is seen without a GPU.

The rules, as of torch's ProcessGroupNCCL:

    communicator   made at a group's first call, or at a pair's first unbatched send or receive: the
                   host waits there until all of its ranks have come; `eager`: when the group is
                   made, and a pair then uses the group's
    stream         one communicator's calls run in order on each of its ranks; those of different
                   communicators run beside each other
    batch          `batch_isend_irecv` is one call: its messages run in any order among themselves

Waiting for a call blocks the host here, which NCCL's does not: what runs here runs there. When all
ranks wait and none can go on, each raises a `HangError` that says who waits for what.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg

LIMIT_S = 60.0  # a rank that waits outside of these groups is not seen to hang
BACKEND = "blocking"


class HangError(Exception):
    """Ranks wait for each other for ever; says who waits for what."""


@dataclass(frozen=True)
class Issued:
    """A call as a rank made it: its group's ranks, what it is, the elements it moves."""

    group: str
    ranks: tuple[int, ...]
    kind: str
    numel: int


@dataclass(eq=False)
class Message:
    """One send or receive, and whether it has happened."""

    peer: int
    sends: bool
    tensor: Tensor
    done: bool = False


@dataclass(eq=False)
class Call:
    """What a rank has put on a communicator's stream."""

    kind: str
    alike: tuple[Any, ...] = ()  # what all ranks' calls have in common
    messages: list[Message] = field(default_factory=list)
    tensors: Any = None
    run: Callable[[dict[int, Any]], None] | None = None  # with all ranks' tensors
    done: bool = False


class Communicator:
    """The streams of some ranks, and who has come to make them."""

    def __init__(self, name: str, ranks: tuple[int, ...]) -> None:
        self.name, self.ranks = name, ranks
        self.here: set[int] = set()
        self.queues: dict[int, deque[Call]] = {r: deque() for r in ranks}

    def advance(self) -> str:
        """Runs what can run; returns what is wrong, or nothing."""
        while True:
            heads = {r: q[0] for r, q in self.queues.items() if q}
            if not (self._exchanged(heads) or self._ended(heads)):
                break
        if len(heads) < len(self.ranks) or any(call.messages for call in heads.values()):
            return ""
        if len({(call.kind, call.alike) for call in heads.values()}) > 1:
            had = "; ".join(f"rank {r}: {c.kind} {c.alike}" for r, c in heads.items())
            return f"{self.name} of ranks {self.ranks}: calls differ: {had}"
        first = next(iter(heads.values()))
        assert first.run is not None
        first.run({r: call.tensors for r, call in heads.items()})
        for r, call in heads.items():
            call.done = True
            self.queues[r].popleft()
        return self.advance()

    def _exchanged(self, heads: dict[int, Call]) -> bool:
        """Whether a message went from the first call of one rank's stream to that of another's."""
        for r, call in heads.items():
            for m in call.messages:
                if m.done or not m.sends or m.peer not in heads:
                    continue
                for other in heads[m.peer].messages:
                    if not (other.done or other.sends) and other.peer == r:
                        with torch.no_grad():
                            other.tensor.copy_(m.tensor)
                        m.done = other.done = True
                        return True
        return False

    def _ended(self, heads: dict[int, Call]) -> bool:
        """Whether a call of messages has ended."""
        for r, call in heads.items():
            if call.messages and all(m.done for m in call.messages):
                call.done = True
                self.queues[r].popleft()
                return True
        return False


class Room:
    """What the ranks' threads share.

    Attributes:
        calls: of each rank, in order.
    """

    def __init__(self, world: int, eager: bool) -> None:
        self.eager = eager
        self.calls: dict[int, list[Issued]] = {r: [] for r in range(world)}
        self._changed = threading.Condition(threading.RLock())
        self._live = set(range(world))
        self._waiting: dict[int, tuple[str, Callable[[], bool]]] = {}
        self._made: dict[object, Communicator] = {}
        self._problem = ""

    def communicator(self, rank: int, name: str, ranks: tuple[int, ...]) -> Communicator:
        """Returns a communicator, once all of its ranks have asked for it."""
        with self._changed:
            found = self._made.setdefault((name, ranks), Communicator(name, ranks))
            found.here.add(rank)
            self._changed.notify_all()
        self.wait(
            rank, lambda: len(found.here) == len(ranks),
            lambda: f"the communicator of ranks {ranks} of group {name} (rank(s) "
            f"{sorted({*ranks} - found.here)} made no call in it)",
        )  # fmt: skip
        return found

    def communicators_of(self, rank: int) -> int:
        """Returns how many communicators a rank has."""
        return sum(rank in made.ranks for made in self._made.values())

    def launch(self, rank: int, on: Communicator, call: Call) -> None:
        """Puts a call on this rank's stream of a communicator."""
        with self._changed:
            on.queues[rank].append(call)
            self._problem = self._problem or on.advance()
            self._changed.notify_all()

    def wait(self, rank: int, until: Callable[[], bool], what: Callable[[], str]) -> None:
        """Blocks a rank's host.

        Raises:
            HangError: it would for ever.
        """
        with self._changed:
            self._waiting[rank] = what, until
            self._look()
            self._changed.wait_for(lambda: until() or bool(self._problem), LIMIT_S)
            if not until():
                self._problem = self._problem or f"{LIMIT_S:g} s without progress: {self._said()}"
                self._changed.notify_all()
                raise HangError(self._problem)
            del self._waiting[rank]

    def leave(self, rank: int) -> None:
        """Takes down that a rank makes no more calls."""
        with self._changed:
            self._live.discard(rank)
            self._waiting.pop(rank, None)
            self._look()

    def _look(self) -> None:
        stuck = self._live and {*self._waiting} >= self._live
        if stuck and not any(until() for _, until in self._waiting.values()):
            self._problem = self._problem or self._said()
            self._changed.notify_all()

    def _said(self) -> str:
        return "; ".join(f"rank {r} waits for {what()}" for r, (what, _) in
                         sorted(self._waiting.items()))  # fmt: skip


class Launched(dist._Work):
    """A call that was put on a stream."""

    def __init__(self, room: Room, rank: int, call: Call, where: str) -> None:
        super().__init__()
        self._room, self._rank, self._call, self._where = room, rank, call, where

    def wait(self, timeout: Any = None) -> bool:
        call = self._call
        self._room.wait(self._rank, lambda: call.done, lambda: f"{call.kind} in {self._where}")
        return True

    def is_completed(self) -> bool:
        return self._call.done


class BlockingGroup(dist.ProcessGroup):
    """One rank's end of a process group."""

    def __init__(self, options: Any, room: Room) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._rank, self._room, self._store = options.group_rank, room, options.store
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self._me = self._ranks[self._rank]
        self._name = options.group_id
        if room.eager:
            room.communicator(self._me, self._name, self._ranks)

    def size(self) -> int:
        return len(self._ranks)

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    def get_group_store(self) -> Any:
        return self._store

    @property
    def group_name(self) -> str:
        return str(self._name)

    def _launch(self, call: Call, numel: int, pair: tuple[int, ...] = ()) -> Launched:
        apart = bool(pair) and not self._room.eager
        ranks, name = (pair, f"{self._name}, messages") if apart else (self._ranks, self._name)
        self._room.calls[self._me].append(Issued(self._name, self._ranks, call.kind, numel))
        on = self._room.communicator(self._me, name, ranks)
        self._room.launch(self._me, on, call)
        return Launched(self._room, self._me, call, f"group {name} of ranks {ranks}")

    def batch(self, ops: Sequence[dist.P2POp]) -> list[Launched]:
        """Starts messages as one call."""
        messages = [
            Message(self._ranks[op.group_peer], op.op is dist.isend, op.tensor.detach())
            for op in ops
        ]
        return [self._launch(Call("batch", messages=messages), sum(m.tensor.numel()
                                                                   for m in messages))]  # fmt: skip

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Launched:
        return self._message(tensors[0], self._ranks[to], True)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> Launched:
        return self._message(tensors[0], self._ranks[source], False)

    def _message(self, x: Tensor, peer: int, sends: bool) -> Launched:
        kind = f"{'a send to' if sends else 'a receive from'} rank {peer}"
        pair = min(self._me, peer), max(self._me, peer)
        message = Message(peer, sends, x.detach())
        return self._launch(Call(kind, messages=[message]), x.numel(), pair)

    def _together(self, kind: str, alike: tuple[Any, ...], tensors: Any, run: Any) -> Launched:
        numel = sum(x.numel() for x in tensors)
        return self._launch(Call(kind, alike, tensors=tensors, run=run), numel)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Launched:
        most = opts is not None and opts.reduceOp == dist.ReduceOp.MAX

        def run(every: dict[int, list[Tensor]]) -> None:
            stacked = torch.stack([x for (x,) in every.values()])
            found = stacked.amax(0) if most else stacked.sum(0)
            for (x,) in every.values():
                x.detach().copy_(found)

        return self._together("all_reduce", (tuple(tensors[0].shape), most), tensors, run)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Launched:
        root = self._ranks[opts.rootRank]

        def run(every: dict[int, list[Tensor]]) -> None:
            for (x,) in every.values():
                x.detach().copy_(every[root][0])

        return self._together("broadcast", (root, tuple(tensors[0].shape)), tensors, run)

    def all_gather_single(self, out: Tensor, own: Tensor, opts: Any = None) -> Launched:
        def run(every: dict[int, list[Tensor]]) -> None:
            whole = torch.cat([x.reshape(-1) for _, x in every.values()])
            for into, _ in every.values():
                into.detach().view(-1).copy_(whole)

        return self._together("all_gather", (own.numel(),), [out, own], run)

    def all_to_all_single(
        self, out: Tensor, own: Tensor, takes: list[int], gives: list[int], opts: Any = None
    ) -> Launched:
        n = len(self._ranks)
        takes, gives = ([*s] or [x.shape[0] // n] * n for s, x in ((takes, out), (gives, own)))

        def run(every: dict[int, Any]) -> None:
            sent = {r: x.split([int(s) for s in splits]) for r, (_, x, _, splits) in every.items()}
            for at, r in enumerate(self._ranks):
                every[r][0].detach().copy_(torch.cat([sent[s][at] for s in self._ranks]))

        tensors = [out, own, torch.tensor(takes), torch.tensor(gives)]
        return self._together("all_to_all", (), tensors, run)

    def barrier(self, opts: Any = None) -> Launched:
        return self.allreduce([torch.zeros(1)])

    _allgather_base = all_gather_single  # names of torch before 2.13
    alltoall_base = all_to_all_single


_room: list[Room] = []


def _made(options: Any, _: Any) -> BlockingGroup:
    return BlockingGroup(options, _room[-1])


dist.Backend.register_backend(BACKEND, _made, extended_api=True, devices=["cpu"])


@contextmanager
def _threaded(room: Room) -> Iterator[None]:
    """Has torch.distributed know each thread as a rank."""
    plain = dist.batch_isend_irecv

    def batch(ops: list[dist.P2POp]) -> list[Any]:
        group = ops[0].group
        return group.batch(ops) if isinstance(group, BlockingGroup) else plain(ops)

    _room.append(room)
    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    dist.batch_isend_irecv = batch
    try:
        yield
    finally:
        dist.batch_isend_irecv = plain
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
        _room.pop()


def run_blocking(
    fn: Callable[..., Any], world: int, *args: Any, eager: bool = False
) -> tuple[list[Any], Room]:
    """Returns `fn(rank, *args)` of each rank, a thread of this process, and what they did.

    Args:
        fn: what a rank does; its default group is of all ranks, and blocks.
        world: number of ranks.
        args: passed on to `fn`.
        eager: whether communicators are made with their groups.

    Raises:
        HangError: ranks wait for each other.
    """
    room, store = Room(world, eager), dist.HashStore()
    found: list[Any] = [None] * world
    problems: list[BaseException] = []

    def main(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world)
                found[rank] = fn(rank, *args)
        except BaseException as e:
            problems.append(e)
        finally:
            room.leave(rank)

    with _threaded(room):
        threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * LIMIT_S)
    if problems:
        raise next((e for e in problems if isinstance(e, HangError)), problems[0])
    return found, room
