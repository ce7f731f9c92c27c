"""What attention allocates while it runs, and the pairs of query and key it computes.

Follows `dcpc/attention/`: its flash kernel (torch's CPU one, called once for each query of a group)
and its blocks of matmuls. Measured as the lines of `transients.py` are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import CeilDiv

from dcpc.ops.attention import (
    DEMANDS,
    ROWS,
    WIDEST,
    Sight,
    added_dtype,
    kernel_name,
    masks_window,
)
from dcpc.symbolic_profile.ops.facts import CallFacts, Facts, TensorFacts, argument
from dcpc.symbolic_profile.polynomials import Packs, QueryBlock, Shares, Short, larger

BSHD = (0, 2, 1, 3)  # the order of dims in memory in which kernels take and give gradients
ZERO, ONE = sympy.Integer(0), sympy.Integer(1)


def _kernel_blocks(
    call: CallFacts, rows: sympy.Expr | None, keys: sympy.Expr | None
) -> tuple[sympy.Expr, sympy.Expr, sympy.Expr]:
    """Queries and keys of a block, and bytes of an element beside its float32 (0 in float32).

    Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
    """
    query, key = call.tensor("query"), call.tensor("key")
    keys = sympy.Min(512, key.shape[2] if keys is None else keys)
    reduced = query.dtype.itemsize if query.dtype.itemsize < 4 else 0
    return QueryBlock(query.shape[2] if rows is None else rows), keys, sympy.Integer(reduced)


def kernel(
    call: CallFacts,
    rows: sympy.Expr | None = None,
    keys: sympy.Expr | None = None,
    calls: sympy.Expr = ONE,
) -> sympy.Expr:
    """Returns the bytes of a thread's scores of a block, row maxima and sums, output: each one.

    Args:
        call: of the kernel, or of an op that calls it.
        rows: how many queries it is called for, None: all.
        keys: how many keys, None: all.
        calls: how many calls the samples are divided among.
    """
    packed = _packed(call, rows, keys, calls)
    queries, keys, reduced = _kernel_blocks(call, rows, keys)
    width = call.tensor("query").shape[3]
    accumulator = max(call.tensor("query").dtype.itemsize, 4)
    buffer = queries * (keys + 2 + width) * accumulator + queries * keys * reduced
    return call.threads * buffer + packed


def _packed(
    call: CallFacts, rows: sympy.Expr | None, keys: sympy.Expr | None, calls: sympy.Expr
) -> sympy.Expr:
    """Bytes of keys and values as a processor with AMX multiplies them in bfloat16, else 0.

    A thread has a block's keys besides, and queries where an odd width is made even. Not followed:
    few queries of many keys are not packed.

    Source: torch 2.13, aten/src/ATen/native/cpu/FlashAttentionKernel.cpp (`need_pack`).
    """
    query, key = call.tensor("query"), call.tensor("key")
    if query.dtype != torch.bfloat16 or not _multiplies_tiles():
        return ZERO
    batch, heads, queries, width = query.shape
    queries, keys = queries if rows is None else rows, key.shape[2] if keys is None else keys
    block, even = sympy.Min(512, keys), _even(width)
    own = batch / calls * heads * (keys * even + _even(keys) * width)
    padded = QueryBlock(queries) * (_even(block) - block + even * (width % 2))
    each = block * width + padded
    return Packs(queries, keys) * 2 * (own + call.threads * each)


def _even(size: sympy.Expr) -> sympy.Expr:
    return 2 * CeilDiv(size, 2)


@functools.cache
def _multiplies_tiles() -> bool:
    return bool(torch.cpu._is_amx_tile_supported())


@functools.cache
def _multiplies_halves() -> bool:
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


def kernel_backward(
    call: CallFacts,
    rows: sympy.Expr | None = None,
    keys: sympy.Expr | None = None,
    calls: sympy.Expr = ONE,
) -> sympy.Expr:
    """Returns the bytes of a thread's scores and their gradients, one row sum, grad_out's copy.

    That is made unless it lies (b, s, h, d); of some rows always. For arguments see `kernel`.
    """
    queries, keys, reduced = _kernel_blocks(call, rows, keys)
    accumulator = max(call.tensor("query").dtype.itemsize, 4)
    buffer = 2 * queries * keys * (accumulator + reduced) + _gemm(call, queries, keys)
    grad = call.tensor("grad_out")
    copy = grad.size_bytes if rows is None else grad.size_bytes * rows / grad.shape[2]
    if rows is None and grad.contiguous(BSHD):
        copy = ZERO
    return call.threads * buffer + queries * accumulator + copy / calls


def _gemm(call: CallFacts, queries: sympy.Expr, keys: sympy.Expr) -> sympy.Expr:
    """An upper bound: what oneDNN takes for a block's products in half precision.

    Measured on processors with AVX-512 for bfloat16 and float16; one without may take none.
    """
    query = call.tensor("query")
    if query.dtype == torch.float16 and _multiplies_halves():
        return 4 * queries * keys + 256 * (queries + keys) + 17_540
    if query.dtype != torch.bfloat16:
        return ZERO
    width = query.shape[3]
    packed = 2 * 64 * 64 * CeilDiv(keys, 64) * CeilDiv(width, 64)
    return 4 * (queries + keys) * width + 2 * queries * keys + packed + 5248


# ------------------------------------------------------------------------------- dcpc::attention


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
    if not _by_flash(call):
        return _by_window(call, blocks(call), _windowed)
    return _by_sharers(call, functools.partial(_forward_held, call))


def _by_sharers(call: CallFacts, held: Callable[[sympy.Expr], sympy.Expr]) -> sympy.Expr:
    """Returns the bytes of an attention: with a call for each row of a mask that samples share.

    Args:
        call: of the attention.
        held: the bytes, by how many calls the samples are divided among.
    """
    mask, samples = call.given("mask"), call.tensor("query").shape[0]
    if mask is None or mask.shape[0] in (1, samples):
        return held(ONE)
    shares = Shares(mask.shape[0], samples)
    return shares * held(mask.shape[0]) + (1 - shares) * held(ONE)


def _forward_held(call: CallFacts, calls: sympy.Expr) -> sympy.Expr:
    """Bytes of forward by the kernel."""
    query, groups = call.tensor("query"), _groups(call)
    rows = _run(call)
    share = rows / query.shape[2]
    lse_bytes = query.numel / query.shape[3] * _accumulator(query)
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
    return _with_added(call, held, share)


def _merged(query: TensorFacts, numel: sympy.Expr, lse_bytes: sympy.Expr) -> sympy.Expr:
    """A part's output and logsumexp, and what merging them makes; all outputs wide, if half."""
    if query.dtype.itemsize >= 4:
        return numel * query.dtype.itemsize + 5 * lse_bytes
    wide = query.numel * _accumulator(query)
    return wide + numel * (query.dtype.itemsize + _accumulator(query)) + 5 * lse_bytes


