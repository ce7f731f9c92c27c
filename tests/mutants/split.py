"""Faults of how a program is split: rules and factors, placement, lowering to one rank's graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

from torch import fx

from dcpc.ir import TensorInfo
from dcpc.passes.sharding import sharding
from dcpc.passes.sharding.rule_types import OpSharding
from dcpc.passes.sharding.rules import op_name, op_sharding
from tests.mutants.plant import Mutant, edited

_rule = partial(Mutant, phase="rules")
_place = partial(Mutant, phase="placement")
_lower = partial(Mutant, phase="lowering")


def _ruled(
    op: str, edit: Callable[[OpSharding], OpSharding]
) -> Callable[[], AbstractContextManager[Any]]:
    """Returns what plants a fault in the rule of an op."""

    def faulty(node: fx.Node, info: Mapping[str, TensorInfo], *rest: Any) -> OpSharding:
        found = op_sharding(node, info, *rest)
        return edit(found) if op_name(node) == op else found

    return lambda: mock.patch.object(sharding, "op_sharding", faulty)


def _free(rule: OpSharding) -> OpSharding:
    return replace(rule, whole=frozenset())


def _added_up(rule: OpSharding) -> OpSharding:
    gone = rule.whole - {n for dim in rule.output for n in dim}
    return replace(rule, whole=rule.whole - gone, summed=rule.summed | gone)


def _exchanged(rule: OpSharding) -> OpSharding:
    return replace(rule, whole=rule.sizes.keys() - rule.whole)


RULES = [
    _rule("a running sum of pieces", setting="grid 2", quick=True, plant=_ruled(
        "aten.cumsum", _free)),
    _rule("pieces are rolled by themselves", setting="grid 2", plant=_ruled("aten.roll", _free)),
    _rule("a flip along a split dim", setting="near 2", plant=_ruled("aten.flip", _free)),
    _rule("a running sum of one number a position", setting="near 2", plant=_ruled(
        "aten.cumsum", _free)),
    _rule("a softmax of each piece", setting="sums 2", plant=_ruled("aten.softmax", _free)),
    _rule("a running sum along a split dim", setting="sums 2", plant=_ruled(
        "aten.cumsum", _free)),
    _rule("largest elements of pieces are added", setting="reduced 2", plant=_ruled(
        "aten.amax", _added_up)),
    _rule("two names of a softmax exchanged", setting="sums 2", quick=True, plant=_ruled(
        "aten.softmax", _exchanged)),
    _rule("tanh passes a partial sum on", setting="reduced 2", plant=_ruled(
        "aten.tanh", lambda rule: replace(rule, linear="first"))),
    _rule("a biased product passes partial sums on", setting="reduced 2", plant=_ruled(
        "aten.linear", lambda rule: replace(rule, linear="first"))),
    _rule("a slice forgets where it begins", setting="shifted", plant=edited(
        "passes.sharding.sharding:_factor",
        "table.size(key), parent, shift)", "table.size(key), parent, 0)")),
]  # fmt: skip

PLACEMENT = [
    _place("a summed name is lost: partial taken for whole", setting="sums 2", quick=True,
        plant=edited("passes.sharding.sharding:_shard",
        "if in_output else PARTIAL", "if in_output else REPLICATED")),
    _place("what is passed on as a partial sum is taken for whole", setting="sums 2", plant=edited(
        "passes.sharding.sharding:_partial",
        "range(operands)), PARTIAL, -1)", "range(operands)), REPLICATED, -1)")),
    _place("whatever op passes a partial sum on", setting="reduced 2", plant=edited(
        "passes.sharding.sharding:_partial",
        "not operands or rule.linear == \"none\"", "not operands")),
    _place("a slice of a zigzag dim taken in order", setting="shifted ring 2", plant=edited(
        "ir:Placement.is_zigzag",
        "factor.key if factor.parent < 0 else factor.parent", "factor.key")),
    _place("pieces of a factor follow another split", setting="shifted ring 2", plant=edited(
        "ir:Placement.is_zigzag", "in self.zigzag", "in self.zigzag and factor.parent < 0")),
]  # fmt: skip

LOWERING = [
    _lower("start off by one", setting="gathered 2", quick=True, plant=edited(
        "codegen.lower.integer_inputs:IntegerInput.value",
        "\"start\": mine[0][0]", "\"start\": max(mine[0][0] - 1, 0)")),
    _lower("turn off by one", setting="ring 2", plant=edited(
        "codegen.lower.integer_inputs:IntegerInput.value",
        "\"turn\": mine[0][1]", "\"turn\": mine[0][1] + 1")),
    _lower("second off by one", setting="ring 2", quick=True, plant=edited(
        "codegen.lower.integer_inputs:IntegerInput.value",
        "else mine[-1][0]", "else mine[-1][0] - 1")),
    _lower("skip off by one", setting="shifted", plant=edited(
        "codegen.lower.integer_inputs:IntegerInput.value",
        "max(self.shift - start, 0)", "max(self.shift - 1 - start, 0)")),
    _lower("a wrong zigzag position", setting="even 2", quick=True, plant=edited(
        "codegen.lower.integer_inputs:IntegerInput._runs", "self.shift, p, rank, self.zigzag",
        "self.shift, p, p - 1 - rank, self.zigzag")),
    _lower("an all-reduce left out", setting="sums 2", quick=True, plant=edited(
        "codegen.lower.local_graph:_collective",
        "call(ops.all_reduce.default, (x, on.group))", "x")),
    _lower("an all-gather in order of a zigzag dim", setting="ring 2", plant=edited(
        "codegen.lower.local_graph:_collective",
        "source.size, source)", "source.size, source)._replace(zigzag=False)")),
    _lower("a piece from the beginning, whoever asks", setting="grid 2", plant=edited(
        "codegen.lower.local_graph:LocalGraph.narrowed",
        "(x, dim, start, length)", "(x, dim, 0, length)")),
    _lower("a slice of a piece from its beginning", setting="shifted", plant=edited(
        "codegen.lower.local_ops:_cut",
        "chosen.output.dim, skipped,", "chosen.output.dim, 0,")),
    _lower("queries take themselves for the first", setting="gathered 2", quick=True, plant=edited(
        "codegen.lower.local_attention:local_attention",
        "{**copied.kwargs, **where}", "dict(copied.kwargs)")),
    _lower("queries do not know their second run", setting="zigzag 2", plant=edited(
        "codegen.lower.local_attention:local_attention", "{**copied.kwargs, **where}",
        "{**copied.kwargs, \"start\": where[\"start\"]}")),
    _lower("a ring takes a zigzag dim in order", setting="ring 2", plant=edited(
        "codegen.lower.local_attention:_row_split",
        "*on.integers.split(factor), rows", "*on.integers.split(factor)[:2], False, rows")),
    _lower("keys go round one rank short", setting="ring 2", quick=True, plant=edited(
        "ops.ring_route:route",
        "hops = range(1, positions)", "hops = range(1, positions - 1)")),
    _lower("a mask of a piece of patches one key off", setting="frames 2", plant=edited(
        "codegen.lower.local_attention:_masked",
        "(distance, band[\"after\"])", "(distance, band[\"after\"] + 1)")),
]  # fmt: skip
