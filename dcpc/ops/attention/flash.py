"""Attention by torch's CPU flash kernel, which supports causal masks and additive masks.

Cases that the kernel does not support take several calls: grouped heads (one call for each query of
a group, on a strided view: keys are never repeated), samples that share a mask (one call for each
row of the mask), and queries that start in the middle of the keys (the earlier keys in full, the
rest causal; both are merged by their logsumexp).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from dcpc.ops.attention.kernels import added_dtype, check_sizes, laid, takes
from dcpc.ops.attention.spec import Attended, Sight, empty_gradient, empty_outputs, part_of

aten = torch.ops.aten


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, keep: Tensor | None, sight: Sight
) -> tuple[Tensor, Tensor]:
    """Returns out `[b, h, s, d]` and logsumexp `[b, h, s]`; both are 0 for rows without a key."""
    given = q
    q, k, v = _laid(q, k, v)
    added = _added(q, mask, keep)
    if added is None or not _is_shared(added, q):
        return _of_heads(given, (q, k, v), added, keep, sight)
    out, lse = empty_outputs(given, v)
    for at, samples in _sharers(added, q):
        some = q[samples]
        part, part_lse = _of_heads(some, (some, k[samples], v[samples]), added[at], keep, sight)
        out[samples].copy_(part)
        lse[samples].copy_(part_lse)
        del part, part_lse
    return out, lse


def _of_heads(
    given: Tensor,
    tensors: tuple[Tensor, Tensor, Tensor],
    added: Tensor | None,
    keep: Tensor | None,
    sight: Sight,
) -> tuple[Tensor, Tensor]:
    """Returns out, laid out as `given`, and logsumexp, by one call for each query of a group."""
    q, k, v = tensors
    added = _expanded(added, q)
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        out, lse = _forward(q, k, v, added, keep, sight)
        return out if q is given else empty_outputs(given, v)[0].copy_(out), lse
    out, lse = empty_outputs(given, v)
    for i in range(groups):
        heads = slice(i, None, groups)
        part, part_lse = _forward(q[:, heads], k, v, part_of(added, 1, heads), keep, sight)
        out[:, heads].copy_(part)
        lse[:, heads].copy_(part_lse)
        del part, part_lse
    return out, lse


def backward(
    given: Attended, mask: Tensor | None, keep: Tensor | None, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, laid out (b, s, h, d)."""
    q, k, v = _laid(given.q, given.k, given.v)
    given = given._replace(q=q, k=k, v=v, out=laid("flash", given.out))
    added = _added(q, mask, keep)
    if added is None or not _is_shared(added, q):
        return _backward_of_heads(given, added, sight)
    dq, dk, dv = map(empty_gradient, (q, k, v))
    for at, samples in _sharers(added, q):
        one = _backward_of_heads(given.samples(samples), added[at], sight)
        for whole, part in zip((dq, dk, dv), one, strict=True):
            whole[samples].copy_(part)
        del one, part
    return dq, dk, dv


