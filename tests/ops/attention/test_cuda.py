"""dcpc.ops.attention.cuda: who sees whom, by a plain function that counts as flash-attn does."""

import math
from types import SimpleNamespace

import pytest
import torch

from dcpc.ops.attention import blocks, cuda
from dcpc.ops.attention.spec import Attended, Sight


def hidden(q, k, left, right):
    """flash-attn's README: query i sees keys i + sk - sq - left to i + sk - sq + right; -1: all."""
    sq, sk = q.shape[1], k.shape[1]
    distance = torch.arange(sk) - torch.arange(sq).unsqueeze(1) - (sk - sq)
    gone = torch.zeros(sq, sk, dtype=torch.bool)
    if left >= 0:
        gone |= distance < -left
    return gone | (distance > right) if right >= 0 else gone


def plain(q, k, v, scale, left, right):
    """(out, logsumexp) of `[b, s, h, d]`."""
    repeats = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeats, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(hidden(q, k, left, right), -math.inf)
    out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1)


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


@pytest.fixture
def flash_attn(monkeypatch):
    made = SimpleNamespace(_flash_attn_forward=forward, _flash_attn_backward=backward)
    monkeypatch.setattr(cuda, "installed", made)
    monkeypatch.setattr(cuda, "recent", lambda device: True)


CASES = [
    # before, after, start, queries, keys
    (None, None, 0, 5, 7),
    (None, 0, 0, 7, 7),
    (None, 0, 0, 3, 9),  # a first piece of the queries: keys after it are not seen by any
    (None, 0, 4, 3, 9),
    (None, 0, 6, 3, 9),
    (2, 0, 0, 8, 8),
    (2, 0, 0, 3, 9),
    (2, 0, 5, 3, 9),
    (3, 1, 2, 4, 9),
    (1, None, 3, 4, 9),
    (None, 2, 1, 4, 9),
]


@pytest.mark.parametrize(("before", "after", "start", "queries", "keys"), CASES)
@pytest.mark.parametrize("groups", [1, 2])
def test_every_query_sees_what_it_should(flash_attn, before, after, start, queries, keys, groups):
    torch.manual_seed(0)
    sight = Sight(0.3, before, after, start)
    q = torch.randn(2, 2 * groups, queries, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, keys, 8, dtype=torch.float64) for _ in range(2))
    grad = torch.randn_like(q)
    assert cuda.able(q.bfloat16(), k.bfloat16(), sight)
    out, lse = cuda.forward(q, k, v, sight)
    expected = blocks.forward(q, k, v, None, None, sight)
    torch.testing.assert_close((out, lse), expected, rtol=1e-12, atol=1e-12)
    given = Attended(grad, q, k, v, out, lse)
    found = cuda.backward(given, sight)
    wanted = blocks.backward(given, None, None, sight)[:3]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_a_kernel_does_not_do_is_left_to_the_blocks(flash_attn, monkeypatch):
    q, k = (torch.zeros(1, 4, n, 8, dtype=torch.bfloat16) for n in (4, 6))
    causal = Sight(1.0, None, 0, 0)
    assert cuda.able(q, k, causal)
    assert not cuda.able(q.float(), k.float(), causal)
    assert not cuda.able(q[..., :7], k[..., :7], causal)
    assert not cuda.able(q, k, Sight(1.0, None, -1, 0))  # the first query sees no key
    assert not cuda.able(q, k, Sight(1.0, 1, None, 6))  # the last ones see none
    monkeypatch.setattr(cuda, "installed", None)  # torch's own: no windows, causal if square
    assert cuda.able(q, k, causal)
    assert cuda.able(q, k[:, :2], causal)
    assert not cuda.able(q, k, Sight(1.0, None, 0, 2))
    assert not cuda.able(q, k, Sight(1.0, 2, 0, 0))
    monkeypatch.setattr(cuda, "recent", lambda device: False)
    assert not cuda.able(q, k, causal)
