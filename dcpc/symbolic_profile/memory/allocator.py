"""Simulates torch's CUDA caching allocator: rounded blocks, cut from segments.

    request    rounded up to 512 bytes; a block of that size is cut
               up to 1 MiB        from segments of 2 MiB
               below 10 MiB       from segments of 20 MiB
               else               from a segment of its size, rounded up to 2 MiB
    block      the smallest free one that is large enough, of equal ones the one at the lowest
               address; what is left of it is a free block, unless that is under 512 bytes (of
               small segments) or up to 1 MiB (of the others): then it goes along
    free       joins free neighbours of the same segment
    full       where the device has no room for a segment, all segments without a block are given
               back first; what then does not fit is an error

`torch.cuda.max_memory_allocated` counts blocks, `max_memory_reserved` segments, and only segments
are memory of the device. Source: torch 2.13, c10/core/AllocatorConfig.h (sizes) and
c10/cuda/CUDACachingAllocator.cpp (`round_size`, `get_allocation_size`, `get_free_block`,
`should_split`, `try_merge_blocks`, `release_cached_blocks`), with its default settings.

Not followed: other streams than one, and `expandable_segments`. Segments are taken to lie one after
the other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from dcpc.symbolic_profile.memory.memory import MemoryTimeline

BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20
SMALL_SEGMENT_BYTES = 2 << 20
LARGE_BYTES = 10 << 20
LARGE_SEGMENT_BYTES = 20 << 20
SEGMENT_ROUNDING_BYTES = 2 << 20
LEAST_REST_BYTES = SMALL_BYTES + 1  # of a large block
# Later steps reserve up to 0.4% more than the first (STDiT3-XL/2, 25 buckets on an H200).
SPARE = 0.98


def rounded(size_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """Returns a size rounded up to whole blocks, bytes; 0 bytes need no block."""
    return -(-size_bytes // block_bytes) * block_bytes


def segment_bytes(size_bytes: int) -> int:
    """Returns the bytes of the segment that is made for a block where no free one is enough."""
    if size_bytes <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size_bytes < LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return rounded(size_bytes, SEGMENT_ROUNDING_BYTES)


@dataclass(slots=True, eq=False)
class SegmentBlock:
    """A piece of a segment.

    Attributes:
        address: address of its first byte.
        size_bytes: size.
        small: whether its segment holds small blocks.
        free: whether it can be allocated.
        before: the piece before it in its segment.
        after: the piece after it.
    """

    address: int
    size_bytes: int
    small: bool
    free: bool = False
    before: SegmentBlock | None = None
    after: SegmentBlock | None = None


class CachingAllocator:
    """Allocates as torch does on one stream of a GPU, without any memory.

    Args:
        limit_bytes: memory of the device. Segments beyond it are counted all the same.

    Attributes:
        allocated_bytes: bytes of the allocated blocks.
        reserved_bytes: bytes of all segments.
        most_allocated_bytes: maximum of `allocated_bytes` since `reset`.
        most_reserved_bytes: maximum of `reserved_bytes` since `reset`.
        given_back: segments returned to the device since `reset`.
    """

    def __init__(self, limit_bytes: float = inf) -> None:
        self._limit_bytes = limit_bytes
        self._end = self.most_reserved_bytes = self.given_back = 0
        self.allocated_bytes = self.reserved_bytes = self.most_allocated_bytes = 0
        # Free blocks of either kind of segment by size, then address.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._at: dict[int, SegmentBlock] = {}

    def reset(self) -> None:
        """Forgets the most that was allocated."""
        self.most_allocated_bytes, self.given_back = self.allocated_bytes, 0
        self.most_reserved_bytes = self.reserved_bytes

    def allocate(self, size_bytes: int) -> SegmentBlock | None:
        """Returns a block of at least so many bytes; None for no bytes."""
        if not size_bytes:
            return None
        size = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        small = size <= SMALL_BYTES
        free = self._free[small]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = self._at[free.pop(place)[1]]
        else:
            block = self._segment(segment_bytes(size), small)
        if block.size_bytes - size >= (BLOCK_BYTES if small else LEAST_REST_BYTES):
            self._split(block, size)
        block.free = False
        self.allocated_bytes += block.size_bytes
        if self.allocated_bytes > self.most_allocated_bytes:
            self.most_allocated_bytes = self.allocated_bytes
        return block

    def use(self, size_bytes: int) -> None:
        """Allocates so many bytes and takes them back at once."""
        size = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        small = size <= SMALL_BYTES
        free = self._free[small]
        place = bisect_left(free, (size, 0))
        if place == len(free):
            self.release(self.allocate(size_bytes))
            return
        # The blocks are again what they were.
        found = free[place][0]
        taken = size if found - size >= (BLOCK_BYTES if small else LEAST_REST_BYTES) else found
        if self.allocated_bytes + taken > self.most_allocated_bytes:
            self.most_allocated_bytes = self.allocated_bytes + taken

    def release(self, block: SegmentBlock | None) -> None:
        """Takes a block back."""
        if block is None:
            return
        assert not block.free, f"the block at {block.address} is free"
        self.allocated_bytes -= block.size_bytes
        free = self._free[block.small]
        for other in (block.before, block.after):
            if other is not None and other.free:
                del free[bisect_left(free, (other.size_bytes, other.address))]
                first, second = (other, block) if other is block.before else (block, other)
                block = self._join(first, second)
        block.free = True
        insort(free, (block.size_bytes, block.address))

    def _segment(self, size_bytes: int, small: bool) -> SegmentBlock:
        if self.reserved_bytes + size_bytes > self._limit_bytes:
            self._give_back()
        block = self._at[self._end] = SegmentBlock(self._end, size_bytes, small)
        self._end += size_bytes
        self.reserved_bytes += size_bytes
        self.most_reserved_bytes = max(self.most_reserved_bytes, self.reserved_bytes)
        return block

    def _give_back(self) -> None:
        """Gives back the segments that are one free block."""
        for free in self._free.values():
            for size_bytes, address in [*free]:
                block = self._at[address]
                if block.before is None and block.after is None:
                    free.remove((size_bytes, address))
                    del self._at[address]
                    self.reserved_bytes -= size_bytes
                    self.given_back += 1

    def blocks(self) -> list[SegmentBlock]:
        """Returns all blocks, by address."""
        return [self._at[address] for address in sorted(self._at)]

    def _split(self, block: SegmentBlock, size_bytes: int) -> None:
        rest = SegmentBlock(
            block.address + size_bytes, block.size_bytes - size_bytes, block.small, True
        )
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size_bytes = rest, size_bytes
        self._at[rest.address] = rest
        insort(self._free[block.small], (rest.size_bytes, rest.address))

    def _join(self, first: SegmentBlock, second: SegmentBlock) -> SegmentBlock:
        """Makes two neighbours one, the first."""
        first.size_bytes += second.size_bytes
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self._at[second.address]
        return first


@dataclass(frozen=True, slots=True)
class Usage:
    """Memory of a GPU in a step that is not the first.

    Attributes:
        requested_bytes: peak of the requested bytes.
        allocated_bytes: peak of the allocated blocks, as `torch.cuda.max_memory_allocated` says.
        reserved_bytes: segments, as `torch.cuda.max_memory_reserved` says; more than the device has
            where the step does not fit.
        given_back: segments that a step returns to the device to make room for others. The device
            finishes all its work before that.
    """

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    given_back: int = 0


def usage(
    timeline: MemoryTimeline,
    values: Sequence[int],
    resident: Iterable[int],
    steps: int = 2,
    limit_bytes: float = inf,
) -> Usage:
    """Returns the GPU memory of a timeline's step, after `steps - 1` others.

    Args:
        timeline: allocations and frees of forward and backward.
        values: bytes of each numbered size of the timeline.
        resident: bytes of each tensor that stays: parameters, optimizer state, inputs.
        steps: number of steps to run; from the second on, segments of the one before exist. A step
            that leaves some of the device free is not repeated: memory hardly grows.
        limit_bytes: memory of the device.
    """
    device = CachingAllocator(limit_bytes)
    staying = 0
    for size in resident:
        device.allocate(size)
        staying += size
    events = _numbered(timeline)
    for _ in range(steps):
        device.reset()
        _run(device, events, values)
        if device.most_reserved_bytes <= SPARE * limit_bytes < inf:
            break
    requested = staying + int(timeline.live(np.array(values, dtype=np.int64)).max())
    most = device.most_allocated_bytes, device.most_reserved_bytes
    return Usage(requested, *most, device.given_back)


def _run(
    device: CachingAllocator, events: Iterable[tuple[int, int | None]], values: Sequence[int]
) -> None:
    """Runs a step.

    Args:
        device: allocator of the device.
        events: size and number of each allocation; the number's complement where it is freed, no
            number where it is freed at once.
        values: bytes of each size.
    """
    held: dict[int, SegmentBlock | None] = {}
    for size, number in events:
        if number is None:
            device.use(values[size])
        elif number >= 0:
            held[number] = device.allocate(values[size])
        else:
            device.release(held.pop(~number))
    for block in held.values():
        device.release(block)


def _numbered(timeline: MemoryTimeline) -> list[tuple[int, int | None]]:
    """Returns the events of a timeline in the form that `_run` takes.

    A free names its storage's block. Frees of copies that stand for others may have no block of
    their own: then the last block of that size is freed. Where there is none (it would come from a
    copy that is not run by itself), none is freed: the block stays up to the end of the step.
    """
    found: list[tuple[int, int | None]] = []
    # Numbers by size, then storage, the last one made at the end.
    held: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for number, (size, change, storage) in enumerate(_events(timeline)):
        own = held[size]
        if change > 0:
            blocks = own.pop(storage, None) or []
            blocks.append(number)
            own[storage] = blocks
            found.append((size, number))
        elif change == 0:
            found.append((size, None))
        elif own:
            storage = storage if storage in own else next(reversed(own))
            freed = own[storage].pop()
            if not own[storage]:
                del own[storage]
            if found[-1][1] == freed:
                found[-1] = size, None
            else:
                found.append((size, ~freed))
    return found


def _events(timeline: MemoryTimeline) -> Iterator[tuple[int, int, int]]:
    """Yields (size, 1, 0 or -1, storage): allocations, a point's transient, frees."""
    steps, weights = timeline.steps.tolist(), timeline.weights.tolist()
    storages, done = timeline.storages, timeline.done.tolist()
    at = 0
    transients = [*timeline.transients.tolist(), -1]
    for stop, transient in zip([*done, len(steps)], transients, strict=True):
        while at < stop:
            first, times = at, abs(weights[at])
            while at < stop and abs(weights[at]) == times:
                at += 1
            for _ in range(times):
                for i in range(first, at):
                    yield steps[i], 1 if weights[i] > 0 else -1, storages[i] if times == 1 else -1
        if transient >= 0:
            yield transient, 0, -1
