"""Predicts the peak memory while backward passes one block, for a choice of saved values.

    backward's calls, in order     |--- last block ---|--- ... ---|--- first block ---|
    alive in a block's part        what all blocks before it save, a constant
                                   + this block's: saved, recomputed, gradients, transients

A block's part ends with the last call that reads one of its values. What a block makes again is
made right before its first use, as `codegen/joint/schedule.py` does it. Sizes are numbers here,
those at which choices are weighed; what a plan really needs is the profile's to say.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from dcpc.passes.recompute.block_cuts import ForwardCall

Reads = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ValueMemory:
    """The storages of values.

    Attributes:
        storages: call -> storages of its value, without those of parameters and inputs, which are
            always alive.
        size_bytes: storage -> bytes.
        transient_bytes: call -> bytes it needs while it runs; 0 without an entry.
        backward: calls made by differentiation, in execution order, and all their reads.
        gradients: names of the calls whose values stay alive to the end.
    """

    storages: Mapping[str, tuple[int, ...]]
    size_bytes: Mapping[int, float]
    transient_bytes: Mapping[str, float]
    backward: tuple[tuple[str, Reads], ...]
    gradients: frozenset[str]


class Timelines:
    """The part of backward that belongs to each block.

    Args:
        calls: calls of forward, in execution order.
        blocks: (first call, after the last) of each block.
        outside: names of the values that other blocks read.
        memory: storages of values, and the calls of backward.
    """

    def __init__(
        self,
        calls: Sequence[ForwardCall],
        blocks: Sequence[tuple[int, int]],
        outside: set[str],
        memory: ValueMemory,
    ) -> None:
        self._memory, self._outside = memory, outside
        self._calls = {c.name: c for c in calls}
        self._block = {c.name: i for i, (low, high) in enumerate(blocks) for c in calls[low:high]}
        self._names = [[c.name for c in calls[low:high]] for low, high in blocks]
        self._own = {name for name, _ in memory.backward}
        self._parts = self._ranges(len(blocks))
        self._last = self._last_uses()

    def _ranges(self, count: int) -> list[tuple[int, int]]:
        """Returns (first call of backward, after the last) of each block."""
        stops = [0] * count
        for i, (_, reads) in enumerate(self._memory.backward):
            for name in reads:
                if name in self._block and name not in self._outside:
                    stops[self._block[name]] = i + 1
        ranges = [(0, 0)] * count
        start = 0
        for block in reversed(range(count)):
            ranges[block] = (start, max(start, stops[block]))
            start = ranges[block][1]
        if count:
            ranges[0] = (ranges[0][0], len(self._memory.backward))
        return ranges

    def _last_uses(self) -> dict[int, int]:
        """Returns storage -> index of the last backward call that uses it."""
        last: dict[int, int] = {}
        for i, (name, reads) in enumerate(self._memory.backward):
            for used in (name, *reads):
                for storage in self._memory.storages.get(used, ()):
                    last[storage] = i
        for name in self._memory.gradients & self._own:
            for storage in self._memory.storages.get(name, ()):
                last[storage] = len(self._memory.backward)
        return last

    def shape(self, block: int) -> Hashable:
        """Returns a key that is equal for blocks with equal memory needs for each choice."""
        start, stop = self._parts[block]
        memory = self._memory
        return tuple(
            (
                sum(memory.size_bytes[s] for s in memory.storages.get(name, ())),
                memory.transient_bytes.get(name, 0.0),
                tuple(self._local(read, start) for read in reads),
            )
            for name, reads in memory.backward[start:stop]
        )

    def _local(self, name: str, start: int) -> Hashable:
        """Returns the key of a value that a part of backward reads."""
        size = sum(self._memory.size_bytes[s] for s in self._memory.storages.get(name, ()))
        return size, name in self._own, name in self._block

    def passing_bytes(self, block: int) -> float:
        """Returns the bytes made before a block's part of backward and alive beyond it."""
        return sum(self._memory.size_bytes[s] for s in self._passing(block))

    def _passing(self, block: int) -> set[int]:
        start, stop = self._parts[block]
        made = (s for name, _ in self._memory.backward[:start] for s in self._storages(name))
        return {s for s in made if self._last[s] >= stop}

    def crossing_bytes(self, block: int) -> float:
        """Returns the bytes of a block's values that other blocks read, which are saved."""
        found = {
            s for name in self._names[block] if name in self._outside
            for s in self._memory.storages.get(name, ())
        }  # fmt: skip
        return sum(self._memory.size_bytes[s] for s in found)

    def peak_bytes(self, block: int, again: frozenset[str]) -> float:
        """Returns the most bytes alive in a block's part, without the saved ones of others."""
        order, alive = self._order(block, again)
        memory, stop = self._memory, self._parts[block][1]
        last = {s: i for i, (_, used) in enumerate(order) for s in used}
        dying: list[list[int]] = [[] for _ in order]
        for storage, i in last.items():
            if self._last.get(storage, 0) < stop:
                dying[i].append(storage)
        live = sum(memory.size_bytes[s] for s in alive)
        most = live
        for i, (name, used) in enumerate(order):
            for storage in used:
                if storage not in alive:
                    alive.add(storage)
                    live += memory.size_bytes[storage]
            most = max(most, live + memory.transient_bytes.get(name, 0.0))
            for storage in dying[i]:
                if storage in alive:
                    alive.remove(storage)
                    live -= memory.size_bytes[storage]
        return most

    def _order(
        self, block: int, again: frozenset[str]
    ) -> tuple[list[tuple[str, list[int]]], set[int]]:
        """Returns (call, its storages) of a block's part, and the storages alive at its start."""
        start, stop = self._parts[block]
        order: list[tuple[str, list[int]]] = []
        alive: set[int] = set()
        done: set[str] = set()
        passing = self._passing(block)

        def touched(names: Reads) -> list[int]:
            counted = (n for n in names if n in self._own or self._block.get(n) == block)
            return [s for n in counted for s in self._storages(n) if s not in passing]

        def need(name: str) -> None:
            if name in done or self._block.get(name) != block:
                return
            done.add(name)
            call = self._calls[name]
            if name not in again or name in self._outside:
                alive.update(self._storages(name))
                return
            for source in call.reads:
                need(source)
            order.append((name, touched((name, *call.reads))))

        for name, reads in self._memory.backward[start:stop]:
            for read in reads:
                need(read)
            order.append((name, touched((name, *reads))))
        return order, alive | self._entering(block)

    def _entering(self, block: int) -> set[int]:
        """Returns the storages made before a block's part that die in it."""
        start, stop = self._parts[block]
        made = (s for name, _ in self._memory.backward[:start] for s in self._storages(name))
        return {s for s in made if start <= self._last[s] < stop}

    def _storages(self, name: str) -> tuple[int, ...]:
        return self._memory.storages.get(name, ())
