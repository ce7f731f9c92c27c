"""Recognises causal, sliding-window and padding masks of attention, by the positions they compare.

A dense mask `[batch, 1, seq, seq]` is memory that grows with the square of the length. What it says
is mostly "keys at most here, at least there, and no padding", which `dcpc::attention` computes from
positions and a truth value a key. The element (b, h, i, j) of a mask is read off the graph as an
expression (`mask_graph.py`) and normalised here to

    j <= i + after  and  j >= i - before  and  keep[b, j]  and  segment[b, i] == segment[b, j]

or left as it is, with the reason in the report. The last of them is of sequences packed in one row
(`segments.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from dcpc.fx.large_graphs import source_line
from dcpc.ir import MaskDecision, MaskPlan, Program, Recipe
from dcpc.ops.attention import hides
from dcpc.passes.masks.mask_graph import MaskReader
from dcpc.passes.masks.mask_values import (
    FALSE,
    TRUE,
    Affine,
    Data,
    Truth,
    Value,
    WhereValue,
    both,
    either,
    negation,
    truth_of,
)
from dcpc.passes.masks.segments import is_one, segment_of, within

# A number at or below this, added to a score, leaves nothing of the score in float32 and float64.
DROWNS = -1e30


class _RefusedError(Exception):
    """The reason why a mask stays a tensor."""


@dataclass(slots=True)
class _Band:
    """The limits found so far in a conjunction."""

    before: int | None = None
    after: int | None = None
    keep: Recipe | None = None
    segment: Recipe | None = None

    def limit(self, before: int | None = None, after: int | None = None) -> None:
        """Tightens the limits."""
        if before is not None:
            self.before = before if self.before is None else min(self.before, before)
        if after is not None:
            self.after = after if self.after is None else min(self.after, after)


def recognise_masks(program: Program) -> MaskPlan:
    """Returns the recognised masks of a program's attentions, and why others stay tensors."""
    reader = MaskReader(program)
    decisions: dict[str, MaskDecision] = {}
    refused: dict[tuple[str, str], list[str]] = {}
    for node in program.gm.graph.nodes:
        mask = _mask_of(node)
        if mask is None or node.kwargs.get("before") is not None:
            continue
        try:
            decisions[node.name] = _Mask(program, reader, node, mask).decide()
        except _RefusedError as reason:
            refused.setdefault((mask.name, str(reason)), []).append(node.name)
    return MaskPlan(decisions, notes_of(program, refused))


def notes_of(program: Program, refused: Mapping[tuple[str, str], Sequence[str]]) -> tuple[str, ...]:
    """Returns a line for each mask that stays a tensor, from (mask, reason) -> attentions."""
    return tuple(_note(program, *why, nodes) for why, nodes in refused.items())


def _mask_of(node: fx.Node) -> fx.Node | None:
    """Returns the mask of an attention that has one and no other limits."""
    if str(node.target) != "dcpc.attention.default" or len(node.args) < 4:
        return None
    mask, *keep = node.args[3:]
    return mask if isinstance(mask, fx.Node) and not any(keep) else None


def _note(program: Program, mask: str, reason: str, nodes: Sequence[str]) -> str:
    node = next(n for n in program.gm.graph.nodes if n.name == mask)
    line = source_line(node)
    count = f"{len(nodes)} attentions" if len(nodes) > 1 else nodes[0]
    return f"mask {mask} of {count} stays a tensor: {reason}{f' ({line})' if line else ''}"


