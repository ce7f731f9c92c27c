"""The options of every node of a model, as indices into a catalogue: read once for all buckets.

Nodes that can do the same at the same cost, as those of repeated layers, are one `NodeKind`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import lcm

import sympy
import torch
from torch import fx

from dcpc.ir import Label, NodePlacement, Program, TensorInfo, call_of, is_tuple, tensor_operands
from dcpc.passes.placement.label_costs import (
    NO_WORK,
    WHOLE,
    Catalogue,
    Costs,
    NodeWork,
    PricedCall,
    RingTurn,
)
from dcpc.passes.placement.node_calls import call_patterns, dtype_of
from dcpc.passes.placement.state_graph import (
    FIRST_SHARDED,
    PARTIAL,
    REPLICATED,
    Interned,
    NodeKind,
    Nodes,
    Option,
    StateGraph,
    build_graph,
)
from dcpc.passes.sharding.rule_types import OpSharding, is_ring
from dcpc.passes.sharding.sharding import Sharding
from dcpc.symbolic_profile.ops.flops import halo_rows


def _code(label: Label) -> int:
    if label.partial:
        return PARTIAL
    return FIRST_SHARDED + (label.dim << 8) + label.index if label.sharded else REPLICATED


def _placed(call: PricedCall, pieces: Sequence[tuple[int, int]], split: int) -> PricedCall:
    """Returns a call with these pieces of the node's tensors, and this share of its product."""
    share = split if call.sizes else WHOLE
    return call._replace(moved=tuple(pieces[i] for i, _ in call.moved), share=share)


