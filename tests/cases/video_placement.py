"""A video transformer's training step, its placement, and Ulysses on the same graph to compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm

import sympy
import torch

from dcpc.buckets import Buckets
from dcpc.ir import Factor, Label, Placement, Program, tensor_operands
from dcpc.passes.sharding.sharding import Sharding
from dcpc.trace import trace
from models.stdit import RectifiedFlow, STDiT, STDiTConfig, input_specs

# Source: shared/specs/stdit.md 1.7: 360p, 102 frames: 30 x 920 tokens
LONG_VIDEO = {"batch": 1, "frames": 30, "height": 45, "width": 80}
MANY_VIDEOS = {"batch": 8, "frames": 15, "height": 30, "width": 53}


def stdit(config: STDiTConfig) -> Program:
    """Returns the traced training step of an STDiT, without memory for its weights."""
    with torch.device("meta"):
        model = RectifiedFlow(STDiT(config))
    sizes = [{"frames": 2, "height": 18, "width": 32}, {"frames": 120, "height": 90, "width": 160}]
    return trace(model, Buckets(inputs=input_specs(config), sizes=sizes))


def changes(program: Program, placement: Placement) -> dict[tuple[str, Label], Label]:
    """Returns (value, label wanted) -> label it has, for each collective of forward."""
    found: dict[tuple[str, Label], Label] = {}
    for node in program.gm.graph.nodes:
        chosen = placement.nodes.get(node.name)
        operands = tensor_operands(node, program.info) if chosen is not None else []
        for source, want in zip(operands, chosen.operands if chosen else (), strict=False):
            have = placement.nodes[source.name].output
            if have != want and (have.sharded or have.partial):
                found[source.name, want] = have
    return found


def switches(program: Program, placement: Placement, sizes: Mapping[str, int]) -> list[str]:
    """Returns the collectives of forward on values of at least a quarter of the tokens, N x D."""
    dims = {program.symbols[n]: s for n, s in sizes.items()}
    numels = {n: float(i.numel.subs(dims)) for n, i in program.info.items()}
    norms = [n.name for n in program.gm.graph.nodes if "layer_norm" in str(n.target)]
    tokens = max(numels[n] for n in norms)
    return [
        f"{name}: {have} -> {want}"
        for (name, want), have in changes(program, placement).items()
        if numels[name] >= tokens / 4
    ]


def sent_bytes(program: Program, placement: Placement, sizes: Mapping[str, int]) -> float:
    """Returns the bytes all ranks together send in forward; the last is of the loss alone."""
    dims = {program.symbols[n]: s for n, s in sizes.items()}
    p, total = placement.sp, 0.0
    for (name, want), have in changes(program, placement).items():
        whole = float(program.info[name].size_bytes.subs(dims))
        if have.sharded and want.sharded:
            at = [_shares(placement, name, label, dims) for label in (have, want)]
            total += whole * (1 - sum(a * b for a, b in zip(*at, strict=True)))
        elif have.partial and not want.sharded:
            total += 2 * whole * (p - 1)
        else:
            total += whole * (p - 1)
    for name, chosen in placement.nodes.items():
        if chosen.name == "ring":
            total += _ring_bytes(program, name, p, chosen.across, dims)
    return total


def _ring_bytes(
    program: Program, name: str, p: int, across: int, dims: Mapping[sympy.Symbol, int]
) -> float:
    """Returns the bytes all ranks send for keys and values that go round, and to swap heads."""
    node = next(n for n in program.gm.graph.nodes if n.name == name)
    operands = tensor_operands(node, program.info)[:3]
    query, key, value, out = (
        float(program.info[n].size_bytes.subs(dims)) for n in (*(o.name for o in operands), name)
    )
    heads = int(program.info[operands[1].name].shape[1])
    turned = (key + value) * (lcm(heads, across) // heads)
    swapped = (query + turned + out) * (across - 1) / across
    return turned * (p // across - 1) + swapped


def _shares(
    placement: Placement, name: str, label: Label, dims: Mapping[sympy.Symbol, int]
) -> list[float]:
    size = int(placement.factors[name][label.dim][label.index].size.subs(dims))
    return [(size // placement.sp + (r < size % placement.sp)) / size for r in range(placement.sp)]


def ulysses(program: Program, sharding: Sharding) -> Sharding:
    """Returns what is left where rows of patches are split, and heads in attention over them.

    That is the scheme of Open-Sora v1.2 without its all-to-alls around cross-attention: queries,
    keys, values and the result of each spatial attention change places.
    """
    rows = _rows_of_patches(program, sharding)
    every = {f for name in sharding.factors for f in _factors(sharding, name)}
    frames = {f.key for f in every if f.size == program.symbols["frames"]}
    kept = dict(sharding.alternatives)
    for node in program.gm.graph.nodes:
        if node.name not in kept or node.op != "call_function":
            continue
        given = kept[node.name]
        split = [a for a in given if a.factor == rows and not a.across]
        if not split or split[0].nonempty:
            continue
        operands = tensor_operands(node, program.info)
        keys = {f.key for k in operands[1:2] for f in _factors(sharding, k.name)}
        heads = [a for a in given if a.name == "h"]
        if heads and split[0].name == "q" and rows in keys:
            kept[node.name] = tuple(heads)
        elif sharding.rules[node.name].multiplies:
            kept[node.name] = tuple(split)
        else:
            kept[node.name] = tuple(a for a in given if a.factor not in frames)
    return replace(sharding, alternatives=kept)


def _factors(sharding: Sharding, name: str) -> list[Factor]:
    return [f for dim in sharding.factors[name] for f in dim]


def _rows_of_patches(program: Program, sharding: Sharding) -> int:
    """Key of the first factor of a frame's tokens: the one most values have."""
    counts: dict[int, int] = {}
    for f in (f for name in sharding.factors for f in _factors(sharding, name)):
        if f.size.has(sympy.floor) and f.size.has(program.symbols["height"]):
            counts[f.key] = counts.get(f.key, 0) + 1
    return max(counts, key=lambda key: counts[key])
