"""Buckets for given lengths: the sizes to which a dataset's samples are padded at least cost.

One named dim: with the lengths v(1) < ... < v(n), w samples of each and c(j) the cost of a sample
padded to v(j), the least cost of k buckets up to v(j) is

    f(k, j) = min over i < j of f(k-1, i) + c(j) * (w(i+1) + ... + w(j)),

which is tried for every i. Several dims: buckets begin as the shapes that occur and are merged, two
at a time, where that costs least; then each shape goes to the cheapest bucket that holds it, and
buckets shrink to what they hold. Shapes that differ in which dims are 0 or 1 are not merged: they
need different traces.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from dcpc.buckets.specs import MAX_SIZE, tokens_of
from dcpc.errors import BucketError

Shape = tuple[int, ...]  # of the named dims, in their order
Cost = Callable[[Shape], float]  # of one sample of this shape

DEFAULT_PADDING = 0.03  # of the cost, where neither it nor a number of buckets is given
_MOST_LENGTHS = 1024  # lengths of one dim that are told apart
_MOST_SHAPES = 96  # shapes of several dims that are told apart


@dataclass(frozen=True, slots=True)
class Chosen:
    """Buckets and their padding.

    Attributes:
        shapes: shape of each bucket, ascending by cost.
        padding: padding's fraction of the cost of all padded samples, 0 to 1.
    """

    shapes: tuple[Shape, ...]
    padding: float


def sizes_for(
    names: Sequence[str],
    lengths: object,
    count: int | None,
    padding: float | None,
    multiple_of: int | Mapping[str, int],
    seconds: Callable[[dict[str, int]], float] | None,
) -> list[dict[str, int]]:
    """Returns the sizes of buckets for samples of these lengths, as `Buckets.from_lengths` has it.

    Raises:
        BucketError: an argument is wrong.
    """
    by_name = dict(multiple_of) if isinstance(multiple_of, Mapping) else {}
    steps = [by_name.get(n, 1) if by_name else multiple_of for n in names]
    whole = [k for k in steps if isinstance(k, int) and 1 <= k <= MAX_SIZE]
    if len(whole) < len(steps) or by_name.keys() - {*names}:
        raise BucketError(
            f"Buckets.from_lengths: got multiple_of={multiple_of!r}; expected an integer from 1 "
            f"on, or one by name of {', '.join(names)}; correct it"
        )
    _check_choice(count, padding)

    def cost(shape: Shape) -> float:
        sizes = dict(zip(names, shape, strict=True))
        return float(tokens_of(shape)) if seconds is None else float(seconds(sizes))

    share = DEFAULT_PADDING if padding is None and count is None else padding
    chosen = best_shapes(counted(lengths, names), whole, count, share, cost)
    if chosen is None:
        raise BucketError(
            f"Buckets.from_lengths: got count={count}; expected more: samples differ in which of "
            "their dims are 0 or 1, and none of these is padded to another; raise count="
        )
    return [dict(zip(names, shape, strict=True)) for shape in chosen.shapes]


def _check_choice(count: object, padding: object) -> None:
    """Refuses a number of buckets or a share of padding that cannot be."""
    if count is not None and (not isinstance(count, int) or count < 1):
        raise BucketError(
            f"Buckets.from_lengths: got count={count!r}; expected an integer from 1 on; correct it"
        )
    if padding is not None and not (isinstance(padding, int | float) and 0 < padding < 1):
        raise BucketError(
            f"Buckets.from_lengths: got padding={padding!r}; expected a share above 0 and below 1, "
            "such as 0.03; correct it"
        )


def counted(lengths: object, names: Sequence[str]) -> Counter[Shape]:
    """Returns shape -> number of samples.

    Args:
        lengths: one entry a sample: an integer where there is one dim, else the length of each dim
            by its name; or a dataset with `dims(i)`.
        names: names of the dims.

    Raises:
        BucketError: there are no samples, or an entry is something else.
    """
    rows: Iterable[object]
    if hasattr(lengths, "dims") and hasattr(lengths, "__len__"):
        rows = (lengths.dims(i) for i in range(len(lengths)))
    elif isinstance(lengths, np.ndarray | Iterable) and not isinstance(lengths, str | Mapping):
        rows = iter(lengths)
    else:
        raise _wrong(repr(type(lengths).__name__), names)
    found = Counter(_shape(i, row, names) for i, row in enumerate(rows))
    if not found:
        raise _wrong("0 samples", names)
    return found


def _shape(index: int, row: object, names: Sequence[str]) -> Shape:
    given = [row.get(name) for name in names] if isinstance(row, Mapping) else [row]
    try:
        found = tuple(operator.index(n) for n in given)  # type: ignore[arg-type]
    except TypeError:
        found = ()
    least = 0 if len(names) > 1 else 1  # all of a sample may not be nothing
    if len(found) != len(names) or not all(least <= n <= MAX_SIZE for n in found):
        raise _wrong(f"{row!r} for sample {index}", names)
    return found


def _wrong(got: str, names: Sequence[str]) -> BucketError:
    one = f"{{{', '.join(f'{name!r}: 512' for name in names)}}}"
    one += ", or an integer" if len(names) == 1 else ""
    return BucketError(
        f"Buckets.from_lengths: lengths: got {got}; expected one entry a sample, {one}, from "
        f"{int(len(names) == 1)} to {MAX_SIZE}, or a dataset with dims(i); pass such a list"
    )


def best_shapes(
    counts: Mapping[Shape, int],
    steps: Sequence[int],
    count: int | None,
    padding: float | None,
    cost: Cost = tokens_of,
) -> Chosen | None:
    """Returns buckets for samples of these shapes; None: there have to be more than `count`.

    Args:
        counts: samples of each shape.
        steps: divisor of each dim's sizes.
        count: maximum number of buckets; None: as many as `padding` needs.
        padding: largest share of the cost that padding may be; the fewest buckets that keep it are
            taken. None: as many buckets as `count` allows.
        cost: cost of one sample of a shape; it grows with each dim.
    """
    several = len(steps) > 1
    rounded: Counter[Shape] = Counter()
    for shape, n in counts.items():
        rounded[tuple(-(-size // k) * k for size, k in zip(shape, steps, strict=True))] += n
    if not several and len(rounded) > 1:
        rounded[2,] += rounded.pop((1,), 0)  # a length of 1 would be a trace of its own
    return _chosen(+rounded, cache(cost), count, padding, several)


def _chosen(
    counts: Mapping[Shape, int], cost: Cost, count: int | None, padding: float | None, several: bool
) -> Chosen | None:
    ladder = _merged(counts, cost) if several else _cut(counts, cost)
    few = [shapes for shapes in ladder if count is None or len(shapes) <= count]
    if not few:
        return None
    least = sum(n * cost(shape) for shape, n in counts.items())
    for shapes in few if padding is not None else few[-1:]:
        smaller = _shrunk(counts, shapes, cost)
        share = 1 - least / padded_cost(counts, smaller, cost)
        if padding is not None and share <= padding:
            break
    return Chosen(tuple(sorted(smaller, key=cost)), share)


def padded_cost(counts: Mapping[Shape, int], shapes: Sequence[Shape], cost: Cost) -> float:
    """Returns the cost of all samples, each padded to the cheapest bucket that holds it."""
    each = [cost(home) for home in _homes(counts, shapes, cost)]
    return sum(n * one for n, one in zip(counts.values(), each, strict=True))


def _homes(counts: Mapping[Shape, int], shapes: Sequence[Shape], cost: Cost) -> list[Shape]:
    """Returns each shape's cheapest bucket with room, if possible with the same dims of 0 and 1."""
    by_cost = sorted(shapes, key=cost)
    sizes, samples = np.array(by_cost), np.array(list(counts))
    room = (samples[:, None] <= sizes).all(axis=-1)
    alike = room & (samples.clip(max=2)[:, None] == sizes.clip(max=2)).all(axis=-1)
    usable = np.where(alike.any(axis=1, keepdims=True), alike, room)
    assert usable.any(axis=1).all(), "each shape is held"
    return [by_cost[i] for i in usable.argmax(axis=1)]


