"""The ways to run a packed micro-batch, with its seconds as a formula, and a batch's work by them.

A micro-batch whose sequences have lengths l takes

    fixed_s + sum of l * token_s(l)

seconds on its ranks: those of a launch, and of the tokens of each sequence. A token of a longer one
has more others to attend to; that of a very short one pays more for the calls by which attention
works through each sequence by itself, where it does (on a CPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, inf

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# A sequence of more than this share of a cheapest micro-batch is placed before the others, if no
# other is given; the most that are, but for those that fit in none.
_LONG, _MOST_LONG = 0.25, 140
# The shorter share of a batch whose cheapest degree is that of the others.
_SHORT = 0.9
# Seconds that differ by less than this share are alike: curves are of other lengths in each bucket.
_ALIKE = 1e-3


@dataclass(frozen=True, slots=True)
class BinKind:
    """A row of the plan table as a bin that sequences are laid into.

    Attributes:
        key: number of the bucket in the table.
        number: number of the row in the bucket's rows.
        degree: ranks of the group.
        rows: maximum rows of the micro-batch.
        room: tokens of a row.
        fixed_s: seconds of a micro-batch before its first token.
        curve: (length, seconds of a token of a sequence of this length), ascending.
    """

    key: int
    number: int
    degree: int
    rows: int
    room: int
    fixed_s: float
    curve: tuple[tuple[int, float], ...]
    _at: tuple[Floats, Floats, Floats] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Makes the curve's lengths, seconds of a token and of a sequence."""
        at, token_s = np.array(self.curve).T
        object.__setattr__(self, "_at", (at, token_s, at * token_s))

    @property
    def tokens(self) -> int:
        """Most tokens of a micro-batch."""
        return self.rows * self.room

    def load_s(self, lengths: Floats) -> Floats:
        """Returns the seconds that sequences add to a micro-batch.

        They are interpolated by token or by sequence, whichever is less: the first is right where
        they grow with the square of a length, the other where they do not grow.
        """
        at, token_s, each_s = self._at
        by_token = lengths * np.interp(lengths, at, token_s)
        return np.asarray(np.minimum(by_token, np.interp(lengths, at, each_s)))


def worthwhile(kinds: Sequence[BinKind]) -> list[BinKind]:
    """Returns the kinds that no other of their degree holds more than and is faster than."""
    found: list[BinKind] = []
    for kind in sorted(kinds, key=lambda k: (k.degree, -k.room, -k.tokens, _full_s(k))):
        if not any(_covers(other, kind) for other in found):
            found.append(kind)
    return found


def _full_s(kind: BinKind) -> float:
    return kind.fixed_s + kind.tokens * kind.curve[-1][1]


def _covers(other: BinKind, kind: BinKind) -> bool:
    at = np.array([length for length, _ in kind.curve], dtype=np.float64)
    return (
        other.degree == kind.degree
        and other.room >= kind.room
        and other.tokens >= kind.tokens
        and other.fixed_s <= kind.fixed_s * (1 + _ALIKE)
        and bool((other.load_s(at) <= kind.load_s(at) * (1 + _ALIKE)).all())
    )


