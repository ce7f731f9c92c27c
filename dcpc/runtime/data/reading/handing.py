"""Samples of a stream on their way from rank 0, which reads it, to the ranks that run them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace

import torch

from dcpc.runtime.data.cuts import PlannedBatch
from dcpc.runtime.data.reading.stream import SampleStream
from dcpc.runtime.data.reading.stream_parts import check_same
from dcpc.runtime.data.samples import Samples
from dcpc.runtime.data.window import Position
from dcpc.runtime.groups.relay import Relay

Sample = Mapping[str, torch.Tensor]


class Handing:
    """Hands the samples of each micro-batch of an epoch to its ranks; they cross the store once.

    Rank 0 gives them before it sends the plan, so that no rank waits for more than the plan.
    """

    def __init__(
        self, relay: Relay | None, stream: SampleStream, samples: Samples, rank: int, epoch: int
    ) -> None:
        """Stores the ways; without a relay each rank reads by itself. Begins the samples anew."""
        self._relay, self._stream, self._samples = relay, stream, samples
        self._rank, self._epoch, self._repeats = rank, epoch, 0
        samples.restart()

    def filled(self, cut: PlannedBatch) -> PlannedBatch:
        """Returns a batch with its samples, which the stream has just read, and its position."""
        planned = cut.plan.micro_batches if cut.plan else ()
        held = {i: self._samples.load(i) for i in cut.ids(mb.sample_ids for mb in planned)}
        source = self._stream.saved(cut.after.start)
        return replace(cut, held=held, source=source, first=self._stream.first)

    def give(self, cut: PlannedBatch, name: str = "") -> PlannedBatch:
        """Gives the samples of a batch that rank 0 holds to the others; returns the batch."""
        for number, mb in enumerate(cut.plan.micro_batches if cut.plan else ()):
            readers = len({*mb.ranks} - {0})
            if readers and self._relay is not None:
                data = packed({i: cut.held[i] for i in cut.ids([mb.sample_ids])})
                self._relay.give(f"samples/{name or cut.index}/{number}", data, readers)
        return cut

    def take(self, cut: PlannedBatch, name: str = "") -> PlannedBatch:
        """Takes the samples that this rank runs, so that the stream has them; returns the batch.

        Raises:
            DataError: this rank's stream has another first sample than rank 0's.
        """
        stream, relay = self._stream, self._relay
        assert relay is not None, "this rank does not read"
        if cut.first and not stream.compared:
            stream.compared = True
            stream.begin(self._epoch, Position(), None)
            stream.reaches(0)
            check_same(stream.first, cut.first, "on rank 0")
            stream.close()
        for number, mb in enumerate(cut.plan.micro_batches if cut.plan else ()):
            if self._rank in mb.ranks:
                data = relay.taken(f"samples/{name or cut.index}/{number}", not name)
                stream.hold(unpacked(data))
        return cut

    def repeat(self, cut: PlannedBatch) -> PlannedBatch:
        """Hands out a batch that was planned again; collective; returns the batch."""
        self._repeats += 1
        if not cut.held:
            return self.take(cut, f"again {self._repeats}")
        own = cut.ids(mb.sample_ids for mb in (cut.plan.of(self._rank) if cut.plan else ()))
        self._stream.hold({i: cut.held[i] for i in own})
        return self.give(cut, f"again {self._repeats}")


def packed(samples: Mapping[int, Sample]) -> bytes:
    """Returns samples as bytes: of each input all values in one tensor."""
    names = [*next(iter(samples.values()))]
    parts = {name: [sample[name] for sample in samples.values()] for name in names}
    shapes = {name: [list(x.shape) for x in own] for name, own in parts.items()}
    data = {name: torch.cat([x.reshape(-1) for x in own]) for name, own in parts.items()}
    written = io.BytesIO()
    torch.save((list(samples), shapes, data), written)
    return written.getvalue()


def unpacked(data: bytes) -> dict[int, Sample]:
    """Returns the samples that `packed` made bytes of."""
    ids, shapes, values = torch.load(io.BytesIO(data), weights_only=True)
    found: dict[int, dict[str, torch.Tensor]] = {i: {} for i in ids}
    for name, own in shapes.items():
        sizes = [torch.Size(shape).numel() for shape in own]
        for i, shape, x in zip(ids, own, values[name].split(sizes), strict=True):
            found[i][name] = x.reshape(shape)
    return dict(found)
