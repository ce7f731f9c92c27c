"""Values of inputs that the model cannot take, found before anything is computed.

Each input on the CPU is read once (labels with an ignored value in them twice); one on a GPU is
left to torch, as looking at it would wait for all that runs there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dcpc.ir import ValueRange

Ranges = Mapping[str, tuple[ValueRange, ...]]


@dataclass(frozen=True, slots=True)
class WrongValue:
    """A value that the model cannot take.

    Attributes:
        name: of the input.
        at: place of the first such element.
        got: its value.
        expected: what it may be.
        advice: what to do.
    """

    name: str
    at: tuple[int, ...]
    got: str
    expected: str
    advice: str

    def __str__(self) -> str:
        at = ", ".join(map(str, self.at))
        return f"input '{self.name}': got {self.got} at [{at}]; expected {self.expected}; " + (
            self.advice
        )


def out_of_range(inputs: Mapping[str, Tensor], ranges: Ranges) -> WrongValue | None:
    """Returns the first integer that is no row or class of what reads it; None: all are."""
    for name, needs in ranges.items():
        for need in needs if inputs[name].device.type == "cpu" else ():
            found = _first_outside(name, inputs[name], need)
            if found is not None:
                return found
    return None


def not_numbers(inputs: Mapping[str, Tensor]) -> WrongValue | None:
    """Returns the first NaN of inputs, or None. Masks are made of infinities."""
    for name, x in inputs.items():
        floating = x.is_floating_point() and x.device.type == "cpu"
        # A sum is NaN where an element is (or where two infinities cancel): it needs no mask.
        if floating and x.numel() and x.dtype.itemsize > 1 and bool(x.sum().isnan()):
            places = x.isnan().nonzero()
            if len(places):
                at = tuple(places[0].tolist())
                return WrongValue(
                    name, at, "nan", "a number", "correct the sample, or pass check_values=False "
                    "to the loader if the model takes NaN",
                )  # fmt: skip
    return None


def _first_outside(name: str, x: Tensor, need: ValueRange) -> WrongValue | None:
    first = [0] * x.ndim
    for extent in need.extents:
        first[extent.dim] = begin = max(0, extent.first)
        length = x.shape[extent.dim] - begin - max(0, extent.last)
        x = x.narrow(extent.dim, begin, max(0, length))
    if not x.numel():
        return None
    least, most = (int(v) for v in torch.aminmax(x))
    if least >= 0 and most < need.size:
        return None
    outside = (x < 0) | (x >= need.size)
    if need.ignored is not None and torch.iinfo(x.dtype).min <= need.ignored:
        outside &= x != need.ignored
    places = outside.nonzero()
    if not len(places):
        return None
    at = places[0].tolist()
    value = int(x[tuple(at)])
    ignored = "" if need.ignored is None else f", or {need.ignored}, which it ignores"
    return WrongValue(
        name,
        tuple(a + b for a, b in zip(at, first, strict=True)),
        str(value),
        f"0 to {need.size - 1}, the {need.reader}{ignored}",
        "correct the data (another tokenizer's ids?), or make the model's vocabulary larger",
    )