def backward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that attention's backward holds beyond its inputs and outputs.

    An upper bound where sequences are packed, as of forward.
    """
    if call.node.target._opname == "attention_mask_backward":  # type: ignore[union-attr]
        return mask_backward(call)
    if not _by_flash(call):
        return _by_window(call, blocks_backward(call), _windowed_backward)
    return _by_sharers(call, functools.partial(_backward_held, call))


def _backward_held(call: CallFacts, calls: sympy.Expr) -> sympy.Expr:
    """Bytes of backward by the kernel."""
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    rows, groups = _run(call), _groups(call)
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
            held += wide * _accumulator(query)
    return larger(held, blocks_backward(call)) if packed else _with_added(call, held, share)


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
    query, groups = call.tensor("query"), _groups(call)
    lse_bytes = query.numel / query.shape[3] * _accumulator(query)
    held = kernel(call) + _relaid(call, "query", "key", "value")
    if groups == 1:
        return held + _relaid(call, "query")
    return held + (query.size_bytes + lse_bytes) / groups


def _windowed_backward(call: CallFacts) -> sympy.Expr:
    query, key, value, grad = (call.tensor(n) for n in ("query", "key", "value", "grad_out"))
    groups = _groups(call)
    held = kernel_backward(call) + _relaid(call, "query", "key", "value", "out")
    if groups == 1:
        return held
    if grad.contiguous(BSHD):
        held += grad.size_bytes
    held -= sympy.expand(grad.size_bytes - grad.size_bytes / groups)
    return held + query.size_bytes / groups + key.size_bytes + value.size_bytes


def _relaid(call: CallFacts, *names: str) -> sympy.Expr:
    """Bytes of the copies of those tensors that do not lie as the kernel reads them."""
    held = ZERO
    for x in map(call.tensor, names):
        apart = x.shape[3] != 1 and x.strides[3] != 1
        overlap = x.shape[2] != 1 and x.strides[2] == 0
        held += x.size_bytes if apart or overlap else ZERO
    return held


def _run(call: CallFacts) -> sympy.Expr:
    """The most queries that a kernel is called for."""
    rows = call.tensor("query").shape[2]
    cut = argument(call.node, "turn") is not None and call.given("segment") is None
    return CeilDiv(rows, 2) if cut else rows


def sight_of(call: CallFacts) -> Sight:
    """Returns what an attention's queries see, wherever they are."""
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


