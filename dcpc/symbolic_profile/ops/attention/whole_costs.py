"""Transient memory of `dcpc::attention`, and the pairs of query and key it computes.

Follows `dcpc/ops/attention/`: its flash kernel (torch's CPU one, called once for each query of a
group) and its blocks of matmuls. Measured as the lines of `transients.py` are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import sympy
from torch import fx
from torch.utils._sympy.functions import CeilDiv

from dcpc.ops.attention import DEMANDS, ROWS, WIDEST, Sight, added_dtype, kernel_name, masks_window
from dcpc.symbolic_profile.ops.attention.runs import RunBytes
from dcpc.symbolic_profile.ops.attention.scratch import (
    BSHD,
    ONE,
    ZERO,
    accumulator,
    kernel,
    kernel_backward,
    lies_badly,
)
from dcpc.symbolic_profile.ops.attention.shapes import DTYPES, head_sizes
from dcpc.symbolic_profile.ops.facts import CallFacts, Facts, TensorFacts, argument
from dcpc.symbolic_profile.polynomials import Shares, Short, larger


def pairs(node: fx.Node, facts: Facts) -> sympy.Expr:
    """Returns the pairs of query and key of one head that are computed.

    Of causal attention over a piece of the queries that is all of them, as on the last rank; over a
    zigzag piece as many as any rank has (exact where 2p divides the length). Packed sequences count
    as one, which is the most there can be.
    """
    query, key = (facts.of(argument(node, name))[0] for name in ("query", "key"))
    queries, keys = query.shape[2], key.shape[2]
    before, after = argument(node, "before"), argument(node, "after")
    if before is not None and after is not None:
        pieces = argument(node, "turn") is not None or argument(node, "start", 0) != 0
        if pieces or queries != keys or min(before, after) < 0:
            return queries * sympy.Min(keys, before + after + 1)
        seen, rest = queries, queries - 1  # a window is cut off at both ends of the row
        for limit in (before, after):
            most = sympy.Min(limit, rest)
            seen += queries * most - most * (most + 1) / 2
        return sympy.expand(seen)
    if after is None:
        return queries * keys
    if argument(node, "turn") is not None:
        return queries * (keys + 1) / 2
    if argument(node, "start", 0) != 0:
        return queries * keys
    short = queries if queries == keys else sympy.Min(queries, keys)
    return short * (short + 1) / 2 + (queries - short) * keys


def forward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that attention's forward holds beyond its inputs and outputs.

    An upper bound where sequences are packed: as if one were as long as the row, or all short.
    """
    return _run_bytes(call, backward=False) if _in_runs(call) else forward_bound(call)


def forward_bound(call: CallFacts) -> sympy.Expr:
    """Returns the bytes of `forward`; at the most, of a piece of the queries."""
    if not _by_flash(call):
        return _by_window(call, blocks(call), _windowed)
    return _by_sharers(call, functools.partial(_forward_held, call))


def _in_runs(call: CallFacts) -> bool:
    """Whether the bytes of a piece of the queries follow from its sizes, run by run."""
    hidden = any(call.given(name) is not None for name in ("mask", "keep", "segment"))
    known = call.tensor("query").dtype in DTYPES and not hidden
    later = argument(call.node, "start", 0) != 0 or argument(call.node, "turn") is not None
    return later and known and _by_flash(call)


def _run_bytes(call: CallFacts, backward: bool) -> sympy.Expr:
    """Returns the bytes of a piece of the queries as a function of its sizes."""
    node, size = call.node, call.facts.size
    turn = argument(node, "turn")
    found = (
        int(backward), int(argument(node, "after") is not None), call.tensor("query").shape[2],
        call.tensor("key").shape[2], size(argument(node, "start", 0)),
        -1 if turn is None else size(turn), size(argument(node, "second", 0)),
    )  # fmt: skip
    return RunBytes(*map(sympy.sympify, found), *head_sizes(call, backward))


