"""The global batches of an epoch, one after the other, each with its plan."""

from __future__ import annotations

import base64
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import Any

import torch

from dcpc.buckets import Bucket
from dcpc.errors import DataError
from dcpc.ir.thresholds import PACKING_GAIN
from dcpc.runtime.data.packing import pack
from dcpc.runtime.data.samples import SampleBucket
from dcpc.runtime.data.window import Batch, EpochOrder, Position, index_at, take
from dcpc.runtime.planner.own_lengths import BatchLengths, Dims, OwnLengths
from dcpc.runtime.planner.packed.bins import PackedPrices
from dcpc.runtime.planner.plan_file import plan_json, plan_of
from dcpc.runtime.planner.plans import FREE_MODES, Mode, StepPlan
from dcpc.runtime.planner.protocol import BatchPlanner
from dcpc.runtime.planner.step_planner import Allowed, plan_rows, plan_step
from dcpc.runtime.planner.table import PlanTable

# Mode "evolve" searches for this part of the seconds of the step that runs meanwhile, at most so
# many: later turns find little.
_EVOLVES, _MOST_EVOLVES_S = 0.5, 5.0
# Batches tried until the number of micro-batches is within its bounds.
_TRIES = 32

Rows = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Settings by which global batches are formed and planned.

    Attributes:
        most: tokens of a batch, or samples.
        window: places by which the order may differ from the epoch's (window.py).
        mode: mode of the planner.
        allowed: limits of a step's micro-batches.
        packs: whether samples follow each other in rows, which are then planned as samples.
        by_samples: whether `most` counts samples.
        planner: planner of a model in stages; None: `plan_step` plans.
        own: lengths of micro-batches by their samples; None: those of their buckets.
        prices: seconds of packed micro-batches; None: `planner` plans, or samples are not packed.
        chooses: whether a batch's rows hold one sample each where packing predicts no gain.
    """

    most: int
    window: int
    mode: Mode
    allowed: Allowed
    packs: bool = False
    by_samples: bool = False
    planner: BatchPlanner | None = None
    own: OwnLengths | None = None
    prices: PackedPrices | None = None
    chooses: bool = False

    def plan(
        self, samples: Sequence[tuple[int, Bucket]], table: PlanTable, dims: Callable[[int], Dims]
    ) -> StepPlan:
        """Returns the plan of a batch.

        Args:
            samples: id and bucket of each.
            table: the rows to choose from.
            dims: lengths of a sample, asked for where micro-batches run at those.
        """
        own = self.own
        lengths = None if own is None else BatchLengths(own, {i: dims(i) for i, _ in samples})
        if self.planner is not None:
            return self.planner.plan(samples, table.hash, lengths)
        return plan_step(samples, table, self.mode, self.allowed, lengths)

    def take(
        self,
        order: EpochOrder,
        fit: Callable[[int], SampleBucket],
        position: Position,
        most: int | None = None,
    ) -> Batch:
        """Returns the next batch, of at most so many tokens or samples; default: as ever."""
        limit = self.most if most is None else most
        one_bucket = self.mode == "intra"
        return take(order, fit, position, limit, self.window, one_bucket, self.by_samples)

    def text(self) -> str:
        """Settings that must be equal on all ranks, as text."""
        what = "samples" if self.by_samples else "tokens"
        return (
            f"{what}_per_step={self.most}, window={self.window}, mode={self.mode}, "
            f"{self.allowed}, packs={'auto' if self.chooses else self.packs}"
        ) + (f", own lengths, multiples of {self.own.multiple}" if self.own else "")


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A global batch and its plan.

    Attributes:
        index: number of the step in its epoch.
        plan: plan; None where all remaining samples are too long.
        tokens: tokens of the batch.
        skipped: samples longer than every bucket, left out.
        after: position in the epoch once the step is done.
        plan_s: seconds of forming and planning, on the rank that plans.
        table: plan table that the plan was made from.
        rows: for packed batches: samples of each row; the plan's sample ids number rows.
        last: whether the epoch has no samples after it.
        source: for a stream: position of the source, for the loader's state.
        first: for a stream: digest of its first sample; "": it was not read.
        held: for a stream, on the rank that reads: the samples.
    """

    index: int
    plan: StepPlan | None
    tokens: int
    skipped: tuple[int, ...]
    after: Position
    plan_s: float
    table: PlanTable
    rows: Rows = ()
    last: bool = False
    source: Mapping[str, Any] | None = None
    first: str = ""
    held: Mapping[int, Mapping[str, torch.Tensor]] = field(default_factory=dict, repr=False)

    @property
    def samples(self) -> int:
        """Number of all ranks' samples."""
        return len(self.ids(mb.sample_ids for mb in self.plan.micro_batches)) if self.plan else 0

    @property
    def padding(self) -> int:
        """Tokens of all ranks' micro-batches that are no sample's."""
        micro_batches = self.plan.micro_batches if self.plan else ()
        sizes = (len(mb.sample_ids) * mb.shape.tokens for mb in micro_batches)
        return sum(sizes) - self.tokens

    def ids(self, planned: Iterable[Sequence[int]]) -> tuple[int, ...]:
        """Returns the indices in the dataset of a plan's sample ids."""
        every = [i for ids in planned for i in ids]
        if not self.rows:
            return tuple(every)
        return tuple(i for row in every for i in self.rows[row])

    def message(self, base: PlanTable, job: str) -> dict[str, Any]:
        """Returns it as plain data.

        Args:
            base: table that all ranks have; differences of the plan's are sent, too.
            job: settings that must be equal on all ranks.
        """
        changes = {} if self.table is base else self.table.changes(base)
        return {
            "job": job,
            "index": self.index,
            **({"changes": changes} if changes else {}),
            "plan": None if self.plan is None else plan_json(self.plan, self.table),
            "tokens": self.tokens,
            "skipped": list(self.skipped),
            "start": self.after.start,
            "ahead": sorted(self.after.ahead),
            "plan_s": self.plan_s,
            "rows": [list(row) for row in self.rows],
            "last": self.last,
            "first": self.first,
            # As it is: JSON would make lists of tuples, and text of numbers that are keys.
            "source": base64.b64encode(pickle.dumps(self.source)).decode(),
        }

    @classmethod
    def of(cls, message: Mapping[str, Any], base: PlanTable, job: str) -> PlannedBatch:
        """Returns the planned batch in a `message`.

        Args:
            message: message of rank 0.
            base: plan table that all ranks have.
            job: settings that must be equal on all ranks.

        Raises:
            DataError: the sender iterates something else.
            PlanError: the sender has another plan table.
        """
        if message["job"] != job:
            raise DataError(
                f"loader: got a plan for {message['job']}; expected {job}, as on this rank; give "
                "every rank the same dataset, arguments and state"
            )
        plan = message["plan"]
        table = base.changed(message.get("changes", {}))
        return cls(
            message["index"],
            None if plan is None else plan_of(plan, table, "rank 0's plan"),
            message["tokens"],
            tuple(message["skipped"]),
            Position(message["start"], frozenset(message["ahead"])),
            message["plan_s"],
            table,
            tuple(tuple(row) for row in message["rows"]),
            message["last"],
            pickle.loads(base64.b64decode(message["source"])),
            message["first"],
        )


