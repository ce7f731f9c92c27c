"""One order for what forward prepares, whatever order a model made it in.

Models iterate sets (transformers' ModernBERT makes a rotary embedding for each of a set of layer
types), and Python orders a set of strings otherwise in every process. Ranks would trace different
graphs. What depends on no parameter, positions and masks, has no gradient whose sum has an order:
it is put in the order in which the rest reads it, with names of that order.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise

from torch import fx

from dcpc.random_ops import DRAWS


def order_preparations(graph: fx.Graph, parameters: Collection[str]) -> None:
    """Orders the calls that depend on no parameter by who reads them first; the others stay.

    Each takes the place of another: a reader's are before it, as at least as many were.

    Args:
        graph: without dead code.
        parameters: names of their placeholders.
    """
    stays = staying(graph, parameters)
    calls = [n for n in graph.nodes if n.op != "placeholder"]
    old = [n for n in calls if n not in stays]
    new = [*dict.fromkeys(_read(n for n in calls if n in stays))]
    new = [n for n in new if n.op != "placeholder" and n not in stays]
    assert len(new) == len(old), "there is no dead code"
    names = _names(new)
    places = iter(new)
    order = [next(places) if n not in stays else n for n in calls]
    for before, node in pairwise(order):
        before.append(node)
    for node, name in zip(new, names, strict=True):
        node.name = name
        graph._graph_namespace._rename_object(node, name)


def staying(graph: fx.Graph, parameters: Collection[str]) -> set[fx.Node]:
    """Returns the nodes that depend on a parameter, or draw numbers.

    Args:
        graph: of a program.
        parameters: names of their placeholders.
    """
    stays: set[fx.Node] = set()
    for node in graph.nodes:
        given = node.name in parameters if node.op == "placeholder" else node.op != "call_function"
        read = any(n in stays and n.op != "placeholder" for n in node.all_input_nodes)
        own = any(n.name in parameters for n in node.all_input_nodes)
        if given or read or own or node.target in DRAWS:
            stays.add(node)
    return stays


def _read(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yields what nodes read and themselves, operands first."""
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
    """Returns the names of some nodes, those of one kind in order of their numbers."""
    kinds, numbers = [], defaultdict(list)
    for node in nodes:
        kind, number = re.fullmatch(r"(.*?)(?:_(\d+))?", node.name).groups("")  # type: ignore[union-attr]
        kinds.append(kind)
        numbers[kind].append(number)
    ordered = {kind: iter(sorted(own, key=lambda n: int(n or 0))) for kind, own in numbers.items()}
    picked = ((kind, next(ordered[kind])) for kind in kinds)
    return [f"{kind}_{number}" if number else kind for kind, number in picked]