def _few(shape: Shape) -> Shape:
    """Returns a shape of several dims with 2 for larger sizes."""
    return tuple(min(n, 2) for n in shape if len(shape) > 1)


def _cut(counts: Mapping[Shape, int], cost: Cost) -> list[list[Shape]]:
    """Returns the best 1, 2, 3, ... buckets of one dim."""
    lengths = sorted(n for (n,) in counts)
    kept = lengths
    if len(lengths) > _MOST_LENGTHS:  # far apart for long lengths, whose padding is a small share
        steps = np.geomspace(lengths[0], lengths[-1], _MOST_LENGTHS)
        places = np.searchsorted(lengths, steps, side="right") - 1
        kept = sorted({lengths[i] for i in places} | {lengths[-1]})
    place = np.searchsorted(kept, lengths)
    weight = np.bincount(place, weights=[counts[n,] for n in lengths], minlength=len(kept))
    below = np.concatenate([[0.0], np.cumsum(weight)])  # samples up to each length
    costs = np.array([cost((n,)) for n in kept])
    # between[i, j]: the lengths i+1 .. j, counted from 1, in one bucket
    between = costs[None, :] * (below[None, 1:] - below[:-1, None])
    between[np.tril_indices(len(kept), -1)] = np.inf
    best = between[0]
    before: list[npt.NDArray[np.int64]] = []
    ladder: list[list[Shape]] = []
    for k in range(1, len(kept) + 1):
        ladder.append([(kept[j],) for j in _cuts(before, len(kept) - 1)])
        if k == len(kept):
            break
        tried = best[:-1, None] + between[1:, :]
        before.append(tried.argmin(axis=0))
        best = tried.min(axis=0)
    return ladder


