"""Sorts the calls that prepare positions and masks, so that all ranks trace the same graph.

Models iterate sets (transformers' ModernBERT makes a rotary embedding for each of a set of layer
types), and Python orders a set of strings otherwise in every process. Ranks would trace different
graphs. What depends on no parameter, positions and masks, has no gradient whose sum has an order:
it is put in an order that follows from who reads it, with names of that order.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import groupby, pairwise

from torch import fx

from dcpc.ops.random import DRAWS


def order_preparations(graph: fx.Graph, parameters: Collection[str]) -> None:
    """Sorts neighbouring calls that depend on no parameter by their last user; other calls stay.

    Values that many blocks read then precede those that the first block prepares for itself, so
    that this block begins as the others do.
    """
    stays = staying(graph, parameters)
    calls = [n for n in graph.nodes if n.op != "placeholder"]
    first = {n: i for i, n in enumerate(_read(n for n in calls if n in stays))}
    last: dict[fx.Node, int] = {}
    for i, node in reversed([*enumerate(calls)]):
        last[node] = i if node in stays else max(last[user] for user in node.users)
    order: list[fx.Node] = []
    for stay, nodes in groupby(calls, stays.__contains__):
        run = [*nodes]
        order += run if stay else sorted(run, key=lambda n: (-last[n], first[n]))
    for before, node in pairwise(order):
        before.append(node)
    made = [n for n in order if n not in stays]
    for node, name in zip(made, _names(made), strict=True):
        node.name = name
        graph._graph_namespace._rename_object(node, name)


def staying(graph: fx.Graph, parameters: Collection[str]) -> set[fx.Node]:
    """Returns the nodes that depend on a parameter or draw random numbers."""
    stays: set[fx.Node] = set()
    for node in graph.nodes:
        given = node.name in parameters if node.op == "placeholder" else node.op != "call_function"
        read = any(n in stays and n.op != "placeholder" for n in node.all_input_nodes)
        own = any(n.name in parameters for n in node.all_input_nodes)
        if given or read or own or node.target in DRAWS:
            stays.add(node)
    return stays


def _read(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yields nodes and all their transitive operands, operands first."""
    seen: set[fx.Node] = set()
    stack = [(n, False) for n in nodes][::-1]
    while stack:
        node, read = stack.pop()
        if read:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(n, False) for n in reversed(node.all_input_nodes)]


def _names(nodes: Iterable[fx.Node]) -> list[str]:
    """Returns the names of some nodes, sorted by number within each base name."""
    kinds, numbers = [], defaultdict(list)
    for node in nodes:
        kind, number = re.fullmatch(r"(.*?)(?:_(\d+))?", node.name).groups("")  # type: ignore[union-attr]
        kinds.append(kind)
        numbers[kind].append(number)
    ordered = {kind: iter(sorted(own, key=lambda n: int(n or 0))) for kind, own in numbers.items()}
    picked = ((kind, next(ordered[kind])) for kind in kinds)
    return [f"{kind}_{number}" if number else kind for kind, number in picked]