def _with_added(call: CallFacts, held: sympy.Expr, share: sympy.Expr) -> sympy.Expr:
    """Adds the mask as the kernel wants it: numbers, of truth values first their opposites.

    Keys that do not lie together are copied, too.
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


def _groups(call: CallFacts) -> sympy.Expr:
    """Queries of a key head; a symbol where each rank has its own number of them."""
    return sympy.sympify(call.tensor("query").shape[1]) / call.tensor("key").shape[1]


def _accumulator(x: TensorFacts) -> int:
    return max(x.dtype.itemsize, 4)


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
    size = _accumulator(query)
    copies = ZERO
    if query.dtype.itemsize < size:
        copies += key.shape[1] * keys * (query.shape[3] + value.shape[3]) * size
    if query.dtype.itemsize < size or _groups(call) != 1:
        copies += query.shape[1] * rows * query.shape[3] * size
    return rows, keys, copies


def _hiding(call: CallFacts, rows: sympy.Expr, keys: sympy.Expr) -> sympy.Expr:
    """What says which keys of a block are hidden: distances of positions, truth values."""
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
    """The first and last key of each query's sequence."""
    segment = call.given("segment")
    if segment is None:
        return ZERO
    return segment.shape[0] * call.tensor("query").shape[2] * 2 * 8


