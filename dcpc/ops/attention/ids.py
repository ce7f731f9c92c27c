"""Which sequences of a packed row queries and keys belong to."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dcpc.ops.attention.spec import RunOfRows


class Ids:
    """The sequences of queries and of keys: a query sees keys of its own alone.

    Args:
        segment: `[b or 1, n]`, what sequence each position belongs to.
        queries: the runs of queries, in order.
        keys: the runs of keys, in order.
    """

    def __init__(
        self, segment: Tensor, queries: Sequence[RunOfRows], keys: Sequence[RunOfRows]
    ) -> None:
        self._queries, self._keys = taken(segment, queries), taken(segment, keys)
        self._low, self._high = self._extents()

    def _extents(self) -> tuple[Tensor, Tensor]:
        """For each query the first key of its sequence and the one after its last."""
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
        """Returns the part (start, stop) of a run of keys that may be seen.

        Args:
            keys: start and stop.
            at: sample, first query and number of queries.
        """
        sample, rows = self._at(at)
        low = max(keys[0], int(self._low[sample, rows].min()))
        return low, max(low, min(keys[1], int(self._high[sample, rows].max())))

    def hidden(self, keys: tuple[int, int], at: tuple[int, int, int]) -> Tensor:
        """Returns `[rows, keys]`: which keys belong to other sequences."""
        sample, rows = self._at(at)
        mine = self._queries[sample, rows].unsqueeze(1)
        return self._keys[sample, slice(*keys)] != mine

    def _at(self, at: tuple[int, int, int]) -> tuple[int, slice]:
        sample, first, rows = at
        return sample if self._queries.shape[0] > 1 else 0, slice(first, first + rows)


def taken(segment: Tensor, runs: Sequence[RunOfRows]) -> Tensor:
    """Returns the ids of the rows of some runs, `[b or 1, rows]`."""
    parts = [segment[:, run.position : run.position + run.length] for run in runs]
    return torch.cat(parts, 1) if len(parts) != 1 else parts[0]
