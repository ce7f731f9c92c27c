"""Finds the node of a program at which a wrong number begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from dcpc.codegen import LoweredPair
from dcpc.fx.large_graphs import source_line
from dcpc.ir import Partition, Program
from dcpc.verify.compare import Given
from dcpc.verify.exactness import LIMIT
from dcpc.verify.replay import Replay, in_order


def reader(program: Program, where: str) -> str:
    """Returns which node reads the parameter whose gradient differs, as text; "" for the loss."""
    names = {n for n, p in program.parameters.items() if where == p}
    for node in program.gm.graph.nodes:
        if any(operand.name in names for operand in node.all_input_nodes):
            return f", read by {_said(node)}"
    return ""


def first_difference(
    program: Program,
    given: Given,
    lowering: LoweredPair,
    parts: Partition,
    integers: Mapping[str, int],
) -> str:
    """Returns the first node whose value one rank's forward does not have, as text; "" if none."""
    expected: dict[str, Tensor] = {}
    found: dict[str, list[Tensor]] = {}

    def keep(node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor) and node.op == "call_function":
            expected[node.name] = value.detach()

    def collect(node: fx.Node, value: Any) -> None:
        if isinstance(value, Tensor) and node.op == "call_function":
            found.setdefault(lowering.joint.owner.get(node.name, ""), []).append(value)

    given.of_program(keep)
    values = in_order(parts.forward, {**given.tensors, **integers})
    with torch.no_grad():
        Replay(parts.forward, given.calls, collect).run(*values)
    for node in program.gm.graph.nodes:
        mine = [v for v in found.get(node.name, []) if v.shape == expected[node.name].shape]
        if mine and not any(_close(v, expected[node.name]) for v in mine):
            return f"; the first value that differs is that of {_said(node)}"
    return ""


def _close(got: Tensor, expected: Tensor) -> bool:
    return got.dtype == expected.dtype and torch.allclose(
        got, expected, rtol=LIMIT, atol=LIMIT, equal_nan=True
    )


def _said(node: fx.Node) -> str:
    line = source_line(node)
    return f"node '{node.name}' ({node.target}{f', {line}' if line else ''})"
