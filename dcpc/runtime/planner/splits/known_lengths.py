"""The lengths of a batch's samples as JSON, with the model's answers that a planner asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dcpc.buckets import Bucket, Sizes
from dcpc.errors import PlanError
from dcpc.ir import PlanRow
from dcpc.runtime.planner.own_lengths import BatchLengths, Dims, OwnLengths
from dcpc.runtime.planner.table import PlanTable

_Key = tuple[int, ...]


@dataclass(slots=True)
class KnownLengths:
    """Answers about lengths, in place of a model's.

    Attributes:
        table: plan table of the buckets and rows that the answers are for.
        asked: source of unknown answers, which are then kept; None: no model is here.
        right: bucket and lengths -> whether its graphs are right at them.
        seconds_s: bucket, row, samples and lengths -> predicted seconds.
    """

    table: PlanTable
    asked: OwnLengths | None = None
    right: dict[_Key, bool] = field(default_factory=dict)
    seconds_s: dict[_Key, float] = field(default_factory=dict)

    def runs_at(self, bucket: Bucket, sizes: Sizes) -> bool:
        """Returns whether a bucket's graphs are right at some lengths."""
        key = (self.table.key(bucket), *_ordered(sizes))
        if key not in self.right:
            self.right[key] = self._model().runs_at(bucket, sizes)
        return self.right[key]

    def seconds_at(self, bucket: Bucket, row: PlanRow, sizes: Sizes, count: int) -> float:
        """Returns the predicted seconds of some samples by a row."""
        number = self.table.key(bucket)
        key = (number, self.table.rows[number].index(row), count, *_ordered(sizes))
        if key not in self.seconds_s:
            ask = self._model().seconds_at
            assert ask is not None, "this rank's model predicts"
            self.seconds_s[key] = ask(bucket, row, sizes, count)
        return self.seconds_s[key]

    def _model(self) -> OwnLengths:
        if self.asked is None:
            raise PlanError(
                "replay: got a plan file without the seconds at some lengths that are planned with "
                "now; expected a file of this dcpc; save the plan again"
            )
        return self.asked


def lengths_json(
    lengths: BatchLengths,
    samples: Sequence[tuple[int, Bucket]],
    table: PlanTable,
    plan: Callable[[BatchLengths], object],
) -> dict[str, Any]:
    """Returns lengths as plain data, with the answers that planning these samples needs."""
    own = lengths.own
    known = KnownLengths(table, own)
    fresh = OwnLengths(known.runs_at, known.seconds_at, own.least, own.multiple)
    plan(BatchLengths(fresh, lengths.dims))
    return {
        "multiple": own.multiple,
        "dims": [dict(lengths.dims[i]) for i, _ in samples],
        "least": [dict(own.least(bucket)) for bucket in table.buckets],
        "right": [[*key, right] for key, right in known.right.items()],
        "seconds_s": [[*key, seconds_s] for key, seconds_s in known.seconds_s.items()],
    }


def lengths_of(
    data: Mapping[str, Any], samples: Sequence[tuple[int, Bucket]], table: PlanTable
) -> BatchLengths:
    """Returns the lengths in the data of `lengths_json`."""
    known = KnownLengths(table)
    known.right = {tuple(map(int, key)): bool(right) for *key, right in data["right"]}
    known.seconds_s = {tuple(map(int, key)): float(s) for *key, s in data["seconds_s"]}
    least = [{str(n): int(size) for n, size in sizes.items()} for sizes in data["least"]]
    own = OwnLengths(
        known.runs_at, known.seconds_at, lambda bucket: least[table.key(bucket)],
        int(data["multiple"]),
    )  # fmt: skip
    dims = [_dims(sizes) for sizes in data["dims"]]
    return BatchLengths(own, {i: own_dims for (i, _), own_dims in zip(samples, dims, strict=True)})


def _dims(sizes: Mapping[str, Any]) -> Dims:
    return tuple(sorted((str(name), int(size)) for name, size in sizes.items()))


def _ordered(sizes: Sizes) -> _Key:
    return tuple(size for _, size in sorted(sizes.items()))
