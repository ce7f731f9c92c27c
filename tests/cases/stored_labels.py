"""Weights of which each rank keeps a piece, as alternatives of a placement: what may be stored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dcpc.ir import REPLICATED, Label, Placement, Program, tensor_operands
from dcpc.passes.sharding.sharding import Alternative, Sharding


def weights(program: Program, sharding: Sharding) -> list[str]:
    """Returns the parameters of two dims and more; norms and biases stay whole."""
    return [name for name in program.parameters if len(sharding.factors[name]) > 1]


def classes(program: Program, sharding: Sharding) -> dict[str, list[str]]:
    """Returns the weights of each class, those of equal blocks, by their name without numbers."""
    found: dict[str, list[str]] = {}
    for name in weights(program, sharding):
        found.setdefault(re.sub(r"_\d+_", "_", name), []).append(name)
    return found


def splits(sharding: Sharding, name: str) -> list[Label]:
    """Returns every label that splits a weight."""
    dims = enumerate(sharding.factors[name])
    return [Label(d, i) for d, factors in dims for i in range(len(factors))]


def stored(sharding: Sharding, labels: Mapping[str, Sequence[Label]]) -> Sharding:
    """Returns the sharding of a program whose ranks have a piece of each weight and no more.

    Args:
        sharding: sharding of the program.
        labels: labels among which the piece of each weight may be chosen.
    """
    kept = dict(sharding.alternatives)
    for name, given in labels.items():
        factors = sharding.factors[name]
        kept[name] = tuple(Alternative((), at, factors[at.dim][at.index].key) for at in given)
    return replace(sharding, alternatives=kept)


def forced(
    program: Program, sharding: Sharding, labels: Mapping[str, Label], gathered: bool
) -> Sharding:
    """Returns the sharding in which each weight is gathered before it is read, or never is.

    Args:
        program: traced model.
        sharding: sharding of the program.
        labels: label of the stored piece of each weight.
        gathered: whether readers take the whole weight; else they take the piece, where they can.
    """
    found = stored(sharding, {name: [label] for name, label in labels.items()})
    kept = dict(found.alternatives)
    for node in program.gm.graph.nodes:
        sources = [n.name for n in tensor_operands(node, program.info)]
        for name in [s for s in sources if s in labels and node.name in kept]:
            at, want = sources.index(name), REPLICATED if gathered else labels[name]
            kept[node.name] = (
                tuple(a for a in kept[node.name] if a.operands[at] == want) or kept[node.name]
            )
    return replace(found, alternatives=kept)


def read_whole(program: Program, placement: Placement) -> set[str]:
    """Returns the parameters that are stored split and that some reader wants whole."""
    return {
        source.name
        for node in program.gm.graph.nodes
        if node.name in placement.nodes
        for source, want in zip(
            tensor_operands(node, program.info), placement.nodes[node.name].operands, strict=False
        )
        if source.name in program.parameters
        and (want, placement.nodes[source.name].output.sharded) == (REPLICATED, True)
    }
