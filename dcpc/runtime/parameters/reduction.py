"""The one sum of gradients of a step, on the way while the last backward still runs.

Parameters, last ones first, form comm buckets. A bucket is put on the wire as soon as this rank has
the last gradient in it and all buckets before it are on the wire: so every rank sends them in one
order, whatever it runs, and a rank with nothing to run sends them at once.

    backward's last micro-batch   ...  w3 ready   w2 ready   w1 ready   end
    bucket 0 = [w3, w2]                           sent ─────────────────►
    bucket 1 = [w1]                                          sent ──────►

A bucket is one flat tensor, made when it is sent; the gradients become views of it. A parameter
without a gradient on any rank stays without: a flag for each says so once, at the end.

Memory stays within what the plan has for the last backward. It counts that backward's gradients
beside those of earlier micro-batches until it ends; here they are added as they come, and the flat
tensor of a bucket is no larger than what that set free.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.distributed as dist

from dcpc.errors import GroupError
from dcpc.runtime.groups.groups import Groups

# Large enough to run at the wire's bandwidth, small enough to leave early.
# Source: torch DistributedDataParallel's default, bucket_cap_mb=25.
COMM_BUCKET_BYTES = 25_000_000


class GivenUpError(Exception):
    """A rank gave the step up: the sum came about on all ranks, and is of no use."""


@dataclass(slots=True)
class CommBucket:
    """Parameters whose gradients are summed at once.

    Attributes:
        params: parameters of the bucket.
        waits_for: ids of the parameters whose gradient is not final.
        flat: all gradients while they are on the wire, then their sum.
        work: handle that waits for the sum.
    """

    params: list[torch.nn.Parameter]
    waits_for: set[int] = field(default_factory=set)
    flat: torch.Tensor | None = None
    work: dist.Work | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the gradients."""
        return sum(p.numel() * p.dtype.itemsize for p in self.params)

    # How many may be on the wire at once; None: any number, as they take no memory of their own.
    in_flight: ClassVar[int | None] = None

    def start(self, pg: dist.ProcessGroup) -> None:
        """Puts the gradients on the wire."""
        self.work = dist.all_reduce(self._gather(), group=pg, async_op=True)

    def wait(self) -> None:
        """Waits for the sum; may be called again."""
        assert self.work is not None, "a comm bucket was never sent"
        self.work.wait()

    def spread(self, used: Mapping[int, int]) -> None:
        """Sets `grad` of each parameter that has a gradient on some rank to its sum.

        Args:
            used: id of a parameter -> whether some rank has a gradient of it.
        """
        for p, piece in zip(self.params, self._pieces(), strict=True):
            if used[id(p)]:
                # An optimizer wants a gradient that lies as its parameter does.
                same = piece.stride() == p.stride()
                p.grad = piece if same else torch.empty_like(p).copy_(piece)

    def _gather(self) -> torch.Tensor:
        """Returns all gradients as one dense tensor; `grad` of the parameters is empty then.

        One parameter alone is sent from where its gradient lies: it may be very large.
        """
        if len(self.params) == 1:
            (p,) = self.params
            grad, p.grad = p.grad, None
            self.flat = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
            if grad is not None:
                dense = dense_gradient(grad)
                self.flat = dense if dense.is_contiguous() else dense.contiguous()
            return self.flat
        first = self.params[0]
        count = sum(p.numel() for p in self.params)
        self.flat = torch.empty(count, dtype=first.dtype, device=first.device)
        for p, piece in zip(self.params, self._pieces(), strict=True):
            grad, p.grad = p.grad, None
            if grad is None:
                piece.zero_()
            else:
                piece.copy_(dense_gradient(grad))
        return self.flat

    def _pieces(self) -> list[torch.Tensor]:
        """Returns each parameter's part of the dense tensor, in its shape."""
        assert self.flat is not None, "nothing was gathered"
        parts = self.flat.view(-1).split([p.numel() for p in self.params])
        return [part.view(p.shape) for part, p in zip(parts, self.params, strict=True)]


