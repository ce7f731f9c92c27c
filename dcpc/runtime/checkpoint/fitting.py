"""Checks that a checkpoint fits this model and optimizer, and allocates targets for its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from dcpc.errors import CheckpointError
from dcpc.runtime.checkpoint.optimizers import misfit
from dcpc.runtime.checkpoint.parts import Parts

_GROUP = ("optimizer", "param_groups")


def fitting(
    tensors: Any, folder: Path, parts: Parts, manifest: Mapping[str, Any], small: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns name -> tensor that the checkpoint's tensor is read into.

    Raises:
        CheckpointError: the checkpoint is of another model or optimizer, or lacks a part.
    """
    table = manifest["tensors"]
    missing = [name for name in parts.small() if name not in small]
    if parts.optimizer is not None and manifest["optimizer"] is None:
        missing.append("optimizer")
    if missing:
        raise CheckpointError(
            f"load {folder}: got {missing[0]}=, which was not saved; expected what save() was "
            "given; leave it out"
        )
    into = {name: v for name, (_, v) in tensors.flat({"model": parts.model.state_dict()}).items()}
    saved = {name: row for name, row in table.items() if row["path"][0] == "model"}
    if problem := _other_model(into, saved, tensors.dtype_of):
        raise CheckpointError(
            f"load {folder}: {problem}; expected the model that was saved; make it alike, or "
            "read its tensors by torch.distributed.checkpoint"
        )
    if parts.optimizer is None:
        return into
    return into | _of_optimizer(tensors, folder, parts, parts.optimizer, manifest)


def nested(tensors: Any, table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by the paths that a checkpoint's table has for their names."""
    leaves = [(tuple(table[name]["path"]), value) for name, value in values.items()]
    found: dict[str, Any] = tensors.nested(leaves)
    return found


def _of_optimizer(
    tensors: Any, folder: Path, parts: Parts, optimizer: Optimizer, manifest: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns name -> target for the optimizer's state; its groups are already read.

    Raises:
        CheckpointError: the checkpoint is of another optimizer.
    """
    table = manifest["tensors"]
    groups = {n: None for n, row in table.items() if tuple(row["path"][:2]) == _GROUP}
    told = {n: tensors.empty_like(None, table[n]) for n in groups}
    tensors.read(folder, table, told)
    kind, parameters = type(optimizer).__name__, parts.parameters()
    named = nested(tensors, table, told)["optimizer"]
    problem = misfit(optimizer, parameters, named, parts.partial)
    if kind != manifest["optimizer"]:
        problem = f"got {kind}; expected {manifest['optimizer']}, which was saved"
    if problem:
        raise CheckpointError(
            f"load {folder}: optimizer: {problem}; make it as the one that was saved, or leave "
            "optimizer= out to start with a new one"
        )
    state = {n: row for n, row in table.items()
             if row["path"][0] == "optimizer" and n not in told}  # fmt: skip
    for name, row in state.items():
        own = parameters.get(row["path"][2])
        if own is not None or not parts.partial:
            told[name] = tensors.empty_like(own, row)
    return told


def _other_model(
    own: Mapping[str, Any], saved: Mapping[str, Any], dtype_of: Callable[[Any], Any]
) -> str:
    """Returns the first difference between a saved model and this one, or ""."""
    if other := sorted({*own} ^ {*saved}):
        whose = "not saved" if other[0] in own else "saved alone"
        more = f" and {len(other) - 1} more" * (len(other) > 1)
        return f"got a model with other tensors ('{other[0]}': {whose}{more})"
    for name, value in own.items():
        dtype, size = dtype_of(saved[name]), saved[name].get("size")
        if isinstance(value, torch.Tensor) and (dtype, size) != (value.dtype, [*value.shape]):
            mine = f"{value.dtype} {tuple(value.shape)}"
            return f"got '{name}' as {mine}; expected {dtype} {tuple(size or ())}, which was saved"
    return ""
