"""The video demo's steps without dcpc's plans: a fixed degree for all buckets, and plain DDP."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from itertools import islice
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import dcpc
from dcpc.ir import BucketPlan
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.parameters.store import WholeStore
from dcpc.runtime.step.on_group import OnGroup
from dcpc.runtime.step.step import train_step
from examples.baselines import Dcpc
from examples.forced import ForcedVariant, OwnPlans
from examples.video_samples import Samples
from examples.video_workload import VideoWorkload


class FixedSp:
    """Every bucket at SP degree `sp`, one sample a micro-batch, everything recomputed.

    What the longest video needs is done to every image. Runs dcpc's own variants of that setting,
    each trace with the placement of its largest bucket.
    """

    def __init__(
        self,
        compiled: dcpc.CompiledModel,
        model: nn.Module,
        workload: VideoWorkload,
        samples: Samples,
        sp: int,
    ) -> None:
        self.name = f"sp {sp} and full recompute for every bucket"
        self.model = model
        buckets, self.groups = compiled.buckets, compiled.groups
        self._variants = {b: _forced(compiled, model, b, sp) for b in buckets}
        plans = {b: self._plan(b, sp) for b in buckets}
        self.loader = workload.loader(samples, OwnPlans(compiled, plans))
        self.steps: list[Step] = []

    def _plan(self, bucket: dcpc.Bucket, sp: int) -> BucketPlan:
        variant = self._variants[bucket]
        cost = variant.predict({**bucket.sizes, "batch": 1})
        return BucketPlan(
            bucket=bucket,
            sp=sp,
            micro_batch=1,
            menu_step=variant.menu_step,
            steps=variant.menu_step,
            seconds_s=cost.seconds_s,
            peak_bytes=cost.peak_bytes,
            reason="fixed",
        )

    def load(self, count: int, skip: int = 0) -> None:
        self.steps = list(islice(self.loader, skip, skip + count))
        for bucket, variant in self._variants.items():
            variant.prepare({**bucket.sizes, "batch": 1})

    def run(self, index: int) -> float:
        store = WholeStore(self.model.parameters(), self.groups)
        return float(train_step(OnGroup(self._call, store), self.steps[index]).loss)

    def _call(self, mb: MicroBatch, inputs: Mapping[str, Tensor]) -> Tensor:
        return self._variants[mb.bucket](**inputs)


class PlainDdp:
    """The plain model in DistributedDataParallel, one clip at a time: no two shapes to pad."""

    def __init__(self, model: nn.Module, samples: Samples, source: Dcpc) -> None:
        """Takes the samples of another system's steps, dealt out as DistributedSampler does.

        Args:
            model: plain; its parameters are shared.
            samples: where they come from.
            source: loaded before this one.
        """
        self.name = "plain DDP, one by one"
        self.model = model
        self._ddp = DistributedDataParallel(model)
        self._samples, self._source = samples, source
        self._steps: list[tuple[list[dict[str, Tensor]], int]] = []

    def load(self, count: int, skip: int = 0) -> None:
        self._steps = [(self._mine(s), s.samples) for s in self._source.steps[:count]]

    def _mine(self, step: Step) -> list[dict[str, Tensor]]:
        ids = sorted({i for mb in step.plan.micro_batches for i in mb.sample_ids})
        mine = ids[dist.get_rank() :: dist.get_world_size()]
        return [{n: x[None] for n, x in self._samples[i].items()} for i in mine]

    def run(self, index: int) -> float:
        batches, count = self._steps[index]
        # DDP needs a backward on every rank: without a sample, one of weight 0.
        weight = 1 / count if batches else 0.0
        batches = batches or [{n: x[None] for n, x in self._samples[0].items()}]
        total = torch.zeros((), dtype=torch.float64)
        for i, batch in enumerate(batches):
            with nullcontext() if i == len(batches) - 1 else self._ddp.no_sync():
                loss = self._ddp(**batch) * weight
                # DDP takes the mean over the ranks; their sum is meant.
                (loss * dist.get_world_size()).backward()
                total += loss.detach()
        dist.all_reduce(total)
        return float(total)


def _forced(
    compiled: dcpc.CompiledModel, model: nn.Module, bucket: dcpc.Bucket, sp: int
) -> ForcedVariant:
    runnable = compiled.planned.by_bucket[bucket]
    mine = (b for b, v in compiled.planned.by_bucket.items() if v is runnable)
    largest = max(mine, key=lambda b: prod(b.sizes.values()))
    placement = runnable.priced.placement({**largest.sizes, "batch": 1}, sp)
    return ForcedVariant(compiled, placement, runnable.priced.at(placement).steps, model, runnable)
