"""`dcpc::attention` against attention written out densely: values and every gradient."""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import dcpc.attention  # noqa: F401 - registers the op

LEARNED = ("bias", "drowned")  # masks with a gradient

OP = torch.ops.dcpc.attention.default
SCALE = 0.3


@dataclass(frozen=True)
class Setting:
    """One call: sizes, what hides keys, dtype."""

    heads: tuple[int, int] = (4, 4)  # of queries, of keys
    lengths: tuple[int, int] = (70, 70)
    widths: tuple[int, int] = (8, 8)
    before: int | None = None
    after: int | None = None
    start: int = 0
    empty: str = "zero"
    keep: str = ""  # "right", "left" or "gone": where padding is
    mask: str = ""  # "bool", "float", "bias" (with a gradient), "rows"
    dtype: torch.dtype = torch.float64
    turn: int | None = None
    second: int = 0
    segment: str = (
        ""  # "sorted", "repeated" (in stretches), "ones", "alternating", "one row", "one long"
    )

    @property
    def rest(self) -> tuple:
        """Arguments of the ops after the tensors."""
        s = self
        return (SCALE, s.before, s.after, s.start, s.turn, s.second, s.empty)

    @property
    def positions(self) -> Tensor:
        """Of the queries among the keys."""
        row = torch.arange(self.lengths[0])
        turn = self.lengths[0] if self.turn is None else self.turn
        return torch.where(row < turn, row + self.start, row - turn + self.second)