class _Mask:
    def __init__(self, program: Program, reader: MaskReader, node: fx.Node, mask: fx.Node) -> None:
        self.program, self.node, self.mask = program, node, mask
        query, key, *_ = (program.info[n.name].shape for n in node.all_input_nodes)
        self.sizes = {"b": query[0], "h": query[1], "i": query[2], "j": key[2]}
        self.reader = reader
        shape = program.info[mask.name].shape
        self.shared = shape[0] not in (1, query[0])  # by several samples, see `dcpc::attention`
        self.dtype = program.info[node.all_input_nodes[0].name].dtype
        names = zip(shape, self.sizes, strict=True)
        self.index = tuple(Affine(0) if n == 1 else Affine(0, ((v, 1),)) for n, v in names)

    def decide(self) -> MaskDecision:
        """Returns the recognised form of the mask.

        Raises:
            _RefusedError: it is no conjunction of limits of the distance and of conditions on a
                key.
        """
        info = self.program.info[self.mask.name]
        if info.shape[2] == 1:
            raise _RefusedError("it has one row for all queries, and so no square of the length")
        value = self.reader.read(self.mask, self.index)
        lows: set[float] = set()
        if info.dtype == torch.bool:
            seen = truth_of(value)
        else:
            seen, lows = self._seen(value)
        band = _Band()
        seen, band.segment = self._without_segment(seen)
        for part in seen.members if seen.kind == "all" else (seen,):
            self._take(part, band)
        given = self.node.kwargs.get("after")
        if isinstance(given, int):
            band.limit(after=given)
        if band.keep is not None and not any(get[4] >= 0 for get in _gets(band.keep)):
            raise _RefusedError("it hides all keys of a sample or none")
        empty = self._empty(band, lows)
        return MaskDecision(band.before, band.after, band.keep, empty, band.segment)

    def _without_segment(self, seen: Truth) -> tuple[Truth, Recipe | None]:
        """Returns the mask within one sequence, and the segments; None: a single segment."""
        parts = seen.members if seen.kind == "all" else (seen,)
        found = [segment_of(self.program, part) for part in parts]
        segment = next((s for s in found if s is not None), None)
        if segment is None:
            return seen, None
        if self.sizes["i"] != self.sizes["j"]:
            raise _RefusedError("it compares sequences of queries and keys of different lengths")
        rest = [p for p, own in zip(parts, found, strict=True) if own != segment]
        if is_one(self.reader, segment):
            return both(*rest), None
        recipe: Recipe = self._looked_up(segment)
        return both(*(within(self.reader, segment, part) for part in rest)), recipe

    # ------------------------------------------------------------------------- numbers to truth

    def _seen(self, value: Value) -> tuple[Truth, set[float]]:
        """Returns where an additive mask leaves a score unchanged, and its numbers elsewhere."""
        if isinstance(value, WhereValue):
            yes, low_yes = self._seen(value.yes)
            no, low_no = self._seen(value.no)
            seen = either(both(value.condition, yes), both(negation(value.condition), no))
            return seen, low_yes | low_no
        if isinstance(value, Affine) and value.constant:
            number = float(value.number)
            if number == 0:
                return TRUE, set()
            if hides(number, self.dtype):
                return FALSE, {number}
            raise _RefusedError(
                f"it adds {number:g} to scores, which may differ by as much; float('-inf') and "
                "torch.finfo(dtype).min hide keys for sure"
            )
        raise _RefusedError(f"it adds numbers to scores: {self._blame(value)}")

    def _blame(self, value: Value) -> str:
        data = next(_lookups(value), None)
        if data is None:
            return "they depend on positions"
        node = next(n for n in self.program.gm.graph.nodes if n.name == data[1])
        return f"those of node {node.name} ({node.target})"

    def _empty(self, band: _Band, lows: set[float]) -> str:
        """Returns the result rule of a query that sees no key; "" to keep the attention's own."""
        if not lows or self._sees_something(band):
            return ""
        if len(lows) > 1:
            several = " and ".join(f"{low:g}" for low in sorted(lows))
            raise _RefusedError(f"a query may see no key, and then {several} make the difference")
        (low,) = lows
        own = self.node.kwargs.get("empty", "zero")
        if low == float("-inf"):
            return "zero" if own == "safe" else ""
        if own == "zero":
            raise _RefusedError(
                f"a query may see no key, and what torch's fused attention makes of {low:g} alone "
                "depends on its kernel; use a mask of truth values"
            )
        if low > DROWNS:
            raise _RefusedError(f"a query may see no key, and {low:g} does not drown its scores")
        return "mean"

    def _sees_something(self, band: _Band) -> bool:
        """Whether every query surely sees a key: the first one, or its own."""
        if band.keep is not None:
            return False
        before, after = band.before, band.after
        if band.segment is not None:  # a query and its own key are of one sequence
            return (after is None or after >= 0) and (before is None or before >= 0)
        own = self.sizes["i"] == self.sizes["j"] and (before is None or before >= 0)
        return (after is None or after >= 0) and (before is None or own)

    # --------------------------------------------------------------------------- truth to limits

    def _take(self, part: Truth, band: _Band) -> None:
        """Adds one member of the conjunction to the band."""
        if part == FALSE:
            raise _RefusedError("it hides every key from every query")
        if part.kind == "positive":
            assert part.affine is not None
            self._limit(part.affine, band)
            return
        recipe = self._recipe(part)
        band.keep = recipe if band.keep is None else ("and", band.keep, recipe)

    def _limit(self, affine: Affine, band: _Band) -> None:
        """Adds `affine` >= 0: a limit of the distance, unless it holds at every position."""
        coefficients = dict(affine.coefficients)
        number = sympy.sympify(affine.number)
        lowest = sum(c * (self.sizes[v] - 1) for v, c in coefficients.items() if c < 0) + number
        if sympy.sympify(lowest).is_nonnegative:
            return
        if set(coefficients) != {"i", "j"} or coefficients["i"] != -coefficients["j"]:
            text = self._text(affine)
            raise _RefusedError(f"it compares {text} with 0, no distance of query and key")
        if not number.is_Integer:
            text = self._text(affine)
            raise _RefusedError(f"the distance it compares, {text}, depends on a length")
        limit = int(number) // abs(coefficients["i"])
        if coefficients["i"] > 0:
            band.limit(after=limit)
        else:
            band.limit(before=limit)

    def _text(self, affine: Affine) -> str:
        words = {"b": "sample", "h": "head", "i": "query", "j": "key"}
        terms = [f"{c}*{words[v]}" for v, c in affine.coefficients]
        return " + ".join([*terms, str(affine.number)])

    def _recipe(self, part: Truth) -> Recipe:
        """Returns a truth that depends on the sample and the key alone, as a recipe."""
        if part.kind in ("all", "any"):
            members = [self._recipe(m) for m in part.members]
            found = members[0]
            for member in members[1:]:
                found = ("and" if part.kind == "all" else "or", found, member)
            return found
        if part.kind == "positive":
            assert part.affine is not None
            text = self._text(part.affine)
            raise _RefusedError(f"it holds either by position ({text}) or by something else")
        assert part.data is not None
        recipe: Recipe = self._looked_up(part.data.recipe)
        return ("not", recipe) if part.kind == "not data" else recipe

    def _looked_up(self, recipe: Any) -> Any:
        if not isinstance(recipe, tuple):
            return recipe
        if recipe[0] != "get":
            return (recipe[0], *map(self._looked_up, recipe[1:]))
        _, name, index = recipe
        fixed: list[tuple[int, int]] = []
        where = {"b": -1, "j": -1}
        shape = self.program.info[name].shape
        for dim, (at, size) in enumerate(zip(index, shape, strict=True)):
            if at.constant and sympy.sympify(at.number).is_Integer:
                fixed.append((dim, int(at.number)))
                continue
            ((position, times),) = at.coefficients if len(at.coefficients) == 1 else (("", 0),)
            if position == "b" and self.shared:
                raise _RefusedError(
                    "it hides keys by sample, and several samples share a row of it"
                )
            direct = position in where and times == 1 and at.number == 0 and where[position] < 0
            if not direct or self.sizes[position] != size:
                node = next(n for n in self.program.gm.graph.nodes if n.name == name)
                raise _RefusedError(
                    f"it reads node {name} ({node.target}) at {self._text(at)}, which is not the "
                    "sample and the key"
                )
            where[position] = dim
        return ("get", name, tuple(fixed), where["b"], where["j"])


def _lookups(value: Value) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, Data):
        yield from _gets(value.recipe)


def _gets(recipe: Any) -> Iterator[tuple[Any, ...]]:
    if isinstance(recipe, tuple):
        if recipe[0] == "get":
            yield recipe
        else:
            for part in recipe[1:]:
                yield from _gets(part)
