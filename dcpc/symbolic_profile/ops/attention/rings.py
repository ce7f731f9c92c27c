"""Transient memory of a ring while keys and values go round, and of the swap before it.

Exact for attention that is causal or of all keys, on the rank that holds most of those with as
many rows (`ring_steps.py`). Upper bounds where a window, a mask, `keep` or segments hide keys, and
where values are of another width than keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from dcpc.ops.attention import kernel_name
from dcpc.symbolic_profile.ops.attention.ring_steps import RingBytes
from dcpc.symbolic_profile.ops.attention.scratch import BSHD, accumulator, kernel, kernel_backward
from dcpc.symbolic_profile.ops.attention.shapes import DTYPES, head_sizes
from dcpc.symbolic_profile.ops.attention.whole_costs import (
    blocks,
    blocks_backward,
    groups_of,
    sight_of,
    with_added,
)
from dcpc.symbolic_profile.ops.facts import CallFacts, argument, ranks_of
from dcpc.symbolic_profile.polynomials import larger


def ring_forward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that a ring's forward holds beyond its inputs and outputs."""
    return _ring_bytes(call, backward=False) if _followed(call) else ring_forward_bound(call)


def ring_backward(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that a ring's backward holds beyond its inputs and outputs."""
    return _ring_bytes(call, backward=True) if _followed(call) else ring_backward_bound(call)


def _followed(call: CallFacts) -> bool:
    """Whether a ring's bytes follow from its sizes, step by step."""
    hidden = any(call.given(name) is not None for name in ("mask", "keep", "segment"))
    known = call.tensor("query").dtype in DTYPES and argument(call.node, "before") is None
    return known and not hidden and argument(call.node, "after") in (None, 0) and _by_flash(call)


def _ring_bytes(call: CallFacts, backward: bool) -> sympy.Expr:
    """Returns the bytes of a ring as a function of its sizes."""
    node, size = call.node, call.facts.size
    query, key = call.tensor("query"), call.tensor("key")
    splits = [
        size(argument(node, f"{of}_{name}"))
        for of in ("query", "key")
        for name in ("size", "parent", "shift", "zigzag", "rows")
    ]
    ring = (
        backward, ranks_of(argument(node, "group")), argument(node, "across"),
        argument(node, "after") is not None, argument(node, "empty") in ("mean", "fixed"),
        query.shape[2], key.shape[2], *splits,
    )  # fmt: skip
    found = map(sympy.sympify, map(_number, ring))
    return RingBytes(*found, *head_sizes(call, backward))


def _number(x: bool | int | sympy.Expr) -> int | sympy.Expr:
    return int(x) if isinstance(x, bool) else x


def ring_forward_bound(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that a ring's forward holds at the most, of any attention.

    Keys that come and keys that go, and what a step's kernel or merging its result takes.
    """
    query, value = call.tensor("query"), call.tensor("value")
    groups, outputs = groups_of(call), query.numel / query.shape[3] * value.shape[3]
    lse_bytes = query.numel / query.shape[3] * accumulator(query)
    rows, row_bytes, _ = _round(call)
    added = value.shape[0] * value.shape[1] * value.shape[3] * accumulator(query)
    added += outputs * query.dtype.itemsize
    if query.dtype.itemsize < 4:  # all outputs in float32, of which later only the others are left
        added += outputs * (2 * accumulator(query) - query.dtype.itemsize)
    if not _by_flash(call):
        merged = 6 * lse_bytes + blocks(call)
        return added + row_bytes * (rows.own + larger(rows.own, rows.other)) + merged
    if groups != 1:
        added += (query.size_bytes + lse_bytes) / groups
    first = row_bytes * (rows.own + rows.other) + kernel(call)
    later = larger(kernel(call, None, rows.other), 3 * lse_bytes)
    later += row_bytes * (rows.other + rows.next)
    return with_added(call, added + lse_bytes + larger(first, later), sympy.Integer(1))


def ring_backward_bound(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that a ring's backward holds at the most, of any attention.

    Keys that come and keys that go, gradients that come, that go and that are added to, a rank's
    own if the others' keys come after, and what the largest part takes.
    """
    query, key, value = (call.tensor(name) for name in ("query", "key", "value"))
    groups, wide = groups_of(call), accumulator(query)
    both_bytes = key.size_bytes + value.size_bytes
    rows, row_bytes, wide_bytes = _round(call)
    held = query.size_bytes + query.numel / query.shape[3]
    held -= both_bytes  # the outputs, made when all this is gone
    if query.dtype.itemsize < 4:
        held += query.numel * wide - query.size_bytes
    # What a step has: keys, those that come, gradients, and what one part's are made into.
    first = row_bytes * (2 * rows.own + rows.other) + wide_bytes * rows.own
    later = row_bytes * (2 * rows.other + rows.next) + wide_bytes * (rows.own + 2 * rows.other)
    if rows.late:
        later += wide_bytes * rows.own
    if not _by_flash(call):
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
    return with_added(call, held + larger(first, later), sympy.Integer(1))


@dataclass(frozen=True, slots=True)
class _KeyRows:
    """Rows of keys that one rank has at a time.

    Attributes:
        own: rows of its own.
        other: maximum rows of any other position.
        next: maximum rows that arrive while another's are used: none in a ring of two.
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
    return rows, row * key.dtype.itemsize, row * accumulator(key)


def _by_flash(call: CallFacts) -> bool:
    """Whether the parts of a ring are the kernel's."""
    widths = call.tensor("query").shape[3] == call.tensor("value").shape[3]
    name = kernel_name("cpu", widths, None, False, sight_of(call)._replace(empty="zero"))
    return name == "flash" and call.given("mask") is None


def swap(call: CallFacts) -> sympy.Expr:
    """Returns the bytes that a swap holds beyond its input and output: sent or received ones.

    The input is copied before it is packed, as its parts do not lie together. Back from heads the
    rows of zigzag pieces are picked first: that is the copy, and it stays.
    """
    picked = argument(call.node, "zigzag") and not argument(call.node, "to_heads")
    sent, came = call.inputs_bytes, call.output_bytes
    return larger(sent, came) + sent if picked else larger(sent, came, 2 * sent - came)