def make(s: Setting) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
    generator = torch.Generator().manual_seed(3)

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(s.dtype)

    (h, g), (q, t), (d, e) = s.heads, s.lengths, s.widths
    tensors = [floats(2, q, h, d).transpose(1, 2), floats(2, g, t, d), floats(2, g, t, e)]
    keep = mask = None
    if s.keep:
        keep = torch.ones(2, t, dtype=torch.bool)
        cut = {"right": slice(t - t // 3, t), "left": slice(0, t // 3), "gone": slice(0, t)}
        keep[0, cut[s.keep]] = False
    if s.mask == "bool":
        mask = torch.rand((2, 1, q, t), generator=generator) > 0.5
        mask[1, 0, 3] = False
    elif s.mask == "rows":
        mask = torch.zeros(2, 1, 1, t, dtype=s.dtype)
        mask[0, ..., : t // 2] = float("-inf")
    elif s.mask == "drowned":
        mask = floats(1, h, q, t).masked_fill(torch.arange(t) < t // 2, torch.finfo(s.dtype).min)
        mask[:, :, 2] = torch.finfo(s.dtype).min
    elif s.mask:
        mask = floats(*((1, h, q, t) if s.mask in LEARNED else (2, 1, q, t)))
    for x in (*tensors, *([mask] if s.mask in LEARNED else [])):
        x.requires_grad_()
    return tensors, mask, keep


def segment_of(s: Setting) -> Tensor | None:
    generator = torch.Generator().manual_seed(7)
    t = s.lengths[1]
    if s.segment in ("sorted", "one row"):
        rows = 1 if s.segment == "one row" else 2
        return torch.randint(-3, 3, (rows, t), generator=generator).sort(1, descending=True)[0]
    if s.segment == "repeated":
        ids = torch.randint(0, 3, (2, t // 11 + 1), generator=generator)
        return ids.repeat_interleave(11, 1)[:, :t]
    long = torch.arange(t).clamp(min=t - 100) - (torch.arange(t) == 0).long()
    every = {"one long": long, "ones": torch.arange(t).flip(0), "alternating": torch.arange(t) % 3}
    return every[s.segment].expand(2, t) if s.segment else None


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
    seen = torch.ones(2, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    if s.before is not None:
        seen = seen & (keys >= at - s.before)
    if s.after is not None:
        seen = seen & (keys <= at + s.after)
    if keep is not None:
        seen = seen & keep[:, None, None, :]
    if segment is not None:
        seen = seen & (segment[:, s.positions, None] == segment[:, None])[:, None]
    if mask is not None:
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


SETTINGS = {
    "plain": Setting(),
    "causal": Setting(after=0),
    "grouped": Setting(heads=(6, 2), after=0),
    "one key head": Setting(heads=(4, 1)),
    "wide values": Setting(widths=(8, 5), after=0),
    "grouped wide values": Setting(heads=(6, 2), widths=(8, 5)),
    "cross": Setting(lengths=(33, 150)),
    "few wide keys": Setting(heads=(8, 2), lengths=(33, 9), widths=(48, 40)),
    "few keys, wide values": Setting(lengths=(33, 9), widths=(16, 48), mask="float"),
    "causal from the middle": Setting(lengths=(33, 150), after=0, start=40, heads=(4, 2)),
    "causal from the end": Setting(lengths=(33, 73), after=0, start=40),
    "window": Setting(lengths=(300, 300), before=20, after=0, heads=(4, 2)),
    "window both ways": Setting(lengths=(300, 300), before=20, after=5),
    "window from the middle": Setting(lengths=(150, 400), before=30, after=0, start=170),
    "padding": Setting(keep="right"),
    "padding left": Setting(keep="left", heads=(4, 2)),
    "causal padding": Setting(keep="right", after=0, heads=(4, 2)),
    "causal padding left": Setting(keep="left", after=0),
    "causal padding left from the middle": Setting(
        keep="left", after=0, lengths=(33, 150), start=40
    ),
    "causal nothing kept from the middle": Setting(
        keep="gone", after=0, lengths=(33, 150), start=40
    ),
    "causal padding at the end from the middle": Setting(
        keep="right", after=0, lengths=(60, 100), start=40, heads=(4, 2)
    ),
    "window padding left": Setting(keep="left", before=9, after=0, lengths=(200, 200)),
    "truth mask with an empty row": Setting(mask="bool"),
    "grouped truth mask": Setting(mask="bool", heads=(4, 2)),
    "number mask": Setting(mask="float"),
    "mask of keys": Setting(mask="rows"),
    "learned bias": Setting(mask="bias", lengths=(150, 140)),
    "learned bias, grouped, causal": Setting(mask="bias", after=0, heads=(4, 2)),
    "learned bias with a drowned row": Setting(mask="drowned"),
    "learned bias, padding": Setting(mask="bias", keep="right"),
    "padding by the lowest number": Setting(keep="right", empty="mean"),
    "causal padding left by the lowest number": Setting(keep="left", after=0, empty="mean"),
    "nothing kept by the lowest number": Setting(keep="gone", empty="mean", heads=(4, 2)),
    "causal nothing kept by the lowest number": Setting(
        keep="gone", after=0, empty="mean", heads=(4, 2)
    ),
    "padding left by replacement": Setting(keep="left", after=0, empty="fixed", heads=(4, 2)),
    "truth mask by replacement": Setting(mask="bool", empty="fixed", lengths=(140, 30)),
    "padding of -inf": Setting(keep="right", after=0, empty="nan"),
    "zigzag": Setting(lengths=(40, 90), after=0, start=10, turn=22, second=63, heads=(4, 2)),
    "zigzag, first chunk empty": Setting(lengths=(40, 90), after=0, turn=0, second=50),
    "zigzag, no limit": Setting(lengths=(40, 90), turn=22, second=63, mask="float"),
    "zigzag, second at once": Setting(lengths=(40, 90), after=0, turn=20, second=20, heads=(8, 1)),
    "zigzag padding": Setting(
        lengths=(40, 90), after=0, start=10, turn=22, second=63, keep="left", heads=(4, 2)
    ),
    "zigzag in halves": Setting(lengths=(40, 90), turn=20, second=63, heads=(4, 2)),
    "zigzag in halves, causal": Setting(lengths=(80, 90), turn=40, second=50, after=0),
    "zigzag window": Setting(lengths=(300, 600), before=9, after=3, start=5, turn=150, second=450),
    "zigzag learned bias": Setting(
        lengths=(160, 90), after=0, turn=81, second=11, mask="bias", heads=(4, 2)
    ),
    "zigzag truth mask": Setting(lengths=(40, 90), start=3, turn=30, second=80, mask="bool"),
    "packed": Setting(segment="sorted", after=0),
    "packed, not causal": Setting(segment="sorted", heads=(8, 1)),
    "packed alike": Setting(segment="one row", after=0, heads=(6, 2)),
    "packed, ids come again": Setting(segment="repeated", after=0, lengths=(190, 190)),
    "packed, ids come again, not causal": Setting(segment="repeated", lengths=(190, 190)),
    "packed sequences of one": Setting(segment="ones", after=0, heads=(4, 2)),
    "packed alternating": Setting(segment="alternating", after=0, lengths=(300, 300)),
    "packed long": Setting(segment="sorted", after=0, lengths=(300, 300), heads=(4, 2)),
    "packed, one long among short": Setting(
        segment="one long", after=0, lengths=(1200, 1200), heads=(2, 1)
    ),
    "packed window": Setting(segment="repeated", before=15, after=0, lengths=(190, 190)),
    "packed wide values": Setting(segment="sorted", after=0, widths=(8, 5), heads=(4, 2)),
    "packed padding": Setting(segment="repeated", keep="left", after=0, lengths=(190, 190)),
    "packed nothing kept": Setting(segment="sorted", keep="gone"),
    "packed padding by the lowest number": Setting(
        segment="sorted", keep="left", after=0, empty="mean", heads=(4, 2)
    ),
    "packed padding by replacement": Setting(segment="repeated", keep="right", empty="fixed"),
    "packed truth mask": Setting(segment="repeated", mask="bool", heads=(4, 2)),
    "packed number mask": Setting(segment="sorted", mask="float", after=0),
    "packed learned bias": Setting(segment="repeated", mask="bias", after=0, heads=(4, 2)),
    "packed zigzag": Setting(
        segment="sorted", lengths=(60, 150), after=0, start=20, turn=35, second=110, heads=(4, 2)
    ),
    "packed zigzag, ids come again": Setting(
        segment="repeated", lengths=(60, 150), after=0, start=20, turn=35, second=110
    ),
    "packed zigzag window": Setting(
        segment="repeated", lengths=(60, 150), before=8, after=0, turn=35, second=110
    ),
    "packed zigzag learned bias": Setting(
        segment="sorted", lengths=(60, 150), turn=35, second=110, mask="bias", keep="right"
    ),
}  # fmt: skip


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
