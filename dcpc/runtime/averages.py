"""Running statistics of batch norms: each rank's own within a step, their average after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.step.facts import gather_facts


class RunningAverages:
    """Running statistics that each rank's micro-batches change in their order.

    Args:
        model: model of the user.
        names: names of the statistics, the counts of batches among them; empty: there are none.
        groups: the process groups.
    """

    def __init__(self, model: nn.Module, names: Sequence[str], groups: Groups) -> None:
        self._model, self._names, self._groups = model, names, groups
        self._samples = 0.0  # that this rank has run since the last average

    @torch.no_grad()
    def take(self, held: Sequence[Tensor], new: Sequence[Tensor], samples: float) -> None:
        """Takes the statistics after a micro-batch."""
        for buffer, value in zip(held, new, strict=True):
            buffer.copy_(value)
        self._samples += samples

    @contextmanager
    def of_step(self) -> Iterator[list[bool]]:
        """Averages the statistics over all ranks after its block; collective.

        Where the block raises, or puts something into the list that it gets, they are as before.
        """
        buffers, samples = self._buffers(), self._samples
        before, put_back, made = [b.clone() for b in buffers], list[bool](), False
        try:
            yield put_back
            made = not put_back
        finally:
            if not made:
                self._samples = samples
                for buffer, value in zip(buffers, before, strict=True):
                    buffer.copy_(value)
        if made:
            self.average()

    def average(self) -> None:
        """Replaces the statistics by their mean over the ranks by samples; collective.

        A rank that ran no sample since the last average has no part in it. Counts of batches become
        those of the rank that ran the most.
        """
        mine, self._samples = self._samples, 0.0
        if not self._names:
            return
        pg = self._groups.control(self._groups.world)
        if pg is None:
            return
        every = self._buffers()
        counts = [b for b in every if not b.is_floating_point()]
        means = [b for b in every if b.is_floating_point()]
        samples, *most = gather_facts([mine, *map(float, counts)], self._groups).unbind(1)
        total = float(samples.sum())
        if not total:
            return
        for count, ranks in zip(counts, most, strict=True):
            count.fill_(int(ranks.max()))
        parts = torch.cat([b.detach().double().cpu().flatten() for b in means]) * (mine / total)
        dist.all_reduce(parts, group=pg)
        for mean, value in zip(means, parts.split([b.numel() for b in means]), strict=True):
            mean.copy_(value.view_as(mean))

    def _buffers(self) -> list[Tensor]:
        return [self._model.get_buffer(name) for name in self._names]
