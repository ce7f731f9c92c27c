"""Optimizer state keyed by parameter names, as torch.distributed.checkpoint stores it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from dcpc.errors import CheckpointError

_NAMES = "param_names"  # of a group, in an optimizer that was made of named parameters


def names_in(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> list[list[str]]:
    """Returns the parameter names of each group, without empty parameters that have no name.

    A pipeline stage that trains nothing has one such empty parameter.

    Raises:
        CheckpointError: a parameter is not the compiled model's.
    """
    names = {id(p): name for name, p in parameters.items()}
    for n, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in names and p.numel():
                raise CheckpointError(
                    f"{type(optimizer).__name__}: got a parameter of shape {tuple(p.shape)} in "
                    f"group {n} that the compiled model has not; expected its own; make the "
                    "optimizer of compiled.parameters()"
                )
    return [[names[id(p)] for p in g["params"] if id(p) in names] for g in optimizer.param_groups]


def by_name(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """Returns an optimizer's state keyed by parameter names instead of numbers.

    Raises:
        CheckpointError: a parameter is not the compiled model's, or the state has a key that is no
            text.
    """
    names, own = names_in(optimizer, parameters), optimizer.state_dict()
    numbered = dict(_numbered(optimizer, own, parameters))
    nameless = {n for group in own["param_groups"] for n in group["params"]} - numbered.keys()
    state = {numbered.get(k, k): v for k, v in own["state"].items() if k not in nameless}
    odd = [f"{name}: {key!r}" for name, v in state.items() if isinstance(v, Mapping)
           for key in v if not isinstance(key, str)]  # fmt: skip
    if odd:
        raise CheckpointError(
            f"{type(optimizer).__name__}: got state under a key that is no text ({odd[0]}); "
            "expected texts, as torch's own optimizers have; pass its state_dict() as extra="
        )
    groups = [{**g, "params": mine} for g, mine in zip(own["param_groups"], names, strict=True)]
    for group in groups:
        group.pop(_NAMES, None)  # of this rank's parameters alone: "params" has those of all
    return {"state": state, "param_groups": groups}


def by_number(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], named: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns a state dict for `Optimizer.load_state_dict`: the reverse of `by_name`."""
    own = optimizer.state_dict()
    numbers = {name: n for n, name in _numbered(optimizer, own, parameters)}
    state = {numbers.get(key, key): value for key, value in named.get("state", {}).items()}
    groups = [{**g, **{key: o[key] for key in ("params", _NAMES) if key in o}}
              for g, o in zip(named["param_groups"], own["param_groups"], strict=True)]  # fmt: skip
    return {"state": state, "param_groups": groups}


def misfit(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    named: Mapping[str, Any],
    partial: bool,
) -> str:
    """Returns the reason why a saved state does not fit this optimizer, or ""."""
    mine = names_in(optimizer, parameters)
    saved = [group["params"] for group in named["param_groups"]]
    if len(mine) != len(saved):
        return f"got {len(mine)} groups of parameters; expected {len(saved)}, as were saved"
    for n, (own, kept) in enumerate(zip(mine, saved, strict=True)):
        if other := sorted({*own} ^ {n for n in kept if n in parameters or not partial}):
            whose = "not saved" if other[0] in own else "saved alone"
            return f"got group {n} with other parameters ('{other[0]}': {whose}); expected the same"
    return ""


def _numbered(
    optimizer: Optimizer, own: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[int, str]]:
    """Yields number in the optimizer's state and name of each named parameter."""
    names = {id(p): name for name, p in parameters.items()}
    for group, saved in zip(optimizer.param_groups, own["param_groups"], strict=True):
        for p, number in zip(group["params"], saved["params"], strict=True):
            if id(p) in names:
                yield number, names[id(p)]