def _by_sharers(call: CallFacts, held: Callable[[sympy.Expr], sympy.Expr]) -> sympy.Expr:
    """Returns the bytes where each row of a mask that samples share has a call of its own."""
    mask, samples = call.given("mask"), call.tensor("query").shape[0]
    if mask is None or mask.shape[0] in (1, samples):
        return held(ONE)
    shares = Shares(mask.shape[0], samples)
    return shares * held(mask.shape[0]) + (1 - shares) * held(ONE)


def _forward_held(call: CallFacts, calls: sympy.Expr) -> sympy.Expr:
    """Bytes of forward by the kernel."""
    query, groups = call.tensor("query"), groups_of(call)
    rows = _run(call)
    share = rows / query.shape[2]
    lse_bytes = query.numel / query.shape[3] * accumulator(query)
    held = kernel(call, rows, calls=calls) + _relaid(call, "query", "key", "value")
    if calls != 1:  # one call's results, before they are copied
        held += (query.size_bytes + lse_bytes) * share / calls
    elif groups == 1:  # the output, brought to the layout of queries that were copied
        held += _relaid(call, "query") * share
    if _split(call):  # two parts, merged; the first is the result if heads are not grouped
        held += (query.size_bytes + 2 * lse_bytes) * share / groups / calls
    if groups != 1:
        held += (query.size_bytes + lse_bytes) * share / groups / calls
    if call.given("segment") is not None:
        return larger(held + _merged(query, query.numel, lse_bytes), blocks(call))
    if argument(call.node, "turn") is not None:  # a run's own results, before they are copied
        held += (query.size_bytes + lse_bytes) * share
    return with_added(call, held, share)


def _merged(query: TensorFacts, numel: sympy.Expr, lse_bytes: sympy.Expr) -> sympy.Expr:
    """Returns the bytes of a part's output and logsumexp, and of merging them."""
    if query.dtype.itemsize >= 4:
        return numel * query.dtype.itemsize + 5 * lse_bytes
    wide = query.numel * accumulator(query)
    return wide + numel * (query.dtype.itemsize + accumulator(query)) + 5 * lse_bytes


