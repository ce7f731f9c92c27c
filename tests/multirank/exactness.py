"""A compiled model against the plain one: loss and every gradient, on several ranks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcpc.buckets import Buckets
from dcpc.codegen import bind_group
from dcpc.passes.sharding import analyse
from dcpc.symbolic_profile import Device
from dcpc.symbolic_profile.hardware import Link
from dcpc.trace import trace
from dcpc.trace.capture import find_loss
from dcpc.variants import Variants, group_name

Gradients = dict[str, Tensor | None]

# Links so fast, and everything else so slow, that every op which can be split is split: at the
# short lengths of a test a real device would replicate nearly everything.
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


def plain(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Gradients]:
    """Loss and gradients of the model itself, on one device."""
    model.zero_grad()
    loss = find_loss(model(**inputs))
    loss.backward()
    found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), found


def gradient_error(model: nn.Module, expected: Gradients) -> float:
    """Largest difference, each parameter relative to its own largest gradient.

    A gradient that is zero but for rounding (a bias before a softmax) is compared with 1e-3 of the
    largest of all. A parameter without a gradient must have none.
    """
    scale = max(float(g.abs().max()) for g in expected.values() if g is not None)
    worst = 0.0
    for name, p in model.named_parameters():
        g = expected[name]
        if g is None:
            assert p.grad is None, f"{name} has a gradient, the plain model's has none"
            continue
        assert p.grad is not None, f"{name} has no gradient"
        own = max(float(g.abs().max()), 1e-3 * scale, 1e-12)
        worst = max(worst, float((p.grad - g).abs().max()) / own)
    return worst


def loss_error(got: Tensor, expected: Tensor) -> float:
    """Relative difference of two losses."""
    assert got.shape == ()
    assert got.dtype == expected.dtype
    return abs(float(got.detach() - expected)) / max(abs(float(expected)), 1e-12)


def compiled_error(
    compiled: Any, model: nn.Module, inputs: Mapping[str, Tensor], share: float = 1.0
) -> float:
    """Largest relative error of one call's loss and of its gradients summed over all ranks.

    `share` of the loss counts on this rank: 1 / number of SP groups that run these inputs.
    """
    loss, gradients = plain(model, inputs)
    got = compiled(**inputs)
    (got * share).backward()
    compiled.reduce_gradients()
    return max(loss_error(got, loss), gradient_error(model, gradients))


class Split:
    """A model traced once and run by its variants over all ranks, without planning.

    Cheaper than `dcpc.compile` with several buckets: one placement, made for `sizes`, serves all
    lengths.
    """

    def __init__(
        self, model: nn.Module, buckets: Buckets, sizes: Mapping[str, int], backend: str
    ) -> None:
        self.model, self.world = model, dist.get_world_size()
        self.program = trace(model, buckets)
        sharding = analyse(self.program)
        self.variants = Variants(self.program, sharding, SPLITTING, backend, self._held)
        self.placement = self.variants.placement(sizes, self.world)
        bind_group(group_name(self.world), dist.group.WORLD)

    def _held(self) -> dict[str, Tensor]:
        own = dict(self.model.named_parameters(remove_duplicate=False))
        own |= dict(self.model.named_buffers(remove_duplicate=False))
        names = {**self.program.parameters, **self.program.buffers}
        return {**{p: own[n] for p, n in names.items()}, **self.program.constants}

    @property
    def split_values(self) -> int:
        """Values of which a rank has only a piece or a part of the sum."""
        return sum(p.output.sharded or p.output.partial for p in self.placement.nodes.values())

    def error(
        self, sizes: Mapping[str, int], inputs: Mapping[str, Tensor], recompute: int
    ) -> float:
        """Largest relative error of loss and gradients."""
        loss, gradients = plain(self.model, inputs)
        rank = dist.get_rank()
        variant, integers = self.variants.variant(self.placement, recompute, sizes, rank)
        named = {**self._held(), **{p: inputs[n] for p, n in self.program.inputs.items()}}
        got = variant([named[p] for p in variant.placeholders], integers)
        got.backward()
        for p in self.model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
        return max(loss_error(got, loss), gradient_error(self.model, gradients))

    def errors(
        self,
        name: str,
        points: Iterable[tuple[Mapping[str, int], Mapping[str, Tensor]]],
        recomputes: Sequence[str] = ("none", "all"),
    ) -> dict[str, float]:
        """Error of each (sizes, inputs), by a text that says which."""
        counts = {"none": 0, "all": self.variants.segment_count}
        return {
            f"{name} {sizes} recompute {r}": self.error(sizes, inputs, counts[r])
            for sizes, inputs in points
            for r in recomputes
        }


def wrong(found: Sequence[Mapping[str, float]], limit: float) -> dict[str, float]:
    """What is not below a limit on some rank (NaN is not)."""
    return {k: e for errors in found for k, e in errors.items() if not e < limit}
