"""ZeRO-1: each rank keeps the optimizer's state of some of the parameters, and updates those.

Torch's own `ZeroRedundancyOptimizer` does it. Gradients are whole on every rank after the sum, so
each rank has what its parameters need, and sends them to the others once they are updated.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.step.reduction import trained


class Model(Protocol):
    """A compiled model, as far as an optimizer needs it."""

    @property
    def groups(self) -> Groups:
        """The process groups."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Yields the model's parameters."""


def zero(
    optimizer_class: type[torch.optim.Optimizer], compiled: Model, **options: Any
) -> torch.optim.Optimizer:
    """Returns an optimizer whose state is spread over the ranks; alone: a plain one.

    Collective over all ranks, and so are its `step`, `consolidate_state_dict` (which gathers the
    state on one rank, for `state_dict` there) and `load_state_dict`.

    Example:
        compiled = dcpc.compile(model, buckets, zero=True)
        optimizer = dcpc.zero(torch.optim.AdamW, compiled, lr=1e-3)

    Args:
        optimizer_class: of torch.optim, or one like them.
        compiled: the compiled model.
        options: of the optimizer.
    """
    params = trained(compiled.parameters())
    groups = compiled.groups
    pg = groups.of(groups.world)
    if pg is None:
        return optimizer_class(params, **options)
    # Not at the top: it compiles TorchScript for a second, which most runs never use.
    module = importlib.import_module("torch.distributed.optim")
    sharded: torch.optim.Optimizer = module.ZeroRedundancyOptimizer(
        params, optimizer_class, process_group=pg, **options
    )
    return sharded


def fullest_share(
    parameters: Iterable[torch.nn.Parameter],
    world: int,
    size_bytes: Mapping[int, int] | None = None,
) -> int:
    """Returns the most bytes that one of `world` ranks keeps.

    Source: torch 2.13, `ZeroRedundancyOptimizer._partition_parameters`: whole parameters, largest
    first, each to the rank that has the fewest elements.

    Args:
        parameters: of the model.
        world: ranks that share them out.
        size_bytes: `id(parameter)` -> what is kept of it; default: as many bytes as it has.
    """
    numels, kept_bytes = [0] * world, [0] * world
    for p in sorted(trained(parameters), key=lambda p: p.numel(), reverse=True):
        rank = numels.index(min(numels))
        numels[rank] += p.numel()
        kept_bytes[rank] += p.nbytes if size_bytes is None else size_bytes.get(id(p), 0)
    return max(kept_bytes)
