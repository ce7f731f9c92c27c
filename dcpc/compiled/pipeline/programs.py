"""A program cut into one program for each stage, which go through the passes as any other.

What a stage receives is an input of its program, under the name that the value has in the whole
one; what the next stages need of it are outputs. Values on their way from one stage to a later one
are in no program of those between: they hand them on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import sympy
import torch
from torch import fx

from dcpc.compiled.pipeline.chain import CallChain
from dcpc.fx.large_graphs import LazyGraphModule
from dcpc.ir import Program, TensorInfo


@dataclass(frozen=True, slots=True)
class StageProgram:
    """The part of a program that one stage runs.

    Attributes:
        program: program that takes parameters, the model's inputs, and the received values that it
            reads, as inputs; returns those of the sent values that it makes, or the loss.
        received: names of the values that the stage receives.
        sent: names of the values that it sends; of the last stage the loss.
        flowing: shape, dtype and gradient of each of these values.
        given: the same of all inputs of the model, by their names.
    """

    program: Program
    received: tuple[str, ...]
    sent: tuple[str, ...]
    flowing: Mapping[str, TensorInfo]
    given: Mapping[str, TensorInfo]

    @property
    def read(self) -> tuple[str, ...]:
        """Received values that the program reads; the others are handed on alone."""
        return tuple(n for n in self.received if n in self.program.inputs)


def size_named(name: str) -> int:
    """Stands for a size in a stage's program; the code that is made of it has the expression."""
    raise AssertionError(f"size {name} is not computed by the program itself")


def sizes_of_shapes(
    program: Program, known: Iterable[tuple[TensorInfo, torch.Tensor]]
) -> dict[str, int]:
    """Returns the length of each dim that the shapes of values say."""
    # A dim that is 1 in all of the trace's buckets, or static, is a number in every shape.
    ones = {n: 1 for n, hint in program.hints.items() if hint == 1}
    found = program.dims({**ones, **dict(program.fixed)})
    for info, value in known:
        for expr, size in zip(info.shape, value.shape, strict=True):
            unknown = expr.free_symbols - found.keys()
            if len(unknown) == 1:
                (symbol,) = unknown
                solved = _solved(expr.subs(found), symbol, size)
                found |= {} if solved is None else {symbol: solved}
    return {n: found[symbol] for n, symbol in program.symbols.items() if symbol in found}


def _solved(expr: sympy.Expr, symbol: sympy.Symbol, size: int) -> int | None:
    """Returns a symbol's value where an expression has a size; None: that does not say it."""
    if expr == symbol:
        return size
    try:
        found = sympy.solve(expr - size, symbol)
    except NotImplementedError:  # a quotient that is rounded
        return None
    return int(found[0]) if len(found) == 1 and found[0].is_Integer else None


def stage_programs(
    program: Program,
    chain: CallChain,
    borders: Sequence[int],
    homes: Mapping[str, int] = MappingProxyType({}),
) -> tuple[StageProgram, ...]:
    """Returns the programs of the stages, in order.

    Args:
        program: whole program.
        chain: chain of the program.
        borders: numbers of the chain's borders at which it is cut, its ends included.
        homes: parameter that no call reads, and whose gradient is zero -> stage that has it; by
            default the last one, which also has those of stages without a backward.
    """
    last = len(borders) - 2
    nodes = {n.name: n for n in program.gm.graph.nodes}
    unread = {n: last for n in program.zero_gradients if not nodes[n].users}
    pairs = [*enumerate(pairwise(borders))]
    for j, (low, high) in pairs:
        if _makes_learning(program, chain, low, high):
            unread |= {n: j for n in unread if homes.get(n) == j}
    return tuple(
        _part(program, chain, low, high, {n for n, at in unread.items() if at == j}, j == last)
        for j, (low, high) in pairs
    )


def _makes_learning(program: Program, chain: CallChain, low: int, high: int) -> bool:
    """Whether a stage sends a value of its own that has a gradient, so that it has a backward."""
    own = set(chain.calls[chain.borders[low] : chain.borders[high]])
    return any(n in own and program.info[n].requires_grad for n in chain.crossing[high])


def _part(
    program: Program, chain: CallChain, low: int, high: int, zero: set[str], is_last: bool
) -> StageProgram:
    own = set(chain.calls[chain.borders[low] : chain.borders[high]])
    received = chain.crossing[low]
    sent = program.outputs if is_last else chain.crossing[high]
    # What is returned and follows from inputs alone is made where the loss is.
    free = set(sent) & chain.free if is_last else set[str]()
    needed = _needed(program, chain, own | free) | zero
    needed |= {n for n in sent if n in program.inputs or n in program.buffers} if is_last else set()
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    inputs = {p: n for p, n in program.inputs.items() if p in needed}
    for node in program.gm.graph.nodes:
        if node.op == "placeholder" and node.name in needed:
            made[node] = _placeholder(graph, node)
    for node in program.gm.graph.nodes:
        if node.name in received and node.name in needed:
            made[node] = _placeholder(graph, node)
            inputs[node.name] = node.name
    for node in program.gm.graph.nodes:
        if node.op != "call_function" or node.name not in needed or node in made:
            continue
        target, args, kwargs = node.target, node.args, dict(node.kwargs)
        if node.name in program.scalars:
            target, args, kwargs = size_named, (node.name,), {}
        args, kwargs = fx.node.map_arg((args, kwargs), made.__getitem__)
        made[node] = graph.create_node(node.op, target, args, kwargs, name=node.name)
        made[node].meta = dict(node.meta)
    by_name = {n.name: n for n in made.values()}
    outputs = tuple(n for n in sent if n in own or n in free)
    graph.output(tuple(by_name[n] for n in outputs))
    graph.lint()
    begins = tuple(i for i, n in enumerate(outputs) if program.info[n].requires_grad)
    part = program.only(
        needed,
        gm=LazyGraphModule(torch.nn.Module(), graph),
        inputs=inputs,
        outputs=outputs,
        begins=begins,
        pieces=False,  # stages hand on whole values
        graph_hash=f"{program.graph_hash} calls {chain.borders[low]} to {chain.borders[high]}",
    )
    ends = {*received, *sent}
    flowing = {n: info for n, info in program.info.items() if n in ends}
    given = {name: program.info[p] for p, name in program.inputs.items()}
    return StageProgram(part, received, sent, flowing, given)


def _needed(program: Program, chain: CallChain, own: set[str]) -> set[str]:
    """Returns the names of a stage's calls and of all that they read, received values included."""
    needed = set(own)
    for node in reversed(program.gm.graph.nodes):
        taken = node.name in own or (node.name in chain.free and node.name in needed)
        if taken and node.name not in program.scalars:
            needed |= {source.name for source in node.all_input_nodes}
    return needed


def _placeholder(graph: fx.Graph, node: fx.Node) -> fx.Node:
    made = graph.create_node("placeholder", node.name, name=node.name)
    made.meta = dict(node.meta)
    return made
