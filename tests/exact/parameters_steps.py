"""Steps put together by hand, and bytes that a rank holds: for `benchmarks.parameters`.

A step of `dcpc.DataLoader` has the settings that a planner chose. Here each micro-batch says its
own, so that any mix of lengths, degrees, recompute and ranks can be run.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dcpc
from dcpc.buckets import BATCH, Bucket
from dcpc.plan.prices.studies import Study
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.planner.plans import PlannedMicroBatch, step_plan

TEXT = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
IGNORE = -100
ADAM = functools.partial(torch.optim.Adam, lr=1e-3)


@dataclass(frozen=True, slots=True)
class Work:
    """A micro-batch.

    Attributes:
        seq: length of its samples.
        batch: how many.
        ranks: that take it together, consecutive.
        recompute: share of the steps of recompute that it takes.
    """

    seq: int
    batch: int
    ranks: tuple[int, ...]
    recompute: float = 0.0


def bucket_of(compiled: dcpc.CompiledModel, seq: int) -> Bucket:
    """Returns the shape bucket of a length."""
    return next(b for b in compiled.buckets if b["seq"] == seq)


def study_of(compiled: dcpc.CompiledModel, work: Work) -> Study:
    """Returns what is known of the graph that a micro-batch runs."""
    priced = compiled.planned.by_bucket[bucket_of(compiled, work.seq)].priced
    return priced.at(priced.placement({"seq": work.seq, BATCH: work.batch}, len(work.ranks)))


def menu_step(compiled: dcpc.CompiledModel, work: Work) -> int:
    """Returns the steps of recompute that a micro-batch takes."""
    return round(work.recompute * study_of(compiled, work).steps)


def inputs_of(number: int, work: Work, vocabulary: int) -> dict[str, Tensor]:
    """Returns the inputs of a step's micro-batch, the same on every rank; some labels are ignored.

    Args:
        number: of the micro-batch.
        work: its shape.
        vocabulary: tokens are below it.
    """
    drawn = torch.Generator().manual_seed(1000 * number + work.seq)
    ids = torch.randint(vocabulary, (work.batch, work.seq), generator=drawn)
    labels = (ids * 7 + 3) % vocabulary
    labels[0, : number % work.seq] = IGNORE
    return {"input_ids": ids, "labels": labels}


def step_of(
    compiled: dcpc.CompiledModel, every: Sequence[Work], vocabulary: int, index: int = 0
) -> Step:
    """Returns this rank's part of a step of these micro-batches."""
    rank, planned, own = compiled.groups.rank, [], []
    for number, work in enumerate(every):
        bucket, step = bucket_of(compiled, work.seq), menu_step(compiled, work)
        setting = {"micro_batch": work.batch, "menu_step": step}
        sp, ids = len(work.ranks), tuple(range(100 * number, 100 * number + work.batch))
        planned.append(PlannedMicroBatch(bucket, sp, work.ranks, ids, 1.0, **setting))
        if rank in work.ranks:
            inputs = inputs_of(number, work, vocabulary)
            weight = float((inputs["labels"] != IGNORE).sum())
            own.append(
                MicroBatch(bucket, sp, inputs, weight, ids, work.ranks, number=number, **setting)
            )
    plan = step_plan(planned, compiled.groups.world, compiled.block)
    tokens, samples = (sum(w.batch * k for w in every for k in (of(w),)) for of in _COUNTED)
    return Step(0, index, plan, tuple(own), None, tokens, samples, 0.0)


_COUNTED = (lambda w: w.seq, lambda w: 1)


def whole(tensor: Any) -> Tensor:
    """Returns a tensor of which ranks have rows; collective."""
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    assert isinstance(found, Tensor)
    return found.detach()


def run(compiled: dcpc.CompiledModel, optimizer: torch.optim.Optimizer, step: Step) -> float:
    """Runs a step and the optimizer; returns its loss."""
    loss = float(compiled.train_step(step).loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def bytes_of(tensors: Iterable[Any], mapped: Mapping[int, int] | None = None) -> int:
    """Returns the bytes of the storages that this rank's parts of some tensors lie in.

    Args:
        tensors: those that are none, and those on the meta device, have none.
        mapped: addresses of storages that all ranks map -> ranks: a rank has its share of each.
    """
    own = (getattr(x, "to_local", lambda x=x: x)() for x in tensors if isinstance(x, Tensor))
    found = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in own)}
    shared = mapped or {}
    return sum(-(-size // shared.get(at, 1)) for at, size in found.items() if at)


def rest_bytes(
    compiled: dcpc.CompiledModel, optimizer: torch.optim.Optimizer, *, gradients: bool
) -> int:
    """Returns the bytes that a rank holds between two steps: parameters and the optimizer's state.

    Args:
        compiled: the model.
        optimizer: of its parameters.
        gradients: whether those of the last step count, and what all ranks map for their sum.
    """
    model, world = compiled.model, dist.get_world_size()
    held: list[Any] = [*model.parameters(), *compiled.parameters(), *model.buffers()]
    held += [x for state in optimizer.state.values() for x in state.values()]
    mapped = {}
    pulls = compiled.planned.request.parameters == "pull" and world > 1
    if pulls:  # of parameters that all ranks map
        whole_ones = [p for p in model.parameters() if p.dim()]
        mapped = {p.untyped_storage().data_ptr(): world for p in whole_ones}
    if gradients:
        held += [p.grad for p in (*compiled.parameters(), *model.parameters())]
    total = bytes_of(held, mapped)
    if gradients and pulls:  # the sum, mapped as well, which no tensor of ours names
        total += sum(p.nbytes for p in model.parameters() if p.requires_grad) // world
    return total


def state_bytes(model: nn.Module) -> int:
    """Returns the bytes of parameters, gradients and Adam's state, all of them."""
    return sum(p.nbytes * (4 if p.requires_grad else 1) for p in model.parameters())
