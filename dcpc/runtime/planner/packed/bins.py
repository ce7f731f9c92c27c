"""From a global batch of sequences to packed micro-batches: rows of the plan table as bins."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from dcpc.buckets import Bucket
from dcpc.errors import PlanError
from dcpc.ir import PlanRow
from dcpc.runtime.planner.own_lengths import Dims, OwnLengths
from dcpc.runtime.planner.packed.filling import Bin, PackedDraft
from dcpc.runtime.planner.packed.layouts_search import Searched, search
from dcpc.runtime.planner.packed.ways import BinKind, PackedWork, worthwhile
from dcpc.runtime.planner.plans import PlannedMicroBatch
from dcpc.runtime.planner.table import PlanTable

# Numbers of rows that the sequences of a micro-batch are laid into, besides as many as they had.
_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
# Seconds of a token are known at a row's length, its half and so on, down to this.
_SHORTEST = 16
# What a launch costs is read between a full micro-batch and this part of one.
_PART = 4
# What a token of a row that is padded to its bucket adds, as a share of what it takes: more than 0.
_HELD = 1e-3
_LEAST_S = 1e-15  # of a token

Rows = tuple[tuple[int, ...], ...]
_Kinds = tuple[list[BinKind], list[BinKind]]
_Batch = tuple[str, tuple[int, ...], tuple[int, ...]]  # table, keys, lengths
_Found = tuple[float, BinKind, Dims, list[list[int]]]  # seconds, kind, length, rows


@dataclass(frozen=True, slots=True)
class PackedPrices:
    """Seconds of packed micro-batches, by the profile.

    Attributes:
        own: lengths that rows are padded to, and their seconds.
        to_bucket: whether rows are padded to their bucket in any case.
    """

    own: OwnLengths
    to_bucket: bool = False
    _known: dict[tuple[str, tuple[int, ...]], _Kinds] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _last: dict[_Batch, Searched] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def searched(self, lengths: tuple[int, ...], table: PlanTable, keys: Sequence[int]) -> Searched:
        """Returns the search's result for a batch; it is cached until the next batch."""
        batch = table.hash, tuple(keys), lengths
        if batch not in self._last:
            _, worth_having = self.kinds(table, keys)
            aligned = table.aligned or table.block > 0
            work = PackedWork(lengths, worth_having, table.world, table.node_ranks, aligned)
            self._last.clear()
            self._last[batch] = search(work)
        return self._last[batch]

    def kinds(self, table: PlanTable, keys: Sequence[int]) -> _Kinds:
        """Returns the rows of a table as bins, all of them and those worth having."""
        of_what = table.hash, tuple(keys)
        if of_what not in self._known:
            every = [
                self.kind(key, number, table.buckets[key], row)
                for key in keys
                for number, row in enumerate(table.rows[key])
                if row.sp <= table.world
            ]
            self._known[of_what] = every, worthwhile(every)
        return self._known[of_what]

    def padded(self, bucket: Bucket, tokens: int) -> Dims:
        """Returns the length at which rows of at most so many tokens are run."""
        ((name, _),) = bucket.shape_key
        return bucket.shape_key if self.to_bucket else self.own.padded(bucket, ((name, tokens),))

    def kind(self, key: int, number: int, bucket: Bucket, row: PlanRow) -> BinKind:
        """Returns a row of the table as a bin, its seconds as a formula."""
        ((_, room),) = bucket.shape_key
        tokens = row.micro_batch * room
        lengths = [room]
        while lengths[0] // 2 >= _SHORTEST:
            lengths.insert(0, lengths[0] // 2)
        counts = [tokens // length for length in lengths]
        whole_s = [
            self.own.uniform_s(bucket, row, length, count)
            for length, count in zip(lengths, counts, strict=True)
        ]
        fewer = max(1, counts[0] // _PART)
        fewer_s = self.own.uniform_s(bucket, row, lengths[0], fewer)
        each_s = (whole_s[0] - fewer_s) / max(1, counts[0] - fewer)
        fixed_s = max(0.0, whole_s[0] - each_s * counts[0]) if each_s > 0 else 0.0
        fixed_s = min(fixed_s, *whole_s)
        # A longer sequence takes no less.
        loads = accumulate(((w - fixed_s) / n for w, n in zip(whole_s, counts, strict=True)), max)
        token_s = [max(_LEAST_S, s / length) for s, length in zip(loads, lengths, strict=True)]
        if self.to_bucket:  # a row takes as long whatever it holds
            held_s = min(token_s) * (1 - _HELD)
            fixed_s += held_s * tokens
            token_s = [s - held_s for s in token_s]
        curve = tuple(zip(lengths, token_s, strict=True))
        return BinKind(key, number, row.sp, row.micro_batch, room, fixed_s, curve)


@dataclass(frozen=True, slots=True)
class PackedPlan:
    """Micro-batches without a step around them.

    Attributes:
        micro_batches: micro-batches in the order in which ranks run them; their samples are rows.
        rows: the sequences of each row.
        bound_s: lower bound of the seconds of any plan of these sequences.
        work_s: seconds of all ranks if every sequence ran at its cheapest and none waited.
    """

    micro_batches: tuple[PlannedMicroBatch, ...]
    rows: Rows
    bound_s: float
    work_s: float


def plan_packed(
    sequences: Sequence[tuple[int, int]], table: PlanTable, keys: Sequence[int],
    prices: PackedPrices, turns: Iterable[int] = (),
) -> list[PackedPlan]:  # fmt: skip
    """Returns packed micro-batches of a global batch, every sequence in one row.

    There are two plans where an evolution found another one, which by the rows' formulas ends
    earlier.

    Raises:
        PlanError: a sequence is longer than every bucket.
    """
    kinds, _ = prices.kinds(table, keys)
    longest = max(kind.room for kind in kinds)
    for i, tokens in sequences:
        if tokens > longest:
            raise PlanError(
                f"packing: got sequence {i} of {tokens} tokens; expected at most {longest}, the "
                "longest row of the plan table; cut it, or compile for a longer bucket"
            )
    ordered = sorted(sequences, key=lambda pair: (-pair[1], pair[0]))
    lengths = tuple(tokens for _, tokens in ordered)
    found = prices.searched(lengths, table, keys).further(turns)
    work_s = float(found.work.shares_s().min(axis=0).sum()) / table.world
    plans = []
    for draft in found.drafts:
        finish = _Finish(draft, ordered, kinds, table, prices)
        micro_batches = tuple(finish.micro_batches())
        plans.append(PackedPlan(micro_batches, tuple(finish.rows), found.bound_s, work_s))
    return plans


class _Finish:
    """Bins of a draft as micro-batches of the table."""

    def __init__(
        self,
        draft: PackedDraft,
        ordered: Sequence[tuple[int, int]],
        kinds: Sequence[BinKind],
        table: PlanTable,
        prices: PackedPrices,
    ) -> None:
        self.rows: list[tuple[int, ...]] = []
        self._draft, self._ordered, self._prices, self._table = draft, ordered, prices, table
        self._of_degree: dict[int, list[BinKind]] = {}
        for kind in sorted(kinds, key=lambda k: (k.room, k.rows)):
            self._of_degree.setdefault(kind.degree, []).append(kind)

    def micro_batches(self) -> Iterator[PlannedMicroBatch]:
        """Yields the micro-batches, each in the rows and by the setting that are fastest."""
        for own in self._draft.bins:
            if own.empty:
                continue
            degree = self._draft.work.kinds[own.kind].degree
            seconds_s, kind, dims, rows = min(
                (found for rows in self._ways(own) for found in self._run(degree, rows)),
                key=lambda found: (found[0], found[1].room, found[1].rows, found[1].number),
            )
            numbers = tuple(range(len(self.rows), len(self.rows) + len(rows)))
            self.rows += [tuple(self._ordered[s][0] for s in row) for row in rows]
            bucket = self._table.buckets[kind.key]
            row = self._table.rows[kind.key][kind.number]
            yield PlannedMicroBatch(
                bucket, degree, tuple(range(own.first, own.first + degree)), numbers, seconds_s,
                row.micro_batch, row.menu_step, dims=() if dims == bucket.shape_key else dims,
            )  # fmt: skip

    def _ways(self, own: Bin) -> Iterator[list[list[int]]]:
        """Yields rows for the sequences of a micro-batch: as they were laid, and fewer, level ones.

        Rows are padded to the longest of them, so few that are level leave least padding.
        """
        used = [row for row in own.rows if row]
        yield used
        lengths = self._draft.work.lengths
        sequences = sorted(s for row in used for s in row)  # the longest first
        for count in sorted({n for n in _ROWS if n < len(used)} | {len(used)}):
            level: list[list[int]] = [[] for _ in range(count)]
            heap = [(0.0, number) for number in range(count)]
            for sequence in sequences:
                tokens, number = heap[0]
                level[number].append(sequence)
                heapq.heapreplace(heap, (tokens + float(lengths[sequence]), number))
            yield level

    def _run(self, degree: int, rows: list[list[int]]) -> Iterator[_Found]:
        """Yields how long rows take: for each setting of recompute by the smallest that holds."""
        tokens = max(sum(self._ordered[s][1] for s in row) for row in rows)
        lengths = [self._ordered[s][1] for row in rows for s in row]
        seen = set()
        for kind in self._of_degree[degree]:
            menu_step = self._table.rows[kind.key][kind.number].menu_step
            if kind.rows >= len(rows) and kind.room >= tokens and menu_step not in seen:
                seen.add(menu_step)
                yield (*self._priced(kind, len(rows), tokens, lengths), rows)

    def _priced(
        self, kind: BinKind, count: int, tokens: int, lengths: Sequence[int]
    ) -> tuple[float, BinKind, Dims]:
        """Seconds of so many rows of at most some tokens, their padding's sequences included."""
        bucket = self._table.buckets[kind.key]
        dims = self._prices.padded(bucket, tokens)
        row = self._table.rows[kind.key][kind.number]
        ((_, length),) = dims
        padding = (count * length - sum(lengths)) / count
        alone_s, padding_s = kind.load_s(np.array([length, padding])).tolist()
        apart_s = float(kind.load_s(np.array(lengths, dtype=np.float64)).sum())
        whole_s = self._prices.own.seconds_s(bucket, row, dims, count)
        found_s = whole_s + apart_s + count * (padding_s - alone_s)
        return max(_LEAST_S, found_s), kind, dims