def _cuts(before: Sequence[npt.NDArray[np.int64]], last: int) -> list[int]:
    """Returns the index of each bucket's largest length."""
    found = [last]
    for step in reversed(before):
        found.append(int(step[found[-1]]))
    return found[::-1]


def _merged(counts: Mapping[Shape, int], cost: Cost) -> list[list[Shape]]:
    """Returns buckets of several dims: the fewest possible, then one more at a time."""
    members = _coarse(counts)
    costs = {shape: cost(shape) for shape in members}

    def more(a: Shape, b: Shape) -> float:
        whole = _union(a, b)
        if whole not in costs:
            costs[whole] = cost(whole)
        return members[a] * (costs[whole] - costs[a]) + members[b] * (costs[whole] - costs[b])

    def pairs_of(shape: Shape) -> dict[tuple[Shape, Shape], float]:
        others = (b for b in members if b != shape and _few(b) == _few(shape))
        return {(min(shape, b), max(shape, b)): more(shape, b) for b in others}

    pairs = {pair: extra for shape in list(members) for pair, extra in pairs_of(shape).items()}
    ladder = [list(members)]
    while pairs:
        a, b = min(pairs, key=lambda pair: (pairs[pair], pair))
        whole, moved = _union(a, b), members.pop(a) + members.pop(b)
        members[whole] = members.get(whole, 0) + moved
        gone = {a, b, whole}
        pairs = {pair: extra for pair, extra in pairs.items() if not gone & {*pair}}
        pairs.update(pairs_of(whole))
        ladder.append(list(members))
    return ladder[::-1]


def _coarse(counts: Mapping[Shape, int]) -> dict[Shape, int]:
    """Shapes, at most `_MOST_SHAPES` if dims of 0 and 1 allow it, that hold all others."""
    found = dict(counts)
    if len(counts) <= _MOST_SHAPES:
        return found
    for sizes in range(1, _MOST_SHAPES):
        grids = [_grid(counts, dim, sizes) for dim in range(len(next(iter(counts))))]
        cells: dict[Shape, tuple[Shape, int]] = {}
        for shape, n in counts.items():
            own = zip(grids, shape, strict=True)
            cell = tuple(next(n for n in grid if n >= size) for grid, size in own)
            held, samples = cells.get(cell, (shape, 0))
            cells[cell] = _union(held, shape), samples + n
        if sizes > 1 and len(cells) > _MOST_SHAPES:
            break
        found = {}
        for held, samples in cells.values():
            found[held] = found.get(held, 0) + samples
    return found


def _grid(counts: Mapping[Shape, int], dim: int, sizes: int) -> list[int]:
    """Returns the best `sizes` sizes of one dim alone, and 0 and 1 where they occur."""
    of_dim: Counter[Shape] = Counter()
    for shape, n in counts.items():
        of_dim[shape[dim],] += n
    ladder = _cut(of_dim, lambda shape: float(shape[0]))
    best = ladder[min(sizes, len(ladder)) - 1]
    return sorted({n for (n,) in best} | {n for n in (0, 1) if (n,) in of_dim})


def _union(a: Shape, b: Shape) -> Shape:
    return tuple(map(max, a, b))


def _shrunk(counts: Mapping[Shape, int], shapes: Sequence[Shape], cost: Cost) -> list[Shape]:
    """Returns the buckets shrunk to the largest sample assigned to each."""
    while True:
        held: dict[Shape, Shape] = {}
        for shape, home in zip(counts, _homes(counts, shapes, cost), strict=True):
            held[home] = _union(held.get(home, shape), shape)
        smaller = sorted(set(held.values()))
        if smaller == sorted(shapes):
            return smaller
        shapes = smaller
