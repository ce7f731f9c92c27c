"""Decides, exactly, which factor every value is sharded along: sequence parallelism as a minimum cost.

Each node is a variable whose labels are its alternatives; an edge costs the collective that turns
the label the producer makes into the one the consumer wants, forward plus its transpose in backward.
A changed value that several consumers want alike is paid once, through one yes/no variable. The
minimum is found by variable elimination. Nothing here names a model or a scheme: Ulysses, DSP and
gathered keys come out of the costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import sympy

from dcpc.ir import (
    REPLICATED,
    Factor,
    Label,
    NodePlacement,
    Placement,
    Program,
    tensor_operands,
)
from dcpc.passes.elimination import CostNetwork
from dcpc.passes.sharding import Alternative, Sharding

Table = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rates:
    """What the placement needs to know of the machine.

    Attributes:
        flops_per_s: sustained floating-point rate of a contraction.
        bytes_per_s: memory bandwidth.
        link_bytes_per_s: what one rank sends to the others of its group.
        link_latency_s: start of one collective.
        overhead_s: start of one op.
    """

    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    link_latency_s: float
    overhead_s: float


class _Prices:
    """Seconds of nodes and of label changes at one bucket's sizes."""

    def __init__(
        self,
        program: Program,
        sharding: Sharding,
        sizes: Mapping[str, int],
        sp: int,
        rates: Rates,
    ) -> None:
        self.program, self.sharding, self.sp, self.rates = program, sharding, sp, rates
        self._subs = {program.symbols[n]: s for n, s in sizes.items() if n in program.symbols}
        self._numbers: dict[sympy.Expr, float] = {}
        self._changes: dict[tuple[str, Label, Label], float] = {}
        self._bytes: dict[str, float] = {}
        self.largest: dict[int, float] = {}
        self.cheap = _cheap(program, sharding)

    def number(self, expr: sympy.Expr) -> float:
        """Returns an expression's value at the bucket's sizes."""
        if expr not in self._numbers:
            self._numbers[expr] = float(expr.subs(self._subs))
        return self._numbers[expr]

    def tensor_bytes(self, name: str) -> float:
        """Returns the bytes of a node's whole value."""
        if name not in self._bytes:
            info = self.program.info[name]
            count = 1.0
            for size in info.shape:
                count *= self.number(size)
            self._bytes[name] = count * info.dtype.itemsize
        return self._bytes[name]

    def share(self, factor: Factor) -> float:
        """Returns the largest rank's share of a factor: above 1/p where p does not divide it."""
        n = self.number(factor.size)
        return -(-n // self.sp) / n if n else 1.0

    def label_share(self, name: str, label: Label) -> float:
        """Returns the part of a value that the fullest rank holds."""
        if not label.sharded:
            return 1.0
        return self.share(self.sharding.factors[name][label.dim][label.index])

    def change(self, name: str, have: Label, want: Label) -> float:
        """Returns the seconds of turning one label of a value into another, and back in backward."""
        key = (name, have, want)
        if key not in self._changes:
            forward, backward = self._change(name, have, want)
            grad = self.program.info[name].requires_grad
            self._changes[key] = forward + (backward if grad else 0.0)
        return self._changes[key]

    def _change(self, name: str, have: Label, want: Label) -> tuple[float, float]:
        whole = self.tensor_bytes(name)
        rates, p = self.rates, self.sp
        if have == want:
            return 0.0, 0.0
        if want.partial or (name in self.cheap and have.sharded):
            return np.inf, np.inf

        def wire(sent_bytes: float, copied_bytes: float) -> float:
            return (
                rates.link_latency_s
                + sent_bytes / rates.link_bytes_per_s
                + copied_bytes / rates.bytes_per_s
            )

        if have.sharded and want.sharded:
            piece = whole * max(self.label_share(name, have), self.label_share(name, want))
            seconds = wire(piece * (p - 1) / p, 4 * piece)
            return seconds, seconds
        if have.sharded:  # all-gather; backward: reduce-scatter
            seconds = wire(whole * (p - 1) / p, 2 * whole)
            return seconds, seconds
        if have.partial:  # all-reduce or reduce-scatter; backward: all-reduce or all-gather
            times = 1 if want.sharded else 2
            seconds = wire(times * whole * (p - 1) / p, 2 * whole)
            return seconds, seconds
        piece = whole * self.label_share(name, want)  # a slice; backward: padding with zeros
        copy = rates.overhead_s + 2 * piece / rates.bytes_per_s
        return copy, rates.overhead_s + (whole + piece) / rates.bytes_per_s

    def is_view(self, name: str) -> bool:
        """Whether a node's value is its operand's memory."""
        rule = self.sharding.rules.get(name)
        return rule is not None and rule.is_view

    def compute(self, name: str, operands: list[str], alternative: Alternative) -> float:
        """Returns the seconds of one node, forward and backward, on the fullest rank."""
        rule = self.sharding.rules[name]
        info = self.program.info
        moved = self.tensor_bytes(name) * self.label_share(name, alternative.output)
        for operand, label in zip(operands, alternative.operands, strict=True):
            moved += self.tensor_bytes(operand) * self.label_share(operand, label)
        seconds = moved / self.rates.bytes_per_s
        if rule.multiplies:
            work = 2.0
            for size in rule.sizes.values():
                work *= self.number(size)
            work *= rule.work.get(alternative.name, rule.work.get("", 1.0))
            work *= self.largest.get(alternative.factor, 1.0)
            seconds = max(seconds, work / self.rates.flops_per_s)
        seconds += self.rates.overhead_s
        return seconds * (3.0 if info[name].requires_grad else 1.0)


def _cheap(program: Program, sharding: Sharding) -> set[str]:
    """Returns the values made of inputs and positions alone: masks, rotary tables, labels.

    They are never sent: a rank that wants another piece makes it. This loses nothing and keeps hubs
    that every layer reads (cos, sin) down to a few labels.
    """
    cheap: set[str] = set()
    for node in program.gm.graph.nodes:
        if node.name not in program.info or node.name in program.parameters:
            continue
        rule = sharding.rules.get(node.name)
        heavy = rule is not None and rule.multiplies
        sources = tensor_operands(node, program.info)
        if not heavy and all(s.name in cheap for s in sources):
            cheap.add(node.name)
    return cheap


def place(
    program: Program, sharding: Sharding, sizes: Mapping[str, int], sp: int, rates: Rates
) -> Placement:
    """Returns the placement of least predicted time for one bucket's sizes.

    Args:
        program: the traced model.
        sharding: its factors and alternatives.
        sizes: length of every named dim, batch included.
        sp: ranks of the group.
        rates: the machine.
    """
    prices = _Prices(program, sharding, sizes, sp, rates)
    for dims in sharding.factors.values():
        for dim in dims:
            for factor in dim:
                if factor.key not in prices.largest:
                    prices.largest[factor.key] = prices.share(factor)
    states = _states(program, sharding, prices)
    network = CostNetwork()
    variables = {
        name: network.add_variable(name, np.array([s.cost_s for s in choices]))
        for name, choices in states.items()
    }
    for node in program.gm.graph.nodes:
        if node.name not in variables:
            continue
        for position, source in enumerate(tensor_operands(node, program.info)):
            table = _edge(source.name, states[source.name], states[node.name], position, prices)
            if table.any():
                network.add_edge(variables[source.name], variables[node.name], table)
    solution = network.minimise()
    nodes = {}
    for name, choices in states.items():
        chosen = choices[solution.labels[variables[name]]].alternative
        nodes[name] = NodePlacement(chosen.operands, chosen.output, chosen.name)
    return Placement(
        sp=sp,
        nodes=nodes,
        factors=sharding.factors,
        parents=sharding.parents,
        cost_s=solution.cost,
        width=solution.width,
        graph_hash=program.graph_hash,
    )


@dataclass(frozen=True, slots=True)
class _State:
    """One label of a node's variable: what it does, and one changed form of its value kept at hand.

    `extra` is a label that several consumers want alike: its change is paid here, once.
    """

    alternative: Alternative
    extra: Label | None
    cost_s: float


def _states(
    program: Program, sharding: Sharding, prices: _Prices
) -> dict[str, tuple[_State, ...]]:
    usable = _usable(program, sharding, prices)
    wanted: dict[str, dict[Label, int]] = {name: {} for name in usable}
    for node in program.gm.graph.nodes:
        if node.name in usable:
            for position, source in enumerate(tensor_operands(node, program.info)):
                for label in {a.operands[position] for a in usable[node.name]}:
                    counts = wanted[source.name]
                    counts[label] = counts.get(label, 0) + 1
    states = {}
    for node in program.gm.graph.nodes:
        name = node.name
        if name not in usable:
            continue
        operands = [n.name for n in tensor_operands(node, program.info)]
        # A value that is only looked at differently is changed before the view, not after it.
        sent = name not in prices.cheap and not prices.is_view(name)
        shared = [label for label, count in wanted[name].items() if count > 1] if sent else []
        found = []
        for alternative in usable[name]:
            cost_s = prices.compute(name, operands, alternative) if operands else 0.0
            if name == program.loss:
                cost_s += prices.change(name, alternative.output, REPLICATED)
            found.append(_State(alternative, None, cost_s))
            for extra in shared:
                change_s = prices.change(name, alternative.output, extra)
                if 0.0 < change_s < np.inf:
                    found.append(_State(alternative, extra, cost_s + change_s))
        states[name] = tuple(found)
    return states


def _usable(
    program: Program, sharding: Sharding, prices: _Prices
) -> dict[str, tuple[Alternative, ...]]:
    """Drops alternatives that cannot be part of a minimum.

    That is what splits a factor of one element, and what wants a partial sum of an operand that is
    never one (nothing turns a value into a partial sum).
    """
    usable: dict[str, tuple[Alternative, ...]] = {}
    makes: dict[str, set[Label]] = {}
    for node in program.gm.graph.nodes:
        name = node.name
        if name not in sharding.alternatives:
            continue
        operands = [n.name for n in tensor_operands(node, program.info)]
        usable[name] = tuple(
            a
            for a in sharding.alternatives[name][: 1 if prices.sp == 1 else None]
            if (a.factor < 0 or prices.largest.get(a.factor, 1.0) < 1.0)
            and all(not w.partial or w in makes[o] for w, o in zip(a.operands, operands, strict=True))
        )
        makes[name] = {a.output for a in usable[name]}
    return usable


def _edge(
    source: str,
    made: tuple[_State, ...],
    consumers: tuple[_State, ...],
    position: int,
    prices: _Prices,
) -> Table:
    """Cost of the changes between a value's states and what one operand of a consumer wants."""
    wants = [c.alternative.operands[position] for c in consumers]
    columns = {w: i for i, w in enumerate(dict.fromkeys(wants))}
    small = np.array(
        [
            [0.0 if w == m.extra else prices.change(source, m.alternative.output, w) for w in columns]
            for m in made
        ]
    )
    return small[:, [columns[w] for w in wants]]
