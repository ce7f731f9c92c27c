"""The ranks of pipelines: wires between neighbours, and groups that sum gradients.

Between two neighbours of a lane each direction has a process group of its own, so that each is a
queue (on nccl, too, where a group runs its operations in order, whatever their direction). A
parameter's gradient is summed over the stages that read it (tied parameters have several), all
their ranks, in all replicas, by one process group for each set of stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcpc.errors import GroupError
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.pipeline.layout import PipelineLayout


@dataclass(frozen=True)
class PipelineGrid:
    """Position of this rank in the pipelines, and its process groups.

    Attributes:
        groups: groups of all ranks.
        layout: stages of the ranks.
        readers: parameter -> stages that read it.
    """

    groups: Groups
    layout: PipelineLayout
    readers: Mapping[str, tuple[int, ...]]
    _wires: Mapping[tuple[int, bool], dist.ProcessGroup] = field(repr=False)
    _sums: Mapping[tuple[int, ...], dist.ProcessGroup] = field(repr=False)

    @classmethod
    def make(
        cls, groups: Groups, layout: PipelineLayout | int, parameters: Sequence[str]
    ) -> PipelineGrid:
        """Returns the grid; collective over all ranks.

        Args:
            groups: groups of all ranks.
            layout: stages of the ranks; or so many stages of one rank each, in order.
            parameters: names of the parameters that this rank's stage reads.

        Raises:
            GroupError: the ranks are no multiple of a pipeline's, or part of a larger job; or the
                ranks of a stage read different parameters.
        """
        if isinstance(layout, int):
            layout = PipelineLayout.of(layout)
        if layout.ranks < 1 or groups.world % layout.ranks or not groups.whole:
            raise GroupError(
                f"pipeline of {layout.stages} stages of {layout.sp}: got {groups.world} ranks"
                f"{'' if groups.whole else ', part of a larger job'}; expected a multiple of "
                f"{layout.ranks}, of the whole job; start more ranks, or pass another pipeline= "
                "or sp="
            )
        by_name = _readers(groups, layout, parameters)
        groups.of(layout.sp)
        replicas, lanes = range(groups.world // layout.ranks), range(layout.sp)
        wires = _made(groups, {
            (stage, back, replica, lane): tuple(
                layout.rank(replica, s, lane) for s in (stage, stage + 1)
            )
            for replica in replicas for stage in range(layout.stages - 1)
            for lane in lanes for back in (False, True)
        }, connected=False)  # fmt: skip
        for (stage, back, _, _), pg in wires.items():
            _open(groups, pg, sends=(layout.stage(groups.rank) == stage) != back)
        sums = _made(groups, {
            which: tuple(sorted(layout.rank(r, s, n) for r in replicas for s in which
                                for n in lanes))
            for which in sorted(set(by_name.values()))
            if len(which) * len(replicas) * layout.sp > 1
        })  # fmt: skip
        return cls(groups, layout, by_name, {key[:2]: pg for key, pg in wires.items()}, sums)

    @property
    def stages(self) -> int:
        """Stages of each pipeline."""
        return self.layout.stages

    @property
    def stage(self) -> int:
        """This rank's stage."""
        return self.layout.stage(self.groups.rank)

    @property
    def replica(self) -> int:
        """This rank's pipeline."""
        return self.layout.replica(self.groups.rank)

    @property
    def lane(self) -> int:
        """This rank's place among the ranks of its stage."""
        return self.layout.lane(self.groups.rank)

    @property
    def replicas(self) -> int:
        """Number of pipelines."""
        return self.groups.world // self.layout.ranks

    def every(self) -> list[dist.ProcessGroup]:
        """Returns all process groups that this rank is in, for the watch to break."""
        return [*self._wires.values(), *self._sums.values()]

    def peer(self, stage: int) -> int:
        """Returns the number in the default group of a stage of this pipeline, in this lane."""
        return self.groups.global_ranks[self.layout.rank(self.replica, stage, self.lane)]

    def wire(self, stage: int, back: bool) -> dist.ProcessGroup:
        """Returns the queue between this stage and a neighbour."""
        return self._wires[min(stage, self.stage), back]

    def summing(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Returns each set of stages that read a parameter, and all their ranks, in one order."""
        layout, replicas = self.layout, range(self.replicas)
        return [
            (which, tuple(sorted(
                layout.rank(r, s, n) for r in replicas for s in which for n in range(layout.sp)
            )))
            for which in sorted(set(self.readers.values()))
        ]  # fmt: skip

    def sum_gradients(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> int:
        """Sums gradients over replicas, ranks of a stage and, where tied, over stages, in place.

        Collective over all ranks, once a step. A parameter without a gradient counts as zeros; one
        without a gradient anywhere stays without, as where no micro-batch of the step reads it.

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


def _readers(
    groups: Groups, layout: PipelineLayout, parameters: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Returns parameter -> stages that read it, once all ranks of a stage read the same.

    Raises:
        GroupError: they do not.
    """
    told: list[list[str]] = [list(parameters)] * groups.world
    if groups.world > 1:
        dist.all_gather_object(told, list(parameters), group=groups.control(groups.world))
    for rank, names in enumerate(told):
        first = layout.rank(0, layout.stage(rank))
        if names != told[first]:
            raise GroupError(
                f"stage {layout.stage(rank)} on rank {groups.global_ranks[rank]}: got parameters "
                f"other than on rank {groups.global_ranks[first]}; expected the same "
                "cut in every replica; compile with the same arguments on all ranks"
            )
    readers: dict[str, list[int]] = {}
    for stage in range(layout.stages):
        for name in told[layout.rank(0, stage)]:
            readers.setdefault(name, []).append(stage)
    return {name: tuple(found) for name, found in readers.items()}


def _made(
    groups: Groups, ranks: Mapping[Any, tuple[int, ...]], connected: bool = True
) -> dict[Any, dist.ProcessGroup]:
    """Returns the process groups that this rank is in; every rank makes all, in one order."""
    made = {
        key: groups.shared(members, f"dcpc pipeline {key}", connected)
        for key, members in ranks.items()
    }
    return {key: pg for key, pg in made.items() if pg is not None}


def _open(groups: Groups, pg: dist.ProcessGroup, sends: bool) -> None:
    """Sends one element over a wire, in its direction.

    NCCL's first message between two ranks waits for the other's call. A stage posts its receives
    ahead of its sends, so in a step two stages would wait for each other. All ranks do this in the
    order of the wires, so none waits in a circle.

    Raises:
        GroupError: a neighbour does not take it, or sends none.
    """
    x = torch.zeros(1, device=groups.device)
    try:
        if sends:
            dist.send(x, group=pg, group_dst=1 - pg.rank())
        else:
            dist.recv(x, group=pg, group_src=1 - pg.rank())
    except RuntimeError as e:
        first, second = dist.get_process_group_ranks(pg)
        raise GroupError(
            f"wire of a pipeline between ranks {first} and {second}: got "
            f"{(str(e).splitlines() or ['no reason'])[0]}; expected one element to arrive within "
            f"{groups.timeout_s:g} s; look at the logs of both ranks"
        ) from e


def _sum(parameters: Sequence[nn.Parameter], pg: dist.ProcessGroup) -> None:
    """Sums gradients in place; a parameter that has none on any rank stays without."""
    with torch.no_grad():
        has = parameters[0].new_tensor([float(p.grad is not None) for p in parameters])
        every = [
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters
        ]
        flat: Tensor = torch.cat([*every, has])
    dist.all_reduce(flat, group=pg)
    *pieces, counts = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for p, piece, count in zip(parameters, pieces, counts.tolist(), strict=True):
        p.grad = piece.view(p.shape) if count else None
