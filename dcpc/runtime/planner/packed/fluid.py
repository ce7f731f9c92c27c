"""Tokens of short sequences that ranks can run in some seconds, as if these were a liquid.

A group of the base degree that has R seconds left runs k micro-batches, which leave R - k*fixed_s
for tokens, and have room for k times the tokens of one. So it takes up

    A(R) = max over k of min((R - k*fixed_s) / pace_s, k*tokens),

which rises, and is level where one more micro-batch does not pay for its launch yet. A group of
another kind that has R seconds and W tokens of room in micro-batches it has already launched takes
b tokens into these, and its ranks take up A of the seconds left:

    B(R, W) = max over b of b + A(R - b*pace_s).

Both are piecewise linear, so the best b is 0, all there is room for, or it leaves the ranks just
enough to fill whole micro-batches.
"""

from __future__ import annotations

import numpy as np

from dcpc.runtime.planner.packed.ways import Floats, Integers, PackedWork

_ROUNDING = 1e-9
# Micro-batches of a rank in a step beyond which A is taken to go on as before.
_MOST = 4096


class ShortFluid:
    """A and B of a batch, in tokens, up to some seconds.

    Attributes:
        work: the batch.
        most_s: seconds up to which they are known.
        alone_s: seconds of each sequence by itself, [kind, sequence].
        at, tokens: points of A for a rank: seconds left, tokens; straight between them.
        period_s: seconds of a full micro-batch of the base kind.
    """

    def __init__(self, work: PackedWork, most_s: float) -> None:
        self.work, self.most_s, self.alone_s = work, most_s, work.alone_s()
        points = {0.0, most_s}
        for j in work.bases:
            period_s = work.fixed_s[j] + work.tokens[j] * work.pace_s[j]
            count = min(_MOST, int(most_s / period_s) + 1)
            whole = np.arange(count + 1) * period_s
            points.update(whole.tolist(), (whole + work.fixed_s[j]).tolist())
        self.at: Floats = np.array(sorted(p for p in points if p <= most_s))
        tokens = np.zeros(len(self.at))
        for j in work.bases:
            tokens = np.maximum(tokens, taken(work, j, self.at)[0])
        self.tokens = tokens / work.degree[work.base]
        base = work.base
        self.period_s = float(work.fixed_s[base] + work.tokens[base] * work.pace_s[base])

    def rank_tokens(self, left_s: Floats) -> Floats:
        """Returns A for a rank of a group, by the seconds that are left."""
        return np.asarray(np.interp(left_s, self.at, self.tokens))

    def group_tokens(self, left_s: Floats, room: Floats, kind: Integers) -> tuple[Floats, Floats]:
        """Returns B of groups, and b of each; -inf: a group has no time for its own sequences."""
        degree, pace_s = self.work.degree[kind], self.work.pace_s[kind]
        top = np.maximum(0.0, np.minimum(room, left_s / pace_s))
        period_s = self.period_s
        nearest_s = np.floor(left_s / period_s) * period_s
        farthest_s = np.ceil((left_s - top * pace_s) / period_s - _ROUNDING) * period_s
        b = (left_s - np.stack([left_s, nearest_s, farthest_s, left_s - top * pace_s])) / pace_s
        b = np.minimum(np.maximum(b, 0.0), top)
        value = b + degree * self.rank_tokens(left_s - b * pace_s)
        value[0] += _ROUNDING  # of those as good the first
        best, columns = value.argmax(axis=0), np.arange(len(kind))
        found = np.where(left_s < -_ROUNDING, -np.inf, value[best, columns])
        return found, b[best, columns]

    def bins(self, left_s: float) -> tuple[int, int]:
        """Returns how many micro-batches a group of the base degree runs, and of which kind."""
        best = 0.0, 0, self.work.base
        for j in self.work.bases:
            tokens, count = taken(self.work, j, np.array([left_s]))
            if tokens[0] > best[0] + _ROUNDING:
                best = float(tokens[0]), int(count[0]), j
        return best[1], best[2]


def taken(work: PackedWork, kind: int, left_s: Floats) -> tuple[Floats, Floats]:
    """Returns tokens that a group takes up in some seconds by one kind, and in how many bins."""
    fixed_s, pace_s, tokens = work.fixed_s[kind], work.pace_s[kind], work.tokens[kind]
    few = np.floor(np.maximum(left_s, 0.0) / (fixed_s + tokens * pace_s) + _ROUNDING)
    more = few + 1
    at_few = np.minimum((left_s - few * fixed_s) / pace_s, few * tokens)
    at_more = np.minimum((left_s - more * fixed_s) / pace_s, more * tokens)
    better = at_more > at_few + _ROUNDING
    return np.maximum(0.0, np.where(better, at_more, at_few)), np.where(better, more, few)
