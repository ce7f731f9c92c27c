"""Plain functions that do as a GPU's kernels of attention, in the place of these on the CPU.

They follow the kernels' documentation: flash-attn's README, torch's varlen attention (which calls
the same op with windows), and kernel_forward.h. Half precision is computed in float32.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch


def hidden(q, k, left, right):
    """flash-attn's README: query i sees keys i + sk - sq - left to i + sk - sq + right; -1: all."""
    sq, sk = q.shape[1], k.shape[1]
    distance = torch.arange(sk) - torch.arange(sq).unsqueeze(1) - (sk - sq)
    gone = torch.zeros(sq, sk, dtype=torch.bool)
    if left >= 0:
        gone |= distance < -left
    return gone | (distance > right) if right >= 0 else gone


def widened(x):
    return x.float() if x.dtype.itemsize < 4 else x


def plain(q, k, v, scale, left, right):
    """(out, logsumexp) of `[b, s, h, d]`."""
    repeats, dtype = q.shape[2] // k.shape[2], q.dtype
    k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    q, k, v = map(widened, (q, k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(hidden(q, k, left, right), -math.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return out.to(dtype), scores.logsumexp(-1)


def forward(q, k, v, dropout, scale, causal, left, right, softcap, slopes, return_softmax):
    assert (dropout, causal, softcap, slopes, return_softmax) == (0.0, False, 0.0, None, False)
    return *plain(q, k, v, scale, left, right), None, None


def backward(
    grad, q, k, v, out, lse, dq, dk, dv, dropout, scale, causal, left, right, softcap, slopes,
    deterministic,
):  # fmt: skip
    with torch.enable_grad():
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        made, _ = plain(*given, scale, left, right)
    for place, found in zip((dq, dk, dv), torch.autograd.grad(made, given, grad), strict=True):
        place.copy_(found)


def _each(ends, *tensors):
    """The sequences of `[rows, h, d]`, each as a batch of one; gradients of a kernel read so."""
    for start, stop in pairwise(ends.tolist()):
        yield tuple(x[None, start:stop] for x in tensors)


def flash_forward(
    q, k, v, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale=None,
    window_size_left=None, window_size_right=None, **more,
):  # fmt: skip
    """aten._flash_attention_forward, which counts windows as flash-attn does; -1 and None: all."""
    assert (dropout, causal, debug) == (0.0, False, False)
    limits = scale, window_size_left, window_size_right
    if cum_q is None:
        assert (cum_k, max_q, max_k) == (None, q.shape[1], k.shape[1])
        out, lse = plain(q, k, v, *limits)
    else:
        _check_ends(cum_q, cum_k, max_q, max_k, q)
        found = [plain(*one, *limits) for one in _each(cum_q, q, k, v)]
        out, lse = torch.cat([x[0] for x, _ in found]), torch.cat([x[0] for _, x in found], 1)
    unused = torch.empty((), dtype=torch.uint64)
    return out.contiguous(), lse.contiguous(), unused, unused.clone(), out.new_empty(0)


def plain_backward(grad, q, k, v, out, lse, scale, left, right):
    """The gradients of `plain`, of out and logsumexp: kernels run where autograd is left."""
    groups, dtype = q.shape[2] // k.shape[2], q.dtype
    grad, q, k, v, out = map(widened, (grad, q, k, v, out))
    wide_k, wide_v = (x.repeat_interleave(groups, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, wide_k) * scale
    scores = scores.masked_fill(hidden(q, k, left, right), -math.inf)
    weights = (scores - lse.unsqueeze(-1)).exp()
    inner = torch.einsum("bqhd,bkhd->bhqk", grad, wide_v)
    inner = weights * (inner - torch.einsum("bqhd,bqhd->bhq", grad, out).unsqueeze(-1)) * scale
    dq = torch.einsum("bhqk,bkhd->bqhd", inner, wide_k)
    dk, dv = (
        torch.einsum("bhqk,bqhd->bkhd", inner, q),
        torch.einsum("bhqk,bqhd->bkhd", weights, grad),
    )
    dk, dv = (x.unflatten(2, (k.shape[2], groups)).sum(3) for x in (dk, dv))
    return tuple(x.to(dtype).contiguous() for x in (dq, dk, dv))


def flash_backward(
    grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, dropout, causal, seed, unused, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert (dropout, causal) == (0.0, False)
    limits = scale, window_size_left, window_size_right
    if cum_q is None:
        assert (cum_k, max_q, max_k) == (None, q.shape[1], k.shape[1])
        return plain_backward(grad, q, k, v, out, lse, *limits)
    _check_ends(cum_q, cum_k, max_q, max_k, q)
    each = zip(_each(cum_q, grad, q, k, v, out), _each(cum_q, lse.T), strict=True)
    found = [plain_backward(*one, of_rows.mT, *limits) for one, (of_rows,) in each]
    return tuple(torch.cat([x[0] for x in of_all]) for of_all in zip(*found, strict=True))


def _check_ends(cum_q, cum_k, max_q, max_k, q):
    lengths = cum_q.diff()
    assert cum_q is cum_k
    assert cum_q.dtype == torch.int32
    assert (int(cum_q[0]), int(cum_q[-1])) == (0, q.shape[0])
    assert max_q == max_k == int(lengths.max())
    assert int(lengths.min()) > 0


def efficient(q, k, v, mask_type, scale):
    """kernel_forward.h: no mask (0), or causal counted from the last query and key (2)."""
    assert q.shape[2] == k.shape[2], "query heads that share keys"
    assert mask_type in (0, 2)
    return plain(q, k, v, scale, -1, -1 if mask_type == 0 else 0)


def efficient_forward(
    q,
    k,
    v,
    bias,
    cum_q,
    cum_k,
    max_q,
    max_k,
    dropout,
    mask_type,
    compute_lse,
    *,
    scale=None,
    **more,
):
    assert (bias, cum_q, cum_k, dropout, compute_lse) == (None, None, None, 0.0, True)
    out, lse = efficient(q, k, v, mask_type, scale)
    padded = lse.new_full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), math.inf)
    padded[..., : lse.shape[2]] = lse
    seed = torch.empty((), dtype=torch.int64)
    return out.contiguous(), padded, seed, seed.clone(), q.shape[1], k.shape[1]


def efficient_backward(
    grad, q, k, v, bias, out, cum_q, cum_k, max_q, max_k, lse, dropout, seed, offset, mask_type,
    learns, *, scale=None, **more,
):  # fmt: skip
    assert (bias, cum_q, cum_k, dropout, learns) == (None, None, None, 0.0, False)
    assert (max_q, max_k) == (q.shape[1], k.shape[1])
    assert lse.shape[2] % 32 == 0
    rows = q.shape[1]
    assert bool((lse[..., rows:] == math.inf).all())
    right = -1 if mask_type == 0 else 0
    found = plain_backward(grad, q, k, v, out, lse[..., :rows], scale, -1, right)
    return *found, q.new_empty(0)


def cudnn_forward(
    q, k, v, bias, compute_lse, dropout=0.0, causal=False, debug=False, *, scale=None
):
    """What an H200 gave (docs/results/gpu.md): laid as the queries, a last dim of logsumexp."""
    assert (bias, compute_lse, dropout, debug) == (None, True, 0.0, False)
    assert k.shape[2] > 1
    assert not causal or q.shape[2] == k.shape[2]
    out, lse = plain(*(x.transpose(1, 2) for x in (q, k, v)), scale, -1, 0 if causal else -1)
    seed = torch.empty((), dtype=torch.int64)
    made = torch.empty_like(q).copy_(out.transpose(1, 2))
    lse = lse.contiguous().unsqueeze(3)
    return made, lse, None, None, q.shape[2], k.shape[2], seed, seed.clone(), q.new_empty(0)


def cudnn_backward(
    grad, q, k, v, out, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout, causal, *,
    scale=None,
):  # fmt: skip
    assert (bias, cum_q, cum_k, dropout) == (None, None, None, 0.0)
    assert (max_q, max_k) == (q.shape[2], k.shape[2])
    given = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    found = plain_backward(*given, lse.squeeze(3), scale, -1, 0 if causal else -1)
    places = map(torch.empty_like, (q, k, v))
    return tuple(x.copy_(y.transpose(1, 2)) for x, y in zip(places, found, strict=True))


KERNELS = {
    "_flash_attention_forward": flash_forward,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_cudnn_attention": cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
    "_efficient_attention_forward": efficient_forward,
    "_efficient_attention_backward": efficient_backward,
}


@contextmanager
def on_the_cpu(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Has ops of ATen that the CPU lacks be these functions there."""
    library = torch.library.Library("aten", "IMPL")
    for name, function in kernels.items():
        library.impl(name, function, "CPU")
    try:
        yield
    finally:
        library._destroy()
