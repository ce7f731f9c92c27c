"""A program as a chain of calls, with the borders at which it may be cut and the values there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from dcpc.errors import PlanError
from dcpc.ir import Program

aten = torch.ops.aten

WINDOW = 8  # calls before and after a border, none of which is crossed by fewer bytes
MOST_BORDERS = 256  # of more of them those that the fewest bytes cross
SMALL = 16  # a value is made in each stage if it has so many times the bytes of its parameters

_PRODUCTS = {
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.bmm.default,
    aten.addmm.default,
    aten.convolution.default,
    torch.ops.dcpc.attention.default,
}


@dataclass(frozen=True, slots=True)
class CallChain:
    """The calls of a program that one stage or another has.

    Values that follow from inputs and buffers alone (positions, masks) are free: each stage makes
    those that it needs. So is what is made of parameters alone without a product, if it is much
    larger than they are (the biases of T5's relative positions) or does not learn. Each stage that
    reads such a parameter then has a part of its gradient.

    Attributes:
        calls: names of the calls in execution order, free ones excepted.
        free: names of the nodes that any stage makes for itself.
        borders: positions among the calls where it may be cut: the first and the last are its ends.
        crossing: values made before each border that calls behind it read, in order.
    """

    calls: tuple[str, ...]
    free: frozenset[str]
    borders: tuple[int, ...]
    crossing: tuple[tuple[str, ...], ...]


def chain_of(program: Program, sizes: Mapping[sympy.Symbol, int]) -> CallChain:
    """Returns where a program may be cut: where the fewest bytes flow on.

    Args:
        program: traced model, which returns its loss first.
        sizes: length of every dim at which bytes are weighed, that of the largest bucket.

    Raises:
        PlanError: an input learns, or another output than the loss does.
    """
    learning = [name for name in program.inputs if program.info[name].requires_grad]
    if learning or any(program.begins[1:]):
        got = f"an input that learns ({learning[0]})" if learning else "several losses"
        raise PlanError(
            f"stages: got a model with {got}; expected one whose forward returns a loss and whose "
            "parameters alone learn; compile it without a pipeline"
        )
    free = _free(program, sizes)
    nodes = [n for n in program.gm.graph.nodes if n.op == "call_function" and n.name not in free]
    position = {n: i for i, n in enumerate(nodes)}
    last = [_last_reader(program, n, position) for n in nodes]
    size_bytes = [_bytes(program, n, sizes) for n in nodes]
    crossed = _crossed_bytes(last, size_bytes)
    inner = [b for b in range(1, len(nodes)) if _is_narrow(crossed, b)]
    inner = sorted(sorted(inner, key=lambda b: crossed[b])[:MOST_BORDERS])
    borders = (0, *inner, len(nodes))
    return CallChain(
        calls=tuple(n.name for n in nodes),
        free=frozenset(free),
        borders=borders,
        crossing=tuple(
            tuple(n.name for n, until in zip(nodes[:b], last, strict=False) if until >= b)
            for b in borders
        ),
    )


def _last_reader(program: Program, node: fx.Node, position: Mapping[fx.Node, int]) -> int:
    """Returns the place of the last call that reads a value; -1: none does.

    What is returned is read behind the last call. A size of a value follows from the dims, whoever
    asks for it.
    """
    readers = [u for u in node.users if u.name not in program.scalars]
    return max((position.get(u, len(position)) for u in readers), default=-1)


def _bytes(program: Program, node: fx.Node, sizes: Mapping[sympy.Symbol, int]) -> float:
    """Returns the bytes of a value; infinite for one that no stage can send, such as a tuple."""
    info = program.info.get(node.name)
    return float("inf") if info is None else float(info.size_bytes.subs(sizes))


def _crossed_bytes(last: list[int], size_bytes: list[float]) -> list[float]:
    """Returns the bytes that cross each border, `[calls + 1]`."""
    found = []
    alive: dict[int, float] = {}
    for border in range(len(last) + 1):
        if border:
            alive[border - 1] = size_bytes[border - 1]
        alive = {i: size for i, size in alive.items() if last[i] >= border}
        found.append(sum(alive.values()))
    return found


def _is_narrow(crossed: list[float], border: int) -> bool:
    """Whether no border nearby is crossed by fewer bytes, nor the one before by as few."""
    near = crossed[max(1, border - WINDOW) : min(border + WINDOW, len(crossed) - 2) + 1]
    own = crossed[border]
    return own < float("inf") and own == min(near) and (border == 1 or crossed[border - 1] > own)


def _free(program: Program, sizes: Mapping[sympy.Symbol, int]) -> set[str]:
    """Returns the nodes that any stage makes for itself; placeholders are not among them."""
    light: set[str] = set()
    made_of: dict[str, frozenset[str]] = {}  # of what is made of parameters and light values alone
    free: set[str] = set()
    for node in program.gm.graph.nodes:
        name, reads = node.name, [a.name for a in node.all_input_nodes]
        if node.op == "placeholder":
            parameter = name in program.parameters
            made_of[name] = frozenset([name] if parameter else [])
            light |= set() if parameter else {name}
        elif node.op == "call_function":
            if name in program.scalars or all(r in light for r in reads):
                light.add(name)
                free.add(name)
                made_of[name] = frozenset()
            elif node.target not in _PRODUCTS and all(r in made_of for r in reads):
                made_of[name] = frozenset().union(*(made_of[r] for r in reads))
    for node in program.gm.graph.nodes:
        of = made_of.get(node.name) if node.op == "call_function" else None
        if of and _is_small(program, node, of, sizes):
            free |= {node.name, *_made_before(node, made_of)}
    return free


def _is_small(
    program: Program, node: fx.Node, of: frozenset[str], sizes: Mapping[sympy.Symbol, int]
) -> bool:
    """Whether a value made of parameters is much larger than they are, or does not learn."""
    own = sum(float(program.info[p].size_bytes) for p in of)
    size_bytes = _bytes(program, node, sizes)
    if size_bytes == float("inf"):
        return False
    return own * SMALL <= size_bytes or not program.info[node.name].requires_grad


def _made_before(node: fx.Node, made_of: Mapping[str, frozenset[str]]) -> set[str]:
    """Returns the calls on parameters that a value follows from."""
    found: set[str] = set()
    todo = [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source.op == "call_function" and made_of[source.name] and source.name not in found:
                found.add(source.name)
                todo.append(source)
    return found
