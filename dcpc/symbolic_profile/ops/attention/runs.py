"""Transient memory of attention of a piece of the queries to all keys, at given sizes.

Follows `dcpc/ops/attention/whole.py` where the flash kernel computes it: a call for each run of
queries (a zigzag piece has two), whose keys before the first query are a part of their own.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from dcpc.ops.attention import Sight
from dcpc.symbolic_profile.ops.attention.shapes import HeadSizes, backward_bytes, forward_bytes
from dcpc.symbolic_profile.polynomials import FUNCTIONS, OfIntegers, each_point


class RunSizes(NamedTuple):
    """Sizes of such an attention besides `HeadSizes`, each an integer.

    Attributes:
        backward: whether it is backward.
        causal: whether a query sees no key after it.
        queries: number of queries.
        keys: number of keys.
        start: position of the first query.
        turn: number of queries that follow without a gap; -1: all.
        second: position of the query after these.
    """

    backward: int
    causal: int
    queries: int
    keys: int
    start: int
    turn: int
    second: int


class RunBytes(OfIntegers):
    """Bytes beyond inputs and outputs: of `RunSizes`, then `HeadSizes`."""

    def _sympystr(self, printer: Any) -> str:
        kind = "backward" if self.args[0] == 1 else "forward"
        return f"attention_{kind}({printer.doprint(self.args[2])})"


@functools.lru_cache(maxsize=1 << 14)
def run_bytes(*sizes: int) -> int:
    """Returns the bytes of `RunBytes`."""
    split = len(RunSizes._fields)
    call, heads = RunSizes(*sizes[:split]), HeadSizes(*sizes[split:])
    turn = None if call.turn < 0 else call.turn
    sight = Sight(1.0, None, 0 if call.causal else None, call.start, turn, call.second)
    runs = sight.runs(call.queries)
    if not runs or 0 in (heads.batch, heads.heads, heads.key_heads, heads.width, call.keys):
        return 0
    of_runs = [(run.length, call.keys, sight.of(run)) for run in runs]
    if not call.backward:
        most = max(forward_bytes(heads, run, fresh=True, own=True) for run in of_runs)
        one = heads.query_bytes(call.queries) + heads.sum_bytes(call.queries)
        return most if len(runs) > 1 else most - one
    most = max(backward_bytes(heads, run, own=True) for run in of_runs)
    both = 2 * heads.key_bytes(call.keys)
    if len(runs) == 1:
        return most - heads.query_bytes(call.queries) - both
    if heads.item_bytes == heads.wide_bytes:
        return most
    wide = both // heads.item_bytes * heads.wide_bytes
    return max(most + wide - both, wide)


FUNCTIONS[RunBytes.__name__] = each_point(run_bytes)
