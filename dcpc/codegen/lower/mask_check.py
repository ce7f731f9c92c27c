"""Compares recognised masks with the mask tensors that the program computes.

Both are computed for all (sample, head, query, key) at several small sizes, from drawn inputs: any
integers, sequences in a row, positions that restart. One size exceeds the mask's limits, and the
largest number to which its low dtypes count exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from dcpc.buckets import BATCH
from dcpc.fx.large_graphs import called_on_cpu
from dcpc.ir import MaskDecision, MaskPlan, Program
from dcpc.ops.attention import hiding

# Sizes of the dims, cycled; the last two are for programs that need multiples.
ENOUGH = 3  # number of these sizes at which a mask is compared, if the program runs there
SIZES = ((7, 11, 13), (11, 13, 7), (13, 7, 11), (8, 16, 24), (16, 16, 16))
MOST_ELEMENTS = 1 << 25
GROWING = (17, 23, 37, 67, 131, 263, 521, 1031, 2111, 4099)
# Largest integer up to which a dtype counts by ones; beyond it rounds or wraps.
COUNTS_TO = {torch.bfloat16: 256, torch.float16: 2048, torch.uint8: 255, torch.int8: 127}


def wrong_masks(program: Program, applied: Program, plan: MaskPlan) -> dict[str, str]:
    """Returns attentions whose mask differs from the recognised one, with the first difference."""
    values: dict[tuple[int, ...], Values] = {}
    found: dict[tuple[Any, ...], str] = {}
    wrong: dict[str, str] = {}
    before, after = (_by_name(p) for p in (program, applied))
    alike = _Alike()
    for name, decision in plan.decisions.items():
        node, new = before[name], after[name]
        query, key = (program.info[n.name].shape[2] for n in node.all_input_nodes[:2])
        limits = (decision.before, decision.after, decision.empty, node.kwargs.get("after"))
        case = (*limits, query, key, *map(alike.number, (node.args[3], *new.args[3:])))
        if case not in found:
            found[case] = MaskCase(program, before, after, node, new, decision).differs(values)
        if found[case]:
            wrong[name] = found[case]
    return wrong


def _by_name(program: Program) -> dict[str, fx.Node]:
    return {n.name: n for n in program.gm.graph.nodes}


class _Alike:
    """Numbers nodes so that nodes computed alike from the same inputs have one number."""

    def __init__(self) -> None:
        self._of_node: dict[fx.Node, int] = {}
        self._of_call: dict[Any, int] = {}

    def number(self, node: Any) -> int | None:
        """Returns the number of a node; None for anything else."""
        if not isinstance(node, fx.Node):
            return None
        stack = [node]
        while stack:
            top = stack[-1]
            missing = [n for n in top.all_input_nodes if n not in self._of_node]
            stack += missing
            if not missing:
                stack.pop()
                own = top.name if top.op == "placeholder" else str(top.target)
                given = map_arg((top.args, top.kwargs), self._of_node.__getitem__)
                operands = tuple(self._of_node[n] for n in top.all_input_nodes)
                call = (own, str(given), operands)
                self._of_node[top] = self._of_call.setdefault(call, len(self._of_call))
        return self._of_node[node]


class MaskCase:
    """One mask tensor, and its recognised form."""

    def __init__(
        self,
        program: Program,
        before: Mapping[str, fx.Node],
        after: Mapping[str, fx.Node],
        node: fx.Node,
        new: fx.Node,
        decision: MaskDecision,
    ) -> None:
        self.program, self.before, self.after = program, before, after
        self.node, self.new, self.decision = node, new, decision
        self.low = hiding(program.info[node.all_input_nodes[0].name].dtype)
        self.lengths = [program.info[n.name].shape[2] for n in node.all_input_nodes[:2]]
        mask = node.args[3]
        assert isinstance(mask, fx.Node), "a recognised mask is a tensor"
        self.mask = mask

    def differs(self, values: dict[tuple[int, ...], Values]) -> str:
        """Returns the first difference as text, "" if there is none."""
        compared = 0
        reason = "it could not be evaluated"
        for small, dims in self._settings():
            if small and compared == ENOUGH:
                continue
            key = tuple(dims.values())
            try:
                if key not in values:
                    values[key] = Values(self.program, dims, len(values))
                found = self._differs_at(values[key])
            except Exception as error:  # the program does not run at these sizes
                reason = f"it could not be evaluated: {type(error).__name__}: {error}"
                continue
            if found:
                sizes = ", ".join(f"{n} {s}" for n, s in dims.items())
                return f"what was read off it is not what it is: at {sizes}, {found}"
            compared += 1
        return "" if compared else reason

    def _settings(self) -> Iterator[tuple[bool, dict[str, int]]]:
        """Yields (whether sizes are small, sizes of dims); the last exceed the mask's limits."""
        names = [n for n in self.program.symbols if n != BATCH]
        small = [dict(zip(names, _cycled(row, len(names)), strict=True)) for row in SIZES]
        yield from ((True, {BATCH: 2, **dims}) for dims in small)
        needed = self._straddled()
        for size in GROWING:
            dims = {BATCH: 2} | {n: size + 2 * i for i, n in enumerate(names)}
            query, key = (self._number(length, dims) for length in self.lengths)
            if query * key > MOST_ELEMENTS:
                return
            if min(query, key) > needed:
                yield False, dims
                return

    def _number(self, length: sympy.Expr, dims: Mapping[str, int]) -> int:
        return int(length.subs(self.program.dims(dims)))

    def _straddled(self) -> int:
        limits = [abs(n) for n in (self.decision.before, self.decision.after) if n is not None]
        stack, seen = [self.mask], set()
        while stack:
            node = stack.pop()
            if node not in seen:
                seen.add(node)
                stack += node.all_input_nodes
                if node.name in self.program.info:
                    limits.append(COUNTS_TO.get(self.program.info[node.name].dtype, 0))
        return max(limits, default=0) + 2

    def _differs_at(self, values: Values) -> str:
        mask = values.of(self.before, self.mask)
        query, key = (self._number(length, values.dims) for length in self.lengths)
        i, j = torch.arange(query)[:, None], torch.arange(key)
        within = torch.ones(1, 1, query, key, dtype=torch.bool)
        given = self.node.kwargs.get("after")
        if isinstance(given, int):
            within = within & (j <= i + given)
        seen = torch.ones(1, 1, query, key, dtype=torch.bool)
        if self.decision.before is not None:
            seen = seen & (j >= i - self.decision.before)
        if self.decision.after is not None:
            seen = seen & (j <= i + self.decision.after)
        _, keep, segment, *_ = (*self.new.args[3:], None, None, None)
        if self.decision.keep is not None:
            seen = seen & values.of(self.after, keep)[:, None, None, :]
        if self.decision.segment is not None:
            own = values.of(self.after, segment)
            seen = seen & (own[:, None, :, None] == own[:, None, None, :])
        return self._compared(mask, seen, within)

    def _compared(self, mask: Tensor, seen: Tensor, within: Tensor) -> str:
        if mask.dtype == torch.bool:
            wrong = (mask & within) != seen
        else:
            wrong = torch.where(seen, (mask != 0) | ~within, (mask > self.low) & within)
            nothing = ~seen.any(-1, keepdim=True)
            same = (mask == mask[..., :1]) & mask.isfinite()
            drowned = same if self.decision.empty == "mean" else mask == float("-inf")
            wrong = wrong | (nothing & ~drowned & within)
        if not wrong.any():
            return ""
        place = tuple(wrong.nonzero()[0].tolist())
        got = seen.expand_as(wrong)[place].item()
        real = mask.expand_as(wrong)[place].item()
        taken = "seen" if got else "hidden"
        return f"(sample, head, query, key) = {place} is {real} and was taken for {taken}"


