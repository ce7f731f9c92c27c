"""dcpc and what one does without it, on the same samples in the same processes.

    Dcpc        plan and variant per bucket, balanced steps
    FixedSp     padded buckets, two an octave, at one SP degree with full recompute: what the
                longest sample needs
    PlainDdp    DistributedDataParallel, each batch padded to its longest sample
    GroupedDdp  the same with batches of like length

All of them take exact weights, so from equal weights they go through equal losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

import dcpc
from dcpc.ir import BucketPlan
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.parameters.store import WholeStore
from dcpc.runtime.planner.plans import StepPlan
from dcpc.runtime.step.on_group import OnGroup
from dcpc.runtime.step.step import train_step
from examples.forced import ForcedVariant, OwnPlans
from examples.stdlib_source import BEGIN, IGNORE, PAD, StdlibSource
from examples.workload import Workload

Batch = dict[str, Tensor]
NOTHING = StepPlan((), (), 0.0)


class System(Protocol):
    """A way to compute the gradients of a step.

    Attributes:
        name: for tables.
        model: whose gradients; each system has its own copy.
    """

    name: str
    model: nn.Module

    def load(self, count: int, skip: int = 0) -> None:
        """Makes ready `count` steps after the first `skip`: not part of what is timed."""

    def run(self, index: int) -> float:
        """Adds the gradient of a step to every parameter's `grad`; returns the global loss."""


class Dcpc:
    """The compiled model, as its plans say."""

    def __init__(self, compiled: dcpc.CompiledModel, loader: dcpc.DataLoader) -> None:
        self.name = "dcpc"
        self.model = compiled.model
        self.compiled, self.loader = compiled, loader
        self.steps: list[Step] = []
        self.imbalances: list[float] = []

    def load(self, count: int, skip: int = 0) -> None:
        self.steps = list(islice(self.loader, skip, skip + count))

    def run(self, index: int) -> float:
        result = self.compiled.train_step(self.steps[index])
        self.imbalances.append(result.imbalance)
        return float(result.loss)


