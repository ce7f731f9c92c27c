"""The ranks of a pipeline: replicas x stages, the wires between neighbours, who sums what.

    world 4, 2 stages     replica 0: ranks 0 1     replica 1: ranks 2 3

Between two neighbours each direction has a process group of its own, so that each is a queue (on
nccl, too, where a group runs what it is given in order, whatever its direction). A parameter's
gradient is summed over the stages that read it (tied parameters have several) in all replicas, by
one process group for each set of stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcpc.errors import GroupError
from dcpc.runtime.groups.groups import Groups


@dataclass(frozen=True)
class PipelineGrid:
    """Where this rank is in the pipelines, and its process groups.

    Attributes:
        groups: of all ranks.
        stages: of each pipeline.
        readers: parameter -> stages that read it.
    """

    groups: Groups
    stages: int
    readers: Mapping[str, tuple[int, ...]]
    _wires: Mapping[tuple[int, bool], dist.ProcessGroup] = field(repr=False)
    _sums: Mapping[tuple[int, ...], dist.ProcessGroup] = field(repr=False)

    @classmethod
    def make(cls, groups: Groups, stages: int, parameters: Sequence[str]) -> PipelineGrid:
        """Returns the grid; collective over all ranks.

        Args:
            groups: all ranks: replica by replica, in each stage by stage.
            stages: of each pipeline.
            parameters: names of those that this rank's stage reads.

        Raises:
            GroupError: the ranks are no multiple of the stages, or part of a larger job; or the
                ranks of a stage read different parameters.
        """
        if stages < 1 or groups.world % stages or not groups.whole:
            raise GroupError(
                f"pipeline of {stages} stages: got {groups.world} ranks"
                f"{'' if groups.whole else ', part of a larger job'}; expected a multiple of the "
                "stages, of the whole job; start more ranks, or pass another pipeline="
            )
        told: list[list[str]] = [list(parameters)] * groups.world
        if groups.world > 1:
            dist.all_gather_object(told, list(parameters), group=groups.control(groups.world))
        for rank, names in enumerate(told):
            if names != told[rank % stages]:
                raise GroupError(
                    f"stage {rank % stages} on rank {groups.global_ranks[rank]}: got parameters "
                    f"other than on rank {groups.global_ranks[rank % stages]}; expected the same "
                    "cut in every replica; compile with the same arguments on all ranks"
                )
        readers: dict[str, list[int]] = {}
        for stage in range(stages):
            for name in told[stage]:
                readers.setdefault(name, []).append(stage)
        by_name = {name: tuple(found) for name, found in readers.items()}
        wires = _made(groups, {
            (pair, back): (pair, pair + 1)
            for pair in range(groups.world - 1) if (pair + 1) % stages for back in (False, True)
        })  # fmt: skip
        firsts = range(0, groups.world, stages)
        sums = _made(groups, {
            which: tuple(first + s for first in firsts for s in which)
            for which in sorted(set(by_name.values())) if len(which) * len(firsts) > 1
        })  # fmt: skip
        return cls(groups, stages, by_name, wires, sums)

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.groups.rank % self.stages

    @property
    def replica(self) -> int:
        """This rank's pipeline."""
        return self.groups.rank // self.stages

    @property
    def replicas(self) -> int:
        """How many pipelines there are."""
        return self.groups.world // self.stages

    def every(self) -> list[dist.ProcessGroup]:
        """Returns all process groups that this rank is in, for the watch to break."""
        return [*self._wires.values(), *self._sums.values()]

    def peer(self, stage: int) -> int:
        """Returns the number in the default group of a stage of this pipeline."""
        return self.groups.global_ranks[self.replica * self.stages + stage]

    def wire(self, stage: int, back: bool) -> dist.ProcessGroup:
        """Returns the queue between this stage and a neighbour.

        Args:
            stage: the neighbour.
            back: the one for gradients.
        """
        pair = self.replica * self.stages + min(stage, self.stage)
        return self._wires[pair, back]

    def sum_gradients(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Sums gradients over the replicas and, of tied parameters, over their stages, in place.

        Collective over all ranks, once a step. A parameter without a gradient counts as zeros.

        Args:
            parameters: by name; those that this rank's stage does not read are left alone.

        Returns:
            The bytes of gradients that this rank put into sums.
        """
        summed_bytes = 0
        mine = {name: p for name, p in parameters if self.stage in self.readers.get(name, ())}
        for which, pg in self._sums.items():
            if self.stage not in which:
                continue
            names = [name for name in sorted(mine) if self.readers[name] == which]
            for dtype in dict.fromkeys(mine[name].dtype for name in names):
                together = [mine[name] for name in names if mine[name].dtype == dtype]
                summed_bytes += sum(p.nbytes for p in together)
                _sum(together, pg)
        return summed_bytes


def _made(groups: Groups, ranks: Mapping[object, tuple[int, ...]]) -> dict:  # type: ignore[type-arg]
    """Returns the process groups that this rank is in; every rank makes all, in one order."""
    found = {}
    for key, members in ranks.items():
        pg = dist.new_group(
            [groups.global_ranks[r] for r in members],
            timeout=timedelta(seconds=groups.timeout_s),
            group_desc=f"dcpc pipeline {key}",
        )
        if groups.rank in members:
            found[key] = pg
    return found


def _sum(parameters: Sequence[nn.Parameter], pg: dist.ProcessGroup) -> None:
    flat: Tensor = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters]
    )
    dist.all_reduce(flat, group=pg)
    for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = piece.view(p.shape)
