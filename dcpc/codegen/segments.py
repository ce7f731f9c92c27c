"""Cuts a forward graph where a single activation flows on: the units of recompute.

A residual network is a chain of blocks; between two blocks one value is alive. Found by structure:
a point is a cut if only one activation made before it is read after it, those apart that several
repeated blocks read alike (an encoder's result, a timestep's embedding).
"""

from __future__ import annotations

from dcpc.codegen.repeats import shared_values
from dcpc.ir import Program, tensor_operands


def segments(program: Program) -> dict[str, int]:
    """Returns node name -> index of its segment, for every node with a tensor value.

    A run of single nodes between two cuts (a final norm, a head, a reshape) is one segment with its
    neighbour: recomputing it alone would save nothing.
    """
    nodes = [
        n for n in program.gm.graph.nodes if n.op == "call_function" and n.name in program.info
    ]
    position = {n.name: i for i, n in enumerate(nodes)}
    last_use = [i for i in range(len(nodes))]
    shared = shared_values(program)
    for i, node in enumerate(nodes):
        for source in tensor_operands(node, program.info):
            if source.name in position and source.name not in shared:
                last_use[position[source.name]] = i
    cuts = []
    furthest = -1
    active = [program.info[n.name].requires_grad for n in nodes]
    for i in range(len(nodes)):
        if not active[i]:
            continue
        if furthest <= i:
            cuts.append(i)
        furthest = max(furthest, last_use[i])
    return _number(nodes_between=cuts, names=[n.name for n in nodes], active=active)


def _number(nodes_between: list[int], names: list[str], active: list[bool]) -> dict[str, int]:
    """Numbers the intervals between cuts; an interval of one activation joins the one before."""
    result: dict[str, int] = {}
    segment, start = 0, 0
    for cut in [*nodes_between, len(names) - 1]:
        if cut < start:
            continue
        interior = sum(active[start : cut + 1])
        if interior > 1 and start > 0:
            segment += 1
        for i in range(start, cut + 1):
            result[names[i]] = segment
        start = cut + 1
    return result
