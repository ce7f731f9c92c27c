"""Cuts attention into rectangles: a run of queries against a run of keys, of one sample or of all.

Queries of a rank may lie in several runs of positions, keys that come from another rank as well,
and a packed row holds several sequences. A rectangle has none of that: its queries and its keys
follow each other and may see each other, so the kernels know it by one number, the position of
its first query among its keys. Keys that no query sees have no rectangle. `Ids` are for
kernels that hide the keys of other sequences instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dcpc.ops.attention.spec import RunOfRows, Sight


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Consecutive queries against consecutive keys.

    Attributes:
        samples: slice of the batch.
        queries: rows of the queries' tensor, with their positions.
        keys: rows of the keys' tensor, with their positions.
        sight: limits by position; limits that hide nothing here are left out.
        first: whether it is the first in its list with any of its queries.
    """

    samples: slice
    queries: RunOfRows
    keys: RunOfRows
    sight: Sight
    first: bool

    @property
    def rows(self) -> slice:
        """The slice of these rows in the queries' tensor."""
        return slice(self.queries.at, self.queries.at + self.queries.length)

    @property
    def columns(self) -> slice:
        """The slice of these rows in the keys' tensor."""
        return slice(self.keys.at, self.keys.at + self.keys.length)

    @property
    def positions(self) -> slice:
        """The slice of these keys among all keys."""
        return slice(self.keys.position, self.keys.position + self.keys.length)


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A run of rows of one sequence, None where rows are not packed."""

    run: RunOfRows
    id: int | None


class QueryCutter:
    """Cuts one rank's queries against any runs of keys.

    Args:
        queries: runs of queries.
        sight: limits by position.
        segment: integer `[b or 1, n]`: the number of the sequence at each position; None: not
            packed.
    """

    def __init__(self, queries: Sequence[RunOfRows], sight: Sight, segment: Tensor | None) -> None:
        self._sight = sight
        self._samples = [slice(None)]
        self._stretches: list[list[RunOfRows] | None] = [None]
        self._ids: list[list[int]] = [[]]
        if segment is not None:
            if segment.shape[0] > 1:
                self._samples = [slice(i, i + 1) for i in range(segment.shape[0])]
            found = [_stretches(ids) for ids in segment]
            self._stretches = [runs for runs, _ in found]
            self._ids = [ids for _, ids in found]
        self._queries = [list(self._cut(queries, i)) for i in range(len(self._samples))]

    def against(self, keys: Sequence[RunOfRows]) -> Iterator[Rectangle]:
        """Yields the rectangles of all queries and some keys, those of a query in sequence."""
        for i, samples in enumerate(self._samples):
            by_id: dict[int | None, list[RunOfRows]] = defaultdict(list)
            for stretch in self._cut(keys, i):
                by_id[stretch.id].append(stretch.run)
            for stretch in self._queries[i]:
                first = True
                for run in by_id.get(stretch.id, ()):
                    found = _trimmed(stretch.run, run, self._sight, samples, first)
                    if found is not None:
                        yield found
                        first = False

    def _cut(self, runs: Iterable[RunOfRows], sample: int) -> Iterator[_Stretch]:
        stretches, ids = self._stretches[sample], self._ids[sample]
        for run in runs:
            if not run.length:
                continue
            if stretches is None:
                yield _Stretch(run, None)
                continue
            for stretch, name in zip(stretches, ids, strict=True):
                start = max(run.position, stretch.position)
                stop = min(run.position + run.length, stretch.position + stretch.length)
                if start < stop:
                    yield _Stretch(
                        RunOfRows(run.at + start - run.position, stop - start, start), name
                    )


def _stretches(ids: Tensor) -> tuple[list[RunOfRows], list[int]]:
    names, counts = torch.unique_consecutive(ids, return_counts=True)
    runs, position = [], 0
    for count in counts.tolist():
        runs.append(RunOfRows(position, count, position))
        position += count
    return runs, names.tolist()


def sees(queries: RunOfRows, keys: RunOfRows, before: int | None, after: int | None) -> bool:
    """Returns whether some of the queries may see some of the keys."""
    nothing_else = Sight(1.0, before, after)
    return _trimmed(queries, keys, nothing_else, slice(None), True) is not None


def _trimmed(
    queries: RunOfRows, keys: RunOfRows, sight: Sight, samples: slice, first_of_queries: bool
) -> Rectangle | None:
    """Returns the queries that see any key and the keys that any query sees, or None."""
    before, after = sight.before, sight.after
    low, high = queries.position, queries.position + queries.length - 1
    first, last = keys.position, keys.position + keys.length - 1
    if after is not None:
        low = max(low, first - after)
    if before is not None:
        high = min(high, last + before)
    if low > high:
        return None
    if after is not None:
        last = min(last, high + after)
    if before is not None:
        first = max(first, low - before)
    if first > last:
        return None
    after = None if after is None or last <= low + after else after
    before = None if before is None or first >= high - before else before
    return Rectangle(
        samples,
        RunOfRows(queries.at + low - queries.position, high - low + 1, low),
        RunOfRows(keys.at + first - keys.position, last - first + 1, first),
        Sight(sight.scale, before, after, low - first, empty=sight.empty),
        first_of_queries,
    )


class Ids:
    """The sequences of queries and keys: a query sees keys of its own sequence alone.

    Args:
        segment: integer `[b or 1, n]`: the number of the sequence at each position.
        queries: runs of queries, in order.
        keys: runs of keys, in order.
    """

    def __init__(
        self, segment: Tensor, queries: Sequence[RunOfRows], keys: Sequence[RunOfRows]
    ) -> None:
        self._queries, self._keys = taken(segment, queries), taken(segment, keys)
        self._low, self._high = self._extents()

    def _extents(self) -> tuple[Tensor, Tensor]:
        """Returns, for each query, the first key of its sequence and the one after the last."""
        rows = self._queries.shape[1]
        both = torch.cat([self._queries, self._keys], 1)
        length = self._keys.shape[1]
        low = self._queries.new_full(self._queries.shape, length, dtype=torch.long)
        high = torch.zeros_like(low)
        key = torch.arange(length, device=low.device)
        for sample, ids in enumerate(both):
            names, index = ids.unique(return_inverse=True)
            first = low.new_full((len(names),), length)
            stop = low.new_zeros((len(names),))
            first.scatter_reduce_(0, index[rows:], key, "amin")
            stop.scatter_reduce_(0, index[rows:], key + 1, "amax")
            low[sample], high[sample] = first[index[:rows]], stop[index[:rows]]
        return low, high

    def within(self, keys: tuple[int, int], at: tuple[int, int, int]) -> tuple[int, int]:
        """Returns the part (start, stop) of a run of keys that these queries may see.

        Args:
            keys: start and stop of the run.
            at: index of the sample, first query and number of queries.
        """
        sample, rows = self._at(at)
        low = max(keys[0], int(self._low[sample, rows].min()))
        return low, max(low, min(keys[1], int(self._high[sample, rows].max())))

    def hidden(self, keys: tuple[int, int], at: tuple[int, int, int]) -> Tensor:
        """Returns `[rows, keys]`: whether each key belongs to another sequence."""
        sample, rows = self._at(at)
        mine = self._queries[sample, rows].unsqueeze(1)
        return self._keys[sample, slice(*keys)] != mine

    def _at(self, at: tuple[int, int, int]) -> tuple[int, slice]:
        sample, first, rows = at
        return sample if self._queries.shape[0] > 1 else 0, slice(first, first + rows)


def taken(segment: Tensor, runs: Sequence[RunOfRows]) -> Tensor:
    """Returns the sequence numbers of the rows in some runs, `[b or 1, rows]`."""
    parts = [segment[:, run.position : run.position + run.length] for run in runs]
    return torch.cat(parts, 1) if len(parts) != 1 else parts[0]