def _cycled(row: tuple[int, ...], count: int) -> list[int]:
    return [row[i % len(row)] for i in range(count)]


class Values:
    """Values of a program's nodes at given sizes, from drawn inputs.

    Args:
        program: program that the nodes belong to.
        dims: size of each named dim.
        kind: index of the way in which inputs are drawn; also the seed.
    """

    def __init__(self, program: Program, dims: Mapping[str, int], kind: int) -> None:
        self.program, self.dims, self.kind = program, dims, kind
        self._at = program.dims(dims)
        self._known: dict[str, Any] = {}

    def of(self, nodes: Mapping[str, fx.Node], node: Any) -> Tensor:
        """Returns a node's value. Nodes of equal names are equal in all graphs of the program."""
        stack = [node]
        with torch.no_grad():
            while stack:
                top = stack[-1]
                missing = [n for n in top.all_input_nodes if n.name not in self._known]
                if top.name in self._known or not missing:
                    stack.pop()
                    if top.name not in self._known:
                        self._known[top.name] = self._made(top)
                else:
                    stack += missing
        value: Tensor = self._known[node.name]
        return value

    def _made(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._drawn(node)
        if node.name in self.program.scalars:
            return int(self.program.scalars[node.name].subs(self._at))
        return called_on_cpu(node, {n: self._known[n.name] for n in node.all_input_nodes})

    def _drawn(self, node: fx.Node) -> Tensor:
        """Returns a drawn input, parameter or buffer; a constant has its value."""
        if node.name in self.program.constants:
            return self.program.constants[node.name].detach().cpu()
        info = self.program.info[node.name]
        shape = [int(s.subs(self._at)) for s in info.shape]
        generator = torch.Generator().manual_seed(self.kind)
        if info.dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.7
        if info.dtype.is_floating_point or info.dtype.is_complex:
            return torch.randn(shape, generator=generator).to(info.dtype)
        drawn = torch.randint(0, 3, shape, generator=generator)
        if not shape or self.kind % 3 == 0:
            return drawn.to(info.dtype)
        starts = torch.rand(shape, generator=generator) < 0.3
        if self.kind % 3 == 1:  # numbers of sequences
            return starts.cumsum(-1).to(info.dtype)
        row = torch.arange(shape[-1]).expand(shape)  # positions that restart
        return (row - torch.where(starts, row, 0).cummax(-1).values).to(info.dtype)
