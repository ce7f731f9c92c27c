"""Draws programs: what templates draw from, repeats with one thing changed, losses, sizes."""

# ruff: noqa: E501 - a line of source a template

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from tests.fuzz.program import MARK, Program, Step

B, H, W = sympy.symbols("b h w", integer=True, positive=True)
WIDTH = 4
INPUTS = {
    "x": ("float64[batch, h, 4]", (B, H, WIDTH), "float"),
    "z": ("float64[batch, 4, h, 3]", (B, WIDTH, H, 3), "float"),
    "y": ("float64[batch, w, 4]", (B, W, WIDTH), "float"),
    "ids": ("int64[batch, h]", (B, H), "int"),
    "jds": ("int64[batch, w]", (B, W), "int"),
    "keep": ("bool[batch, h]", (B, H), "bool"),
    "stay": ("bool[batch, w]", (B, W), "bool"),
}
SWAPPED = {"h": "w", "w": "h", "ids": "jds", "jds": "ids", "keep": "stay", "stay": "keep"}
NUMBERS = (2, 3, 4, 5, 6, 7)


@dataclass(frozen=True)
class Value:
    """A value: its name, the size of each dim, and whether it is floats, integers or truths."""

    name: str
    shape: tuple[Any, ...]
    kind: str = "float"

    @property
    def ndim(self) -> int:
        return len(self.shape)


class Skip(Exception):  # noqa: N818 - not an error: the template cannot use what there is
    """A template has no values that it can use."""


Template = Callable[["Draw", Value], None]
TEMPLATES: list[tuple[float, Template]] = []


def template(weight: float = 1.0) -> Callable[[Template], Template]:
    """Adds a function that appends a step which reads a value."""

    def add(function: Template) -> Template:
        TEMPLATES.append((weight, function))
        return function

    return add