class FixedSp:
    """Every bucket at SP degree `sp`, sequences split, everything recomputed.

    Runs dcpc's own variant of that setting, with the placement chosen for one sample of the longest
    bucket (for a GPT that is Ulysses). Left to choose, dcpc would split short buckets by samples
    even here, which a fixed degree does not do.
    """

    def __init__(
        self,
        compiled: dcpc.CompiledModel,
        model: nn.Module,
        workload: Workload,
        dataset: StdlibSource,
        sp: int,
    ) -> None:
        self.name = f"padded buckets, sp {sp}, full recompute"
        self.model = model
        buckets, self.groups = workload.ladder, compiled.groups
        longest = max(buckets, key=lambda b: b["seq"])
        priced = compiled.runnable.priced
        placement = priced.placement({**longest.sizes, "batch": 1}, sp)
        everything = priced.at(placement).steps
        self._variant = ForcedVariant(compiled, placement, everything, model)
        plans = {b: self._plan(b, longest["seq"] // b["seq"], sp) for b in buckets}
        own = OwnPlans(compiled, plans, buckets)
        self.loader = workload.loader(dataset, own, mode="inter")
        self.steps: list[Step] = []

    def _plan(self, bucket: dcpc.Bucket, batch: int, sp: int) -> BucketPlan:
        """A micro-batch has as many tokens as one sample of the longest bucket: that fits."""
        cost = self._variant.predict({**bucket.sizes, "batch": batch})
        return BucketPlan(
            bucket=bucket,
            sp=sp,
            micro_batch=batch,
            menu_step=self._variant.menu_step,
            steps=self._variant.menu_step,
            seconds_s=cost.seconds_s,
            peak_bytes=cost.peak_bytes,
            reason="fixed",
        )

    def load(self, count: int, skip: int = 0) -> None:
        self.steps = list(islice(self.loader, skip, skip + count))

    def run(self, index: int) -> float:
        store = WholeStore(self.model.parameters(), self.groups)
        return float(train_step(OnGroup(self._call, store), self.steps[index]).loss)

    def _call(self, mb: MicroBatch, inputs: Mapping[str, Tensor]) -> Tensor:
        assert mb.sp == self._variant.placement.sp, f"planned for sp {mb.sp}"
        return self._variant(**inputs)


class PlainDdp:
    """The plain model in DistributedDataParallel, each batch padded to its longest sample."""

    def __init__(self, model: nn.Module, dataset: StdlibSource, source: Dcpc, batch: int) -> None:
        """Takes the samples of another system's steps, dealt out as DistributedSampler does.

        Args:
            model: plain; its parameters are shared.
            dataset: the samples.
            source: loaded before this one.
            batch: samples in a batch of one rank; a step accumulates over its batches.
        """
        padding = (
            f"batches of {batch} padded to the longest" if batch > 1 else "one by one, no padding"
        )
        self.name = f"plain DDP, {padding}"
        self.model = model
        self.batch = batch
        self._ddp = DistributedDataParallel(model)
        self._dataset, self._source = dataset, source
        self._steps: list[tuple[list[Batch], int]] = []

    def load(self, count: int, skip: int = 0) -> None:
        assert not self._source.steps or self._source.steps[0].index == skip, (
            "load the source first"
        )
        self._steps = [(self._batches(s), s.tokens) for s in self._source.steps[:count]]

    def _batches(self, step: Step) -> list[Batch]:
        """Returns this rank's batches of a step."""
        ids = sorted({i for mb in step.plan.micro_batches for i in mb.sample_ids})
        mine = ids[dist.get_rank() :: dist.get_world_size()]
        if not mine:  # DDP needs a backward on every rank: one token of weight 0
            token = torch.full((1, 1), BEGIN)
            return [{"input_ids": token, "labels": torch.full_like(token, IGNORE)}]
        return [self._pad(mine[i : i + self.batch]) for i in range(0, len(mine), self.batch)]

    def _pad(self, ids: Sequence[int]) -> Batch:
        samples = [self._dataset[i] for i in ids]
        return {
            name: pad_sequence([s[name] for s in samples], batch_first=True, padding_value=fill)
            for name, fill in PAD.items()
        }

    def run(self, index: int) -> float:
        batches, tokens = self._steps[index]
        total = torch.zeros((), dtype=torch.float64)
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with nullcontext() if last else self._ddp.no_sync():
                total += self._backward(batch, tokens)
        dist.all_reduce(total)
        return float(total)

    def _backward(self, batch: Batch, tokens: int) -> Tensor:
        """Returns a batch's share of the step's loss, once its gradient is added."""
        count = int((batch["labels"] != IGNORE).sum())
        if count == 0:  # a mean over nothing is NaN, and NaN * 0 too
            batch = {**batch, "labels": batch["input_ids"]}
        loss = self._ddp(**batch) * (count / tokens)
        # DDP takes the mean over the ranks; their sum is meant.
        (loss * dist.get_world_size()).backward()
        return loss.detach().double()


class GroupedDdp(PlainDdp):
    """The plain model in DDP, as one does without dcpc: samples of like length share a batch.

    The samples of a step are sorted and cut into batches of at most so many tokens, padding
    included. Each batch, the longest samples first, goes to the rank with the fewest tokens so far.
    """

    def __init__(self, model: nn.Module, dataset: StdlibSource, source: Dcpc, tokens: int) -> None:
        super().__init__(model, dataset, source, tokens)
        self.name = f"DDP, grouped by length, batches of {tokens:,} tokens"

    def _batches(self, step: Step) -> list[Batch]:
        ids = sorted(i for mb in step.plan.micro_batches for i in mb.sample_ids)
        ids.sort(key=self._length, reverse=True)
        groups: list[list[int]] = []
        for i in ids:
            if not groups or (len(groups[-1]) + 1) * self._length(groups[-1][0]) > self.batch:
                groups.append([])
            groups[-1].append(i)
        dealt: list[list[list[int]]] = [[] for _ in range(dist.get_world_size())]
        tokens = [0] * len(dealt)
        for group in groups:
            to = tokens.index(min(tokens))
            dealt[to].append(group)
            tokens[to] += len(group) * self._length(group[0])
        mine = [self._pad(group) for group in dealt[dist.get_rank()]]
        return mine or super()._batches(replace(step, plan=NOTHING))

    def _length(self, i: int) -> int:
        return self._dataset.dims(i)["seq"]
