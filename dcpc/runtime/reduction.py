"""The one sum of gradients of a step, on the way while the last backward still runs.

Parameters, last ones first, form comm buckets. A bucket is put on the wire as soon as this rank has
the last gradient in it and all buckets before it are on the wire: so every rank sends them in one
order, whatever it runs, and a rank with nothing to run sends them at once.

    backward's last micro-batch   ...  w3 ready   w2 ready   w1 ready   end
    bucket 0 = [w3, w2]                           sent ─────────────────►
    bucket 1 = [w1]                                          sent ──────►

A bucket is one flat tensor; the gradients become views of it. It ends with a flag for each of its
parameters: their sum is 0 where no rank has a gradient, and that parameter stays without.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dcpc.errors import GroupError
from dcpc.runtime.groups import Groups

# Large enough to run at the wire's bandwidth, small enough to leave early.
# Source: torch DistributedDataParallel's default, bucket_cap_mb=25.
COMM_BUCKET_BYTES = 25_000_000


@dataclass(slots=True)
class _CommBucket:
    params: list[torch.nn.Parameter]
    flat: torch.Tensor | None = None
    pieces: dict[int, torch.Tensor] = field(default_factory=dict)  # by id of the parameter
    waits_for: set[int] = field(default_factory=set)
    work: dist.Work | None = None

    @property
    def size_bytes(self) -> int:
        return sum(p.numel() * p.dtype.itemsize for p in self.params)

    def open(self) -> torch.Tensor:
        """Returns the flat tensor: gradients one after the other, then a flag for each."""
        if self.flat is None:
            first, lengths = self.params[0], [p.numel() for p in self.params]
            flat = torch.empty(sum(lengths) + len(lengths), dtype=first.dtype, device=first.device)
            *pieces, flags = flat.split([*lengths, len(lengths)])
            flags.zero_()
            pairs = zip(self.params, pieces, strict=True)
            self.pieces = {id(p): piece.view(p.shape) for p, piece in pairs}
            self.flat = flat
        return self.flat

    @property
    def flags(self) -> torch.Tensor:
        return self.open()[-len(self.params) :]


class Reduction:
    """The sum of all parameters' gradients over all ranks, once.

    Args:
        params: those that train, each once, in the same order on every rank.
        groups: the process groups.
        bucket_bytes: most bytes of a comm bucket (one larger parameter is one of its own).

    Attributes:
        early_bytes: bytes that were on the wire before the last backward had ended.
    """

    def __init__(
        self,
        params: Sequence[torch.nn.Parameter],
        groups: Groups,
        bucket_bytes: int = COMM_BUCKET_BYTES,
    ) -> None:
        self.groups = groups
        self.pg = groups.of_gradients()
        self.early_bytes = 0
        self._finishing = False
        self._buckets = [] if self.pg is None else _comm_buckets(params[::-1], bucket_bytes)
        self._bucket = {id(p): b for b in self._buckets for p in b.params}
        self._next = 0  # first bucket that is not on the wire

    @property
    def total_bytes(self) -> int:
        """Bytes of the gradients of all buckets; 0 alone."""
        return sum(b.size_bytes for b in self._buckets)

    def deliver(self, p: torch.nn.Parameter, gradient: torch.Tensor | None) -> None:
        """Takes what the last backward adds to `p.grad`; this rank adds nothing to it any more.

        Args:
            p: one of the parameters.
            gradient: of its shape; None: backward found none.

        Raises:
            GroupError: a rank did not live.
        """
        bucket = self._bucket[id(p)]
        bucket.open()
        piece = bucket.pieces[id(p)]
        with torch.no_grad():
            parts = [_dense(g) for g in (p.grad, gradient) if g is not None]
            piece.copy_(parts[0]) if parts else piece.zero_()
            for more in parts[1:]:
                piece.add_(more)
            if parts:
                bucket.flags[[q is p for q in bucket.params].index(True)] = 1
        p.grad = None
        bucket.waits_for.discard(id(p))
        self._send()

    def send(self) -> None:
        """Sends what is left: backward has ended.

        Raises:
            GroupError: a rank did not live.
        """
        self._finishing = True
        for bucket in self._buckets:
            for p in [p for p in bucket.params if id(p) in bucket.waits_for]:
                self.deliver(p, None)

    def finish(self) -> None:
        """Sends what is left, waits, and sets every parameter's `grad` to the sum; alone: nothing.

        Raises:
            GroupError: a rank did not live.
        """
        self.send()
        for bucket in self._buckets:
            self._arrive(bucket)

    def _send(self) -> None:
        while self._next < len(self._buckets) and not self._buckets[self._next].waits_for:
            bucket = self._buckets[self._next]
            try:
                bucket.work = dist.all_reduce(bucket.open(), group=self.pg, async_op=True)
            except RuntimeError as e:
                raise self._broken(e) from e
            self._next += 1
            if not self._finishing:
                self.early_bytes += bucket.size_bytes

    def _arrive(self, bucket: _CommBucket) -> None:
        assert bucket.work is not None, "a comm bucket was never sent"
        try:
            bucket.work.wait()
        except RuntimeError as e:
            raise self._broken(e) from e
        bucket.work = None
        with torch.no_grad():
            for p, count in zip(bucket.params, bucket.flags.tolist(), strict=True):
                piece = bucket.pieces.pop(id(p))
                if count == 0:
                    continue
                # An optimizer wants a gradient that lies as its parameter does.
                same = piece.stride() == p.stride()
                p.grad = piece if same else torch.empty_like(p).copy_(piece)
        bucket.flat = None

    def _broken(self, e: RuntimeError) -> GroupError:
        groups = self.groups
        return GroupError(
            f"sum of gradients on rank {groups.global_ranks[groups.rank]}: got "
            f"{str(e).splitlines()[0]}; expected all of {groups.world} ranks to live; look at the "
            "log of the rank that ended first and start the job again"
        )


def trained(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Returns those that require a gradient, tied ones once."""
    return list({id(p): p for p in parameters if p.requires_grad}.values())


def summary(params: Sequence[torch.nn.Parameter]) -> str:
    """Returns what all ranks' parameters have in common if their gradients can be added."""
    kinds = sorted({str(p.dtype).removeprefix("torch.") for p in params})
    numel = sum(p.numel() for p in params)
    return f"{len(params)} parameters, {numel} elements of {'+'.join(kinds) or 'no type'}"


def _comm_buckets(params: Sequence[torch.nn.Parameter], bucket_bytes: int) -> list[_CommBucket]:
    """Returns the parameters in runs of one dtype and device, each of a size to travel at once.

    In the order in which runs are complete when parameters come in this order.
    """
    done: list[_CommBucket] = []
    filling: dict[tuple[torch.dtype, torch.device], _CommBucket] = {}
    for p in params:
        key = (p.dtype, p.device)
        bucket = filling.setdefault(key, _CommBucket([]))
        if bucket.params and bucket.size_bytes + p.numel() * p.dtype.itemsize > bucket_bytes:
            done.append(bucket)
            bucket = filling[key] = _CommBucket([])
        bucket.params.append(p)
        bucket.waits_for.add(id(p))
    return done + list(filling.values())


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    if gradient.layout is torch.strided:
        return gradient
    warnings.warn(
        f"a gradient of shape {tuple(gradient.shape)} is sparse and is summed as a dense one; make "
        "the embedding with sparse=False",
        stacklevel=2,
    )
    return gradient.to_dense()
