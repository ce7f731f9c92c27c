"""The caching allocator's rules, by hand as in torch's source, and what always holds."""

import numpy as np
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.symbolic_profile.memory.allocator import CachingAllocator, rounded, segment_bytes, usage
from dcpc.symbolic_profile.memory.memory import MemoryTimeline

KIB, MIB = 1 << 10, 1 << 20


def test_sizes_are_whole_blocks_of_512_bytes():
    assert [rounded(n) for n in (0, 1, 512, 513, 1024)] == [0, 512, 512, 1024, 1024]


def test_segments_are_of_2_of_20_or_of_whole_2_mib():
    """`get_allocation_size`: kSmallBuffer, kLargeBuffer, kRoundLarge; 10 MiB is large already."""
    sizes = {512: 2, MIB: 2, MIB + 512: 20, 10 * MIB - 512: 20, 10 * MIB: 10, 11 * MIB: 12}
    assert {size: segment_bytes(size) // MIB for size in sizes} == sizes


def test_small_blocks_share_a_segment_and_join_when_freed():
    gpu = CachingAllocator()
    a, b, c = (gpu.allocate(700 * KIB) for _ in range(3))
    assert gpu.reserved_bytes == 4 * MIB  # two in the first, with 648 KiB left over
    assert (a.address, b.address, c.address) == (0, 700 * KIB, 2 * MIB)
    gpu.release(a)
    assert gpu.allocate(648 * KIB).address == 1400 * KIB  # the smallest that is enough
    gpu.release(b)
    # 1348 KiB are left behind c, 1400 where a and b were.
    assert gpu.allocate(1000 * KIB).address == 2748 * KIB
    assert gpu.allocate(1000 * KIB).address == 0
    assert gpu.reserved_bytes == 4 * MIB
    assert gpu.allocated_bytes == (1000 + 1000 + 648 + 700) * KIB


def test_what_is_left_of_a_large_block_goes_along_up_to_a_mib():
    """`should_split`: more than kSmallSize must remain."""
    gpu = CachingAllocator()
    whole = gpu.allocate(12 * MIB)
    gpu.release(whole)
    kept = gpu.allocate(11 * MIB)
    assert (kept.size_bytes, gpu.allocated_bytes, gpu.reserved_bytes) == (
        12 * MIB, 12 * MIB, 12 * MIB
    )  # fmt: skip
    gpu.release(kept)
    cut = gpu.allocate(11 * MIB - 512)
    assert cut.size_bytes == 11 * MIB - 512
    assert gpu.allocate(MIB + 512).address == cut.size_bytes


def test_middle_sizes_are_cut_from_20_mib_and_small_ones_never_from_there():
    gpu = CachingAllocator()
    first, second = gpu.allocate(9 * MIB), gpu.allocate(9 * MIB)
    assert gpu.reserved_bytes == 20 * MIB
    assert second.address == 9 * MIB
    assert second.size_bytes == 9 * MIB  # 2 MiB are left
    gpu.allocate(MIB)
    assert gpu.reserved_bytes == 22 * MIB
    gpu.release(first)
    assert gpu.allocate(9 * MIB).address == first.address


def test_of_equal_blocks_the_lowest_is_taken_and_no_bytes_have_none():
    gpu = CachingAllocator()
    blocks = [gpu.allocate(4 * KIB) for _ in range(5)]
    for i in (3, 1):
        gpu.release(blocks[i])
    assert gpu.allocate(4 * KIB).address == 4 * KIB
    assert gpu.allocate(0) is None
    gpu.release(None)


def timeline(events: list[tuple[int, int, int]], points: int) -> MemoryTimeline:
    """A timeline of (size, weight, storage), its last point after so many of them."""
    sizes, weights, storages = zip(*events, strict=True)
    return MemoryTimeline(
        sizes=(sympy.Integer(0),),
        steps=np.array(sizes),
        weights=np.array(weights),
        storages=storages,
        done=np.array([points]),
        transients=np.array([0]),
        names=("end",),
        saved={},
        gradients={},
        returned={},
        shared={},
    )


def test_blocks_of_the_first_step_serve_the_second():
    """A block that was freed early is split; the second step finds its pieces joined again."""
    values = [0, 6 * MIB, 3 * MIB, 15 * MIB]
    events = [(1, 1, 1), (2, 1, 2), (1, -1, 1), (3, 1, 3), (2, -1, 2), (3, -1, 3)]
    found = usage(timeline(events, 4), values, [5 * MIB])
    assert found.requested_bytes == (5 + 3 + 15) * MIB
    assert found.allocated_bytes == (5 + 3 + 16) * MIB  # 15 MiB have 16 to themselves
    assert found.reserved_bytes == (20 + 16) * MIB


def test_segments_without_a_block_are_given_back_where_the_device_is_full():
    """`malloc`: release_cached_blocks where cudaMalloc fails; a segment in use stays whole."""
    gpu = CachingAllocator(limit_bytes=64 * MIB)
    whole, part = gpu.allocate(30 * MIB), gpu.allocate(9 * MIB)  # the rest of a 20 MiB segment
    gpu.release(whole)
    large = gpu.allocate(32 * MIB)
    assert (gpu.reserved_bytes, gpu.given_back) == (52 * MIB, 1)
    assert gpu.most_reserved_bytes == 52 * MIB, "30 + 20 before, 20 + 32 after"
    gpu.release(large)
    gpu.allocate(46 * MIB)  # no room beside the segment that part lies in: it is an error
    assert gpu.most_reserved_bytes == 66 * MIB
    assert not part.free


def test_copies_that_stand_for_more_are_run_as_often():
    values = [0, 2 * MIB]
    deep = [(1, 1, 1), (1, 3, 1), (1, -3, 1), (1, -1, 1)]
    every = [(1, 1, i) for i in range(4)] + [(1, -1, i) for i in reversed(range(4))]
    found, expected = (usage(timeline(e, n), values, []) for e, n in ((deep, 2), (every, 4)))
    assert found == expected
    assert found.requested_bytes == 8 * MIB


def test_what_a_copy_frees_that_is_not_there_stays_up_to_the_end():
    """Each of three copies frees what the one before handed on, and the first has none before."""
    values = [0, 2 * MIB, 12 * MIB]
    deep = [(2, -3, -1), (2, 3, -1), (1, 1, 1), (1, -1, 1)]
    found = usage(timeline(deep, 2), values, [])
    assert found.allocated_bytes == 14 * MIB


SIZES = st.one_of(st.integers(0, 4 * KIB), st.integers(0, 3 * MIB), st.integers(9 * MIB, 25 * MIB))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SIZES, st.integers(0, 3)), max_size=60))
def test_blocks_never_overlap_and_segments_stay_whole(requests):
    gpu, held = CachingAllocator(), []
    asked = 0
    for size, frees in requests:
        before = gpu.reserved_bytes
        block = gpu.allocate(size)
        if block is not None:
            assert block.size_bytes >= size
            held.append(block)
            asked += size
        assert gpu.reserved_bytes - before in (0, segment_bytes(rounded(size)))
        for _ in range(min(frees, len(held))):
            gpu.release(held.pop(len(held) // 2))
        blocks = gpu.blocks()
        assert sum(b.size_bytes for b in blocks) == gpu.reserved_bytes >= gpu.allocated_bytes
        assert sum(b.size_bytes for b in held) == gpu.allocated_bytes
        assert all(not b.free for b in held)
        ends = [b.address + b.size_bytes for b in blocks]
        assert ends[:-1] == [b.address for b in blocks[1:]]
        # Neighbours of one segment are never both free: they would be one.
        assert not any(b.free and b.after is not None and b.after.free for b in blocks)
    for block in held:
        gpu.release(block)
    assert gpu.allocated_bytes == 0
    assert all(b.before is None and b.after is None for b in gpu.blocks())
