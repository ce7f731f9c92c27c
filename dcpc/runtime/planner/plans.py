"""The plan of one optimizer step: who runs which samples with which row, in one global order.

Every rank runs its own part of the order, so two groups that share a rank never wait for each other
in a circle, and ranks that share nothing never wait at all: the step ends when `timeline` says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dcpc.buckets import Bucket
from dcpc.errors import PlanError

Mode = Literal["auto", "evolve", "intra", "inter"]
MODES: tuple[Mode, ...] = ("auto", "evolve", "intra", "inter")
# Those that choose among all rows of the plan table.
FREE_MODES: tuple[Mode, ...] = ("auto", "evolve")


@dataclass(frozen=True, slots=True)
class RowSetting:
    """A row of a bucket's plan table: how a micro-batch is run.

    Attributes:
        sp: ranks of the group.
        micro_batch: maximum samples; the placement is made for so many.
        menu_step: steps of recompute taken.
    """

    sp: int
    micro_batch: int
    menu_step: int


@dataclass(frozen=True, slots=True)
class PlannedMicroBatch:
    """Some samples of one bucket on one group of ranks.

    Attributes:
        bucket: shape of the samples.
        sp: number of ranks that share them.
        ranks: these ranks, consecutive.
        sample_ids: the samples, in order; packed: those of all rows, one row after the other.
        seconds_s: predicted seconds, forward and backward, on these ranks.
        micro_batch: samples of the row of the plan table that it runs; it may have fewer.
        menu_step: steps of recompute that the row takes.
        rows: packed: the samples of each row of its tensors, in the order of the row.
        dims: lengths that the samples are padded to; none: the bucket's.
    """

    bucket: Bucket
    sp: int
    ranks: tuple[int, ...]
    sample_ids: tuple[int, ...]
    seconds_s: float
    micro_batch: int = 0
    menu_step: int = 0
    rows: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    dims: tuple[tuple[str, int], ...] = ()

    @property
    def batch(self) -> int:
        """Size of the dim `batch` of its tensors: rows where it is packed, else samples."""
        return len(self.rows or self.sample_ids)

    @property
    def shape(self) -> Bucket:
        """Shape that the samples are padded to: the bucket, or shorter lengths."""
        return Bucket(self.dims) if self.dims else self.bucket

    def on(self, ranks: tuple[int, ...]) -> PlannedMicroBatch:
        """Returns the same on other ranks, in less time than `replace` takes."""
        return PlannedMicroBatch(
            self.bucket, self.sp, ranks, self.sample_ids, self.seconds_s, self.micro_batch,
            self.menu_step, self.rows, self.dims,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Work of every rank in one optimizer step.

    Attributes:
        micro_batches: micro-batches in the global order that all ranks follow.
        busy_s: predicted busy seconds of each rank.
        makespan_s: predicted seconds until the last rank is done, waits for peers included.
        bound_s: lower bound of `makespan_s` for these samples and this table; 0: not known.
        binds: text of the reason why no plan is faster.
        mode: mode that made it.
        table: hash of the plan table it was made from.
        block: ranks that wait for each other after each micro-batch, see `rounds_of`; 0: none do.
        speeds: speed of each rank; seconds are those of the ranks that run them; none: equal.
        pipelines: the schedule of each pipeline, as `runtime/pipeline/` reads it, for its own
            micro-batches in this order; none: ranks of a group run a micro-batch together.
    """

    micro_batches: tuple[PlannedMicroBatch, ...]
    busy_s: tuple[float, ...]
    makespan_s: float
    bound_s: float = 0.0
    binds: str = ""
    mode: Mode = "inter"
    table: str = ""
    block: int = 0
    speeds: tuple[float, ...] = ()
    pipelines: tuple[str, ...] = ()

    @property
    def free_s(self) -> float:
        """Predicted seconds of the same micro-batches where ranks run free of each other."""
        return max(timeline(self.micro_batches, len(self.busy_s))[2], default=0.0)

    @property
    def lockstep_s(self) -> float:
        """Predicted seconds of the same micro-batches in rounds, of blocks or else of all ranks."""
        world = len(self.busy_s)
        return max(timeline(self.micro_batches, world, self.block or world)[2], default=0.0)

    @property
    def imbalance(self) -> float:
        """Mean idle share of the ranks, 0 to 1: see `imbalance`."""
        return imbalance(self.busy_s)

    @property
    def gap(self) -> float:
        """Distance from the lower bound, as a share of it; 0 where there is none."""
        return self.makespan_s / self.bound_s - 1.0 if self.bound_s > 0 else 0.0

    @property
    def accumulation(self) -> int:
        """Micro-batches of the rank that has most."""
        counts = [0] * len(self.busy_s)
        for mb in self.micro_batches:
            for rank in mb.ranks:
                counts[rank] += 1
        return max(counts, default=0)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(first rank, degree) of every group of more than one rank, in order of first use."""
        found = ((mb.ranks[0], mb.sp) for mb in self.micro_batches if mb.sp > 1)
        return tuple(dict.fromkeys(found))

    @property
    def fingerprint(self) -> str:
        """A short text that is equal for equal plans."""
        rows = [mb.rows for mb in self.micro_batches if mb.rows]
        text = f"{self.micro_batches!r}{''.join(self.pipelines)}{rows or ''}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def packed(self, rows: Sequence[tuple[int, ...]]) -> StepPlan:
        """Returns the plan by samples, of one by the numbers of rows; without rows itself."""
        if not rows:
            return self
        found = []
        for mb in self.micro_batches:
            own = tuple(rows[number] for number in mb.sample_ids)
            found.append(replace(mb, sample_ids=tuple(i for row in own for i in row), rows=own))
        return replace(self, micro_batches=tuple(found))

    def by_rows(self, rows: Sequence[tuple[int, ...]]) -> StepPlan:
        """Returns the plan by the numbers of rows, as it was before `packed`."""
        if not rows:
            return self
        numbers = {row: number for number, row in enumerate(rows)}
        found = (
            replace(mb, sample_ids=tuple(numbers[row] for row in mb.rows), rows=())
            for mb in self.micro_batches
        )
        return replace(self, micro_batches=tuple(found))

    def of(self, rank: int) -> tuple[PlannedMicroBatch, ...]:
        """Returns the micro-batches of one rank, in order."""
        return tuple(mb for mb in self.micro_batches if rank in mb.ranks)


def rounds(ranks: Sequence[Sequence[int]], world: int) -> list[list[int]]:
    """Returns the numbers of the micro-batches of each round, of which no two share a rank."""
    free = [0] * world  # first round in which a rank has nothing to do
    found: list[list[int]] = []
    for number, own in enumerate(ranks):
        at = max(free[r] for r in own)
        for r in own:
            free[r] = at + 1
        found += [[] for _ in range(at + 1 - len(found))]
        found[at].append(number)
    return found


def rounds_of(plan: StepPlan, rank: int, block: int) -> list[tuple[PlannedMicroBatch, ...]]:
    """Returns, round by round, the micro-batches that run at once in a rank's block.

    Blocks are of consecutive ranks. Each goes through its own rounds, free of the others: it only
    meets those that take a micro-batch together with it.

    Raises:
        PlanError: a micro-batch is of some ranks of one block and some of another.
    """
    first = rank // block * block
    every, own = plan.micro_batches, range(first, first + block)
    for mb in every:
        begin, end = mb.ranks[0] % block, (mb.ranks[-1] + 1) % block
        if (begin or end) and mb.ranks[0] // block != mb.ranks[-1] // block:
            raise PlanError(
                f"micro-batch of {mb.bucket}: got ranks {mb.ranks[0]} to {mb.ranks[-1]}; expected "
                f"ranks within one block of {block}, or all ranks of several: those of a block "
                "gather parameters together; plan the step with this compiled model, or compile "
                "it with another block="
            )
    found = []
    for numbers in rounds([mb.ranks for mb in every], len(plan.busy_s)):
        here = tuple(every[n] for n in numbers if any(r in own for r in every[n].ranks))
        found += [here] * bool(here)
    return found


def timeline(
    micro_batches: Sequence[PlannedMicroBatch], world: int, block: int = 0
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    """Returns when each micro-batch begins, and each rank's busy seconds and end, all in seconds.

    A micro-batch begins when the last of its ranks has ended the one before, in rounds when all
    ranks of their blocks have.
    """
    free_s, busy_s = [0.0] * world, [0.0] * world
    begins = [0.0] * len(micro_batches)
    together = rounds([mb.ranks for mb in micro_batches], world) if block else [
        [number] for number in range(len(micro_batches))
    ]  # fmt: skip
    for numbers in together:
        if block:
            ends_s = [max(free_s[i : i + block]) for i in range(0, world, block)]
            free_s = [ends_s[r // block] for r in range(world)]
        for number in numbers:
            mb = micro_batches[number]
            begins[number] = begin_s = max(free_s[r] for r in mb.ranks)
            for r in mb.ranks:
                free_s[r] = begin_s + mb.seconds_s
                busy_s[r] += mb.seconds_s
    return tuple(begins), tuple(busy_s), tuple(free_s)


def step_plan(micro_batches: Sequence[PlannedMicroBatch], world: int, block: int = 0) -> StepPlan:
    """Returns the plan that runs micro-batches in the order given, with its predicted seconds."""
    _, busy_s, end_s = timeline(micro_batches, world, block)
    last_s = max(end_s, default=0.0)
    return StepPlan(tuple(micro_batches), busy_s, last_s, block=block)


def better(plan: StepPlan, best: StepPlan, most: int, gain: float) -> bool:
    """Whether a plan is to be taken instead of the best so far.

    Args:
        plan: new plan.
        best: best plan so far.
        most: maximum of a rank's micro-batches: a smaller excess is better; 0: any number.
        gain: fraction of the seconds that it has to save otherwise.
    """
    over = max(0, plan.accumulation - most) if most else 0
    best_over = max(0, best.accumulation - most) if most else 0
    if over != best_over:
        return over < best_over
    return plan.makespan_s < (1 - gain) * best.makespan_s


def imbalance(busy_s: Sequence[float]) -> float:
    """Returns the mean over ranks of (max t - t_r), as a share of max t; 0 where nobody works.

    Source: VideoSys' `calculate_imbalance`, which reports it in percent.
    """
    longest_s = max(busy_s, default=0.0)
    if longest_s <= 0:
        return 0.0
    return sum(longest_s - t for t in busy_s) / len(busy_s) / longest_s