class Reduction:
    """The sum of all parameters' gradients over all ranks, once.

    Args:
        params: parameters that train, each once, in the same order on every rank.
        groups: the process groups.
        bucket_bytes: largest size of a comm bucket (a larger parameter has one of its own).
        bucket: function that makes a comm bucket of its parameters.

    Attributes:
        early_bytes: bytes that were on the wire before the last backward had ended.
        given_up: whether this rank has no gradients to add.
    """

    takes_all = False  # of earlier backwards gradients are added up in `grad`

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        groups: Groups,
        bucket_bytes: int = COMM_BUCKET_BYTES,
        bucket: Callable[[list[torch.nn.Parameter]], CommBucket] = CommBucket,
    ) -> None:
        self.groups = groups
        self.pg = self._over()
        self.early_bytes = 0
        self.given_up = False
        self._finishing = False
        runs = [] if self.pg is None else in_runs(params[::-1], bucket_bytes)
        self._buckets = [bucket(run) for run in runs]
        for made in self._buckets:
            made.waits_for = {id(p) for p in made.params}
        self._bucket = {id(p): b for b in self._buckets for p in b.params}
        self._used: dict[int, bool] = {}  # id of the parameter -> this rank has a gradient
        self._next = 0  # first bucket that is not on the wire
        self._kept = set[int]()  # addresses of gradients that stay where they were made

    def _over(self) -> dist.ProcessGroup | None:
        """Returns the group of the ranks that sum; None of one."""
        return self.groups.of_gradients()

    @property
    def total_bytes(self) -> int:
        """Bytes of the gradients of all buckets; 0 alone."""
        return sum(b.size_bytes for b in self._buckets)

    def deliver(self, p: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Takes a gradient of the last backward: this rank adds no more to that parameter's.

        Args:
            p: one of the parameters.
            gradient: gradient of its shape; None: backward found none.

        Raises:
            GroupError: a rank did not live.
        """
        bucket = self._bucket[id(p)]
        with torch.no_grad():
            if gradient is None:
                pass
            elif p.grad is not None:
                p.grad.add_(gradient)
            elif len(bucket.params) == 1:
                # It is summed in place, and backward may still read what it made.
                p.grad = gradient.clone()
            else:
                p.grad = gradient
        self._settled(bucket, p)

    def add(self, p: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Adds a gradient to those of earlier micro-batches, as autograd would.

        The first one stays where it is, if nothing else is in its memory.
        """
        if p.grad is not None:
            p.grad.add_(gradient)
            return
        made = dense_gradient(gradient)
        memory = made.untyped_storage()
        alone = memory.nbytes() == made.nbytes and memory.data_ptr() not in self._kept
        self._kept.add(memory.data_ptr())
        stays = alone and made.dtype == p.dtype and made.stride() == p.stride()
        p.grad = made if stays else torch.empty_like(p, requires_grad=False).copy_(made)

    def _settled(self, bucket: CommBucket, p: torch.nn.Parameter) -> None:
        """Sends the comm buckets that are complete, as a parameter's gradient is final."""
        self._used[id(p)] = p.grad is not None
        bucket.waits_for.discard(id(p))
        self._send()

    def collect(self) -> None:
        """Takes the gradients of a backward before the last: they stay in `grad`."""

    def give_up(self) -> None:
        """Takes part in the sum without gradients: this rank could not run all of its part."""
        self.given_up = True
        for bucket in self._buckets:
            for p in bucket.params:
                p.grad = None

    def send(self) -> None:
        """Sends the comm buckets that are left: backward has ended.

        Raises:
            GroupError: a rank did not live.
        """
        self._finishing = True
        for bucket in self._buckets:
            for p in [p for p in bucket.params if id(p) in bucket.waits_for]:
                self._settled(bucket, p)
        self._send()

    def finish(self) -> None:
        """Sends the buckets that are left, waits, and sets `grad` to the sum; alone: nothing.

        Raises:
            GroupError: a rank did not live.
            GivenUpError: on all ranks, if one gave up.
        """
        if not self._buckets:
            if self.given_up:
                raise GivenUpError
            return
        self.send()
        try:
            order = [id(p) for b in self._buckets for p in b.params]
            used = used_anywhere({i: self._used[i] for i in order}, self.groups, self.given_up)
            for bucket in self._buckets:
                bucket.wait()
        except RuntimeError as e:
            raise broken_sum(self.groups, e) from e
        if used is None:
            raise GivenUpError
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.spread(used)
                bucket.flat = bucket.work = None

    def _send(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].waits_for:
            bucket = self._buckets[self._next]
            try:
                if not self._has_room(bucket.in_flight):
                    return
                assert self.pg is not None, "alone there are no comm buckets"
                with torch.no_grad():
                    bucket.start(self.pg)
            except RuntimeError as e:
                raise broken_sum(self.groups, e) from e
            self._next += 1
            if not self._finishing:
                self.early_bytes += bucket.size_bytes

    def _has_room(self, in_flight: int | None) -> bool:
        """Whether the next comm bucket may be sent; waits for that once backward has ended."""
        if in_flight is None or self._next < in_flight:
            return True
        before = self._buckets[self._next - in_flight]
        if self._finishing or before.work is None or before.work.is_completed():
            before.wait()
            return True
        return False


def used_anywhere(
    used: Mapping[int, bool], groups: Groups, given_up: bool
) -> dict[int, int] | None:
    """Returns id of a parameter -> whether any rank has a gradient of it; waits for all ranks.

    None where one of them gave the step up.

    Args:
        used: id of a parameter -> whether this rank has a gradient; ordered alike on all ranks.
        groups: the process groups.
        given_up: whether this rank gave up.
    """
    flags = torch.tensor([*used.values(), given_up], dtype=torch.uint8)
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=groups.control(groups.world))
    *found, any_gave_up = flags.tolist()
    return None if any_gave_up else dict(zip(used, found, strict=True))


