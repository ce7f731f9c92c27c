"""First and best fit by trees give what looking through all bins gives."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.commands.simulate.barriers.packing.ranks import FreeRanks
from dcpc.commands.simulate.barriers.packing.rooms import Rooms, best_fit

sizes = st.lists(st.integers(1, 10), max_size=40)


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_first_fit_is_the_first_bin_with_room(items):
    tree, rooms, refused = Rooms(), [], {1, 4}
    for item in items:
        expected = next((b for b, r in enumerate(rooms) if r >= item and b not in refused), None)
        assert tree.first(item, lambda b: b not in refused) == expected
        at = len(rooms) if expected is None else expected
        rooms[at:] = rooms[at:] or [10]
        rooms[at] -= item
        tree.set(at, rooms[at])


@settings(max_examples=60, deadline=None)
@given(sizes)
def test_best_fit_is_the_fullest_bin_with_room(items):
    bins = best_fit(items, 10)
    rooms: list[int] = []
    for item in sorted(items, reverse=True):
        fits = [r for r in rooms if r >= item]
        rooms.append((min(fits) if fits else 10) - item)
        if fits:
            rooms.remove(min(fits))
    assert sorted(i for b in bins for i in b) == list(range(len(items)))
    assert sorted(10 - sum(items[i] for i in b) for b in bins) == sorted(rooms)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20), max_size=30))
def test_ranks_come_from_the_node_with_least_room(degrees):
    free = FreeRanks.all(24, 8)
    for degree in degrees:
        rooms = [h - lo for lo, h in zip(free.low, free.high, strict=True)]
        before = free.count()
        first = free.take(degree)
        fits = [r for r in rooms if r >= degree]
        if degree > 8:
            assert first is None or free.count() == before - degree
        elif not fits:
            assert first is None
        else:
            node = first // 8
            assert rooms[node] == min(fits)
            assert free.low[node] == first + degree