def count_steps(
    order: EpochOrder,
    fit: Callable[[int], SampleBucket],
    recipe: Recipe,
    forget: Callable[[Iterable[int]], None],
) -> int:
    """Returns the number of steps of an epoch, without planning any.

    Args:
        order: index in the dataset of each place of the epoch.
        fit: bucket and tokens of a sample.
        recipe: settings by which batches are formed; accumulation is not bounded.
        forget: function that drops loaded samples.
    """
    position, steps = Position(), 0
    while index_at(order, position.start) is not None:
        batch = recipe.take(order, fit, position)
        forget([*(i for i, _ in batch.samples), *batch.skipped])
        position = batch.after
        steps += bool(batch.samples)
    return steps


def cut_epoch(
    order: EpochOrder,
    fit: Callable[[int], SampleBucket],
    table: Callable[[], PlanTable],
    recipe: Recipe,
    position: Position,
    index: int,
    evolves: bool = False,
) -> Iterator[PlannedBatch]:
    """Yields the planned batches of the rest of an epoch.

    How many turns an evolution has depends on the clock.

    Args:
        order: index in the dataset of each place of the epoch.
        fit: bucket and tokens of a sample.
        table: function that returns the rows to choose from, called before each batch.
        recipe: settings by which batches are formed and planned.
        position: position in the epoch.
        index: number of the next step.
        evolves: whether a better plan is searched for while the step before runs.
    """
    runs_s, last = 0.0, index_at(order, position.start) is None
    while not last:
        begin_s = time.perf_counter()
        now = table()
        batch, plan, rows = _bounded(order, fit, now, recipe, position)
        end_s = begin_s + min(_EVOLVES * runs_s, _MOST_EVOLVES_S)
        if evolves and plan is not None and time.perf_counter() < end_s:
            plan, rows = _further(batch, fit, now, recipe, plan, rows, _until(end_s))
        runs_s = plan.makespan_s if plan is not None else 0.0
        position = batch.after
        last = index_at(order, position.start) is None
        took_s = time.perf_counter() - begin_s
        yield PlannedBatch(
            index, plan, batch.tokens, batch.skipped, position, took_s, now, rows, last
        )
        index += 1