def blocks(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that forward by blocks of matmuls holds, on any device."""
    rows, keys, held = _block(call)
    query, value = call.tensor("query"), call.tensor("value")
    heads, size = query.shape[1], _accumulator(query)
    column = heads * rows
    later = column * (2 * size + 1) + column * value.shape[3] * size
    return held + _ids(call) + column * keys * size + larger(_hiding(call, rows, keys), later)


def blocks_backward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that backward by blocks of matmuls holds, on any device."""
    rows, keys, held = _block(call)
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    heads, size = query.shape[1], _accumulator(query)
    column = heads * rows
    if query.dtype.itemsize < size:
        held += (key.numel + value.numel) * size
    if query.dtype.itemsize < size or _groups(call) != 1:
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
    size = _accumulator(query)
    if mask.dtype.itemsize == size:
        return blocks_backward(call)
    sums = size * (call.tensor("key").numel + call.tensor("value").numel)
    wide = size * mask.numel
    sums = sums if query.dtype.itemsize < size else ZERO
    return larger(blocks_backward(call) + wide - mask.size_bytes, sums + wide)


# ----------------------------------------------------------------------- dcpc::attention_of_rows


def rows_forward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that attention of valid rows holds beyond inputs and outputs, at the most.

    As if a sample had all positions: one sample's results, its part of the mask, and what `forward`
    holds for it.
    """
    query, value = call.tensor("query"), call.tensor("value")
    length, heads, size = _positions(call), query.shape[1], _accumulator(query)
    results = heads * length * (value.shape[3] * query.dtype.itemsize + size)
    given = length * (heads + call.tensor("key").shape[1]) * query.shape[3] * query.dtype.itemsize
    given += length * value.shape[1] * value.shape[3] * query.dtype.itemsize
    kernels = larger(kernel(call, length, length), _rows_block(call))
    return results + given + kernels + 2 * _rows_mask(call, query.dtype.itemsize)


def rows_backward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that its backward holds beyond inputs and outputs, at the most."""
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    length, heads, size = _positions(call), query.shape[1], _accumulator(query)
    widths = heads * query.shape[3] + key.shape[1] * (query.shape[3] + value.shape[3])
    gradients = length * widths * (2 * query.dtype.itemsize + size)
    gradients += length * heads * value.shape[3] * (query.dtype.itemsize + size)
    kernels = larger(kernel_backward(call, length, length), 2 * _rows_block(call))
    held = gradients + kernels + 2 * _rows_mask(call, query.dtype.itemsize)
    if call.node.target._opname.endswith("_mask_backward"):  # type: ignore[union-attr]
        mask = call.tensor("mask")
        wide = size * mask.numel if mask.dtype.itemsize < size else ZERO
        held += wide + 2 * _rows_mask(call, size)
    return held


def _positions(call: CallFacts) -> sympy.Expr:
    """How many positions a sample has, valid ones and padding."""
    return call.tensor("mask").shape[3]


def _rows_block(call: CallFacts) -> sympy.Expr:
    """Scores of a block of one sample's queries, and its copies of queries, keys and values."""
    query, value = call.tensor("query"), call.tensor("value")
    length, size = _positions(call), _accumulator(query)
    rows, heads = sympy.Min(ROWS, length), query.shape[1]
    scores = heads * rows * (2 * length + query.shape[3] + value.shape[3] + 4) * size
    return scores + heads * length * (query.shape[3] + value.shape[3]) * size


def _rows_mask(call: CallFacts, size: int) -> sympy.Expr:
    """One sample's part of a mask, in numbers of so many bytes."""
    _, heads, queries, keys = call.tensor("mask").shape
    return heads * queries * keys * size


# -------------------------------------------------------------------------- dcpc::ring_attention


def ring_forward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that a ring's forward holds beyond its inputs and outputs.

    Keys that come and keys that go, and what a step's kernel or merging its result takes. An upper
    bound, but for whole queries of 2 ranks that see all keys (queries of a zigzag piece are one run
    on the last rank alone).
    """
    query, value = call.tensor("query"), call.tensor("value")
    groups, outputs = _groups(call), query.numel / query.shape[3] * value.shape[3]
    lse_bytes = query.numel / query.shape[3] * _accumulator(query)
    rows, row_bytes, _ = _round(call)
    added = value.shape[0] * value.shape[1] * value.shape[3] * _accumulator(query)
    added += outputs * query.dtype.itemsize
    if query.dtype.itemsize < 4:  # all outputs in float32, of which later only the others are left
        added += outputs * (2 * _accumulator(query) - query.dtype.itemsize)
    if not _ring_by_flash(call):
        merged = 6 * lse_bytes + blocks(call)
        return added + row_bytes * (rows.own + larger(rows.own, rows.other)) + merged
    if groups != 1:
        added += (query.size_bytes + lse_bytes) / groups
    first = row_bytes * (rows.own + rows.other) + kernel(call)
    later = larger(kernel(call, None, rows.other), 3 * lse_bytes)
    later += row_bytes * (rows.other + rows.next)
    return _with_added(call, added + lse_bytes + larger(first, later), sympy.Integer(1))


def ring_backward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that a ring's backward holds beyond its inputs and outputs.

    Keys that come and keys that go, gradients that come, that go and that are added to, a rank's
    own if the others' keys come after, and what the largest part takes. An upper bound, as of
    forward.
    """
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    groups, accumulator = _groups(call), _accumulator(query)
    both_bytes = key.size_bytes + value.size_bytes
    rows, row_bytes, wide_bytes = _round(call)
    held = query.size_bytes + query.numel / query.shape[3]
    held -= both_bytes  # the outputs, made when all this is gone
    if query.dtype.itemsize < 4:
        held += query.numel * accumulator - query.size_bytes
    # What a step has: keys, those that come, gradients, and what one part's are made into.
    first = row_bytes * (2 * rows.own + rows.other) + wide_bytes * rows.own
    later = row_bytes * (2 * rows.other + rows.next) + wide_bytes * (rows.own + 2 * rows.other)
    if rows.late:
        later += wide_bytes * rows.own
    if not _ring_by_flash(call):
        return held + larger(first, later) + blocks_backward(call)
    if groups != 1:
        grad = call.tensor("grad_out")
        if rows.all_see and grad.contiguous(BSHD):  # one query of each group is copied
            held += grad.size_bytes
        held -= sympy.expand(grad.size_bytes - grad.size_bytes / groups)
        held += query.size_bytes / groups + both_bytes
    whole = None if rows.all_see else query.shape[2]
    first += kernel_backward(call, whole)
    later += kernel_backward(call, whole, rows.other)
    return _with_added(call, held + larger(first, later), sympy.Integer(1))


@dataclass(frozen=True, slots=True)
class _KeyRows:
    """Rows of keys that one rank has at a time.

    Attributes:
        own: its own.
        other: the most that any other position has.
        next: the most that come while another's are used: none in a ring of two.
        late: whether others' keys may come after all that a rank sees of its own.
        all_see: whether all queries see all keys.
    """

    own: sympy.Expr
    other: sympy.Expr
    next: sympy.Expr
    late: bool
    all_see: bool


def _round(call: CallFacts) -> tuple[_KeyRows, sympy.Expr, sympy.Expr]:
    """Returns the rows of a ring, and the bytes of one: keys and values, and their gradients.

    All positions together have all keys, and hardly two have numbers that differ by more than one
    element of the dim that is split; so this holds for every number of ranks.
    """
    key, value = call.tensor("key"), call.tensor("value")
    split = {
        name: call.facts.size(argument(call.node, f"key_{name}"))
        for name in ("size", "rows", "shift")
    }
    own, rest = key.shape[2], split["size"] * split["rows"] - key.shape[2]
    most = own + split["rows"] * (split["shift"] + argument(call.node, "across"))
    other = sympy.Min(most, rest)
    before, after = (argument(call.node, name) for name in ("before", "after"))
    late = after is not None and (not argument(call.node, "key_zigzag") or before is not None)
    row = (key.numel + value.numel) / own
    rows = _KeyRows(
        own, other, sympy.Min(most, rest - other), late, before is None and after is None
    )
    return rows, row * key.dtype.itemsize, row * _accumulator(key)


def _ring_by_flash(call: CallFacts) -> bool:
    """Whether the parts of a ring are the kernel's."""
    widths = call.tensor("query").shape[3] == call.tensor("value").shape[3]
    name = kernel_name("cpu", widths, None, False, sight_of(call)._replace(empty="zero"))
    return name == "flash" and call.given("mask") is None


def swap(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that a swap holds beyond its input and output: what is sent, or comes.

    Back from heads the rows of zigzag pieces are picked first.
    """
    picked = argument(call.node, "zigzag") and not argument(call.node, "to_heads")
    held = larger(call.inputs_bytes, call.output_bytes)
    return held + call.inputs_bytes if picked else held
