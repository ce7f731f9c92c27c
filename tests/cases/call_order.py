"""What collectives each rank calls, in which order, and whether ranks could wait in a circle.

    with recording() as calls:      # on each rank
        compiled.train_step(step)
    check_alike(every_ranks_calls)  # each group's ranks call the same
    circle(every_ranks_calls)       # [] if one order of all calls is that of each rank

A GPU may run only one call at a time. So a rank's calls wait for each other in the order in which
they were made, whatever their groups, and each waits for the same call of its group's other ranks.
No rank waits for ever if and only if these waits have no circle.
"""

from __future__ import annotations

import inspect
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist

# What is called -> the argument whose elements all ranks have alike; "": ranks differ.
SEEN = {
    "all_reduce": "tensor", "broadcast": "tensor", "all_gather_single": "input_tensor",
    "all_gather_into_tensor": "input_tensor", "all_to_all_single": "", "barrier": "",
    "isend": "tensor", "irecv": "tensor", "send": "tensor", "recv": "tensor",
}  # fmt: skip
MESSAGES = ("isend", "irecv", "send", "recv")

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Made:
    """A call as a rank made it.

    Attributes:
        group: its name.
        ranks: of the group.
        kind: what was called.
        numel: elements that all of its ranks have alike; -1: they differ.
        messages: of a batch or of one message: (other rank, whether this one sends, elements).
    """

    group: str
    ranks: Ranks
    kind: str
    numel: int
    messages: tuple[tuple[int, bool, int], ...] = ()


@contextmanager
def recording() -> Iterator[list[Made]]:
    """Takes down the calls of this rank."""
    calls: list[Made] = []
    made = {name: _recorder(name, calls) for name in SEEN if hasattr(dist, name)}
    plain = {recorder: getattr(dist, name) for name, recorder in made.items()}
    message = dist.P2POp

    def p2p_op(op: Any, *args: Any, **kwargs: Any) -> Any:  # it takes torch's own functions alone
        return message(plain.get(op, op), *args, **kwargs)

    with ExitStack() as stack:
        more = {"batch_isend_irecv": _batches(calls), "P2POp": p2p_op}
        for name, instead in (*made.items(), *more.items()):
            stack.enter_context(mock.patch.object(dist, name, instead))
        yield calls


def _group(pg: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, Ranks]:
    found = dist.group.WORLD if pg is None else pg
    assert isinstance(found, dist.ProcessGroup)
    return found, tuple(dist.get_process_group_ranks(found))


def _recorder(name: str, calls: list[Made]) -> Any:
    plain = getattr(dist, name)
    signature = inspect.signature(plain)

    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        pg, ranks = _group(given.get("group"))
        numel = given[SEEN[name]].numel() if SEEN[name] else -1
        messages: tuple[tuple[int, bool, int], ...] = ()
        if name in MESSAGES:
            side = "dst" if name.endswith("send") else "src"
            peer = given.get(side)
            peer = ranks[given[f"group_{side}"]] if peer is None else peer
            messages = ((peer, side == "dst", numel),)
        calls.append(Made(str(pg.group_name), ranks, name, numel, messages))
        return plain(*args, **kwargs)

    return call


def _batches(calls: list[Made]) -> Any:
    plain = dist.batch_isend_irecv
    sends = dist.isend

    def call(ops: list[dist.P2POp]) -> Any:
        pg, ranks = _group(ops[0].group)
        messages = tuple((ranks[op.group_peer], op.op is sends, op.tensor.numel()) for op in ops)
        calls.append(Made(str(pg.group_name), ranks, "batch", -1, messages))
        return plain(ops)

    return call


def check_alike(every: Sequence[Sequence[Made]]) -> None:
    """Asserts that ranks of a group call the same in it, and that each message is received."""
    by_group: dict[tuple[str, Ranks], dict[int, list[tuple[str, int]]]] = defaultdict(dict)
    for rank, calls in enumerate(every):
        for made in calls:
            assert rank in made.ranks, f"rank {rank} calls in a group that it is not in: {made}"
            mine = by_group[made.group, made.ranks].setdefault(rank, [])
            if not made.messages:
                mine.append((made.kind, made.numel))
    for (name, ranks), found in by_group.items():
        first = found.get(ranks[0], [])
        for rank in ranks:
            assert found.get(rank, []) == first, f"group {name} of {ranks}: rank {rank} differs"
    sent, received = _messages(every, True), _messages(every, False)
    assert sent == received, "messages that are sent are not those that are received"


def _messages(
    every: Sequence[Sequence[Made]], sends: bool
) -> dict[tuple[str, int, int], list[int]]:
    """Returns (group, sender, receiver) -> elements of each message, in the order of one side."""
    found: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for rank, calls in enumerate(every):
        for made in calls:
            for peer, sending, numel in made.messages:
                if sending is sends:
                    pair = (rank, peer) if sends else (peer, rank)
                    found[made.group, *pair].append(numel)
    return dict(found)


def circle(every: Sequence[Sequence[Made]]) -> list[str]:
    """Returns calls that wait for each other in a circle, [] if none do.

    Args:
        every: calls of each rank, alike.
    """
    nodes = _nodes(every)
    after: dict[object, set[object]] = defaultdict(set)
    for mine in nodes:
        for a, b in itertools.pairwise(mine):
            if a != b:
                after[a].add(b)
    return _cycle(after)


def _nodes(every: Sequence[Sequence[Made]]) -> list[list[object]]:
    """Returns for each rank's calls what runs at once on all of its ranks, one name for all.

    Batches that have a message between them are one: neither ends without the other.
    """
    joined: dict[object, object] = {}

    def root(x: object) -> object:
        while joined.setdefault(x, x) != x:
            x = joined[x]
        return x

    found: list[list[object]] = []
    for rank, calls in enumerate(every):
        count: dict[object, int] = defaultdict(int)
        mine: list[object] = []
        for place, made in enumerate(calls):
            key: object = (made.group, made.ranks)
            if made.messages:
                key = (rank, place)
                for peer, sending, _ in made.messages:
                    pair = (rank, peer) if sending else (peer, rank)
                    line = (made.group, pair, sending)
                    other = (made.group, pair, count[line])
                    joined[root(key)] = root(other)
                    count[line] += 1
                mine.append(key)
            else:
                mine.append((*made.ranks, made.group, count[key]))
                count[key] += 1
        found.append(mine)
    return [[root(x) for x in mine] for mine in found]


def _cycle(after: Mapping[object, set[object]]) -> list[str]:
    """Returns the nodes of a cycle of a directed graph."""
    done: set[object] = set()
    for start in list(after):
        path: list[object] = []
        on_path: set[object] = set()
        stack: list[tuple[object, bool]] = [(start, False)]
        while stack:
            node, leaves = stack.pop()
            if leaves:
                on_path.discard(path.pop())
                done.add(node)
            elif node in on_path:
                return [str(n) for n in path[path.index(node) :]]
            elif node not in done:
                path.append(node)
                on_path.add(node)
                stack.append((node, True))
                stack += [(following, False) for following in after.get(node, ())]
    return []