def _until(end_s: float) -> Iterator[int]:
    return takewhile(lambda _: time.perf_counter() < end_s, count())


def _bounded(
    order: EpochOrder,
    fit: Callable[[int], SampleBucket],
    table: PlanTable,
    recipe: Recipe,
    position: Position,
) -> tuple[Batch, StepPlan | None, Rows]:
    """Returns the next batch, larger or smaller until its micro-batches are within the bounds.

    With its plan, and the rows that it is a plan of.
    """
    limit, allowed = recipe.most, recipe.allowed
    batch = recipe.take(order, fit, position)
    if not batch.samples:
        return batch, None, ()
    shrinks = False
    for _ in range(_TRIES):
        plan, rows = _planned(batch, fit, table, recipe)
        if not allowed.holds(plan) and len(batch.samples) > 1:
            shrinks = True
            share = allowed.most / plan.accumulation
            limit = max(1, min(batch.tokens - 1, int(batch.tokens * share)))
        elif plan.accumulation < allowed.least and not shrinks:
            limit = int(max(limit, batch.tokens) * min(2.0, allowed.least / plan.accumulation)) + 1
        else:
            break
        other = recipe.take(order, fit, position, limit)
        while other.samples == batch.samples and not shrinks:
            if index_at(order, other.after.start) is None:
                break
            limit *= 2  # the next sample is longer than what was added
            other = recipe.take(order, fit, position, limit)
        if other.samples == batch.samples:
            break  # none left, or no smaller batch
        batch = other
    else:
        plan, rows = _planned(batch, fit, table, recipe)
    return batch, plan, rows


def _further(
    batch: Batch,
    fit: Callable[[int], SampleBucket],
    table: PlanTable,
    recipe: Recipe,
    plan: StepPlan,
    rows: Rows,
    turns: Iterable[int],
) -> tuple[StepPlan, Rows]:
    """Returns a plan that ends earlier and its rows, where an evolution finds one."""
    if recipe.prices is None or plan.makespan_s <= plan.bound_s:
        return plan, rows
    other, other_rows = _planned(batch, fit, table, recipe, turns)
    allowed = recipe.allowed
    holds = allowed.holds(other) or not allowed.holds(plan)
    if holds and other.accumulation >= min(allowed.least, plan.accumulation):
        return other, other_rows
    return plan, rows


def _planned(
    batch: Batch,
    fit: Callable[[int], SampleBucket],
    table: PlanTable,
    recipe: Recipe,
    turns: Iterable[int] = (),
) -> tuple[StepPlan, Rows]:
    """Returns the plan of a batch, and the rows that it is of."""
    if not recipe.packs:
        return recipe.plan(batch.samples, table, lambda i: fit(i).dims), ()
    found = _packed(batch, fit, table, recipe, turns)
    if not recipe.chooses:
        return found
    numbered = [(number, bucket) for number, (_, bucket) in enumerate(batch.samples)]
    alone = recipe.plan(numbered, table, lambda number: fit(batch.samples[number][0]).dims)
    if found[0].makespan_s < alone.makespan_s * (1 - PACKING_GAIN):
        return found
    return alone, tuple((i,) for i, _ in batch.samples)


def _packed(
    batch: Batch,
    fit: Callable[[int], SampleBucket],
    table: PlanTable,
    recipe: Recipe,
    turns: Iterable[int],
) -> tuple[StepPlan, Rows]:
    if recipe.prices is not None:
        sequences = [(i, fit(i).tokens) for i, _ in batch.samples]
        only = batch.samples[0][1] if recipe.mode == "intra" else None
        return plan_rows(sequences, table, recipe.prices, only, recipe.mode, turns)

    def row_s(bucket: Bucket) -> float:
        rows = table.rows[table.key(bucket)]
        usable = rows if recipe.mode in FREE_MODES else rows[:1]
        return min(row.rank_seconds for row in usable)

    one = recipe.mode == "intra"
    packed = pack(batch.samples, lambda i: fit(i).tokens, table.buckets, row_s, one)
    numbered = list(enumerate(packed.buckets))

    def row_dims(number: int) -> Dims:
        ((name, _),) = packed.buckets[number].shape_key
        return ((name, sum(fit(i).tokens for i in packed.rows[number])),)

    return recipe.plan(numbered, table, row_dims), packed.rows
