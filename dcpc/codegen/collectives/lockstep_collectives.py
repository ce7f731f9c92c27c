"""Collectives as functions of all ranks' arguments at once, without messages.

Each function takes the list of all ranks' arguments (by name) and returns the list of their
results: the definition of the ops in `collectives.py`, `ring_swap.py` and `ring.py`. Sums are in
the order of those ops, except for `all_reduce`, whose order is the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dcpc.codegen.collectives.collectives import DimSplit, gathered, joined, scattered
from dcpc.codegen.collectives.halo import HaloCall, given_parts, origins, placed, traffic
from dcpc.codegen.collectives.ring import RingCall, empty_results
from dcpc.codegen.collectives.ring_swap import SwapCall, in_order, rows_of
from dcpc.ops.arguments import taken
from dcpc.ops.attention import Backward, Forward, Operands, accumulated, empty_gradient
from dcpc.ops.ring_route import DIRECTIONS, Route

ops = torch.ops.dcpc
Call = Mapping[str, Any]  # the arguments of one rank's call, by name


def added_up(pieces: Sequence[Tensor]) -> Tensor:
    """Returns the sum of all ranks' tensors, added in rank order."""
    out = pieces[0].clone(memory_format=torch.contiguous_format)
    for piece in pieces[1:]:
        assert piece.shape == out.shape, f"a sum of {tuple(out.shape)} and {tuple(piece.shape)}"
        out += piece
    return out


def _split(call: Call, prefix: str, size: str) -> DimSplit:
    return taken(DimSplit, {**call, f"{prefix}size": call[prefix + size]}, prefix)


def _whole(calls: Sequence[Call], prefix: str = "") -> Tensor:
    """Returns the whole dim from the ranks' pieces."""
    return gathered([c["x"] for c in calls], _split(calls[0], prefix, "size"))


def _pieces(x: Tensor, calls: Sequence[Call], prefix: str = "") -> list[Tensor]:
    """Returns each rank's piece of a whole tensor."""
    splits = [_split(call, prefix, "length") for call in calls]
    views = scattered(x, splits[0], len(calls))
    found = [view.clone(memory_format=torch.contiguous_format) for view in views]
    for split, piece in zip(splits, found, strict=True):
        got, expected = piece.shape[split.dim], split.size
        assert got == expected, f"a piece of dim {split.dim}: got length {got}, expected {expected}"
    return found


def _all_gather(calls: Sequence[Call]) -> list[Tensor]:
    return [_whole(calls)] * len(calls)


def _reduce_scatter(calls: Sequence[Call]) -> list[Tensor]:
    return _pieces(added_up([c["x"] for c in calls]), calls)


def _all_to_all(calls: Sequence[Call]) -> list[Tensor]:
    return _pieces(_whole(calls, "gather_"), calls, "scatter_")


def _all_reduce(calls: Sequence[Call]) -> list[Tensor]:
    return [added_up([c["x"] for c in calls])] * len(calls)