class Draw:
    """A program as it is drawn.

    Args:
        seed: of everything that is drawn.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.steps: list[Step] = []
        self.parameters: dict[str, str] = {}
        self.values: list[Value] = []
        self.inputs = {n: Value(n, shape, kind) for n, (_, shape, kind) in INPUTS.items()}
        self.constants: set[int] = set()
        self.mirror: dict[str, Value] = {}
        self.both = self.rng.random() < 0.7  # whether there is a second dim

    # ------------------------------------------------------------------------------------ what is

    def pick(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def flag(self, share: float = 0.5) -> bool:
        return self.rng.random() < share

    def among(self, wanted: Callable[[Value], bool]) -> Value:
        """Returns a value that is wanted, rather a late one."""
        found = [v for v in self.values if wanted(v)]
        if not found:
            raise Skip
        return self.rng.choice(found[-4:] if self.flag(0.7) else found)

    def like(self, v: Value) -> Value:
        """Returns floats of the same shape."""
        return self.among(lambda u: u.shape == v.shape and u.kind == "float")

    def dim(self, v: Value, *, least: int = 0) -> int:
        """Returns one of a value's dims, rather one of positions than the batch or a width."""
        dims = [i for i, n in enumerate(v.shape) if not (n.is_Integer and n < least)]
        along = [i for i in dims if v.shape[i].free_symbols - {B}]
        if not dims:
            raise Skip
        return self.rng.choice(along if along and self.flag(0.75) else dims)

    def named(self, v: Value, dim: int) -> int:
        """Returns the dim as it is written: from either end."""
        return dim - v.ndim if self.flag(0.4) else dim

    def size(self) -> Any:
        """Returns the size of a named dim."""
        return self.pick(H, W) if self.both else H

    # ----------------------------------------------------------------------------------- numbers

    def const(self, *choices: int | float) -> str:
        """Returns a number that a repeat may change."""
        value = self.rng.choice(choices)
        if isinstance(value, int) and value > 1:
            self.constants.add(value)
        return f"`{value}`"

    def number(self) -> str:
        """Returns a float, constant or of a dim, positive and not large."""
        n, m = self.size(), self.size()
        c = self.rng.choice(NUMBERS)
        texts = [
            self.const(0.5, 0.25, 1.5, 2.0), f"{n} / {self.const(8, 4)}", f"{self.const(1, 2)} / {n}",
            f"1.0 / {n}", f"{n} * {self.const(0.125, 0.25)}", f"({n} - 1) / {self.const(2, 3)}",
            f"{n} / {m}", f"({n} + {self.const(1, 2)}) / {c}", f"{n} / {self.const(3, 5)}",
        ]  # fmt: skip
        return str(self.rng.choice(texts[:1] * 3 + texts))

    def integer(self, n: Any) -> str:
        """Returns an integer, constant or of a dim, positive, mostly at most n."""
        m = self.size()
        texts = [
            self.const(1, 2), self.const(1, 2, 3), f"{n} // {self.const(2, 3)}", f"{n} - 1",
            f"({n} + 1) // {self.const(2)}", f"{m} // {self.const(2, 3)}", f"{m} - 1",
        ]  # fmt: skip
        return str(self.rng.choice(texts))

    def dtype(self, *choices: str) -> str:
        return f"torch.{self.rng.choice(choices)}"

    # ------------------------------------------------------------------------------------ adding

    def parameter(self, *shape: int, scale: float = 0.5) -> str:
        """Adds a parameter; returns how it is named in the source."""
        return self.module(f"nn.Parameter(torch.randn({', '.join(map(str, shape))}) * {scale})")

    def module(self, text: str) -> str:
        name = f"p{len(self.parameters)}"
        self.parameters[name] = text
        return f"self.{name}"

    def put(
        self,
        code: str | Sequence[str],
        shape: Sequence[Any],
        *,
        kind: str = "float",
        out: str = "",
    ) -> Value:
        """Appends a step: an expression, or lines that end with `out` made."""
        out = out or self.fresh()
        lines = (f"{out} = {code}",) if isinstance(code, str) else tuple(code)
        names = set(re.findall(r"\b[a-z]+\d*\b", " ".join(lines)))
        reads = tuple(v for v in (*self.inputs, *(u.name for u in self.values)) if v in names)
        sizes = tuple(sympy.sympify(n) for n in shape)
        self.steps.append(Step(out, lines, reads, tuple(map(str, sizes)), kind))
        value = Value(out, sizes, kind)
        if kind != "term":
            self.values.append(value)
        return value

    def fresh(self) -> str:
        """Returns a name that is not taken."""
        self._count = getattr(self, "_count", -1) + 1
        return f"v{self._count}"

    # ------------------------------------------------------------------------------------ growing

    def step(self) -> None:
        """Appends a step of some template, or a repeat of one with something changed."""
        if self.flag(0.3) and self.again():
            return
        weights = [w for w, _ in TEMPLATES]
        for _ in range(20):
            ((_, function),) = self.rng.choices(TEMPLATES, weights)
            count = len(self.steps), dict(self.parameters), list(self.values)
            try:
                function(self, self.among(lambda v: v.kind == "float" and v.ndim > 1))
            except Skip:
                del self.steps[count[0] :]
                self.parameters, self.values = count[1], count[2]
                continue
            return

    def again(self) -> bool:
        """Repeats a step: of the other dim, of another value, or with another constant."""
        known = [s for s in self.steps if s.kind != "term" and s.reads]
        if not known:
            return False
        step = self.rng.choice(known)
        shapes = {v.name: v.shape for v in (*self.inputs.values(), *self.values)}
        if self.both and self.flag(0.6):
            return self._mirrored(step)
        out = self.fresh()
        lines = [self._renamed(line, {step.out: out}) for line in step.lines]
        if self.flag(0.5):
            first = step.reads[0]
            others = [v.name for v in self.values if v.shape == shapes[first] and v.kind == "float"]
            if first in self.inputs or not others:
                return False
            lines = [self._renamed(line, {first: self.rng.choice(others)}) for line in lines]
        lines = [self._changed(line) for line in lines]
        self.put(lines, shapes[step.out], kind=step.kind, out=out)
        return True

    def _mirrored(self, step: Step) -> bool:
        """Repeats a step with h and w exchanged; operands are those of the other dim."""
        names: dict[str, str] = {**SWAPPED}
        for read in step.reads:
            if read in self.mirror:
                names[read] = self.mirror[read].name
            elif read not in SWAPPED:
                return False
        old = next(v for v in self.values if v.name == step.out)
        out = names[step.out] = self.fresh()
        lines = [self._renamed(line, names) for line in step.lines]
        if self.flag(0.5):
            lines = [self._changed(line) for line in lines]
        swap = {
            s: sympy.Symbol(self._renamed(str(s), SWAPPED), integer=True, positive=True)
            for n in old.shape
            for s in n.free_symbols
        }
        made = self.put(
            lines, [n.subs(swap, simultaneous=True) for n in old.shape], kind=step.kind, out=out
        )
        self.mirror |= {old.name: made, made.name: old}
        return True

    @staticmethod
    def _renamed(text: str, names: dict[str, str]) -> str:
        # A keyword argument or an attribute of that name is none of ours.
        return re.sub(
            r"(?<![.\w])[a-z]+\d*\b(?!\s*=[^=])|^[a-z]+\d*\b", lambda m: names.get(m[0], m[0]), text
        )

    def _changed(self, line: str) -> str:
        """Changes one marked constant."""
        marked = list(re.finditer("`([^`]*)`", line))
        if not marked:
            return line
        m = self.rng.choice(marked)
        now = m[1]
        new = str(float(now) * 0.75) if "." in now else str(max(1, int(now) + self.pick(-1, 1)))
        return f"{line[: m.start()]}`{new}`{line[m.end() :]}"

    # ----------------------------------------------------------------------------------- the end

    def program(self) -> Program:
        text = MARK.sub("", "\n".join(line for s in self.steps for line in s.lines))
        used = {n: INPUTS[n][0] for n in INPUTS if re.search(rf"\b{n}\b", text)}
        if re.search(r"\bw\b", text) and not {"y", "jds", "stay"} & set(used):
            used["y"] = INPUTS["y"][0]
        if not any("[batch, h" in spec for spec in used.values()):
            used["x"] = INPUTS["x"][0]
        points = self._points(used)
        layout = self.pick("", "", "", "turned", "strided")
        return Program(used, dict(self.parameters), tuple(self.steps), points, layout)

    def _points(self, used: dict[str, str]) -> tuple[dict[str, int], ...]:
        """Sizes on either side of a constant, and one that ranks do not divide."""
        c = self.rng.choice(sorted(self.constants)) if self.constants else 4
        # What is one or two shorter than a dim should not be 1, for which torch has another graph.
        least = 3 if self.flag(0.1) else 4
        near = sorted({max(least, n) for n in (c - 1, c, c + 1)} | {least, least + 1})
        other = self.rng.sample(sorted({*near, 5, 8, 11}), 3)
        near = [*self.rng.sample(near, 2), self.pick(9, 10, 11)]
        names = {"batch", "h"} | ({"w"} if any(", w" in s for s in used.values()) else set())
        every = zip((2, 1, 2), near, other, strict=True)
        points = [{"batch": b, "h": n, "w": m} for b, n, m in every]
        found = {p["h"]: p for p in points}.values()
        return tuple({k: v for k, v in p.items() if k in names} for p in found)
