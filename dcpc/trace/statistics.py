"""Running statistics of batch norms in train(), as values that a captured graph returns.

    F.batch_norm in training   ->  the same without running statistics, and writes of the new ones
    the new running statistics ->  the last outputs, where `batch_norm="micro"` asks for them

The plain model writes them as it always does; its outputs get copies, so that both are compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeGuard

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dcpc.buckets import BATCH
from dcpc.errors import TraceError
from dcpc.fx.large_graphs import source_line
from dcpc.ir import Program

REFUSE, MICRO = BATCH_NORM = "refuse", "micro"
STATISTICS_NOTE = (
    "batch norms in train(): statistics of the micro-batch that a group runs, padding included; "
    "running statistics are averaged over the ranks each step (batch_norm='micro')"
)
COUNT = "num_batches_tracked"
_KEPT = ("running_mean", "running_var", COUNT)


class Cumulative(float):
    """Momentum of a batch norm without one: its share is 1 / (batches so far).

    Attributes:
        norm: the batch norm.
    """

    norm: nn.Module


def is_tracking(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Whether a module is a batch norm that has running statistics."""
    return isinstance(module, _BatchNorm) and module.running_mean is not None


def running_names(model: nn.Module, *, training: bool = False) -> tuple[str, ...]:
    """Returns the names of the running statistics of a model's batch norms, each buffer once.

    Args:
        model: model of the user.
        training: whether only those of modules in train() are meant, which forward changes.
    """
    return tuple(
        f"{at}.{name}" if at else name
        for at, module in model.named_modules()
        if is_tracking(module) and (module.training or not training)
        for name in _KEPT
        if getattr(module, name) is not None
    )


def new_statistics(model: nn.Module) -> tuple[Tensor, ...]:
    """Returns copies of the running statistics that forward has just changed, without gradient."""
    names = running_names(model, training=True)
    return tuple(model.get_buffer(name).clone() for name in names)


@contextmanager
def settled(model: nn.Module) -> Iterator[None]:
    """Has batch norms in train() use their running statistics within its block."""
    found = [m for m in model.modules() if is_tracking(m) and m.training]
    for module in found:
        module.training = False
    try:
        yield
    finally:
        for module in found:
            module.training = True


@contextmanager
def with_cumulative(model: nn.Module) -> Iterator[None]:
    """Gives batch norms without a momentum a `Cumulative` one within its block."""
    found = [m for m in model.modules() if is_tracking(m) and m.momentum is None]
    for module in found:
        momentum = module.momentum = Cumulative(math.nan)
        momentum.norm = module
    try:
        yield
    finally:
        for module in found:
            module.momentum = None


def refuse_synchronised(model: nn.Module) -> None:
    """Refuses batch norms that would average over all ranks in the middle of forward.

    Raises:
        TraceError: there is one in train().
    """
    found = [n for n, m in model.named_modules() if isinstance(m, nn.SyncBatchNorm) and m.training]
    if found:
        raise TraceError(
            f"got a SyncBatchNorm in train() ({', '.join(found[:4])}); expected batch norms whose "
            "statistics are of one micro-batch: ranks run other lengths and numbers of "
            "micro-batches in a step, so they never all stand at the same norm; make them "
            "BatchNorms and take batch_norm='micro', take GroupNorm or LayerNorm, or call eval() "
            "on them"
        )


def with_statistics(program: Program, names: Sequence[str]) -> Program:
    """Returns a program whose last outputs are known to be the new values of these buffers.

    Raises:
        TraceError: a batch norm sees one value a channel where a micro-batch is one sample.
    """
    if not names:
        return program
    at = {name: placeholder for placeholder, name in program.buffers.items()}
    held = tuple(at[name] for name in names)
    one = {program.symbols[BATCH]: 1} if BATCH in program.symbols else {}
    op = torch.ops.aten._native_batch_norm_legit.no_stats
    for node in program.gm.graph.find_nodes(op="call_function", target=op):
        source: Any = node.args[0]
        shape = program.info[source.name].shape
        if sympy.Mul(*(size for d, size in enumerate(shape) if d != 1)).subs(one) == 1:
            raise TraceError(
                f"got a batch norm in train() of {list(shape)}, over samples alone "
                f"({source_line(node)}); expected positions besides: a micro-batch may have one "
                "sample, whose values have no variance (torch refuses it, too); norm before "
                "pooling, take LayerNorm, or call eval() on it"
            )
    return replace(program, statistics=held, notes=(STATISTICS_NOTE,))


def batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Returns a batch norm in training, and writes its running statistics by plain ops.

    NotImplemented where there are none, or none that change.

    Args:
        input: values [batch, channels, ...]; the statistics of a channel are over all other dims.
        running_mean: running mean [channels].
        running_var: running variance [channels], of which each batch's is the unbiased one.
        weight: factor [channels].
        bias: summand [channels].
        training: whether the statistics are those of the input.
        momentum: share of the input's statistics in the new running ones.
        eps: added to the variance.
    """
    if not training or running_mean is None or running_var is None:
        return NotImplemented
    F._verify_batch_size(input.size())  # type: ignore[attr-defined]
    made, mean, inverse = torch._native_batch_norm_legit(input, weight, bias, True, 0.0, eps)
    count = math.prod(size for d, size in enumerate(input.shape) if d != 1)
    with torch.no_grad():
        mean, inverse = mean.detach(), inverse.detach()
        # Of a channel whose values are all alike rounding may leave less than 0.
        variance = (inverse.pow(-2) - eps).clamp_min(0) * count / (count - 1)
        share: Any = momentum
        if isinstance(momentum, Cumulative):
            share = momentum.norm.get_buffer(COUNT).to(running_mean.dtype).reciprocal()
        for running, new in ((running_mean, mean), (running_var, variance)):
            running.copy_(running * (1 - share) + new * share)
    return made