def backward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that attention's backward holds beyond its inputs and outputs.

    An upper bound where sequences are packed, as of forward.
    """
    if call.node.target._opname == "attention_mask_backward":  # type: ignore[union-attr]
        return mask_backward(call)
    return _run_bytes(call, backward=True) if _in_runs(call) else backward_bound(call)


def backward_bound(call: CallFacts) -> sympy.Expr:
    """Returns the bytes of `backward`; at the most, of a piece of the queries."""
    if not _by_flash(call):
        return _by_window(call, blocks_backward(call), _windowed_backward)
    return _by_sharers(call, functools.partial(_backward_held, call))


def _backward_held(call: CallFacts, calls: sympy.Expr) -> sympy.Expr:
    """Bytes of backward by the kernel."""
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    rows, groups = _run(call), groups_of(call)
    packed = call.given("segment") is not None
    parts = packed or argument(call.node, "turn") is not None
    share = rows / query.shape[2]
    held = kernel_backward(call, rows if parts else None, calls=calls)
    held += _relaid(call, "query", "key", "value", "out")
    own = ZERO  # of one call
    if groups != 1:
        if not parts:
            grad = call.tensor("grad_out")
            if grad.contiguous(BSHD):  # whole it needs no copy, one query of each group does
                own += grad.size_bytes
            own -= sympy.expand(grad.size_bytes - grad.size_bytes / groups)
        else:
            used = call.tensor("grad_out").size_bytes * share
            own -= sympy.expand(used - used / groups)
        own += query.size_bytes * share / groups + key.size_bytes + value.size_bytes
    if _split(call):
        own += query.size_bytes * share / groups + key.size_bytes + value.size_bytes
    if calls != 1:  # its gradients, before they are copied
        own += query.size_bytes * share + key.size_bytes + value.size_bytes
    held += sympy.expand(own / calls)
    if parts:  # a part's own gradients, before they are added up, in float32 if half
        held += query.size_bytes * share + key.size_bytes + value.size_bytes
        if query.dtype.itemsize < 4:
            wide = key.numel + value.numel + (query.numel if packed else 0)
            held += wide * accumulator(query)
    return larger(held, blocks_backward(call)) if packed else with_added(call, held, share)


def _by_window(
    call: CallFacts, otherwise: sympy.Expr, by_mask: Callable[[CallFacts], sympy.Expr]
) -> sympy.Expr:
    """Returns the bytes of a kernel that computes a window by a mask, or of blocks otherwise."""
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    hidden = any(call.given(name) is not None for name in ("mask", "keep", "segment"))
    sight, same = sight_of(call), query.shape[3] == value.shape[3]
    one_run = argument(call.node, "turn") is None and query.dtype in DEMANDS["flash"].dtypes
    if not one_run or not masks_window("cpu", same, hidden, sight) or sight.misses(0, 0):
        return otherwise
    before, after = sight.before, sight.after
    whole = argument(call.node, "start", 0) == 0
    masks = (before is not None) + (after is not None and not (whole and after == 0))
    mask_bytes = query.shape[2] * key.shape[2] * query.dtype.itemsize
    held = by_mask(call) + (mask_bytes if masks else 0)
    if masks == 2:  # one is added to the other before there are results
        held = larger(held, 2 * mask_bytes - call.output_bytes)
    if not whole or query.shape[2] != key.shape[2]:  # blocks again if one sees no key
        held = larger(held, otherwise)
    short = Short(query.shape[2], key.shape[2])
    return short * held + (1 - short) * otherwise


def _windowed(call: CallFacts) -> sympy.Expr:
    query, groups = call.tensor("query"), groups_of(call)
    lse_bytes = query.numel / query.shape[3] * accumulator(query)
    held = kernel(call) + _relaid(call, "query", "key", "value")
    if groups == 1:
        return held + _relaid(call, "query")
    return held + (query.size_bytes + lse_bytes) / groups


def _windowed_backward(call: CallFacts) -> sympy.Expr:
    query, key, value, grad = (call.tensor(n) for n in ("query", "key", "value", "grad_out"))
    groups = groups_of(call)
    held = kernel_backward(call) + _relaid(call, "query", "key", "value", "out")
    if groups == 1:
        return held
    if grad.contiguous(BSHD):
        held += grad.size_bytes
    held -= sympy.expand(grad.size_bytes - grad.size_bytes / groups)
    return held + query.size_bytes / groups + key.size_bytes + value.size_bytes


def _relaid(call: CallFacts, *names: str) -> sympy.Expr:
    """Bytes of the copies of those tensors that do not lie as the kernel reads them."""
    return sympy.Add(*(x.size_bytes for x in map(call.tensor, names) if lies_badly(x)))


def _run(call: CallFacts) -> sympy.Expr:
    """Returns the maximum of queries that a kernel is called for."""
    rows = call.tensor("query").shape[2]
    cut = argument(call.node, "turn") is not None and call.given("segment") is None
    return CeilDiv(rows, 2) if cut else rows


def sight_of(call: CallFacts) -> Sight:
    """Returns the mask spec of an attention, wherever its queries are."""
    scale, before, after = (argument(call.node, name) for name in ("scale", "before", "after"))
    return Sight(scale, before, after, empty=argument(call.node, "empty", "zero"))


def _by_flash(call: CallFacts) -> bool:
    query, value, mask = call.tensor("query"), call.tensor("value"), call.given("mask")
    name = kernel_name(
        "cpu",
        query.shape[3] == value.shape[3],
        None if mask is None else mask.dtype,
        call.given("keep") is not None,
        sight_of(call),
        call.given("segment") is not None,
    )
    return name == "flash"


def with_added(call: CallFacts, held: sympy.Expr, share: sympy.Expr) -> sympy.Expr:
    """Returns the bytes with those of the mask as the kernel wants it, in numbers.

    Of truth values their opposites come first; keys that do not lie together are copied, too.
    """
    query, mask, keep = call.tensor("query"), call.given("mask"), call.given("keep")
    given = mask or keep
    if given is None:
        return held
    apart = given.dtype.is_floating_point and given.shape[3] != 1 and given.strides[3] not in (0, 1)
    if given.dtype == added_dtype(given.dtype, query.dtype) and not apart:
        return held
    numel = given.numel
    if mask is not None and mask.shape[2] != 1:
        numel *= share
    added = numel * added_dtype(given.dtype, query.dtype).itemsize
    return added + (larger(held, numel) if given.dtype.itemsize == 1 else held)


def _split(call: CallFacts) -> bool:
    """Whether the keys before the first query are a part of their own."""
    later = argument(call.node, "start", 0) != 0 or argument(call.node, "turn") is not None
    return argument(call.node, "after") is not None and later


def groups_of(call: CallFacts) -> sympy.Expr:
    """Returns the queries of a key head; a symbol where each rank has its own number of them."""
    return sympy.sympify(call.tensor("query").shape[1]) / call.tensor("key").shape[1]


def _block(call: CallFacts) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
    """Rows of a block, its keys, and the bytes of its own copies of queries, keys and values."""
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    rows = sympy.Min(ROWS, query.shape[2])
    before, after = argument(call.node, "before"), argument(call.node, "after")
    keys = key.shape[2]
    if before is not None and after is not None:
        keys = sympy.Min(keys, rows + before + after)
    if call.given("segment") is not None and _by_flash(call):  # blocks for short sequences alone
        keys = sympy.Min(keys, WIDEST)
    size = accumulator(query)
    copies = ZERO
    if query.dtype.itemsize < size:
        copies += key.shape[1] * keys * (query.shape[3] + value.shape[3]) * size
    if query.dtype.itemsize < size or groups_of(call) != 1:
        copies += query.shape[1] * rows * query.shape[3] * size
    return rows, keys, copies


def _hiding(call: CallFacts, rows: sympy.Expr, keys: sympy.Expr) -> sympy.Expr:
    """Returns the bytes that hide keys of a block: distances of positions, truth values."""
    held = ZERO
    mask = call.given("mask")
    if mask is not None and mask.dtype.itemsize == 1:
        _, heads, of_rows, of_keys = mask.shape
        held = heads * (1 if of_rows == 1 else rows) * (1 if of_keys == 1 else keys)
    both = [argument(call.node, name) is not None for name in ("before", "after")]
    if any(both):
        held = rows * keys * (8 + 1 + 2 * all(both)) + 8 * rows
    if call.given("segment") is not None:
        held = larger(held, rows * keys)
    return held


def _ids(call: CallFacts) -> sympy.Expr:
    """Returns the first and last key of each query's sequence."""
    segment = call.given("segment")
    if segment is None:
        return ZERO
    return segment.shape[0] * call.tensor("query").shape[2] * 2 * 8


