"""The samples to simulate: lengths from a file or a histogram, formed into global batches."""

from __future__ import annotations

import csv
import json
import math
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dcpc.buckets import MAX_SIZE, Bucket
from dcpc.commands.simulate.model_rows import tokens_of
from dcpc.errors import PlanError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of lengths.

    Attributes:
        shares: probability of each entry.
        low: shortest length of each entry.
        high: longest length of each entry; within an entry log-uniform.
    """

    shares: npt.NDArray[np.float64]
    low: npt.NDArray[np.int64]
    high: npt.NDArray[np.int64]

    def draw(self, count: int, rng: np.random.Generator) -> npt.NDArray[np.int64]:
        """Returns lengths in tokens, [count]."""
        entry = rng.choice(len(self.shares), count, p=self.shares)
        low, high = np.log(self.low[entry]), np.log(self.high[entry])
        drawn: npt.NDArray[np.float64] = np.exp(low + rng.random(count) * (high - low))
        return np.clip(np.rint(drawn).astype(np.int64), self.low[entry], self.high[entry])

    def upto(self, longest: int) -> Lengths:
        """Returns the part that is no longer than this.

        Raises:
            PlanError: there is none.
        """
        keep = self.low <= longest
        if not keep.any():
            raise PlanError(
                f"lengths: got none up to {longest} tokens (the shortest is {self.low.min()}); "
                "expected some that fit the largest bucket; add a larger bucket"
            )
        shares = self.shares[keep]
        return Lengths(shares / shares.sum(), self.low[keep], np.minimum(self.high[keep], longest))


def read_lengths(file: Path) -> Lengths:
    """Returns the lengths of a JSON file, `{"lens": [tokens, ...]}`, each as likely as the others.

    Raises:
        PlanError: the file is not of this form.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["lens"]
        given = np.array(found)
        if given.size and given.dtype.kind not in "iu":
            raise ValueError("lens with other values than whole numbers below 2**63")
        lens = given.astype(np.int64)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise PlanError(
            f"{file}: got {_unread(error)}"
            '; expected a JSON file {"lens": [tokens, ...]}; correct it'
        ) from error
    if lens.ndim != 1 or not len(lens) or lens.min() < 1:
        raise PlanError(
            f"{file}: got {lens.size} lengths from {lens.min() if lens.size else 'none'} tokens; "
            "expected a list of positive integers in lens; correct it"
        )
    return Lengths(np.full(len(lens), 1 / len(lens)), lens, lens)


def _unread(error: Exception) -> str:
    """Returns in words why no lengths were read."""
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON from line {error.lineno}, column {error.colno} on"
    if isinstance(error, UnicodeDecodeError):
        return "a file that is no text"
    if isinstance(error, KeyError | TypeError):
        return "JSON without a list of numbers named lens"
    return getattr(error, "strerror", None) or str(error)


def read_histogram(file: Path) -> Lengths:
    """Returns the lengths of a CSV file with a header, first column `[low, high]`, second a count.

    Raises:
        PlanError: a row is not of this form.
    """
    entries = []
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            for number, row in enumerate(list(csv.reader(lines))[1:], start=2):
                ends = [int(x) for x in re.findall(r"\d+", row[0])]
                if len(ends) != 2 or ends[0] > ends[1]:
                    raise ValueError(f"line {number}: range {row[0]!r}")
                if not 0 <= float(row[1]) < math.inf or ends[1] > MAX_SIZE:
                    raise ValueError(f"line {number}: {row}")
                entries.append((float(row[1]), max(1, ends[0]), max(1, ends[1])))
        if not sum(count for count, *_ in entries) > 0:
            raise ValueError("no row with a count above 0")
    except (OSError, ValueError, IndexError, csv.Error) as error:
        raise PlanError(
            f'{file}: got {error}; expected a header, then rows "[low, high]",count; correct it'
        ) from error
    shares, low, high = (np.array(column) for column in zip(*entries, strict=True))
    return Lengths(shares / shares.sum(), low.astype(np.int64), high.astype(np.int64))


@dataclass(frozen=True, slots=True)
class Epoch:
    """Samples in global batches.

    Attributes:
        batches: for each batch: (sample, bucket) of each sample.
        tokens: sample -> tokens, padding left out.
    """

    batches: tuple[tuple[tuple[int, Bucket], ...], ...]
    tokens: Mapping[int, int]

    @property
    def samples(self) -> list[tuple[int, Bucket]]:
        """All samples, in order."""
        return [sample for batch in self.batches for sample in batch]


def batches_of_lengths(
    lengths: Lengths, steps: int, tokens_per_step: int, seed: int = 0
) -> list[list[int]]:
    """Returns `steps` batches of lengths, each the first to reach `tokens_per_step`."""
    rng = np.random.default_rng(seed)
    mean = float(lengths.shares @ ((lengths.low + lengths.high) / 2))
    out = []
    for _ in range(steps):
        batch: list[int] = []
        total = 0
        while total < tokens_per_step:
            more = lengths.draw(max(16, int((tokens_per_step - total) / mean) + 1), rng)
            upto = int(np.searchsorted(np.cumsum(more), tokens_per_step - total)) + 1
            batch += more[:upto].tolist()
            total += int(more[:upto].sum())
        out.append(batch)
    return out


def in_buckets(batches: Sequence[Sequence[int]], buckets: Sequence[Bucket]) -> Epoch:
    """Returns the batches with each length in the smallest bucket that holds it.

    Raises:
        PlanError: buckets have more than one length.
    """
    names = {name for bucket in buckets for name, _ in bucket.shape_key}
    if len(names) != 1:
        raise PlanError(
            f"buckets have the dims {', '.join(sorted(names))}; expected one, so that a length has "
            "a bucket; give samples by bucket instead: --shares"
        )
    ordered = sorted(buckets, key=tokens_of)
    ends = [tokens_of(bucket) for bucket in ordered]
    tokens: dict[int, int] = {}
    out = []
    for batch in batches:
        samples = []
        for length in batch:
            number = len(tokens)
            tokens[number] = length
            samples.append((number, ordered[bisect_left(ends, length)]))
        out.append(tuple(samples))
    return Epoch(tuple(out), tokens)


def by_share(
    buckets: Sequence[Bucket],
    shares: Sequence[float],
    steps: int,
    tokens_per_step: int,
    seed: int = 0,
) -> Epoch:
    """Returns batches of samples drawn by bucket.

    Args:
        buckets: all buckets.
        shares: probability of each bucket; any positive scale.
        steps: number of batches.
        tokens_per_step: minimum tokens of a batch; it ends at the first sample that reaches them.
        seed: seed of the draw.

    Raises:
        PlanError: not one share a bucket.
    """
    if len(shares) != len(buckets) or min(shares, default=-1.0) < 0 or not sum(shares):
        raise PlanError(
            f"shares: got {len(shares)} for {len(buckets)} buckets; expected one number from 0 on "
            "for each, in their order, not all 0; correct the list"
        )
    rng = np.random.default_rng(seed)
    chance = np.array(shares) / sum(shares)
    size = np.array([tokens_of(bucket) for bucket in buckets])
    tokens: dict[int, int] = {}
    out = []
    for _ in range(steps):
        total, samples = 0, []
        while total < tokens_per_step:
            at = int(rng.choice(len(buckets), p=chance))
            number = len(tokens)
            tokens[number] = int(size[at])
            total += tokens[number]
            samples.append((number, buckets[at]))
        out.append(tuple(samples))
    return Epoch(tuple(out), tokens)