def broken_sum(groups: Groups, e: RuntimeError) -> GroupError:
    """Returns the error of a sum that did not come about."""
    return GroupError(
        f"sum of gradients on rank {groups.global_ranks[groups.rank]}: got "
        f"{str(e).splitlines()[0]}; expected all of {groups.world} ranks to live; look at the "
        "log of the rank that ended first and start the job again"
    )


def trained(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Returns the parameters that require a gradient, tied ones once."""
    return list({id(p): p for p in parameters if p.requires_grad}.values())


def summary(params: Sequence[torch.nn.Parameter]) -> str:
    """Returns a text that is equal on ranks whose gradients can be added."""
    kinds = sorted(str(d).removeprefix("torch.") for d in {p.dtype for p in params})
    numel = sum(p.numel() for p in params)
    return f"{len(params)} parameters, {numel} elements of {'+'.join(kinds) or 'no type'}"


def in_runs(
    params: Sequence[torch.nn.Parameter], bucket_bytes: int
) -> list[list[torch.nn.Parameter]]:
    """Returns the parameters in runs of one dtype and device, each of a size to travel at once.

    In the order in which runs are complete when parameters come in this order.

    Args:
        params: parameters, each once.
        bucket_bytes: largest size of a run (a larger parameter is a run of its own).
    """
    done: list[list[torch.nn.Parameter]] = []
    filling: dict[tuple[torch.dtype, torch.device], list[torch.nn.Parameter]] = {}
    filled: Counter[tuple[torch.dtype, torch.device]] = Counter()  # bytes
    for p in params:
        key, size_bytes = (p.dtype, p.device), p.numel() * p.dtype.itemsize
        if filled[key] and filled[key] + size_bytes > bucket_bytes:
            done.append(filling.pop(key))
            del filled[key]
        filling.setdefault(key, []).append(p)
        filled[key] += size_bytes
    return done + list(filling.values())


def dense_gradient(gradient: torch.Tensor) -> torch.Tensor:
    """Returns a gradient as a dense tensor.

    Warns:
        UserWarning: it is sparse.
    """
    if gradient.layout is torch.strided:
        return gradient
    warnings.warn(
        f"a gradient of shape {tuple(gradient.shape)} is sparse and is summed as a dense one; make "
        "the embedding with sparse=False",
        stacklevel=2,
    )
    return gradient.to_dense()