def blocks(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that forward by blocks of matmuls holds, on any device."""
    rows, keys, held = _block(call)
    query, value = call.tensor("query"), call.tensor("value")
    heads, size = query.shape[1], accumulator(query)
    column = heads * rows
    later = column * (2 * size + 1) + column * value.shape[3] * size
    return held + _ids(call) + column * keys * size + larger(_hiding(call, rows, keys), later)


def blocks_backward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that backward by blocks of matmuls holds, on any device."""
    rows, keys, held = _block(call)
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    heads, size = query.shape[1], accumulator(query)
    column = heads * rows
    if query.dtype.itemsize < size:
        held += (key.numel + value.numel) * size
    if query.dtype.itemsize < size or groups_of(call) != 1:
        held += column * value.shape[3] * size
    scores = column * keys * size
    widest = key.shape[1] * keys * max(value.shape[3], query.shape[3]) * size
    queries = column * query.shape[3] * size  # their gradients; of few keys more than the scores
    later = scores + larger(scores, widest, queries, _hiding(call, rows, keys))
    products = column * value.shape[3] * size  # of outputs and their gradients, before the scores
    return held + _ids(call) + column * size + larger(later, products)


def mask_backward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that backward with a mask's gradient holds, which is added up in float32.

    In half precision that is the sum beside blocks, before the result is made of it.
    """
    query, mask = call.tensor("query"), call.tensor("mask")
    size = accumulator(query)
    if mask.dtype.itemsize == size:
        return blocks_backward(call)
    sums = size * (call.tensor("key").numel + call.tensor("value").numel)
    wide = size * mask.numel
    sums = sums if query.dtype.itemsize < size else ZERO
    return larger(blocks_backward(call) + wide - mask.size_bytes, sums + wide)