def _swap(calls: Sequence[Call]) -> list[Tensor]:
    """Exchanges rows for heads within each block of `across` consecutive ranks."""
    first, p = taken(SwapCall, calls[0]), len(calls)
    across, rows_dim, heads_dim = first.across, first.rows_dim, first.heads_dim
    found = []
    for start in range(0, p, across):
        block = [c["x"] for c in calls[start : start + across]]
        pieces = [first.split.runs(p, 1, start + i) for i in range(across)]
        if first.to_heads:
            heads = [x.split(first.heads // across, heads_dim) for x in block]
            every = [in_order([h[i] for h in heads], pieces, rows_dim) for i in range(across)]
        else:
            rows = [rows_of(x, pieces, rows_dim) for x in block]
            every = [joined([r[i] for r in rows], heads_dim) for i in range(across)]
        found += every
    for call, x in zip(calls, found, strict=True):
        got, expected = x.shape[rows_dim], call["rows_length"]
        assert got == expected, f"rows after a swap: got {got}, expected {expected}"
    return found


def _windows(calls: Sequence[Call], back: bool) -> list[Tensor]:
    """Returns the rows that each rank's windows cover; if `back`, the sums for each rank's rows."""
    p, every = len(calls), [taken(HaloCall, call) for call in calls]
    operands = zip(calls, every, strict=True)
    given = [given_parts(c["x"], h, p, r, back) for r, (c, h) in enumerate(operands)]
    found = []
    for rank, halo in enumerate(every):
        takes = traffic(halo, p, rank, back)[1]
        parts = [given[r][rank] for r in range(p)]
        found.append(placed(parts, takes, halo, origins(halo, p, rank, back)[1]))
    return found


def _halo(calls: Sequence[Call]) -> list[Tensor]:
    return _windows(calls, back=False)


def _halo_sum(calls: Sequence[Call]) -> list[Tensor]:
    return _windows(calls, back=True)


# ------------------------------------------------------------------------------------------ rings


def _placed(call: Call, p: int, rank: int) -> tuple[Route, Operands]:
    hiding = call["mask"], call["keep"], call["segment"]
    return taken(RingCall, call).placed(call["query"], call["key"], hiding, p, rank)


def _nothing(call: Call) -> bool:
    return taken(RingCall, call).nothing(call["query"], call["key"], call["value"])


def _visits(way: Route) -> Iterator[tuple[int, int, int, int]]:
    """Yields (direction, rank, ring position and rank of the keys' owner), step by step."""
    for direction in DIRECTIONS:
        for step in range(0 if direction > 0 else 1, max(way.hops(direction)) + 1):
            for rank in range(way.p):
                owner = way.held(rank // way.across, step, direction)
                if owner is not None:
                    yield direction, rank, owner, owner * way.across + rank % way.across


def _come(calls: Sequence[Call], rank: int, source: int) -> tuple[Tensor, Tensor]:
    """Returns the keys and values of rank `source` as a rank gets them: contiguous if sent."""
    k, v = calls[source]["key"], calls[source]["value"]
    return (k, v) if source == rank else (k.contiguous(), v.contiguous())


def _ring_forward(calls: Sequence[Call]) -> list[tuple[Tensor, Tensor]]:
    if _nothing(calls[0]):
        empty = [empty_results(c["query"], c["value"], c["mask"]) for c in calls]
        return [(out.zero_(), lse.zero_()) for out, lse in empty]
    routes = [_placed(c, len(calls), rank) for rank, c in enumerate(calls)]
    pairs = zip(routes, calls, strict=True)
    states = [Forward(given, c["query"], c["value"]) for (_, given), c in pairs]
    way = routes[0][0]
    for _, rank, owner, source in _visits(way):
        k, v = _come(calls, rank, source)
        states[rank].add(k, v, way.keys[owner])
    return [state.finish() for state in states]


def _ring_backward(calls: Sequence[Call]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns all gradients. Those of keys are added in the ring's order, direction -1 last."""
    own = ("query", "key", "value")
    if _nothing(calls[0]):
        zeros = [tuple(empty_gradient(c[name]).zero_() for name in own) for c in calls]
        return [(dq, dk, dv) for dq, dk, dv in zeros]
    routes = [_placed(c, len(calls), rank) for rank, c in enumerate(calls)]
    pairs = zip(routes, calls, strict=True)
    states = [
        Backward(given, c["grad_out"], c["query"], c["out"], c["logsumexp"])
        for (_, given), c in pairs
    ]
    way = routes[0][0]
    sums: dict[tuple[int, int], list[Tensor]] = {}  # (whose, direction) -> of keys, of values
    for direction, rank, owner, source in _visits(way):
        k, v = _come(calls, rank, source)
        dk, dv = (x.new_zeros(x.shape, dtype=accumulated(x.dtype)) for x in (k, v))
        states[rank].add(k, v, way.keys[owner], dk, dv)
        more = [dk, dv]
        before = sums.get((source, direction))
        sums[source, direction] = more if before is None else _added(more, before)
    found = []
    for rank, (state, call) in enumerate(zip(states, calls, strict=True)):
        mine, back = sums[rank, 1], sums.get((rank, -1))
        mine = mine if back is None else _added(mine, back)
        dk, dv = (
            empty_gradient(call[name]).copy_(x)
            for name, x in zip(("key", "value"), mine, strict=True)
        )
        found.append((state.finish(), dk, dv))
    return found


def _added(more: Sequence[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
    return [a.add_(b) for a, b in zip(more, before, strict=True)]


# op -> function from all ranks' arguments to all ranks' results.
COLLECTIVES: Mapping[Any, Callable[[Sequence[Call]], Sequence[Any]]] = {
    ops.all_gather.default: _all_gather,
    ops.reduce_scatter.default: _reduce_scatter,
    ops.all_to_all.default: _all_to_all,
    ops.all_reduce.default: _all_reduce,
    ops.swap.default: _swap,
    ops.halo.default: _halo,
    ops.halo_sum.default: _halo_sum,
    ops.ring_attention_forward.default: _ring_forward,
    ops.ring_attention_backward.default: _ring_backward,
}
