"""Groups the parameters that a graph gathers at once (ZeRO-3): those of a repeated block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from dcpc.ir import GatherUnits, Program

aten = torch.ops.aten
# Ops whose backward does not read the parameter.
_READ_ONCE = {aten.embedding.default, aten.add.Tensor, aten.sub.Tensor}
# A numbered module with a larger share of the parameters is divided into its numbered submodules.
_LARGEST_SHARE = 0.25


def units_of(
    program: Program, tensors: Mapping[str, Tensor], ranks: int, copies: Mapping[str, object]
) -> GatherUnits:
    """Returns units of parameters: one for each repeated block, and one for each other module.

    Backward gathers a unit again if forward reads it at one place only, except for the last one.

    Args:
        program: the traced model.
        tensors: placeholder name -> parameter.
        ranks: number of ranks that shard the parameters.
        copies: node name -> copy of a repeated block that it is in; other nodes are absent.
    """
    calls = [n for n in program.gm.graph.nodes if n.op == "call_function"]
    position = {n: i for i, n in enumerate(calls)}
    placeholders = {n.name: n for n in program.gm.graph.nodes if n.op == "placeholder"}
    read: dict[str, list[int]] = {}
    # A parameter of several names is in the unit of the first that is read.
    first_name: dict[int, str] = {}
    for name in program.parameters:
        places = [position[u] for u in placeholders[name].users if u in position]
        if places:
            read[name] = places
    order = sorted(read, key=lambda name: min(read[name]))
    for name in order:
        first_name.setdefault(id(tensors[name]), name)
    groups = _groups(program, order, copies)
    members: dict[object, list[str]] = {}
    for name in order:
        members.setdefault(groups[first_name[id(tensors[name])]], []).append(name)
    units = tuple(map(tuple, members.values()))
    spans = [[p for n in unit for p in read[n]] for unit in units]
    again = frozenset(
        k
        for k, unit in enumerate(units[:-1])
        if max(spans[k]) < min(min(s) for s in spans[k + 1 :])
        and any(_kept_for_backward(placeholders[n]) for n in unit)
    )
    return GatherUnits(units, again, ranks)


def _kept_for_backward(parameter: fx.Node) -> bool:
    return any(user.target not in _READ_ONCE for user in parameter.users)


def _groups(program: Program, order: list[str], copies: Mapping[str, object]) -> dict[str, object]:
    """Returns parameter -> key, equal for parameters that are gathered at once."""
    found = dict(copies)
    numels: Counter[str] = Counter()
    for name in order:
        for prefix in ("", *_numbered(program.parameters[name])):
            numels[prefix] += int(program.info[name].numel)
    apart = 0
    for name in order:
        if name in found:
            apart += 1
            continue
        prefixes = _numbered(program.parameters[name])
        small = [p for p in prefixes if numels[p] <= _LARGEST_SHARE * numels[""]]
        apart += bool(prefixes)
        found[name] = (*small, *prefixes[-1:], apart)[0]
    return found


def _numbered(name: str) -> list[str]:
    """Returns the numbered modules that contain a parameter, outermost first."""
    parts = name.split(".")
    return [".".join(parts[: i + 1]) for i, part in enumerate(parts[:-1]) if part.isdecimal()]
