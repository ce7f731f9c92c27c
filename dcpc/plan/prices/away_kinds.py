"""Saved values that leave the device, kind by kind, and the seconds of the wait for them.

Of equal blocks the same values leave, so a kind is a value of each copy of a block, or one value.
A level is a share of the bytes that could leave, which leave in the order of forward: what is made
first is away the longest, and is needed back when the most is freed. Levels beyond `LEVELS` are the
same shares of the largest first: of more blocks, so that the link has longer for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from torch import fx

from dcpc.codegen import ARRIVE, ASK, GONE, LEAVE, LoweredPair
from dcpc.ir import OUTSIDE, Fold, Schedule
from dcpc.symbolic_profile import END, START, Device, Events, Folding, Meter

SHARE = 0.999  # kinds beyond this share of the bytes that could leave stay
_KINDS: dict[object, str] = {LEAVE: START, GONE: END, ASK: START, ARRIVE: END}
# Names of the values of each kind, and their bytes, in the order of forward.
AwayKinds: TypeAlias = tuple[tuple[tuple[str, ...], float], ...]
LEVELS = 1024


def kinds_of(
    lowering: LoweredPair,
    schedule: Schedule,
    copies: Fold | None,
    meter: Meter,
    sizes: Mapping[str, int],
) -> AwayKinds:
    """Returns the kinds of saved values that could leave, in the order of forward.

    Those of repeated blocks are in the place of the first, the largest first.

    Args:
        lowering: graph of the schedule.
        schedule: schedule in which all values stay.
        copies: number of calls that each node of a folded program stands for; None: one.
        meter: evaluator of the graph's costs.
        sizes: size of each integer of the graph, at which they are weighed.
    """
    able = lowering.able_to_leave(schedule)
    size_bytes = meter.sizes(able, sizes)
    found: dict[object, list[int]] = {}
    seen: dict[object, int] = {}
    for i, node in enumerate(able):
        run, copy = OUTSIDE if copies is None else copies.copy(node.name)
        like = run, copy, str(node.target), size_bytes[i]
        seen[like] = seen.get(like, 0) + 1
        kind: object = node if (run, copy) == OUTSIDE else (run, *like[2:], seen[like])
        found.setdefault(kind, []).append(i)

    def all_bytes(own: Sequence[int]) -> float:
        count = 1 if copies is None else sum(copies.count(able[i].name) for i in own)
        return float(size_bytes[own[0]]) * count

    kinds = sorted(found.values(), key=lambda own: (-all_bytes(own), own[0]))
    totals = [*accumulate(map(all_bytes, kinds))]
    kept = [k for k, t in zip(kinds, totals, strict=True) if t - all_bytes(k) < SHARE * totals[-1]]
    run_of = [OUTSIDE if copies is None else copies.copy(able[own[0]].name) for own in kept]
    begins = {run: min(own[0] for r, own in zip(run_of, kept, strict=True) if r == run)
              for run in {*run_of} - {OUTSIDE}}  # fmt: skip
    order = sorted(zip(run_of, kept, strict=True), key=lambda one: begins.get(one[0], one[1][0]))
    return tuple((tuple(able[i].name for i in own), all_bytes(own)) for _, own in order)


def at_level(kinds: AwayKinds, level: int) -> set[str]:
    """Returns the names of the values that leave at a level; at `LEVELS` and twice that all do."""
    if level > LEVELS:
        kinds, level = tuple(sorted(kinds, key=lambda kind: -kind[1])), level - LEVELS
    going, left = list[tuple[str, ...]](), sum(size for _, size in kinds) * level / LEVELS
    for i, (names, size) in enumerate(kinds):
        if level < LEVELS and size > left:
            going.append(min((k for k in kinds[i:] if k[1] >= left), key=lambda k: k[1])[0])
            break
        going.append(names)
        left -= size
    return {name for names in going for name in names}


def events_of(
    schedule: Schedule,
    copies: Fold | None,
    meter: Meter,
    sizes: Mapping[str, int],
    device: Device,
) -> tuple[Events, Events]:
    """Returns the starts and ends of copies of forward and of backward, of all copies of blocks."""
    of = {ask: value for ask, value in schedule.returning}
    again = set(schedule.forward)
    found = []
    for calls, forward in ((schedule.forward, True), (schedule.backward, False)):
        seconds = meter.seconds(calls, sizes, device, forward=forward).tolist()
        moved = [of.get(n) or (n.args[0] if n.target is LEAVE else None) for n in calls]
        nodes = [n for n in moved if isinstance(n, fx.Node)]
        each = dict(zip(nodes, meter.sizes(nodes, sizes).tolist(), strict=True))
        foldings = (
            Folding.forward(copies, calls, {})
            if forward
            else Folding.backward(copies, calls, again, False, {})
        )
        events, before_s = [], 0.0
        for i in _order(len(calls), foldings):
            before_s += seconds[i]
            kind = _KINDS.get(calls[i].target)
            if kind is not None:
                value = moved[i]
                events.append((before_s, kind, each[value] if isinstance(value, fx.Node) else 0.0))
                before_s = 0.0
        found.append(events)
    return found[0], found[1]


def _order(count: int, foldings: Sequence[Folding]) -> Iterator[int]:
    """Yields positions of calls, those of middle copies as often as they stand for copies."""
    start = 0
    for folding in foldings:
        yield from range(start, folding.first)
        for _ in range(1 + folding.times):
            yield from range(folding.first, folding.stop)
        start = folding.stop
    yield from range(start, count)
