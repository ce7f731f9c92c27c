"""DynaPipe's micro-batching, exact: padded micro-batches of length-sorted samples for a pipeline.

With samples in ascending length and t(i, n) the seconds of samples i..n-1 padded to the longest,
and a cap tmax on each,

    minimise (stages - 1)*tmax + f(N)/replicas,   f(n) = min over i of f(i) + t(i, n).

Every cap that is some t(i, n) counts; none is thinned out. f falls as the cap rises, so between two
caps lo < hi nothing is below (stages - 1)*lo + f_hi(N)/replicas, and most caps are never solved.

For one cap every i is tried, by numpy: right for costs of any shape, and for up to 4096 samples no
slower than the queue in O(N log N) that costs with the quadrangle inequality allow.
"""

import contextlib
import heapq
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dcpc.errors import PlanError, checking_call

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_MOST = (1 << 31) - 1  # tokens of a sample


class PaddedCost(Protocol):
    """Seconds and bytes of one micro-batch, `count` samples padded to `longest` tokens."""

    def seconds(self, count: IntArray, longest: IntArray) -> FloatArray:
        """Forward and backward of one stage; arguments broadcast."""

    def peak_bytes(self, count: IntArray, longest: IntArray) -> FloatArray:
        """Returns its peak memory on a rank; arguments broadcast."""


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """An optimal split.

    Attributes:
        batches: positions of the samples, by micro-batch, shortest first.
        seconds_s: seconds of each micro-batch.
        objective_s: (stages - 1) * longest + sum / replicas.
        caps_solved: number of caps that the search solved.
    """

    batches: tuple[tuple[int, ...], ...]
    seconds_s: tuple[float, ...]
    objective_s: float
    caps_solved: int


@dataclass(frozen=True, slots=True)
class _Table:
    """t(count, length) with infinity where memory is short, [distinct length, count]."""

    cells: FloatArray
    flat: FloatArray
    row: list[int]
    n: int

    def at(self, i: int, n: int) -> float:
        """t(i, n)."""
        return float(self.cells[self.row[n], n - i])


@checking_call("dcpc.microbatch", PlanError)
def microbatch(
    lengths: Sequence[int] | IntArray,
    cost: PaddedCost,
    memory_bytes: float = inf,
    stages: int = 1,
    replicas: int = 1,
) -> MicroBatches:
    """Returns the split of samples into micro-batches that a pipeline finishes first.

    The samples of a micro-batch are padded to its longest. The optimum, whatever the shape of the
    cost (see the module).

    Example:
        class Cost:                                    # arguments are arrays that broadcast
            def seconds(self, count, longest):
                return 0.01 + 1e-6 * count * longest
            def peak_bytes(self, count, longest):
                return 4e6 + 2e3 * count * longest

        split = dcpc.microbatch([512, 37, 480, 45, 9], Cost(), memory_bytes=6e6)
        split.batches                                  # positions, by micro-batch

    Args:
        lengths: tokens, by sample, in any order; a list, or an array of one dim.
        cost: cost of one micro-batch.
        memory_bytes: maximum memory of a micro-batch on a rank.
        stages: stages of the pipeline.
        replicas: data-parallel copies that share the micro-batches.

    Raises:
        PlanError: no samples, or one that does not fit alone; or an argument or a result of `cost`
            is wrong.
    """
    known = _lengths_of(lengths)
    _check_numbers(memory_bytes, stages, replicas)
    if isinstance(cost, type) or not all(hasattr(cost, n) for n in ("seconds", "peak_bytes")):
        raise PlanError(
            f"microbatch: got cost={reprlib.repr(cost)}; expected an object with the methods "
            "seconds(count, longest) and peak_bytes(count, longest); pass one"
        )
    order = np.argsort(known, kind="stable")
    table = _tabulate(known[order], cost, memory_bytes)
    cuts, objective_s, solved = _search_caps(table, stages, replicas)
    pairs = list(pairwise(cuts))
    return MicroBatches(
        batches=tuple(tuple(order[i:n].tolist()) for i, n in pairs),
        seconds_s=tuple(table.at(i, n) for i, n in pairs),
        objective_s=objective_s,
        caps_solved=solved,
    )


def _lengths_of(lengths: object) -> IntArray:
    """Returns the tokens of each sample, int64.

    Raises:
        PlanError: these are no integers from 1 on, or none.
    """
    found = None
    with contextlib.suppress(TypeError, ValueError, OverflowError, RuntimeError):
        found = np.asarray(lengths)
    whole = found is not None and found.ndim == 1 and found.dtype.kind in "iu"
    if found is None or not whole or not len(found) or not 1 <= found.min() <= found.max() <= _MOST:
        got = "0 samples" if found is not None and found.size == 0 else reprlib.repr(lengths)
        raise PlanError(
            f"microbatch: lengths: got {got}; expected a list of one or more integers, the tokens "
            f"of each sample, from 1 to {_MOST}; correct them"
        )
    return found.astype(np.int64)