def _backward_of_heads(
    given: Attended, added: Tensor | None, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    q, k = given.q, given.k
    added = _expanded(added, q)
    groups = q.shape[1] // k.shape[1]
    if groups == 1:
        return _backward(given, added, sight)
    dq = empty_gradient(q)
    dk: Tensor | None = None
    dv: Tensor | None = None
    for i in range(groups):
        heads = slice(i, None, groups)
        one = _backward(given.heads(heads), part_of(added, 1, heads), sight)
        dq[:, heads].copy_(one[0])
        dk = one[1] if dk is None else dk.add_(one[1])
        dv = one[2] if dv is None else dv.add_(one[2])
        del one
    assert dk is not None
    assert dv is not None
    return dq, dk, dv


def forward_windowed(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """Returns out and logsumexp under a window in which each query sees a key, by a mask."""
    mask, rest = _window(q, k, sight)
    return forward(q, k, v, mask, None, rest)


def backward_windowed(given: Attended, sight: Sight) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v of `forward_windowed`."""
    mask, rest = _window(given.q, given.k, sight)
    return backward(given, mask, None, rest)


def _window(q: Tensor, k: Tensor, sight: Sight) -> tuple[Tensor | None, Sight]:
    """Returns the additive mask `[1, 1, s, t]` of a window, and the limits left to the kernel."""
    causal = sight.after == 0 and sight.start == 0
    shape, hidden = (q.shape[2], k.shape[2]), float("-inf")
    mask: Tensor | None = None
    if sight.before is not None:
        mask = q.new_full(shape, hidden).tril_(sight.start - sight.before - 1)
    if sight.after is not None and not causal:
        later = q.new_full(shape, hidden).triu_(sight.start + sight.after + 1)
        mask = later if mask is None else mask.add_(later)
    rest = Sight(sight.scale, after=0 if causal else None)
    return None if mask is None else mask[None, None], rest


def _laid(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_sizes(q, k, v)
    if not takes("flash", q):
        raise TypeError(f"torch's flash attention computes none of {q.dtype}")
    return laid("flash", q), laid("flash", k), laid("flash", v)


def _added(q: Tensor, mask: Tensor | None, keep: Tensor | None) -> Tensor | None:
    """Returns the additive mask of the kernel, `[m, 1 or h, 1 or s, 1 or t]`.

    Its keys are adjacent in memory: the kernel copies any other mask, after expanding it to all
    samples.
    """
    if keep is not None:
        assert mask is None, "one mask at a time"
        mask = keep[:, None, None, :]
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        added = q.new_zeros(mask.shape)
        return added.masked_fill_(mask.logical_not(), float("-inf"))
    dtype = added_dtype(mask.dtype, q.dtype)
    if mask.shape[3] == 1 or mask.stride(3) in (0, 1):
        return mask.to(dtype)
    return mask.to(dtype, memory_format=torch.contiguous_format)


def _expanded(added: Tensor | None, q: Tensor) -> Tensor | None:
    """Returns a mask `[b, 1 or h, s, 1 or t]`, broadcast dims without memory."""
    if added is None:
        return None
    return added.expand(q.shape[0], added.shape[1], q.shape[2], added.shape[3])


def _is_shared(added: Tensor, q: Tensor) -> bool:
    """Returns whether samples share the rows of a mask, other than all a single one."""
    return added.shape[0] not in (1, q.shape[0])


def _sharers(added: Tensor, q: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yields each row of a mask, and the samples that share it."""
    each = q.shape[0] // added.shape[0]
    for row in range(added.shape[0]):
        yield slice(row, row + 1), slice(row * each, (row + 1) * each)


def _split(k: Tensor, sight: Sight) -> int:
    """Returns the number of keys before the first query of causal attention."""
    return 0 if sight.after is None else min(sight.start, k.shape[2])


def _forward(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, keep: Tensor | None, sight: Sight
) -> tuple[Tensor, Tensor]:
    first = _split(k, sight)
    if not first:
        return _call(q, k, v, added, sight.after is not None, sight.scale)
    whole = slice(None, first), slice(first, None)
    out, lse = _call(
        q, k[:, :, whole[0]], v[:, :, whole[0]], part_of(added, 3, whole[0]), False, sight.scale
    )
    if first == k.shape[2]:
        return out, lse
    more, more_lse = _call(
        q, k[:, :, whole[1]], v[:, :, whole[1]], part_of(added, 3, whole[1]), True, sight.scale
    )
    if keep is not None:  # the kernel says 0 where it saw no key
        seen = keep[:, first:].cumsum(1)[:, : q.shape[2]].bool()
        rest = q.shape[2] - seen.shape[1]
        seen = torch.cat([seen, seen[:, -1:].expand(-1, rest)], 1) if rest > 0 else seen
        more_lse.masked_fill_(seen.logical_not_()[:, None, :], float("-inf"))
        none = keep[:, :first].any(1).logical_not_()[:, None, None]
        lse.masked_fill_(none, float("-inf"))
    merged = torch.logaddexp(lse, more_lse)
    merged.masked_fill_(merged == float("-inf"), 0.0)
    out.mul_(lse.sub_(merged).exp_().unsqueeze(-1))
    more.mul_(more_lse.sub_(merged).exp_().unsqueeze(-1))
    return out.add_(more), merged


def _backward(given: Attended, added: Tensor | None, sight: Sight) -> tuple[Tensor, Tensor, Tensor]:
    k, v = given.k, given.v
    first = _split(k, sight)
    if not first:
        return _call_backward(given, added, sight.after is not None, sight.scale)
    dk, dv = empty_gradient(k), empty_gradient(v)
    dq: Tensor | None = None
    for keys, causal in ((slice(None, first), False), (slice(first, None), True)):
        if causal and first == k.shape[2]:
            break
        part = given._replace(k=k[:, :, keys], v=v[:, :, keys])
        one = _call_backward(part, part_of(added, 3, keys), causal, sight.scale)
        dq = one[0] if dq is None else dq.add_(one[0])
        dk[:, :, keys].copy_(one[1])
        dv[:, :, keys].copy_(one[2])
        del one
    assert dq is not None
    return dq, dk, dv


def _call(
    q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, lse = op(q, k, v, 0.0, causal, attn_mask=added, scale=scale)
    return out, lse


def _call_backward(
    given: Attended, added: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    dq, dk, dv = op(*given, 0.0, causal, attn_mask=added, scale=scale)
    return dq, dk, dv
