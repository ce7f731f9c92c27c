"""Plans a pipeline's step from lengths: the split into micro-batches, and their schedule.

The split is exact for its objective, (stages - 1) * longest + sum (`planner/splits/microbatch.py`),
the seconds of a step of 1F1B. A better order fills the ramps with short micro-batches, for which a
smaller weight of the longest one is right. So splits are made for each setting of recompute and for
two weights, the schedule of each is searched, and the one that ends first is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from dcpc.errors import PlanError
from dcpc.runtime.pipeline.apart import Group, split_apart
from dcpc.runtime.pipeline.schedule import (
    FoundSchedule,
    Hop,
    PipelineWork,
    StageCost,
    lower_bound,
    search,
)
from dcpc.runtime.planner.splits.microbatch import PaddedCost, microbatch

Batches = tuple[tuple[int, ...], ...]  # positions of samples, by micro-batch

LIMIT = 60000  # simulated actions for the schedule of the best split


class PipelineCost(Protocol):
    """Costs of micro-batches of padded samples on the stages of a model."""

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""

    @property
    def settings(self) -> int:
        """Settings of recompute that every stage has."""

    @property
    def memory_bytes(self) -> tuple[float, ...]:
        """Memory of each stage for activations."""

    def options(self, stage: int, count: int, longest: int) -> tuple[StageCost, ...]:
        """Returns the costs of a micro-batch on a stage, by setting, the fastest first."""

    def hop(self, stage: int, count: int, longest: int) -> Hop:
        """Returns the costs of its messages from a stage to the next one and back."""

    def padded(self, setting: int, flight: int) -> PaddedCost:
        """Returns seconds of the slowest stage; bytes: the fullest stage's fraction of its memory.

        Args:
            setting: setting of recompute.
            flight: number of equal micro-batches held at once, but no more than 1F1B holds on a
                stage.
        """


@dataclass(frozen=True, slots=True)
class PlannedPipeline:
    """A step of a pipeline.

    Attributes:
        batches: positions of the samples, by micro-batch.
        found: schedule and bound for these micro-batches.
        work: work that it was found for.
    """

    batches: Batches
    found: FoundSchedule
    work: PipelineWork


def work_of(
    lengths: Sequence[int], batches: Sequence[Sequence[int]], cost: PipelineCost
) -> PipelineWork:
    """Returns the costs of micro-batches on every stage.

    Args:
        lengths: tokens of each sample.
        batches: positions of the samples, by micro-batch; each is padded to its longest.
        cost: costs of the model.
    """
    shapes = [(len(batch), max(lengths[i] for i in batch)) for batch in batches]
    stages = cost.stages
    return PipelineWork(
        tuple(tuple(cost.options(s, *shape) for shape in shapes) for s in range(stages)),
        tuple(tuple(cost.hop(s, *shape) for shape in shapes) for s in range(stages - 1)),
        cost.memory_bytes,
    )


def plan_replicas(
    lengths: Sequence[int],
    cost: PipelineCost,
    replicas: int,
    *,
    split: bool = False,
    limit: int = LIMIT,
    apart: Mapping[int, Group] | None = None,
) -> tuple[PlannedPipeline, ...]:
    """Returns the step of each of several pipelines that share the samples.

    Micro-batches are dealt out longest first, each to the pipeline with least to do.

    Args:
        lengths: tokens of each sample.
        cost: costs of the model.
        replicas: number of pipelines.
        split: whether weight gradients may run apart from the rest of a backward.
        limit: maximum of simulated actions for each pipeline's schedule.
        apart: length -> its group, where samples of different groups share no micro-batch; None:
            they do.

    Raises:
        PlanError: a sample does not fit alone, or there are fewer samples than pipelines.
    """
    if len(lengths) < replicas:
        raise PlanError(
            f"pipelines: got {len(lengths)} samples for {replicas} replicas; expected one each at "
            "least; take a larger batch"
        )
    best: tuple[PlannedPipeline, ...] = ()
    for batches in _splits(lengths, cost, replicas, apart):
        made = []
        for own in _dealt(lengths, batches, cost, replicas):
            work = work_of(lengths, own, cost)
            if best and lower_bound(work).seconds_s >= _end_s(best):
                break
            made.append(PlannedPipeline(own, search(work, split=split, limit=0), work))
        if not best or (len(made) == replicas and _end_s(made) < _end_s(best)):
            best = tuple(made)
    longer = [(p, search(p.work, split=split, limit=limit)) for p in best]
    return tuple(
        replace(p, found=found) if found.replay.makespan_s < p.found.replay.makespan_s else p
        for p, found in longer
    )


def _end_s(plans: Sequence[PlannedPipeline]) -> float:
    return max(p.found.replay.makespan_s for p in plans)


def _splits(
    lengths: Sequence[int], cost: PipelineCost, replicas: int, apart: Mapping[int, Group] | None
) -> list[Batches]:
    """Returns different splits, by several settings and weights of the longest micro-batch.

    As many micro-batches as 1F1B has on a stage fit at once; where none does so, one.

    Raises:
        PlanError: a sample does not fit alone.
    """
    made: dict[Batches, None] = {}  # a set that is in order
    alone, weights = [[i] for i in range(len(lengths))], sorted({2, cost.stages})
    for flight in (cost.stages, 1):
        for setting in sorted({0, cost.settings // 2, cost.settings - 1}):
            padded = cost.padded(setting, flight)
            splits = (
                (microbatch(lengths, padded, 1.0, w, replicas).batches for w in weights)
                if apart is None
                else split_apart(lengths, padded, weights, replicas, apart)
            )
            with suppress(PlanError):
                for found in splits:
                    made.setdefault(found)
                    if _longest_s(lengths, found, padded) <= _longest_s(lengths, alone, padded):
                        break  # nor does a larger weight make it shorter: it has the same split
        if made:
            return [*made]
    one, longest = np.array(1), np.array(max(lengths))
    least = min(float(cost.padded(k, 1).peak_bytes(one, longest)) for k in range(cost.settings))
    raise PlanError(
        f"pipeline: got a sample of {longest} tokens, which alone needs {least:.3g} times the "
        "memory that a stage has for activations, with everything recomputed; expected at most 1; "
        "split it, take more stages or raise memory="
    )


def _longest_s(
    lengths: Sequence[int], batches: Sequence[Sequence[int]], padded: PaddedCost
) -> float:
    """Returns the seconds of the slowest micro-batch."""
    counts = np.array([len(batch) for batch in batches])
    longest = np.array([max(lengths[i] for i in batch) for batch in batches])
    return float(padded.seconds(counts, longest).max())


def _dealt(
    lengths: Sequence[int], batches: Batches, cost: PipelineCost, replicas: int
) -> list[Batches]:
    """Returns each replica's micro-batches, in the order of the split."""
    if replicas == 1:
        return [batches]
    parts = list(batches)
    while len(parts) < replicas:
        at = max(range(len(parts)), key=lambda n: len(parts[n]))
        whole = parts.pop(at)
        parts[at:at] = [whole[: len(whole) // 2], whole[len(whole) // 2 :]]
    work = work_of(lengths, parts, cost)
    taken_s = [sum(row[i][0].forward_s + row[i][0].backward_s for row in work.costs)
               for i in range(len(parts))]  # fmt: skip
    load_s, own = [0.0] * replicas, [list[int]() for _ in range(replicas)]
    for i in sorted(range(len(parts)), key=lambda i: -taken_s[i]):
        least = min(range(replicas), key=lambda r: load_s[r])
        load_s[least] += taken_s[i]
        own[least].append(i)
    return [tuple(parts[i] for i in sorted(found)) for found in own]