def _check_numbers(memory_bytes: object, stages: object, replicas: object) -> None:
    """Refuses numbers that are out of range.

    Raises:
        PlanError: names the argument.
    """
    for name, value in (("stages", stages), ("replicas", replicas)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise PlanError(
                f"microbatch: got {name}={reprlib.repr(value)}; expected an integer >= 1; correct "
                "it"
            )
    number = isinstance(memory_bytes, int | float | np.number)
    if isinstance(memory_bytes, bool) or not number or not memory_bytes > 0:  # type: ignore[operator]
        raise PlanError(
            f"microbatch: got memory_bytes={reprlib.repr(memory_bytes)}; expected a number of "
            "bytes above 0; correct it"
        )


def _costs(cost: PaddedCost, what: str, count: IntArray, longest: IntArray) -> FloatArray:
    """Returns a cost's numbers for every count and length, [length, count].

    Raises:
        PlanError: it raises, or returns something else than numbers from 0 on, one for each.
    """
    shape = (len(longest), count.shape[1])
    try:
        said = getattr(cost, what)(count, longest)
        found = np.array(np.broadcast_to(np.asarray(said, dtype=np.float64), shape))
    except Exception as error:
        raise PlanError(
            f"microbatch: cost.{what}: got {type(error).__name__}: {error}; expected numbers of "
            f"shape {shape}, for count {count.shape} and longest {longest.shape}, which are arrays "
            "that broadcast; correct the method"
        ) from error
    if not (found >= 0).all():
        raise PlanError(
            f"microbatch: cost.{what}: got {found[~(found >= 0)][0]}; expected numbers from 0 on; "
            "correct the method"
        )
    return found


def _search_caps(table: _Table, stages: int, replicas: int) -> tuple[list[int], float, int]:
    """Returns the best cuts, their objective and how many caps were solved; best bound first.

    A span (bound, low, high, f) holds the caps flat[low:high], all of which have at least f.
    """
    caps = table.flat
    best_s, best = inf, [0]
    spans = [(-inf, 0, len(caps), 0.0)]
    solved = 0
    while spans:
        bound_s, low, high, above_s = heapq.heappop(spans)
        if bound_s >= best_s:
            break
        at = high - 1 if solved == 0 else (low + high) // 2  # the loosest first
        total_s, cuts = _solve(table, float(caps[at]))
        solved += 1
        below = low  # an infeasible cap leaves none below it
        if total_s < inf:
            longest_s = max(table.at(i, n) for i, n in pairwise(cuts))
            value = (stages - 1) * longest_s + total_s / replicas
            if value < best_s:
                best_s, best = value, cuts
            below = int(np.searchsorted(caps, longest_s))  # up to `at` all are the same
        for start, end, f_s in ((low, below, total_s), (at + 1, high, above_s)):
            if start < end:
                bound_s = (stages - 1) * float(caps[start]) + f_s / replicas
                heapq.heappush(spans, (bound_s, start, end, f_s))
    return best, best_s, solved


def _tabulate(ordered: IntArray, cost: PaddedCost, memory_bytes: float) -> _Table:
    """Returns t for every count a length can occur with."""
    n = len(ordered)
    distinct, last = np.unique(ordered[::-1], return_index=True)
    reach = n - last  # samples up to and with the last of this length
    count = np.arange(n + 1)[None, :]
    asked = np.maximum(count, 1)  # no micro-batch is empty
    longest = distinct[:, None]
    seconds = _costs(cost, "seconds", asked, longest)
    held = _costs(cost, "peak_bytes", asked, longest)
    fits = held <= memory_bytes
    if not fits[-1, 1] or not fits[:, 1].all():
        bad = int(distinct[np.nonzero(~fits[:, 1])[0][-1]])
        raise PlanError(
            f"microbatch: got a sample of {bad} tokens, which alone holds "
            f"{float(held[np.searchsorted(distinct, bad), 1]):.3e} bytes; expected at most "
            f"{memory_bytes:.3e} bytes; split it, recompute more or raise memory_bytes"
        )
    seconds[:, 0] = 0.0
    occurs = (count >= 1) & (count <= reach[:, None])
    seconds = np.where(fits, seconds, inf)
    row = [0, *np.searchsorted(distinct, ordered).tolist()]
    flat = np.unique(seconds[occurs & np.isfinite(seconds)])
    return _Table(seconds, flat, row, n)


def _solve(table: _Table, cap_s: float) -> tuple[float, list[int]]:
    """Returns f(N) under a cap and the cuts 0, ..., N; infinity if some sample is over it."""
    cells = np.where(table.cells <= cap_s, table.cells, inf)
    total_s = np.zeros(table.n + 1)  # f
    count = [0]  # of the last micro-batch of n samples; the fewest of equal ones
    for n in range(1, table.n + 1):
        options_s = total_s[:n][::-1] + cells[table.row[n], 1 : n + 1]
        count.append(int(options_s.argmin()) + 1)
        total_s[n] = options_s[count[n] - 1]
    if total_s[-1] == inf:
        return inf, []
    cuts = [table.n]
    while cuts[-1]:
        cuts.append(cuts[-1] - count[cuts[-1]])
    return float(total_s[-1]), cuts[::-1]
