"""Attention whose keys are all on this rank: by one call of a kernel where possible."""

from __future__ import annotations

from itertools import islice

from torch import Tensor

from dcpc.ops.attention import blocks, cuda, flash, varlen
from dcpc.ops.attention.kernels import SHORT, kernel_name, masks_window, takes
from dcpc.ops.attention.partial import Backward, Forward, Operands
from dcpc.ops.attention.rectangles import Ids
from dcpc.ops.attention.spec import (
    Attended,
    RunOfRows,
    Sight,
    accumulated,
    empty_gradient,
    empty_outputs,
    part_of,
)

# With fewer queries to a call of a fused kernel than this on average blocks are faster. They are
# used then if no run of their queries has more keys than WIDEST between the first and the last one
# seen, which bounds what they hold; or if calls are so many (sequences that alternate) that they
# would take minutes.
SHORTEST = 16
WIDEST = 1024
MOST_CALLS = 8  # for each query


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    segment: Tensor | None,
    sight: Sight,
) -> tuple[Tensor, Tensor]:
    """Returns out `[b, h, s, e]` and logsumexp `[b, h, s]`."""
    kernel = _kernel(q, v, mask, keep, segment, sight)
    runs = sight.runs(q.shape[2])
    if kernel == "cuda" and segment is not None:
        ends = varlen.ends_of(q, k, segment, sight)
        if ends is not None:
            return varlen.forward(q, k, v, ends, sight)
    if kernel != "blocks" and segment is not None:
        given = _operands(q, k, keep, segment, sight)
        if not _in_blocks(given, q):
            state = Forward(given, q, v)
            state.add(k, v, [RunOfRows(0, k.shape[2], 0)])
            return state.finish()
        kernel = "blocks"
    if kernel == "blocks" and _masks_window(q, k, v, (mask, keep, segment), sight):
        return flash.forward_windowed(q, k, v, sight)
    if kernel == "blocks":
        return blocks.forward(q, k, v, mask, keep, sight, ids_of(segment, q, sight))
    if len(runs) == 1:
        return _fused(kernel, q, k, v, mask, keep, sight.of(runs[0]))
    out, lse = empty_outputs(q, v)
    for run in runs:
        rows = slice(run.at, run.at + run.length)
        given_mask = part_of(mask, 2, rows)
        found = _fused(kernel, q[:, :, rows], k, v, given_mask, keep, sight.of(run))
        out[:, :, rows].copy_(found[0])
        lse[:, :, rows].copy_(found[1])
        del found
    return out, lse


def _fused(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    sight: Sight,
) -> tuple[Tensor, Tensor]:
    if kernel == "flash":
        return flash.forward(q, k, v, mask, keep, sight)
    if cuda.able(q, k, sight):
        return cuda.forward(q, k, v, sight)
    return blocks.forward(q, k, v, mask, keep, sight)


def backward(
    given: Attended, mask: Tensor | None, keep: Tensor | None, segment: Tensor | None, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, laid out (b, s, h, d)."""
    _, q, k, v, _, _ = given
    kernel = _kernel(q, v, mask, keep, segment, sight)
    runs = sight.runs(q.shape[2])
    if kernel == "cuda" and segment is not None:
        ends = varlen.ends_of(q, k, segment, sight)
        if ends is not None:
            return varlen.backward(given, ends, sight)
    if kernel != "blocks" and segment is not None:
        operands = _operands(q, k, keep, segment, sight)
        if not _in_blocks(operands, q):
            return _added_up(Backward(operands, given.grad, q, given.out, given.lse), k, v)
        kernel = "blocks"
    if kernel == "blocks" and _masks_window(q, k, v, (mask, keep, segment), sight):
        return flash.backward_windowed(given, sight)
    if kernel == "blocks":
        return blocks.backward(given, mask, keep, sight, ids_of(segment, q, sight))[:3]
    if len(runs) == 1:
        return _fused_backward(kernel, given, mask, keep, sight.of(runs[0]))
    dq = empty_gradient(q)
    dk, dv = (empty_gradient(x, accumulated(x.dtype)).zero_() for x in (k, v))
    for run in runs:
        rows = slice(run.at, run.at + run.length)
        one = _fused_backward(kernel, given.rows(rows), part_of(mask, 2, rows), keep, sight.of(run))
        dq[:, :, rows].copy_(one[0])
        dk.add_(one[1])
        dv.add_(one[2])
        del one
    return dq, _as(k, dk), _as(v, dv)


def _fused_backward(
    kernel: str, given: Attended, mask: Tensor | None, keep: Tensor | None, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    if kernel == "flash":
        return flash.backward(given, mask, keep, sight)
    if cuda.able(given.q, given.k, sight):
        return cuda.backward(given, sight)
    return blocks.backward(given, mask, keep, sight)[:3]


def _added_up(state: Backward, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dk, dv = (empty_gradient(x, accumulated(x.dtype)).zero_() for x in (k, v))
    state.add(k, v, [RunOfRows(0, k.shape[2], 0)], dk, dv)
    return state.finish(), _as(k, dk), _as(v, dv)


def _as(x: Tensor, gradient: Tensor) -> Tensor:
    """Returns a gradient in its tensor's dtype."""
    return gradient if gradient.dtype == x.dtype else empty_gradient(x).copy_(gradient)


def _kernel(
    q: Tensor,
    v: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    segment: Tensor | None,
    sight: Sight,
) -> str:
    return kernel_name(
        q.device.type, q.shape[-1] == v.shape[-1], None if mask is None else mask.dtype,
        keep is not None, sight, segment is not None,
    )  # fmt: skip


def _masks_window(
    q: Tensor, k: Tensor, v: Tensor, hiding: tuple[Tensor | None, ...], sight: Sight
) -> bool:
    """Returns whether "flash" computes a window by a mask: for few queries in one run."""
    rows, keys = q.shape[2], k.shape[2]
    hidden = any(x is not None for x in hiding)
    return (
        max(rows, keys) <= SHORT
        and masks_window(q.device.type, q.shape[3] == v.shape[3], hidden, sight)
        and takes("flash", q)
        and sight.turn is None
        and not sight.misses(sight.start + rows, keys)
    )


def _operands(q: Tensor, k: Tensor, keep: Tensor | None, segment: Tensor, sight: Sight) -> Operands:
    runs = sight.runs(q.shape[2])
    last = max((run.position + run.length for run in runs), default=0)
    averages = sight.empty in ("mean", "fixed") and sight.misses(last, k.shape[2])
    return Operands(None, keep, segment, sight, runs, k.shape[2], averages)


def _in_blocks(given: Operands, q: Tensor) -> bool:
    """Returns whether sequences are so short that blocks compute them."""
    assert given.segment is not None, "only packed sequences are short"
    rows = given.segment.shape[0] * q.shape[2]
    every = given.cut().against([RunOfRows(0, given.keys, 0)])
    calls = sum(1 for _ in islice(every, MOST_CALLS * rows + 1))
    if calls * SHORTEST <= max(rows, SHORTEST * given.segment.shape[0]):
        return False
    if calls > MOST_CALLS * rows:
        return True
    ids = ids_of(given.segment, q, given.sight)
    assert ids is not None
    return blocks.widest(q, given.keys, given.sight, ids) <= WIDEST


def ids_of(segment: Tensor | None, q: Tensor, sight: Sight) -> Ids | None:
    """Returns the sequences of the queries and of all keys, or None if rows are not packed."""
    if segment is None:
        return None
    return Ids(segment, sight.runs(q.shape[2]), [RunOfRows(0, segment.shape[1], 0)])