class PackedWork:
    """A global batch against the kinds of bins: its sequences, longest first.

    Attributes:
        lengths: tokens of each sequence.
        kinds: bins to choose from.
        ranks: number of ranks.
        node_ranks: ranks of a node.
        aligned: groups are blocks that begin at a multiple of their size.
        degree, fixed_s, room: of each kind.
        tokens: most tokens of a micro-batch of each kind, by the lengths' greatest common divisor.
        load_s: seconds that a sequence adds to a micro-batch, [kind, sequence]; inf: does not fit.
        long: number of sequences that are placed one by one, the first ones.
        base: number of the kind that runs the others most cheaply.
        bases: numbers of the kinds of its degree that hold each of the others.
        pace_s: seconds that a token of the others takes, by kind.
        short_tokens: tokens of the others.
    """

    def __init__(
        self,
        lengths: Sequence[float],
        kinds: Sequence[BinKind],
        ranks: int,
        node_ranks: int = 8,
        aligned: bool = False,
        long_share: float = _LONG,
    ) -> None:
        """Sorts the sequences.

        Args:
            lengths: tokens of each sequence.
            kinds: bins to choose from.
            ranks: number of ranks.
            node_ranks: ranks of a node.
            aligned: whether groups are blocks that begin at a multiple of their size.
            long_share: fraction of a cheapest micro-batch beyond which a sequence counts as long.
        """
        self.lengths: Floats = np.sort(np.asarray(lengths, dtype=np.float64))[::-1].copy()
        self.kinds, self.ranks, self.aligned = tuple(kinds), ranks, aligned
        self.node_ranks = max(1, min(node_ranks, ranks))
        self.degree: Integers = np.array([k.degree for k in kinds])
        self.fixed_s: Floats = np.array([k.fixed_s for k in kinds])
        step = gcd(*(int(n) for n in lengths))
        rooms = [k.room // step * step or k.room for k in kinds]
        self.tokens: Floats = np.array(
            [k.rows * n for k, n in zip(kinds, rooms, strict=True)], float
        )
        self.room: Floats = np.array([k.room for k in kinds], dtype=np.float64)
        n = self.lengths
        self.load_s: Floats = np.stack([k.load_s(n) for k in kinds])
        self.load_s[self.room[:, None] < n] = inf
        self.base = self._cheapest()
        self.long = self._count_long(long_share)
        short = n[self.long :]
        self.short_tokens = float(short.sum())
        longest = short.max(initial=0.0)
        fits = (self.degree == self.degree[self.base]) & (self.room >= longest)
        self.bases: list[int] = np.nonzero(fits)[0].tolist()
        if self.base not in self.bases:
            self.base = min(self.bases, key=lambda j: self.fixed_s[j] / self.tokens[j])
        self.pace_s: Floats = np.array([_pace_s(k, short) for k in kinds])

    def shares_s(self) -> Floats:
        """Returns rank-seconds of each sequence in a full micro-batch, [kind, sequence]."""
        part = self.fixed_s[:, None] * self.lengths / self.tokens[:, None]
        return np.asarray(self.degree[:, None] * (part + self.load_s))

    def alone_s(self) -> Floats:
        """Returns seconds of each sequence by itself, [kind, sequence]."""
        return np.asarray(self.fixed_s[:, None] + self.load_s)

    @property
    def tokens_in_s(self) -> float:
        """Tokens of short sequences that all ranks take up in a second."""
        return float(self.ranks / (self.degree[self.base] * self.pace_s[self.base]))

    def _cheapest(self) -> int:
        short = self.lengths <= np.quantile(self.lengths, _SHORT)
        cost_s = self.shares_s()[:, short].sum(axis=1)
        if not np.isfinite(cost_s).any():  # no kind holds all of them: that which holds most
            return int(self.room.argmax())
        return int(cost_s.argmin())

    def with_long(self, share: float) -> PackedWork:
        """Returns the same batch, where a sequence of more than this share counts as long."""
        lengths = self.lengths.tolist()
        return PackedWork(lengths, self.kinds, self.ranks, self.node_ranks, self.aligned, share)

    def _count_long(self, share: float) -> int:
        longest = self.room[self.degree == self.degree[self.base]].max()
        least = min(share * self.tokens[self.base], self.room[self.base])
        count = min(_MOST_LONG, int((self.lengths > least).sum()))
        return max(count, int((self.lengths > longest).sum()))


def _pace_s(kind: BinKind, lengths: Floats) -> float:
    """Mean seconds of a token of those sequences that a row of this kind holds."""
    held = lengths[lengths <= kind.room]
    if not len(held):
        return kind.curve[-1][1] if len(lengths) else kind.curve[0][1]
    return float(kind.load_s(held).sum() / held.sum())
