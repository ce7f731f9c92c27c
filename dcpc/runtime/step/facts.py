"""Facts that all ranks know of a step: its total weight, equal inputs, numbers of each rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dcpc.errors import DataError
from dcpc.fx.torch_api.torch_collectives import all_gather_single
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.same_state import checksum


def total_weight(step: Step, groups: Groups) -> float:
    """Returns the sum of all micro-batches' weights, each counted on its group's first rank."""
    total = step.total_weight
    if total is None:
        firsts = [mb for mb in step.micro_batches if mb.ranks[0] == groups.rank]
        total = float(gather_facts([sum(mb.weight for mb in firsts)], groups).sum())
    if total <= 0:
        raise DataError(
            f"step {step.index} of epoch {step.epoch}: got a total weight of {total} over its "
            f"{step.samples} samples; expected more than 0; check weight= and that not every label "
            "is ignored"
        )
    return total


def refuse_different(step: Step, groups: Groups) -> None:
    """Raises on every rank where those that share a micro-batch have different inputs for it.

    Each has loaded the samples by itself, and a dataset may draw from the process's random numbers.
    Collective over all ranks, if there is such a micro-batch.
    """
    shared = [n for n, mb in enumerate(step.plan.micro_batches) if mb.sp > 1]
    pg = groups.control(groups.world)
    if pg is None or not shared:
        return
    mine = {mb.number: mb for mb in step.micro_batches}
    none = torch.iinfo(torch.int64).min
    found = torch.full((2, len(shared)), none)
    for at, number in enumerate(shared):
        if number in mine:
            texts = [f"{name} {x.dtype} {tuple(x.shape)} {checksum(x)}"
                     for name, x in mine[number].inputs.items()]  # fmt: skip
            text = f"{mine[number].weight} {texts}"
            digest = hashlib.blake2b(text.encode(), digest_size=7).digest()
            found[0, at] = int.from_bytes(digest, "big")
            found[1, at] = -found[0, at]
    dist.all_reduce(found, dist.ReduceOp.MAX, group=pg)
    for at, (most, least) in enumerate(found.t().tolist()):
        if most != -least:
            mb = step.plan.micro_batches[shared[at]]
            ids = list(mb.sample_ids)[:8]
            raise DataError(
                f"step {step.index} of epoch {step.epoch}, samples {ids}: ranks "
                f"{','.join(map(str, mb.ranks))} take them together and got different inputs or "
                "weights; expected the same on each; have the dataset give a sample the same "
                "values on every rank: draw from a generator seeded by its index and the epoch"
            )


def gather_facts(values: Sequence[float], groups: Groups) -> torch.Tensor:
    """Returns `values` of every rank, float64 (world, len(values))."""
    mine = torch.tensor(values, dtype=torch.float64)
    pg = groups.control(groups.world)
    if pg is None:
        return mine[None]
    out = torch.empty(groups.world * len(values), dtype=torch.float64)
    all_gather_single(out, mine, group=pg)
    return out.view(groups.world, -1)
