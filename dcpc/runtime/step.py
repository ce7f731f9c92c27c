"""One optimizer step: every micro-batch of this rank, then one sum of all gradients.

The rule (DESIGN 4.4): a rank differentiates its share of the loss, the objective is the sum over
ranks, so every parameter's gradient is summed over all ranks exactly once, whatever degrees the
step mixes.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dcpc.errors import DataError, GroupError
from dcpc.runtime.agreement import agree
from dcpc.runtime.deal import imbalance
from dcpc.runtime.groups import Groups
from dcpc.runtime.loader import Step

# Large enough to run at the wire's bandwidth, small enough to need little extra memory.
# Source: torch DistributedDataParallel's default, bucket_cap_mb=25.
COMM_BUCKET_BYTES = 25_000_000
# Comm buckets on the wire at once: one travels while the next is copied together.
_IN_FLIGHT = 2

ModelCall = Callable[[int, Mapping[str, torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class StepResult:
    """What came of a step.

    Attributes:
        loss: weighted mean loss of the global batch, float64 scalar, the same on every rank.
        busy_s: measured seconds each rank took for its micro-batches.
        seconds_s: measured seconds of the whole step on this rank, reduction included.
        total_weight: sum of the weights of all micro-batches.
    """

    loss: torch.Tensor
    busy_s: tuple[float, ...]
    seconds_s: float
    total_weight: float

    @property
    def imbalance(self) -> float:
        """Measured mean idle share of the ranks, 0 to 1."""
        return imbalance(self.busy_s)


def train_step(
    call: ModelCall, step: Step, parameters: Iterable[torch.nn.Parameter], groups: Groups
) -> StepResult:
    """Adds the gradient of the global batch's weighted loss to every parameter's `grad`.

    Collective over all ranks.

    Args:
        call: (sp, inputs) -> the loss, scalar; each rank of the block of `sp` gets the same one and
            differentiates its share of it.
        step: from the loader.
        parameters: all of the model's; tied ones count once.
        groups: the process groups the step was planned for.

    Returns:
        The step's loss and measured seconds.

    Raises:
        GroupError: the ranks are not in the same step with the same plan and parameters, or one
            did not arrive.
        DataError: the weights of the step are all zero.
    """
    start_s = time.perf_counter()
    params = _unique(parameters)
    agree(
        groups,
        groups.world,
        "step",
        f"{step.index} of epoch {step.epoch}, plan {step.plan.fingerprint}, {_summary(params)}",
    )
    total = _total_weight(step, groups)
    # Gradients that are there already were reduced by an earlier step: they are not summed again.
    earlier = [p.grad for p in params]
    for p in params:
        p.grad = None
    begin_s = time.perf_counter()
    share = _run(call, step, total, groups)
    busy_s = time.perf_counter() - begin_s
    _reduce(params, groups)
    for p, grad in zip(params, earlier, strict=True):
        if grad is not None:
            p.grad = grad if p.grad is None else grad.add_(p.grad)
    facts = _gather([share, busy_s], groups)
    return StepResult(
        loss=facts[:, 0].sum(),
        busy_s=tuple(facts[:, 1].tolist()),
        seconds_s=time.perf_counter() - start_s,
        total_weight=total,
    )


def reduce_gradients(parameters: Iterable[torch.nn.Parameter], groups: Groups) -> None:
    """Sums every parameter's gradient over all ranks, in place; alone: nothing.

    A parameter without a gradient here counts as zeros, one without a gradient anywhere stays
    without. Collective over all ranks, also those that ran nothing. To be called once per optimizer
    step.

    Args:
        parameters: all of the model's, in the same order on every rank; tied ones count once.
        groups: the process groups.

    Raises:
        GroupError: the ranks have different parameters, or one did not arrive.
    """
    params = _unique(parameters)
    agree(groups, groups.world, "reduce_gradients of", _summary(params))
    _reduce(params, groups)


def _run(call: ModelCall, step: Step, total: float, groups: Groups) -> float:
    """Returns this rank's part of the step's loss; blocks count on their first rank."""
    losses = []
    for mb in step.micro_batches:
        if mb.weight == 0:
            # Every label ignored: a mean over nothing is NaN, and NaN * 0 too. All of the block
            # skip it.
            continue
        inputs = {k: x.to(groups.device, non_blocking=True) for k, x in mb.inputs.items()}
        loss = call(mb.sp, inputs)
        factor = mb.weight / total
        (loss * factor).backward()
        if groups.ranks(mb.sp)[0] == groups.rank:
            losses.append(loss.detach().double() * factor)
    # The read waits for the device once a step, and makes the time measured real.
    share = float(torch.stack(losses).sum()) if losses else 0.0
    if groups.device.type == "cuda":
        torch.cuda.synchronize(groups.device)
    return share


def _total_weight(step: Step, groups: Groups) -> float:
    """Returns the sum of all micro-batches' weights, each counted on its block's first rank."""
    total = step.total_weight
    if total is None:
        firsts = [mb for mb in step.micro_batches if groups.ranks(mb.sp)[0] == groups.rank]
        total = float(_gather([sum(mb.weight for mb in firsts)], groups).sum())
    if total <= 0:
        raise DataError(
            f"step {step.index} of epoch {step.epoch}: got a total weight of {total} over its "
            f"{step.samples} samples; expected more than 0; check weight= and that not every label "
            "is ignored"
        )
    return total


def _gather(values: Sequence[float], groups: Groups) -> torch.Tensor:
    """Returns `values` of every rank, float64 (world, len(values))."""
    mine = torch.tensor(values, dtype=torch.float64)
    pg = groups.control(groups.world)
    if pg is None:
        return mine[None]
    out = torch.empty(groups.world * len(values), dtype=torch.float64)
    dist.all_gather_into_tensor(out, mine, group=pg)
    return out.view(groups.world, -1)


def _unique(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return list({id(p): p for p in parameters if p.requires_grad}.values())


def _summary(params: Sequence[torch.nn.Parameter]) -> str:
    """What all ranks' parameters have in common if their gradients can be added."""
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in params})
    numel = sum(p.numel() for p in params)
    return f"{len(params)} parameters, {numel} elements of {'+'.join(kinds) or 'no type'}"


