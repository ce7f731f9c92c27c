"""Cuts a forward graph where a single activation flows on: the units of recompute.

A residual network is a chain of blocks; between two blocks one value is alive. Found by structure:
a point is a cut if only one activation made before it is read after it, those apart that several
repeated blocks read alike (an encoder's result, a timestep's embedding).
"""

from __future__ import annotations

from dcpc.ir import Program, tensor_operands
from dcpc.repeats import repeated_runs


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


def shared_values(program: Program) -> frozenset[str]:
    """Returns the nodes whose value lives along a run of repeated blocks, beside what flows on.

    Several blocks read it, each in the same place (the encoder's result in a decoder, the embedded
    timestep of a diffusion model), or it is made before the run and read after it (a long skip).
    """
    nodes = [
        n for n in program.gm.graph.nodes if n.op == "call_function" and n.name in program.info
    ]
    facts = [program.info[n.name] for n in nodes]
    calls = [(n.target, f.shape, f.dtype) for n, f in zip(nodes, facts, strict=True)]
    position = {n.name: i for i, n in enumerate(nodes)}
    last_use = {s.name: i for i, n in enumerate(nodes) for s in tensor_operands(n, program.info)}
    found: set[str] = set()
    for run in repeated_runs(calls):
        seen: set[tuple[str, int, int]] = set()
        for i in range(run.start, run.stop):
            for slot, source in enumerate(tensor_operands(nodes[i], program.info)):
                place = (source.name, (i - run.start) % run.period, slot)
                if place in seen:
                    found.add(source.name)
                seen.add(place)
        found |= {
            n for n, i in last_use.items() if position.get(n, i) < run.start and i >= run.stop
        }
    return frozenset(found)
