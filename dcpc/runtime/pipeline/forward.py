"""Runs a batch through all stages of a pipeline without gradients; returns forward's outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.errors import GroupError
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.stage import Shaped, Stage


def returned_by(
    stage: Stage,
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    seed: int,
    grid: PipelineGrid,
    made: Sequence[Shaped],
) -> tuple[Tensor, ...]:
    """Returns the outputs of a batch; the same call on all ranks of this pipeline.

    Raises:
        GroupError: a rank of this pipeline did not arrive in time.
    """
    return from_last(_forward(stage, inputs, sizes, seed, grid), made, grid)


def from_last(
    sent: Sequence[Tensor], made: Sequence[Shaped], grid: PipelineGrid
) -> tuple[Tensor, ...]:
    """Returns the last stage's tensors on all ranks of this pipeline, which call it together.

    Raises:
        GroupError: a rank of this pipeline did not arrive in time.
    """
    groups, layout = grid.groups, grid.layout
    last = layout.rank(0, grid.stages - 1)  # every pipeline's ranks are in one order
    found = []
    for number, (shape, dtype) in enumerate(made):
        value = torch.empty(shape, dtype=dtype)
        if grid.stage == grid.stages - 1:
            value.copy_(sent[number])
        with _waiting(grid):
            dist.broadcast(value, group=groups.control(layout.ranks), group_src=last)
        found.append(value.to(groups.device))
    return tuple(found)


def _forward(
    stage: Stage,
    inputs: Mapping[str, Tensor],
    sizes: Mapping[str, int],
    seed: int,
    grid: PipelineGrid,
) -> tuple[Tensor, ...]:
    """Returns the tensors that the stage sends, once the next one has taken them."""
    at, received = grid.stage, list[Tensor]()
    if at > 0:
        for shape, dtype in stage.received(sizes):
            received.append(torch.empty(shape, dtype=dtype, device=grid.groups.device))
            with _waiting(grid):
                dist.recv(received[-1], src=grid.peer(at - 1), group=grid.wire(at - 1, False))
    with torch.no_grad():
        sent, _ = stage.forward(inputs, tuple(received), seed)
    if at < grid.stages - 1:
        for value in sent:
            with _waiting(grid):
                dist.send(value, dst=grid.peer(at + 1), group=grid.wire(at + 1, False))
    return sent


@contextmanager
def _waiting(grid: PipelineGrid) -> Iterator[None]:
    """Turns a peer's missing answer into an error that names this rank's stage."""
    try:
        yield
    except RuntimeError as e:
        raise GroupError(
            f"a batch on stage {grid.stage} of pipeline {grid.replica}: got "
            f"{str(e).splitlines()[0]}; expected the other ranks of the pipeline within "
            f"{grid.groups.timeout_s:g} s; look at their logs"
        ) from e
