"""What dcpc makes of a model: what stays symbolic, what is split, whether the numbers are its own.

Used by `dcpc check`, by `benchmarks.zoo` and by the tests. Placements are made for `SPLITTING`, a
device on which splitting always pays, because a real one would replicate nearly everything at the
short lengths that can be checked.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn

from dcpc.buckets import BATCH, Buckets
from dcpc.codegen import bind_group
from dcpc.ir import Placement, Program, tensor_operands
from dcpc.passes.sharding import Sharding, analyse
from dcpc.symbolic_profile import Device
from dcpc.symbolic_profile.hardware import Link
from dcpc.trace import trace
from dcpc.trace.capture import find_loss
from dcpc.variants import Variants, group_name

Sizes = Mapping[str, int]
Gradients = dict[str, Tensor | None]

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


@dataclass(frozen=True, slots=True)
class Unsplit:
    """A node that every rank does in whole although its value, or an operand, has a dim to split.

    Attributes:
        node: its name.
        op: its op.
        reason: why.
        shape: of its value, as a text.
        source: the line of the user's code, or of the library's, that makes it; "" if unknown.
    """

    node: str
    op: str
    reason: str
    shape: str
    source: str

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"{self.node}: {self.op} {self.shape}: {self.reason}{where}"


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a model a group shares out.

    Attributes:
        sizes: the shape it was measured at.
        sp: ranks of the group.
        whole_flops: FLOPs of matmuls, convolutions and attention, forward and backward, by the
            profile of the model on one rank.
        rank_flops: the same of the fullest rank of the group.
        collectives: collectives in the forward graph.
        unsplit: nodes each rank does in whole.
    """

    sizes: Sizes
    sp: int
    whole_flops: int
    rank_flops: int
    collectives: int
    unsplit: tuple[Unsplit, ...]

    @property
    def sharded_share(self) -> float:
        """Share s of the whole FLOPs that is split: the fullest rank has (1 - s) + s / sp of it."""
        if self.whole_flops == 0:
            return 1.0
        return (1.0 - self.rank_flops / self.whole_flops) / (1.0 - 1.0 / self.sp)


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative differences of a group's loss and gradients from the plain model's.

    Attributes:
        sizes: the shape of the call.
        loss: of the loss.
        gradient: of all gradients, each relative to its own largest element.
        parameter: the parameter whose gradient differs most.
    """

    sizes: Sizes
    loss: float
    gradient: float
    parameter: str

    @property
    def worst(self) -> float:
        """The larger of the two; NaN where one is."""
        return self.loss if not self.loss <= self.gradient else self.gradient


def plain(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Gradients]:
    """Returns loss and gradients of the model itself, on one device."""
    model.zero_grad()
    loss = find_loss(model(**inputs))
    loss.backward()
    found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return loss.detach(), found


def gradient_errors(model: nn.Module, expected: Gradients) -> dict[str, float]:
    """Returns for each parameter the largest difference, relative to its own largest gradient.

    A gradient that is zero but for rounding (a bias before a softmax) is compared with 1e-3 of the
    largest of all. A parameter without a gradient must have none: its error is infinite else.
    """
    scale = max((float(g.abs().max()) for g in expected.values() if g is not None), default=0.0)
    found = {}
    for name, p in model.named_parameters():
        g = expected[name]
        if g is None or p.grad is None:
            found[name] = 0.0 if g is p.grad else float("inf")
            continue
        own = max(float(g.abs().max()), 1e-3 * scale, 1e-12)
        found[name] = float((p.grad - g).abs().max()) / own
    return found


def loss_error(got: Tensor, expected: Tensor) -> float:
    """Returns the relative difference of two losses; infinite where shape or dtype differ."""
    if got.shape != () or got.dtype != expected.dtype:
        return float("inf")
    return abs(float(got.detach() - expected)) / max(abs(float(expected)), 1e-12)


class Split:
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
    ) -> None:
        """Traces and places.

        Args:
            model: the module.
            buckets: its inputs and sizes; no dim may be 1 in some of the sizes only.
            sizes: the shape that the placement is made for, batch included.
            backend: "eager" or "inductor".
            sp: ranks of the group; default: all there are.
        """
        self.model = model
        self.sp = sp or (dist.get_world_size() if dist.is_initialized() else 1)
        start_s = time.perf_counter()
        self.program: Program = trace(model, buckets)
        self.trace_s = time.perf_counter() - start_s
        self.sharding: Sharding = analyse(self.program)
        self.variants = Variants(self.program, self.sharding, SPLITTING, backend, self._held)
        self.sizes = dict(sizes)
        self.placement: Placement = self.variants.placement(sizes, self.sp)
        world = dist.group.WORLD if dist.is_initialized() else None
        if world is not None:
            bind_group(group_name(self.sp), world)

    def _held(self) -> dict[str, Tensor]:
        own: dict[str, Tensor] = dict(self.model.named_parameters(remove_duplicate=False))
        own |= dict(self.model.named_buffers(remove_duplicate=False))
        names = {**self.program.parameters, **self.program.buffers}
        return {**{p: own[n] for p, n in names.items()}, **self.program.constants}

    @property
    def split_values(self) -> int:
        """Values of which a rank has only a piece or a part of the sum."""
        return sum(p.output.sharded or p.output.partial for p in self.placement.nodes.values())

    def run(self, sizes: Sizes, inputs: Mapping[str, Tensor], recompute: int = 0) -> Tensor:
        """Returns the loss, after summing every parameter's gradient over the group."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        variant, integers = self.variants.variant(self.placement, recompute, sizes, rank)
        named = {**self._held(), **{p: inputs[n] for p, n in self.program.inputs.items()}}
        loss = variant([named[p] for p in variant.placeholders], integers)
        loss.backward()
        for p in self.model.parameters():
            if p.grad is not None and dist.is_initialized():
                dist.all_reduce(p.grad)
        return loss.detach()

    def difference(
        self, sizes: Sizes, inputs: Mapping[str, Tensor], recompute: int = 0
    ) -> Difference:
        """Returns how far loss and gradients are from the plain model's."""
        expected, gradients = plain(self.model, inputs)
        got = self.run(sizes, inputs, recompute)
        errors = gradient_errors(self.model, gradients)
        self.model.zero_grad()
        worst = max(errors, key=lambda n: nan_as_infinite(errors[n]), default="")
        return Difference(
            dict(sizes), loss_error(got, expected), errors.get(worst, 0.0), worst
        )

    def errors(
        self,
        name: str,
        points: Iterable[tuple[Sizes, Mapping[str, Tensor]]],
        recomputes: Sequence[str] = ("none", "all"),
    ) -> dict[str, float]:
        """Returns the largest error of each (sizes, inputs), by a text that says which."""
        counts = {"none": 0, "all": self.variants.segment_count}
        return {
            f"{name} {sizes} recompute {r}": self.difference(sizes, inputs, counts[r]).worst
            for sizes, inputs in points
            for r in recomputes
        }

    def coverage(self) -> Coverage:
        """Returns how much of the model the group shares out, at the placement's sizes."""
        alone = self.variants.placement(self.sizes, 1)
        lowered = self.variants.lowering(self.placement).lowered.gm
        return Coverage(
            sizes=self.sizes,
            sp=self.sp,
            whole_flops=self.variants.predict(alone, 0, self.sizes).flops,
            rank_flops=self.variants.predict(self.placement, 0, self.sizes).flops,
            collectives=sum(_is_collective(n) for n in lowered.graph.nodes),
            unsplit=tuple(self._unsplit()),
        )

    def _unsplit(self) -> Iterable[Unsplit]:
        for node in self.program.gm.graph.nodes:
            if node.op != "call_function" or node.name not in self.program.info:
                continue
            reason = self._why_whole(node)
            if reason:
                shape = ", ".join(map(str, self.program.info[node.name].shape))
                op = str(node.target).removesuffix(".default")
                yield Unsplit(node.name, op, reason, f"[{shape}]", source_line(node))

    def _why_whole(self, node: fx.Node) -> str:
        """Returns why every rank does all of a node that has a dim to split, else ""."""
        chosen = self.placement.nodes[node.name]
        if chosen.output.sharded or chosen.output.partial or chosen.name:
            return ""
        rule = self.sharding.rules[node.name]
        if rule.is_view or not self._long(node):
            return ""
        if rule.reason:
            return rule.reason
        others = [a for a in self.sharding.alternatives[node.name] if a.factor >= 0]
        if not others:
            return "each of its dims is needed whole"
        ways = ", ".join(dict.fromkeys(a.name for a in others))
        return f"it could be split ({ways}); what it is made of, or for, is whole"

    def _long(self, node: fx.Node) -> bool:
        """Whether the value or an operand has a dim that grows, the batch apart."""
        symbols = {s for n, s in self.program.symbols.items() if n != BATCH}
        tensors = [*tensor_operands(node, self.program.info), node]
        shapes = [self.program.info[t.name].shape for t in tensors]
        return any(sympy.sympify(size).free_symbols & symbols for s in shapes for size in s)


def nan_as_infinite(error: float) -> float:
    """Returns an error that compares: NaN is larger than any other."""
    return error if error == error else float("inf")


def _is_collective(node: fx.Node) -> bool:
    names = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
    return any(str(node.target).startswith(f"dcpc.{n}") for n in names)


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def source_line(node: fx.Node) -> str:
    """Returns `file:line` of the code that made a node: the innermost frame outside of torch."""
    frames = _FRAME.findall(str(node.meta.get("stack_trace", "")))
    ours = [f for f in frames if "/torch/" not in f[0]]
    if not ours:
        return ""
    file, line = ours[-1]
    return f"{'/'.join(file.split('/')[-2:])}:{line}"