def _round(
    calls: Sequence[PricedCall],
    rule: OpSharding,
    across: int,
    pieces: Sequence[tuple[int, int]],
    dtype: torch.dtype,
) -> list[PricedCall]:
    """Returns attention's calls as a ring, with swaps of rows and heads if ranks share heads."""
    ring = rule.ring
    assert ring is not None
    key_heads = ring.heads[1]
    repeats = lcm(key_heads, across) // key_heads
    rotated = tuple(pieces[i] for i in ring.rotated) * repeats
    found = []
    for call in calls:
        turned = call
        if call.op_class == "attention":
            op = f"dcpc::ring_attention_{'forward' if call.forward else 'backward'}"
            merged = pieces[-1] if call.forward else pieces[0]
            turn = RingTurn(merged, across, max(1, 4 // dtype.itemsize))
            turned = call._replace(op=op, sent=rotated, ring=turn)
        found.append(turned)
        if across > 1 and turned is not call:
            for piece in (pieces[0], *rotated, pieces[-1]):
                swap = PricedCall("collective", call.forward, dtype, "dcpc::swap", (piece, piece))
                found.append(swap._replace(sent=(piece,), swaps=across))
    return found


class _Reader:
    """Reads every alternative of a program's nodes into a catalogue."""

    def __init__(self, program: Program, sharding: Sharding) -> None:
        self.program, self.sharding = program, sharding
        self.catalogue = Catalogue()
        self.nodes = Nodes()
        self.kinds: Interned[NodeKind] = Interned()
        self._shares = {-1: WHOLE}
        self._least: dict[int, int] = {}
        for factor in (f for dims in sharding.factors.values() for dim in dims for f in dim):
            if factor.key not in self._shares:
                self._shares[factor.key] = self.catalogue.share(factor, sharding.parents)
                self._least[factor.key] = int(factor.size) if factor.size.is_Integer else 0

    def read(self) -> None:
        """Reads the whole graph."""
        position: dict[str, int] = {}
        cheap: set[str] = set(self.program.scalars)
        values: list[int] = []
        for node in self.program.gm.graph.nodes:
            placed = node.name in self.sharding.alternatives
            sources = [position[n.name] for n in tensor_operands(node, self.program.info)]
            unpriced = node.op == "output" or node.name in self.program.scalars or not sources
            if not placed and (unpriced or is_tuple(node, self.program.info)):
                continue
            if placed and self._is_cheap(node, cheap):
                cheap.add(node.name)
            position[node.name] = len(position)
            self.nodes.names.append(node.name)
            self.nodes.sources.append(sources)
            if placed:
                info = self.program.info[node.name]
                values.append(self.catalogue.value(info.shape, info.dtype))
                kind = self._kind(node, sources, values, node.name in cheap)
            else:
                values.append(-1)
                option = Option((REPLICATED,) * len(sources), REPLICATED, NO_WORK, WHOLE, -1)
                kind = NodeKind(0, (), False, False, False, (option,))
            self.nodes.kinds.append(self.kinds[kind])

    def _is_cheap(self, node: fx.Node, cheap: set[str]) -> bool:
        """Whether a value is made of inputs, positions and frozen parameters alone: a mask, labels.

        Such a value is never sent: a rank that needs another piece recomputes it. A piece of it is
        free, so that a rotary table that all layers share does not couple their choices.
        """
        rule = self.sharding.rules.get(node.name)
        heavy = rule is not None and rule.multiplies
        info = self.program.info.get(node.name)
        given = node.name in self.program.parameters and info is not None and info.requires_grad
        sources = call_of(node).all_input_nodes
        return not heavy and not given and all(n.name in cheap for n in sources)

    def _kind(self, node: fx.Node, sources: list[int], values: list[int], cheap: bool) -> NodeKind:
        name = node.name
        tensors = [*sources, len(values) - 1]
        shares = [self._label_shares(self.nodes.names[t]) for t in tensors]
        return NodeKind(
            value=values[-1],
            shares=tuple(shares[-1].items()),
            backward=self.program.info[name].requires_grad,
            cheap=cheap,
            is_output=name in self.program.whole_outputs,
            options=self._options(node, tensors, values, shares),
        )

    def _label_shares(self, name: str) -> dict[int, int]:
        return {
            _code(Label(d, i)): self._shares[factor.key]
            for d, dim in enumerate(self.sharding.factors[name])
            for i, factor in enumerate(dim)
        }

    def _options(
        self, node: fx.Node, tensors: list[int], values: list[int], shares: list[dict[int, int]]
    ) -> tuple[Option, ...]:
        """Returns the options of a node, given the shares of its operands' and output's labels."""
        rule = self.sharding.rules.get(node.name)
        infos = [self.program.info[self.nodes.names[t]] for t in tensors]
        calls: list[PricedCall] = []
        if rule is not None:
            calls = self._calls(node, rule, infos)
        options = []
        for alternative in self.sharding.alternatives[node.name]:
            codes = [_code(label) for label in (*alternative.operands, alternative.output)]
            split = self._shares.get(alternative.factor, WHOLE)
            work = NO_WORK
            if rule is not None and calls:
                pieces = tuple(
                    (values[t], of.get(code, WHOLE))
                    for t, of, code in zip(tensors, shares, codes, strict=True)
                )
                mine = [_placed(call, pieces, split) for call in calls]
                part = rule.work.get(alternative.name, rule.work.get("", 1.0))
                mine = [call._replace(part=call.part * part) for call in mine]
                if alternative.across and rule.ring is not None:
                    mine = _round(mine, rule, alternative.across, pieces, infos[-1].dtype)
                mine += self._nearby(rule, alternative.name, infos)
                held = pieces[-1] if infos[-1].requires_grad and not rule.is_view else None
                work = self.catalogue.work(NodeWork(tuple(mine), held, alternative.across))
            across = alternative.across
            least = self._least.get(alternative.factor, 0) if alternative.nonempty else -1
            options.append(Option(tuple(codes[:-1]), codes[-1], work, split, least, across))
        return tuple(options)

    def _nearby(self, rule: OpSharding, name: str, infos: Sequence[TensorInfo]) -> list[PricedCall]:
        """Returns the collectives inside a node that ranks split along this name need."""
        whole = infos[0].shape
        if name in rule.windows:
            window = rule.windows[name]
            longer = sympy.expand(rule.sizes[name] - rule.sizes[window.source])
            rows = sympy.Integer(halo_rows(window.stride, window.reach, longer))
            dim = next(d for d, names in enumerate(rule.operands[0]) if window.source in names)
            shape, ops = (*whole[:dim], rows, *whole[dim + 1 :]), ("dcpc::halo", "dcpc::halo_sum")
        elif name in rule.averages:  # a sum, and one of squares; of a gradient as many
            groups = [rule.sizes.get(n, sympy.Integer(1)) for n in ("g",)]
            shape, ops = (whole[0], *groups, sympy.Integer(2)), ("dcpc::all_reduce",) * 2
        else:
            return []
        piece = (self.catalogue.value(shape, infos[0].dtype), WHOLE)
        directions = (True, False)[: 1 + infos[0].requires_grad]
        return [
            PricedCall("collective", forward, dtype_of(infos), op, (piece, piece), (piece,))
            for forward, op in zip(directions, ops, strict=False)
        ]

    def _calls(
        self, node: fx.Node, rule: OpSharding, infos: Sequence[TensorInfo]
    ) -> list[PricedCall]:
        """Returns a node's calls, with `moved` as indices into its tensors."""
        info, dtype = self.program.info, dtype_of(infos)
        readers = sum(n.name in info and info[n.name].requires_grad for n in node.users)
        sizes: tuple[int, ...] = ()
        if rule.multiplies:
            sizes = tuple(sorted(self.catalogue.size(s) for s in rule.multiplied))
        return [
            PricedCall(
                op_class=c.op_class,
                forward=c.forward,
                dtype=dtype,
                op="",
                moved=tuple((position, WHOLE) for position in c.moved),
                elements=c.elements,
                sizes=sizes if c.product else (),
                part=c.product,
            )
            for c in call_patterns(call_of(node).target, rule, infos, readers)
        ]


class PlacementModel:
    """A program's nodes and alternatives, prepared once for every bucket and degree.

    Attributes:
        program: the traced model.
        sharding: factors and alternatives of the program.
        catalogue: entries that have a price.
        nodes: variables that are nodes, in graph order; some may not be in `sharding`.
        kinds: distinct kinds of nodes.
    """

    def __init__(self, program: Program, sharding: Sharding) -> None:
        """Reads every alternative once."""
        self.program, self.sharding = program, sharding
        reader = _Reader(program, sharding)
        reader.read()
        self.catalogue, self.nodes, self.kinds = reader.catalogue, reader.nodes, list(reader.kinds)
        self._graphs: dict[tuple[object, ...], StateGraph] = {}
        self._placed: dict[tuple[int, ...], dict[str, NodePlacement]] = {}
        options = [o for kind in self.kinds for o in kind.options]
        self._fewest = sorted({o.least for o in options})
        self._rings = sorted({o.across for o in options})

    @property
    def names(self) -> Sequence[str]:
        """The variables that are nodes, in graph order."""
        return self.nodes.names

    def placed(self, options: tuple[int, ...]) -> Mapping[str, NodePlacement]:
        """Returns the placement of each node, the same object for the same options."""
        if options not in self._placed:
            nodes = self._placed[options] = {}
            for name, option in zip(self.names, options, strict=True):
                if name in self.sharding.alternatives:
                    nodes[name] = self.sharding.alternatives[name][option].placed
        return self._placed[options]

    def graph(self, shares: Costs, sp: int) -> StateGraph:
        """Returns the network of the options that are usable at these shares."""
        splits = tuple((shares < 1.0).tolist())
        fewest = tuple(n for n in self._fewest if n < 0 or n >= sp)
        rings = tuple(a for a in self._rings if is_ring(a, sp))
        key = (sp == 1, splits, fewest, rings)
        if key not in self._graphs:
            self._graphs[key] = build_graph(self.nodes, self.kinds, self.catalogue, splits, sp)
        return self._graphs[key]
