"""A model traced once and run by its variants over a group, split wherever it can be."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcpc.buckets import Buckets, Sizes
from dcpc.codegen import bind_group
from dcpc.ir import Placement, Program
from dcpc.ops.random import DRAWS
from dcpc.passes.sharding.attention_ways import LOWERINGS, attentions, lowerings_of, restricted
from dcpc.passes.sharding.sharding import Sharding
from dcpc.plan.prices.studies import Study
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import group_name, traced
from dcpc.symbolic_profile import Device
from dcpc.symbolic_profile.seconds.hardware import Link
from dcpc.trace.loss import MicroStatistics
from dcpc.verify.compare import Given
from dcpc.verify.draws import KnownParts
from dcpc.verify.exactness import Difference, LossAndGradients, error_of
from dcpc.verify.reference import plain, trainable

# Links so fast, and everything else so slow, that every op which can be split is split.
SPLITTING = Device(
    name="splitting",
    flops_per_s=((torch.float32, 1e6),),
    vector_flops_per_s=1e6,
    memory_bytes_per_s=1e6,
    memory_bytes=1 << 40,
    launch_s=0.0,
    node_ranks=8,
    inside=Link(0.0, 1e15),
    across=Link(0.0, 1e15),
)

# Batch norms that stay in train().
NORMS = MicroStatistics(None)


class SplitModel:
    """A model traced once and run by its variants over a group, without planning.

    Cheaper than `dcpc.compile` with several buckets: one placement, made for `sizes`, serves all
    lengths.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: Buckets,
        sizes: Sizes,
        backend: str = "eager",
        sp: int | None = None,
        attention: str = "auto",
        program: Program | None = None,
    ) -> None:
        """Traces and places.

        Args:
            model: the module.
            buckets: inputs and sizes; no dim may be 1 in some of the sizes only.
            sizes: the shape that the placement is made for, batch included.
            backend: "eager" or "inductor".
            sp: ranks of the group; default: all there are.
            attention: way to split attention, see `passes/sharding/attention_ways.py`.
            program: program of the model, if it is already traced.
        """
        self.model = model
        self.sp = sp or (dist.get_world_size() if dist.is_initialized() else 1)
        start_s = time.perf_counter()
        self._all = traced(model, buckets, SPLITTING, backend, loss=NORMS, program=program)
        self.trace_s = time.perf_counter() - start_s
        self.program: Program = self._all.program
        self.nodes = {n.name: n for n in self.program.gm.graph.nodes}
        self.held = self._all.tensors
        self.sizes = dict(sizes)
        self._split(backend, attention)

    def _split(self, backend: str, attention: str) -> None:
        """Places for a backend, a number of ranks and a lowering of attention."""
        self.sharding: Sharding = restricted(self.program, self._all.sharding, attention)
        self.traced = replace(self._all, sharding=self.sharding, backend=backend)
        self.runnable = Runnable(self.traced)
        self.priced = self.runnable.priced
        self.placement: Placement = self.priced.placement(self.sizes, self.sp)

    @property
    def study(self) -> Study:
        """Costs of the model at its placement."""
        return self.priced.at(self.placement)

    def of(self, backend: str, sp: int, attention: str = "auto") -> SplitModel:
        """Returns the same trace by another backend, number of ranks or lowering of attention."""
        other = copy(self)
        other.sp = sp
        other._split(backend, attention)
        return other

    def lowerings(self) -> list[str]:
        """Returns the lowerings that some attention can have on so many ranks."""
        nodes = attentions(self.program)
        found = {way for n in nodes for way in lowerings_of(self.sharding, n, self.sp)}
        return [way for way in LOWERINGS if way in found and self.sp > 1]

    @property
    def split_values(self) -> int:
        """Values of which a rank has only a piece or a part of the sum."""
        return sum(p.output.sharded or p.output.partial for p in self.placement.nodes.values())

    @property
    def alike(self) -> bool:
        """Whether some rank draws a piece of a tensor; then all its numbers are equal."""
        nodes = self.placement.nodes
        return any(nodes[n.name].output.sharded for n in self.nodes.values() if n.target in DRAWS)

    def ready(self, sizes: Sizes, recompute: str = "none") -> None:
        """Compiles the variants of all ranks for these sizes."""
        for rank in range(self.sp):
            self.runnable.variant(self.placement, self._count(recompute), sizes, rank)

    def _count(self, recompute: str) -> int:
        """Returns how many steps of recompute a setting takes."""
        return 0 if recompute == "none" else self.study.steps

    def run(self, sizes: Sizes, inputs: Mapping[str, Tensor], recompute: str = "none") -> Tensor:
        """Returns the loss, after summing every parameter's gradient over the group."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not None:
            bind_group(group_name(self.sp), world)
        variant, integers = self.runnable.variant(
            self.placement, self._count(recompute), sizes, rank
        )
        named = {**self.held(), **{p: inputs[n] for p, n in self.program.inputs.items()}}
        with KnownParts(self.alike) if variant.draws else nullcontext():
            loss = variant([named[p] for p in variant.placeholders], integers)
            loss.backward()
        for p in self.model.parameters():
            if p.grad is not None and dist.is_initialized():
                dist.all_reduce(p.grad)
        return loss.detach()

    def on_ranks(
        self, sizes: Sizes, inputs: Mapping[str, Tensor], recompute: str = "none"
    ) -> list[LossAndGradients]:
        """Returns each rank's loss, all run in this process, with the group's gradients."""
        count = self._count(recompute)
        ranks = [self.runnable.variant(self.placement, count, sizes, r) for r in range(self.sp)]
        results, gradients = self.given(inputs).of_variants(ranks)
        return [LossAndGradients(result.loss, gradients) for result in results]

    def given(self, inputs: Mapping[str, Tensor]) -> Given:
        """Returns the tensors that graphs take to be compared with the plain model."""
        wanted = trainable(self.model)
        return Given(self.program, self.model, inputs, wide=False, alike=self.alike, wanted=wanted)

    def difference(
        self,
        sizes: Sizes,
        inputs: Mapping[str, Tensor],
        recompute: str = "none",
        *,
        in_step: bool = False,
    ) -> Difference:
        """Returns the difference of loss and gradients from the plain model's.

        Args:
            sizes: length of every dim, batch included.
            inputs: input name -> whole tensor.
            recompute: "none" or "all".
            in_step: whether all ranks run in this process; else each is a process of a group.
        """
        expected = plain(self.model, inputs, alike=self.alike)
        if in_step:
            found = self.on_ranks(sizes, inputs, recompute)
        else:
            self.model.zero_grad()
            loss = self.run(sizes, inputs, recompute)
            held = {n: p.grad for n, p in self.model.named_parameters() if p.requires_grad}
            found = [LossAndGradients(loss, held)]
            self.model.zero_grad()
        errors = (error_of(one, expected, none_is_zero=False)[0] for one in found)
        worst = max(errors, key=lambda error: error.worst)
        return replace(worst, sizes=dict(sizes), recompute=recompute)

    def errors(
        self,
        name: str,
        points: Iterable[tuple[Sizes, Mapping[str, Tensor]]],
        recomputes: Sequence[str] = ("none", "all"),
    ) -> dict[str, float]:
        """Returns the largest error of each (sizes, inputs), by a text that says which."""
        return {
            f"{name} {sizes} recompute {r}": self.difference(sizes, inputs, r).worst
            for sizes, inputs in points
            for r in recomputes
        }
