"""A random module as plain data: it prints as Python source, runs, and can be made smaller.

A program is a list of steps; each is a few lines of Python that make one value of earlier ones.
The lines may name inputs, parameters (`self.p0`), earlier values, and the sizes `b`, `h`, `w`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MARK = re.compile("`")  # around a number in a line that may be another
NAMES = {"batch": "b", "h": "h", "w": "w"}  # of a dim in specs -> in the source


@dataclass(frozen=True)
class Step:
    """Lines that make one value.

    Attributes:
        out: its name.
        lines: of Python; constants that may be changed stand between backticks.
        reads: earlier values and inputs that the lines name.
        shape: text of each size.
        kind: "float", "int", "bool"; a "term" is a scalar of the loss.
    """

    out: str
    lines: tuple[str, ...]
    reads: tuple[str, ...]
    shape: tuple[str, ...]
    kind: str = "float"


@dataclass(frozen=True)
class Program:
    """A module with its inputs, and sizes to run it at.

    Attributes:
        inputs: name -> spec; floats are normal numbers, integers below `HIGH`, bools 2 of 3 true.
        parameters: name -> expression that makes it, after `torch.manual_seed(0)`.
        steps: in order; the loss is the sum of all terms.
        points: sizes of buckets, each of which is run; batch included.
        layout: of inputs and parameters in memory, see `laid`.
    """

    inputs: Mapping[str, str]
    parameters: Mapping[str, str]
    steps: tuple[Step, ...]
    points: tuple[Mapping[str, int], ...]
    layout: str = ""

    @property
    def terms(self) -> list[str]:
        return [s.out for s in self.steps if s.kind == "term"]

    def module_source(self) -> str:
        """Returns the source of the module, a class named Model."""
        lines = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        body = [line for s in self.steps for line in s.lines]
        text = MARK.sub("", "\n".join(body))
        for name, made in self.parameters.items():
            if f"self.{name}" in text:
                lines.append(f"        self.{name} = {made}")
        used = [n for n in self.inputs if re.search(rf"\b{n}\b", text)]
        lines += ["", f"    def forward(self, {', '.join(self.inputs)}):"]
        lines += [f"        {line}" for line in self._sizes(text, used)]
        lines += [f"        {line}" for line in text.splitlines()]
        lines.append(f"        return {' + '.join(self.terms)}")
        return "\n".join(lines) + "\n"

    def _sizes(self, text: str, used: list[str]) -> list[str]:
        found = []
        for dim, short in NAMES.items():
            if re.search(rf"\b{short}\b", text):
                for name in self.inputs:
                    dims = self.inputs[name].partition("[")[2].rstrip("]").split(", ")
                    if dim in dims:
                        found.append(f"{short} = {name}.shape[{dims.index(dim)}]")
                        break
        return found

    def source(self, doc: str = "") -> str:
        """Returns a file with the module, its inputs and sizes: a case of `tests/fuzz/cases/`."""
        return (
            f'"""{doc}"""\n\n'
            "import math  # noqa: F401\n\nimport torch\nfrom torch import nn\n"
            "from torch.nn import functional as F  # noqa: F401\n\n"
            f"INPUTS = {dict(self.inputs)!r}\n"
            f"POINTS = {[dict(p) for p in self.points]!r}\n"
            f"LAYOUT = {self.layout!r}\n\n\n"
            f"{self.module_source()}"
        )

    def model(self) -> nn.Module:
        """Returns the module, in float64, the same at every call."""
        return relaid(made(self.module_source()), self.layout)


HEADER = "import math\nimport torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"
HIGH = 5  # integers of inputs are below


def made(source: str) -> nn.Module:
    """Returns the module that a source declares as Model, parameters after a fixed seed."""
    space: dict[str, Any] = {}
    exec(compile(HEADER + source, "<program>", "exec"), space)
    return seeded(space["Model"])


def seeded(factory: Any) -> nn.Module:
    """Returns a module in float64, parameters after a fixed seed."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return factory().double()
    finally:
        torch.set_default_dtype(before)


def laid(x: Tensor, layout: str) -> Tensor:
    """Returns the same numbers in another layout.

    Args:
        x: a tensor.
        layout: "": as a new tensor; "turned": transposed, images with their channels last;
            "strided": every other element of a tensor twice as long.
    """
    if layout == "strided" and x.ndim:
        return torch.stack([x, x], -1)[..., 0]
    if layout == "turned" and x.ndim > 1:
        return x.movedim(1, -1).contiguous().movedim(-1, 1) if x.ndim > 2 else x.T.contiguous().T
    return x


def relaid(model: nn.Module, layout: str) -> nn.Module:
    """Returns the module, its parameters and buffers in a layout."""
    with torch.no_grad():
        for x in (*model.parameters(), *model.buffers()):
            x.data = laid(x.data, layout)
    return model


def data(
    inputs: Mapping[str, str], sizes: Mapping[str, int], seed: int = 0, layout: str = ""
) -> dict[str, Tensor]:
    """Returns inputs at some sizes, in a layout."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, spec in inputs.items():
        dtype, _, dims = spec.rstrip("]").partition("[")
        shape = [sizes[d] if d in sizes else int(d) for d in dims.split(", ")]
        kind = getattr(torch, dtype)
        if kind == torch.bool:
            found[name] = torch.rand(shape, generator=generator) < 0.67
        elif kind.is_floating_point:
            found[name] = torch.randn(shape, generator=generator, dtype=torch.float64).to(kind)
        else:
            found[name] = torch.randint(0, HIGH, shape, generator=generator).to(kind)
    return {name: laid(x, layout) for name, x in found.items()}
