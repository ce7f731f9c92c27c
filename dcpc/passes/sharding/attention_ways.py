"""The ways to split attention by name; which ones each attention can have, and why not others.

heads     each rank has some of the heads (Ulysses), or of the queries of each key head
gathered  each rank has some of the queries, and all keys and values
ring      each rank has some of queries, keys and values; keys and values go round the ranks
hybrid    ranks that follow each other share heads, and keys and values go round their groups (USP)

Source: Ulysses: arXiv 2309.14509; ring: arXiv 2105.13120 and 2310.01889; hybrid: arXiv 2405.07719.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from dcpc.errors import check_choice
from dcpc.ir import NodePlacement, Program, TensorInfo, tensor_operands
from dcpc.passes.sharding.rule_types import is_usable
from dcpc.passes.sharding.sharding import Alternative, Sharding

LOWERINGS = ("heads", "gathered", "ring", "hybrid")


def lowering_of(chosen: Alternative | NodePlacement) -> str:
    """Returns an alternative's name in `LOWERINGS`, or "batch" or "whole"."""
    if chosen.name == "ring":
        return "hybrid" if chosen.across > 1 else "ring"
    named = {"h": "heads", "g": "heads", "q": "gathered", "b": "batch", "c": "batch"}
    return named.get(chosen.name, "whole")


def way_text(lowering: str, across: int) -> str:
    """Returns the text of a lowering; for a hybrid with the number of ranks that share heads."""
    return f"{lowering} {across}" if across > 1 else lowering


def lowerings_of(sharding: Sharding, node: fx.Node, sp: int) -> set[str]:
    """Returns the lowerings that an attention can have on `sp` ranks, see `lowering_of`."""
    alternatives = sharding.alternatives[node.name]
    return {lowering_of(a) for a in alternatives if is_usable(a.across, sp)}


def attentions(program: Program) -> list[fx.Node]:
    """Returns the program's attentions, in graph order."""
    op = torch.ops.dcpc.attention.default
    return [node for node in program.gm.graph.nodes if node.target is op]


def restricted(program: Program, sharding: Sharding, lowering: str) -> Sharding:
    """Returns the alternatives restricted to one lowering of attention, where that is possible.

    Attention in whole on each rank stays possible, which is only best at a short length.

    Args:
        program: the traced model.
        sharding: factors and alternatives of the program.
        lowering: one of `LOWERINGS`, or "auto" for all.

    Raises:
        PlanError: the lowering is unknown.
    """
    check_choice("got attention=", lowering, ("auto", *LOWERINGS))
    if lowering == "auto":
        return sharding
    alternatives = dict(sharding.alternatives)
    for node in attentions(program):
        given = alternatives[node.name]
        kept = tuple(a for a in given if lowering_of(a) == lowering)
        alternatives[node.name] = (given[0], *kept) if kept else given
    return replace(sharding, alternatives=alternatives, attention=lowering)


def why_not(program: Program, sharding: Sharding, node: fx.Node, sp: int) -> Mapping[str, str]:
    """Returns, by lowering, why an attention cannot have it; possible ones are absent."""
    found = lowerings_of(sharding, node, sp)
    info = [program.info[o.name] for o in tensor_operands(node, program.info)]
    (_, heads, queries, _), keys = info[0].shape, info[1].shape[2]
    reasons = {
        "heads": f"it has {heads} head" if heads == 1 else "its heads are no dim of their own",
        "gathered": "it has one query" if queries == 1 else "its queries are no dim of their own",
        "ring": _why_no_ring(info[0].shape[2] == 1 or keys == 1, info[3:]),
    }
    divisors = f"{heads} heads and {sp} ranks have no divisor in common that is less than {sp}"
    masked = any(len(i.shape) == 4 for i in info[3:])
    by_mask = "a mask's rows would have to be gathered for the ranks that share heads"
    reasons["hybrid"] = reasons["ring"] if "ring" not in found else by_mask if masked else divisors
    return {name: reason for name, reason in reasons.items() if name not in found}


def _why_no_ring(one: bool, masks: Sequence[TensorInfo]) -> str:
    if one:
        return "it has one query or one key"
    if any(mask.requires_grad for mask in masks):
        return "its mask has a gradient, which is the sum over all queries and keys"
    return "its queries or keys are no dim of their own"
