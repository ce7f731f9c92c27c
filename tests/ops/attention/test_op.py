"""`dcpc::attention` against attention written out densely: values and every gradient."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import dcpc.ops.attention  # noqa: F401 - registers the op
from tests.cases.attention_calls import LEARNED, SCALE, SETTINGS, Setting, make, segment_of

OP = torch.ops.dcpc.attention.default


def dense(
    tensors: list[Tensor],
    mask: Tensor | None,
    keep: Tensor | None,
    segment: Tensor | None,
    s: Setting,
) -> Tensor:
    """Attention as its formula, in the tensors' own dtype."""
    q, k, v = tensors
    k, v = (x.repeat_interleave(s.heads[0] // s.heads[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * SCALE
    at = s.positions[:, None]
    keys = torch.arange(k.shape[2])
    seen = torch.ones(len(q), 1, q.shape[2], k.shape[2], dtype=torch.bool)
    if s.before is not None:
        seen = seen & (keys >= at - s.before)
    if s.after is not None:
        seen = seen & (keys <= at + s.after)
    if keep is not None:
        seen = seen & keep[:, None, None, :]
    if segment is not None:
        seen = seen & (segment[:, s.positions, None] == segment[:, None])[:, None]
    if mask is not None:
        mask = mask.repeat_interleave(len(q) // len(mask), 0)
        scores = scores + mask if mask.dtype != torch.bool else scores
        seen = seen & mask if mask.dtype == torch.bool else seen
    low = torch.finfo(s.dtype).min
    if s.empty == "mean":
        return (scores + torch.zeros_like(scores).masked_fill(~seen, low)).softmax(-1) @ v
    if s.empty == "fixed":
        return scores.masked_fill(~seen, low).softmax(-1) @ v
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return weights.masked_fill(~seen.any(-1, keepdim=True), 0.0) @ v


def errors(s: Setting) -> list[float]:
    tensors, mask, keep = make(s)
    leaves = [*tensors, *([mask] if s.mask in LEARNED else [])]
    segment = segment_of(s)
    want = dense(tensors, mask, keep, segment, s)
    found = OP(
        *tensors, mask, keep, segment, scale=SCALE, before=s.before, after=s.after, start=s.start,
        turn=s.turn, second=s.second, empty=s.empty,
    )  # fmt: skip
    g = torch.randn(want.shape, generator=torch.Generator().manual_seed(5)).to(s.dtype)
    pairs = [(found, want)]
    gradients = [torch.autograd.grad(x, leaves, g, allow_unused=True) for x in (found, want)]
    pairs += [p for p in zip(*gradients, strict=True) if p[1] is not None]
    pairs = [(a.detach(), b.detach()) for a, b in pairs]
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-2)) for a, b in pairs]


def test_no_sequence_reads_another_ones_values():
    """What is not a number in one sequence is nowhere in the others' outputs and gradients."""
    q, k, v = (torch.randn(1, 2, 60, 8, dtype=torch.float64) for _ in range(3))
    segment = torch.arange(60)[None] // 20
    for x in (q, k, v):
        x[:, :, 20:40] = float("nan")
        x.requires_grad_()
    out = OP(q, k, v, None, None, segment, scale=1.0, after=0)
    others = torch.arange(60)[segment[0] != 1]
    for x in (out, *torch.autograd.grad(out.sum(), (q, k, v))):
        assert not x[:, :, others].isnan().any()
        assert x[:, :, 20:40].isnan().any()


@pytest.mark.parametrize("name", SETTINGS)
def test_values_and_gradients_are_dense_attention_s(name):
    assert max(errors(SETTINGS[name])) < 1e-12


@pytest.mark.parametrize(
    "name",
    [
        *("causal", "grouped", "window", "learned bias", "causal padding", "zigzag", "packed"),
        *("shared bias", "shared numbers, grouped"),
        *("packed zigzag, ids come again", "packed zigzag window"),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 0.01)]
)
def test_lower_precision_is_within_its_rounding(name, dtype, limit):
    s = SETTINGS[name]
    assert max(errors(replace(s, dtype=dtype))) < limit


def test_statistics_of_half_precision_are_float32():
    x = torch.randn(1, 2, 5, 8, dtype=torch.bfloat16)
    _, lse = torch.ops.dcpc.attention_forward(
        x, x, x, None, None, None, 1.0, None, 0, 0, None, 0, "zero"
    )
    assert lse.dtype == torch.float32


def test_row_of_minus_infinity_alone_is_not_a_number():
    x = torch.randn(1, 1, 3, 4)
    keep = torch.tensor([[False, False, True]])
    out = OP(x, x, x, None, keep, scale=1.0, after=0, empty="nan")
    assert out[0, 0].isnan().any(-1).tolist() == [True, True, False]


@pytest.mark.parametrize("shape", [(0, 4, 5, 5), (2, 4, 0, 5), (2, 0, 5, 5), (2, 4, 5, 0)])
@pytest.mark.parametrize("kernel", ["flash", "blocks"])
def test_pieces_without_elements(shape, kernel):
    b, h, q, t = shape
    x, k, v = (torch.randn(b, h, n, 8, requires_grad=True) for n in (q, t, t))
    band = {"after": 0} if kernel == "flash" else {"before": 2, "after": 1}
    out = OP(x, k, v, scale=1.0, **band)
    assert out.shape == (b, h, q, 8)
    assert not out.any()
    for g, y in zip(torch.autograd.grad(out.sum(), (x, k, v)), (x, k, v), strict=True):
        assert g.shape == y.shape
        assert not g.any()


@pytest.mark.parametrize(
    "band", [{"after": 0}, {"before": 1, "after": 0}, {"after": 0, "start": 2}]
)
def test_gradcheck(band):
    generator = torch.Generator().manual_seed(1)
    shapes = ((1, 2, 3, 2), (1, 1, 6, 2), (1, 1, 6, 2), (1, 2, 3, 6))
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    for x in tensors:
        x.requires_grad_()
    assert torch.autograd.gradcheck(lambda *x: OP(*x, scale=0.7, **band), tensors)
    assert torch.autograd.gradcheck(lambda *x: OP(*x, scale=0.7, **band), tensors[:3])


@pytest.mark.parametrize(
    "name",
    [
        *("grouped", "window", "learned bias", "wide values", "cross", "zigzag", "zigzag window"),
        *("packed", "packed padding", "packed wide values", "packed zigzag learned bias"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_fake_values_are_laid_out_as_real_ones(name, dtype):
    s = replace(SETTINGS[name], dtype=dtype)
    tensors, mask, keep = make(s)
    segment = segment_of(s)
    ops = torch.ops.dcpc

    def both(*tensors: Tensor) -> list[Tensor]:
        out, lse = ops.attention_forward(*tensors, mask, keep, segment, *s.rest)
        op = ops.attention_mask_backward if s.mask in LEARNED else ops.attention_backward
        return [out, lse, *op(out, *tensors, mask, keep, segment, out, lse, *s.rest)]

    real = both(*tensors)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        mask, keep, segment = (
            None if x is None else mode.from_tensor(x) for x in (mask, keep, segment)
        )
        fake = both(*map(mode.from_tensor, tensors))
    for a, b in itertools.zip_longest(real, fake):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
