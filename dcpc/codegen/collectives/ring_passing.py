"""Passes keys and values from rank to rank, while each rank computes with those it has."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.codegen.collectives.collectives import group_named, on_wire, wire_log
from dcpc.ops.attention import Backward, Forward, accumulated
from dcpc.ops.ring_route import DIRECTIONS, Route


@dataclass(frozen=True, slots=True)
class KeysAndValues:
    """Keys and values, or their gradients, as views of one buffer."""

    buffer: Tensor
    k: Tensor
    v: Tensor

    @staticmethod
    def empty(k: Tensor, v: Tensor, rows: int, dtype: torch.dtype) -> KeysAndValues:
        """Returns empty memory for `rows` rows of keys and values shaped like these."""
        shapes = [(*x.shape[:2], rows, x.shape[3]) for x in (k, v)]
        sizes = [a * b * c * d for a, b, c, d in shapes]
        buffer = k.new_empty(sum(sizes), dtype=dtype)
        parts = buffer.split(sizes)
        return KeysAndValues(buffer, *(x.view(s) for x, s in zip(parts, shapes, strict=True)))


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Messages in flight, and the memory that must be held until they have arrived."""

    works: list[dist.Work]
    memory: list[Tensor]

    def wait(self) -> None:
        """Waits for all messages, and releases the memory."""
        for work in self.works:
            work.wait()
        self.works.clear()
        self.memory.clear()


class RingPlace:
    """One rank's place in the ring.

    Args:
        way: route of the keys.
        group: name of the process group.
        k: keys of the rank `[b, g, t, d]`.
        v: values of the rank `[b, g, t, e]`.
    """

    def __init__(self, way: Route, group: str, k: Tensor, v: Tensor) -> None:
        self._pg = group_named(group)
        self._rank = self._pg.rank()
        self.way, self.k, self.v = way, k, v
        assert self._pg.size() == way.p, f"a ring of {way.p} ranks, a group of {self._pg.size()}"
        self.position = self._rank // way.across
        self.own = way.keys[self.position]
        self._sent = 0

    @property
    def chains(self) -> list[Chain]:
        """The directions in which keys travel: forward always, backward only if needed."""
        every = [Chain(self, direction) for direction in DIRECTIONS]
        return [chain for chain in every if chain.direction > 0 or chain.last]

    def empty(self, owner: int, dtype: torch.dtype) -> KeysAndValues:
        """Returns empty memory for the rows of a ring position."""
        return KeysAndValues.empty(self.k, self.v, self.way.rows(owner), dtype)

    def post(self, *messages: tuple[KeysAndValues | None, int, bool]) -> UnderWay:
        """Starts messages, each (rows, distance in ring positions to the peer, whether to send)."""
        ops, held = [], []
        for rows, distance, send in messages:
            if rows is None or not rows.buffer.numel():
                continue
            peer = (self._rank + distance * self.way.across) % self.way.p
            wire = on_wire(rows.buffer)
            kind = dist.isend if send else dist.irecv
            ops.append(dist.P2POp(kind, wire, group=self._pg, group_peer=peer))
            held.append(rows.buffer)
            self._sent += rows.buffer.nbytes if send else 0
        return UnderWay(dist.batch_isend_irecv(ops) if ops else [], held)

    def log(self) -> None:
        """Adds the bytes sent to the wire log."""
        wire_log.add("ring", self._sent)


@dataclass(frozen=True, slots=True)
class Chain:
    """One direction round the ring: 1 to the next position, -1 to the previous one."""

    ring: RingPlace
    direction: int

    @property
    def last(self) -> int:
        """The last step at which any rank receives keys."""
        return max(self.ring.way.hops(self.direction))

    def owner(self, step: int) -> int | None:
        """Returns the ring position whose keys this rank has at a step, or None."""
        return self.ring.way.held(self.ring.position, step, self.direction)

    def passes_on(self, step: int) -> bool:
        """Returns whether this rank sends on the keys that it has at a step."""
        owner = self.owner(step)
        return owner is not None and step < self.ring.way.hops(self.direction)[owner]

    def packed(self) -> KeysAndValues | None:
        """Returns a packed copy of this rank's keys and values to send, or None if not sent."""
        if not self.passes_on(0):
            return None
        mine = self.ring.empty(self.ring.position, self.ring.k.dtype)
        mine.k.copy_(self.ring.k)
        mine.v.copy_(self.ring.v)
        return mine

    def next(self, step: int, held: KeysAndValues | None) -> tuple[KeysAndValues | None, UnderWay]:
        """Starts the next step's exchange, and returns the memory of the incoming keys."""
        owner = self.owner(step + 1)
        coming = None if owner is None else self.ring.empty(owner, self.ring.k.dtype)
        sent = held if self.passes_on(step) else None
        way = self.direction
        return coming, self.ring.post((sent, way, True), (coming, -way, False))


def pass_forward(ring: RingPlace, state: Forward) -> None:
    """Adds to `state` all keys that pass this rank, its own first."""
    for chain in ring.chains:
        held = chain.packed()
        for step in range(chain.last + 1):
            coming, under_way = chain.next(step, held)
            owner = chain.owner(step)
            if step == 0 and chain.direction > 0:
                state.add(ring.k, ring.v, ring.own)
            elif step and owner is not None and held is not None:
                state.add(held.k, held.v, ring.way.keys[owner])
            under_way.wait()
            held = coming


def pass_backward(ring: RingPlace, state: Backward) -> KeysAndValues:
    """Returns the gradients of this rank's keys and values, summed over all ranks."""
    first, *rest = ring.chains
    found = _gradients(first, state)
    assert found is not None, "a rank's own keys have a gradient"
    for chain in rest:
        more = _gradients(chain, state)
        if more is not None:
            found.buffer.add_(more.buffer)
    return found


def _gradients(chain: Chain, state: Backward) -> KeysAndValues | None:
    """Returns the gradients from one direction; the forward one includes this rank's own part.

    The gradients so far of the keys at this rank arrive from the previous rank one step after the
    keys. This rank adds its part and sends them on, or home if no later rank gets these keys.
    """
    ring, way = chain.ring, chain.direction
    dtype, hops = accumulated(ring.k.dtype), ring.way.hops(way)[ring.position]
    held = chain.packed()
    found = before = None
    behind = UnderWay([], [])
    for step in range(chain.last + 1):
        coming, under_way = chain.next(step, held)
        more = _own(chain, step, held, state)
        under_way.wait()
        held = coming
        behind.wait()
        if more is not None and before is not None:
            more.buffer.add_(before.buffer)
        before = None
        home = ring.empty(ring.position, dtype) if 0 < step == hops else None
        if step == hops:
            found = home or more
        following = chain.owner(step + 1) if step or way > 0 else None
        before = None if following is None else ring.empty(following, dtype)
        on = chain.passes_on(step)
        behind = ring.post(
            (more if on else None, way, True),
            (more if step and not on else None, -way * step, True),
            (before, -way, False),
            (home, way * step, False),
        )
    behind.wait()
    return found


def _own(
    chain: Chain, step: int, held: KeysAndValues | None, state: Backward
) -> KeysAndValues | None:
    """Returns this rank's part of the gradients of the keys that it has at a step."""
    ring, owner = chain.ring, chain.owner(step)
    if owner is None or (step == 0 and chain.direction < 0):
        return None
    more = ring.empty(owner, accumulated(ring.k.dtype))
    more.buffer.zero_()
    if step == 0:
        state.add(ring.k, ring.v, ring.own, more.k, more.v)
    elif held is not None:
        state.add(held.k, held.v, ring.way.keys[owner], more.k, more.v)
    return more
