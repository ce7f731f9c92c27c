"""Assigns ranks to pipelines x stages x the ranks of a stage.

    8 ranks, 2 stages of 2 ranks     pipeline 0: 0 1 | 2 3     pipeline 1: 4 5 | 6 7

Ranks of a stage are neighbours: a sequence-parallel group. Each of them is a lane: it sends to and
receives from the rank of its own lane in the stages beside it. Stages may be in another order than
ranks, where ranks are not equally fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PipelineLayout:
    """Ranks of the stages of all pipelines.

    Attributes:
        order: for each stage: its position among a pipeline's groups of ranks.
        sp: ranks that run a stage together.
    """

    order: tuple[int, ...]
    sp: int = 1

    @classmethod
    def of(cls, stages: int, sp: int = 1) -> PipelineLayout:
        """Returns the layout whose stages are in the order of the ranks."""
        return cls(tuple(range(stages)), sp)

    @property
    def stages(self) -> int:
        """Stages of a pipeline."""
        return len(self.order)

    @property
    def ranks(self) -> int:
        """Ranks of a pipeline."""
        return self.stages * self.sp

    def stage(self, rank: int) -> int:
        """Returns the stage that a rank runs."""
        return self.order.index(rank % self.ranks // self.sp)

    def replica(self, rank: int) -> int:
        """Returns the pipeline that a rank is in."""
        return rank // self.ranks

    def lane(self, rank: int) -> int:
        """Returns a rank's place among the ranks of its stage."""
        return rank % self.sp

    def rank(self, replica: int, stage: int, lane: int = 0) -> int:
        """Returns who runs a stage of a pipeline in a lane."""
        return replica * self.ranks + self.order[stage] * self.sp + lane

    def by_rank(self, each: Sequence[float]) -> list[float]:
        """Returns the value of each rank of a pipeline, from the values of its stages."""
        return [each[self.stage(rank)] for rank in range(self.ranks)]
