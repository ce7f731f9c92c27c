"""Coverage: FLOPs that a group splits, and the nodes that it does not split, with reasons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy
from torch import fx

from dcpc.buckets import BATCH, Sizes
from dcpc.commands.check.split import SplitModel
from dcpc.fx.large_graphs import source_line
from dcpc.ir import WHOLE_GRADIENT, tensor_operands
from dcpc.ops.pieces import piece


@dataclass(frozen=True, slots=True)
class Unsplit:
    """A node that every rank does in whole although its value, or an operand, has a dim that grows.

    Attributes:
        node: name of the node.
        op: name of its op.
        reason: reason why it is not split.
        shape: shape of its value, as a text.
        source: file and line of the user's code, or of the library's, that makes it; "" if unknown.
        blocked: whether a rule is missing. Else it could be split, and costs less in whole
            (positions and masks, which a rank makes rather than receives; one number a row of a
            loss), or has no dim of which a piece would do.
    """

    node: str
    op: str
    reason: str
    shape: str
    source: str
    blocked: bool

    def __str__(self) -> str:
        """Returns the node, its op and shape, the reason, and its source line."""
        where = f" ({self.source})" if self.source else ""
        return f"{self.node}: {self.op} {self.shape}: {self.reason}{where}"


@dataclass(frozen=True, slots=True)
class Coverage:
    """FLOPs of a model that a group splits.

    Attributes:
        sizes: the shape it was measured at.
        sp: ranks of the group.
        whole_flops: FLOPs of matmuls, convolutions and attention in forward (backward has twice as
            many, split alike): twice the product of the sizes of an op's names, causal attention
            half.
        split_flops: FLOPs of the calls of which each rank does a piece.
        rank_flops: FLOPs of the fullest rank of the group.
        collectives: collectives in the forward graph.
        unsplit: nodes each rank does in whole.
    """

    sizes: Sizes
    sp: int
    whole_flops: float
    split_flops: float
    rank_flops: float
    collectives: int
    unsplit: tuple[Unsplit, ...]

    @property
    def blocked(self) -> tuple[Unsplit, ...]:
        """Nodes that no rule lets a rank have a piece of."""
        return tuple(u for u in self.unsplit if u.blocked)

    @property
    def sharded_share(self) -> float:
        """Share of the FLOPs of which each rank does a piece."""
        return self.split_flops / self.whole_flops if self.whole_flops else 1.0

    @property
    def rank_share(self) -> float:
        """Share of the FLOPs that the fullest rank does; 1 / sp if all are split evenly."""
        return self.rank_flops / self.whole_flops if self.whole_flops else 1.0


def coverage(split: SplitModel) -> Coverage:
    """Returns the FLOPs of a model that the group splits, at the placement's sizes."""
    lowered = split.traced.lowering(split.placement).lowered.gm
    work = [_flops(split, name) for name in split.sharding.rules]
    return Coverage(
        sizes=split.sizes,
        sp=split.sp,
        whole_flops=sum(whole for whole, _, _ in work),
        split_flops=sum(whole for whole, _, share in work if share < 1),
        rank_flops=sum(part * share for _, part, share in work),
        collectives=sum(_is_collective(n) for n in lowered.graph.nodes),
        unsplit=tuple(_unsplit(split)),
    )


def _flops(split: SplitModel, name: str) -> tuple[float, float, float]:
    """Returns a call's FLOPs, those it has the way it is split, and the fullest rank's share."""
    rule = split.sharding.rules[name]
    if not rule.multiplies:
        return 0.0, 0.0, 1.0
    dims = split.program.dims(split.sizes)
    every = 2.0 * math.prod(int(s.subs(dims)) for s in rule.multiplied)
    chosen = split.placement.nodes[name]
    usual = rule.work.get("", 1.0)
    return every * usual, every * rule.work.get(chosen.name, usual), _share(split, name, dims)


def _share(split: SplitModel, name: str, dims: Mapping[sympy.Symbol, int]) -> float:
    """Returns the fullest rank's share of the factor that a node is split along, 1 for none."""
    placement = split.placement
    chosen = placement.nodes[name]
    ways = split.sharding.alternatives[name]
    if not any(
        (w.operands, w.output, w.name) == (chosen.operands, chosen.output, chosen.name)
        for w in ways
        if w.factor >= 0
    ):
        return 1.0
    sources = [n.name for n in tensor_operands(split.nodes[name], split.program.info)]
    labels = zip((*sources, name), (*chosen.operands, chosen.output), strict=True)
    tensor, label = next((t, label) for t, label in labels if label.sharded)
    factor = placement.factors[tensor][label.dim][label.index]
    size = int(factor.size.subs(dims))
    parent = factor if factor.parent < 0 else placement.parents[factor.parent]
    whole = int(parent.size.subs(dims))
    return max(piece(size, whole, factor.shift, split.sp, r)[1] for r in range(split.sp)) / size


def _unsplit(split: SplitModel) -> Iterable[Unsplit]:
    info = split.program.info
    for node in split.program.gm.graph.nodes:
        if node.op != "call_function" or node.name not in info or not _is_whole(split, node):
            continue
        rule = split.sharding.rules[node.name]
        ways = any(a.factor >= 0 for a in split.sharding.alternatives[node.name])
        reason = rule.reason or "no piece of any of its dims would do"
        if ways:
            reason = "it can be split, and costs less in whole where it stands"
        shape = f"[{', '.join(map(str, info[node.name].shape))}]"
        op = str(node.target).removesuffix(".default")
        blocked = bool(rule.reason) and (info[node.name].requires_grad or not rule.deliberate)
        yield Unsplit(node.name, op, reason, shape, source_line(node), blocked)


def _is_whole(split: SplitModel, node: fx.Node) -> bool:
    """Whether every rank does all of a node that works on something that grows."""
    chosen = split.placement.nodes[node.name]
    if chosen.output.sharded or chosen.output.partial or chosen.name not in ("", WHOLE_GRADIENT):
        return False
    return not split.sharding.rules[node.name].is_view and _long(split, node)


def _long(split: SplitModel, node: fx.Node) -> bool:
    """Whether the value or an operand has a dim that grows, the batch apart."""
    symbols = {s for n, s in split.program.symbols.items() if n != BATCH}
    tensors = [*tensor_operands(node, split.program.info), node]
    shapes = [split.program.info[t.name].shape for t in tensors]
    return any(sympy.sympify(size).free_symbols & symbols for s in shapes for size in s)


def _is_collective(node: fx.Node) -> bool:
    names = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
    return any(str(node.target).startswith(f"dcpc.{n}") for n in names)
