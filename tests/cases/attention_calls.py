"""Calls of `dcpc::attention`: sizes, masks, bands, sequences packed into a row; their operands."""

from dataclasses import dataclass

import torch
from torch import Tensor

LEARNED = ("bias", "drowned", "shared bias")  # masks with a gradient
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
    # "bool", "float", "bias" (with a gradient), "rows"; "shared ...": a row for three samples
    mask: str = ""
    dtype: torch.dtype = torch.float64
    turn: int | None = None
    second: int = 0
    samples: int = 2
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
    b = s.samples
    tensors = [floats(b, q, h, d).transpose(1, 2), floats(b, g, t, d), floats(b, g, t, e)]
    keep = mask = None
    if s.keep:
        keep = torch.ones(s.samples, t, dtype=torch.bool)
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
    elif s.mask == "shared bool":
        mask = torch.rand((b // 3, 1, q, t), generator=generator) > 0.5
        mask[1, 0, 3] = False
    elif s.mask.startswith("shared"):  # made by heads last, as models make a bias of pairs
        mask = floats(b // 3, q, t, h).permute(0, 3, 1, 2).detach()
    elif s.mask:
        mask = floats(*((1, h, q, t) if s.mask in LEARNED else (2, 1, q, t)))
    for x in (*tensors, *([mask] if s.mask in LEARNED else [])):
        x.requires_grad_()
    return tensors, mask, keep


def segment_of(s: Setting) -> Tensor | None:
    generator = torch.Generator().manual_seed(7)
    t = s.lengths[1]
    if s.segment in ("sorted", "one row"):
        rows = 1 if s.segment == "one row" else s.samples
        return torch.randint(-3, 3, (rows, t), generator=generator).sort(1, descending=True)[0]
    if s.segment == "repeated":
        ids = torch.randint(0, 3, (s.samples, t // 11 + 1), generator=generator)
        return ids.repeat_interleave(11, 1)[:, :t]
    long = torch.arange(t).clamp(min=t - 100) - (torch.arange(t) == 0).long()
    every = {"one long": long, "ones": torch.arange(t).flip(0), "alternating": torch.arange(t) % 3}
    return every[s.segment].expand(s.samples, t) if s.segment else None


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
    "short window": Setting(lengths=(128, 128), before=20, after=0, heads=(4, 2)),
    "short window both ways": Setting(before=20, after=5),
    "short window ahead": Setting(after=3, heads=(4, 2), widths=(16, 16)),
    "short window from the middle": Setting(
        lengths=(60, 120), before=30, after=0, start=40, heads=(4, 2)
    ),
    "short window past the keys": Setting(lengths=(70, 30), before=9, after=3),
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
    "shared bias": Setting(samples=6, mask="shared bias", lengths=(150, 140)),
    "shared bias, grouped, causal": Setting(
        samples=6, mask="shared bias", heads=(4, 2), after=0
    ),
    "shared numbers": Setting(samples=6, mask="shared numbers"),
    "shared numbers, grouped": Setting(samples=6, mask="shared numbers", heads=(4, 2)),
    "shared numbers, causal from the middle": Setting(
        samples=6, mask="shared numbers", lengths=(33, 150), after=0, start=40, heads=(4, 2)
    ),
    "shared numbers, wide values": Setting(samples=6, mask="shared numbers", widths=(8, 5)),
    "shared numbers, zigzag": Setting(
        samples=6, mask="shared numbers", lengths=(40, 90), turn=20, second=63
    ),
    "shared numbers, packed": Setting(
        samples=6, mask="shared numbers", segment="repeated", after=0
    ),
    "shared truth mask": Setting(samples=9, mask="shared bool"),
    "shared truth mask by replacement": Setting(samples=6, mask="shared bool", empty="fixed"),
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