def _reduce(params: Sequence[torch.nn.Parameter], groups: Groups) -> None:
    control, pg = groups.control(groups.world), groups.of(groups.world)
    if control is None or pg is None or not params:
        return
    here = torch.tensor([p.grad is not None for p in params], dtype=torch.uint8)
    try:
        dist.all_reduce(here, dist.ReduceOp.MAX, group=control)
        used = [p for p, there in zip(params, here.tolist(), strict=True) if there]
        travelling: deque[tuple[dist.Work, torch.Tensor, list[torch.nn.Parameter]]] = deque()
        for bucket in _comm_buckets(used):
            flat = torch.cat([_gradient(p).reshape(-1) for p in bucket])
            work = dist.all_reduce(flat, group=pg, async_op=True)
            travelling.append((work, flat, bucket))
            if len(travelling) == _IN_FLIGHT:
                _arrive(*travelling.popleft())
        while travelling:
            _arrive(*travelling.popleft())
    except RuntimeError as e:
        raise GroupError(
            f"sum of gradients on rank {groups.global_ranks[groups.rank]}: got "
            f"{str(e).splitlines()[0]}; expected all of {groups.world} ranks to live; look at the "
            "log of the rank that ended first and start the job again"
        ) from e


def _comm_buckets(params: Sequence[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    """Returns the parameters in runs of one dtype and device, each of a size to travel at once."""
    done: list[list[torch.nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], tuple[list[torch.nn.Parameter], int]] = {}
    for p in params:
        key = (p.dtype, p.device)
        run, size_bytes = filling.get(key, ([], 0))
        p_bytes = p.numel() * p.dtype.itemsize
        if run and size_bytes + p_bytes > COMM_BUCKET_BYTES:
            done.append(run)
            run, size_bytes = [], 0
        filling[key] = ([*run, p], size_bytes + p_bytes)
    return done + [run for run, _ in filling.values()]


def _gradient(p: torch.nn.Parameter) -> torch.Tensor:
    if p.grad is None:
        return torch.zeros_like(p, memory_format=torch.contiguous_format)
    if p.grad.layout is not torch.strided:
        warnings.warn(
            f"a gradient of shape {tuple(p.shape)} is sparse and is summed as a dense one; make "
            "the "
            "embedding with sparse=False",
            stacklevel=2,
        )
        p.grad = p.grad.to_dense()
    return p.grad


def _arrive(work: dist.Work, flat: torch.Tensor, params: Sequence[torch.nn.Parameter]) -> None:
    work.wait()
    with torch.no_grad():
        pieces = flat.split([p.numel() for p in params])
        for p, piece in zip(params, pieces, strict=True):
            if p.grad is None:
                p.grad = piece.view_as(p).clone()
            else:
                p.grad.copy_(piece.view_as(p))
