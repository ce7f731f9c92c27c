"""Buckets that do not fit: the memory each needs, how much is missing, and options that fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dcpc.buckets import Bucket
from dcpc.commands.report.what_if import as_traced
from dcpc.ir import BucketPlan
from dcpc.plan.choose import TriedRow, choice_text, least_needed
from dcpc.plan.options import block_of, degrees
from dcpc.plan.planning import Planned, PlanRequest, plan_buckets
from dcpc.plan.progress_bar import during, tracked
from dcpc.symbolic_profile import as_text, bytes_text, headed

# More ranks are tried in powers of two, up to so many times those that were asked for.
MOST_TIMES = 64
# A memory that a plan was asked to fit and does not, as a GPU's segments take more, is raised by
# this share, so many times.
RAISED = 1.05
RAISES = 8
# Of more buckets than these, those that need least have no options of their own looked for.
MOST_SOUGHT = 8


@dataclass(frozen=True, slots=True)
class Remedy:
    """Options with which a bucket fits; a plan was made with them.

    Attributes:
        option: text of the option, such as "--memory 1.3GB".
        plan: the bucket's setting with it.
        amount: bytes or ranks of the option; a bucket fits with more as well.
    """

    option: str
    plan: BucketPlan
    amount: int = 0


@dataclass(frozen=True, slots=True)
class BucketNeed:
    """Memory that a bucket needs which no setting fits.

    Attributes:
        bucket: bucket.
        row: the setting tried that needs least.
        remedies: kind, such as "--memory" -> option that fits; absent: none of this kind does.
    """

    bucket: Bucket
    row: TriedRow
    remedies: Mapping[str, Remedy] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that buckets need which no setting fits.

    Attributes:
        buckets: all such buckets, or those that need most.
        shared: options with which all of these fit at once.
    """

    buckets: Sequence[BucketNeed]
    shared: Sequence[str] = ()


def needs(planned: Planned, memory_of: Callable[[int], int]) -> Needs:
    """Returns the memory that misfits need, and options with which they fit.

    Of many misfits only those that need most, in the order of the plan: each takes a while.
    """
    rows = {bucket: _least(planned, planned.tables[bucket]) for bucket in planned.misfits}
    most = sorted(rows, key=lambda bucket: -rows[bucket].needed_bytes)[:MOST_SOUGHT]
    sought = [bucket for bucket in rows if bucket in most]
    with as_traced(planned):
        found = [
            BucketNeed(bucket, rows[bucket], dict(_remedies(planned, bucket, memory_of)))
            for bucket in tracked(sought, "what would fit:")
        ]
        with during("what would fit all of these"):
            return Needs(found, [*_shared(planned, found, memory_of)])


def _shared(
    planned: Planned, found: Sequence[BucketNeed], memory_of: Callable[[int], int]
) -> Iterator[str]:
    """Yields the options with which all of several buckets fit; plans were made with each."""
    for kind in found[0].remedies if len(found) > 1 else ():
        if not all(kind in need.remedies for need in found):
            continue
        most = max((need.remedies[kind] for need in found), key=lambda remedy: remedy.amount)
        request = (
            replace(planned.request, memory_bytes=most.amount)
            if kind == "--memory"
            else _on_ranks(planned.request, most.amount, memory_of)
        )
        less = [n.bucket for n in found if n.remedies[kind].amount < most.amount]
        if all(_plan(planned, bucket, request)[0] is not None for bucket in less):
            yield most.option


def _remedies(
    planned: Planned, bucket: Bucket, memory_of: Callable[[int], int]
) -> Iterator[tuple[str, Remedy]]:
    asked = planned.request
    _, free = block_of(asked.block or None, degrees("auto", asked.world), asked.world)
    changes: dict[str, PlanRequest] = {}
    if asked.recompute_mode != "auto":
        changes["--recompute auto"] = replace(asked, recompute_mode="auto")
    if asked.sps != free:
        changes["--sp auto"] = replace(asked, sps=free)
    if len(changes) == 2:
        changes[" ".join(changes)] = replace(asked, sps=free, recompute_mode="auto")
    for option, request in changes.items():
        plan, _ = _plan(planned, bucket, request)
        if plan is not None:
            yield option, Remedy(option, plan)
            break
    yield from _more_ranks(planned, bucket, memory_of)
    yield from _more_memory(planned, bucket)


def _more_ranks(
    planned: Planned, bucket: Bucket, memory_of: Callable[[int], int]
) -> Iterator[tuple[str, Remedy]]:
    """Tries more ranks, where a rank keeps the same and wider groups were not ruled out."""
    asked = planned.request
    if asked.parameters != "whole" or asked.sps != degrees("auto", asked.world):
        return
    world = asked.world
    while (world := world * 2) <= MOST_TIMES * asked.world:
        if memory_of(world) < asked.resident_bytes:
            return
        plan, _ = _plan(planned, bucket, _on_ranks(asked, world, memory_of))
        if plan is not None:
            yield "--world", Remedy(f"--world {world}", plan, world)
            return


def _on_ranks(asked: PlanRequest, world: int, memory_of: Callable[[int], int]) -> PlanRequest:
    sps = degrees("auto", world)
    return replace(asked, world=world, sps=sps, memory_bytes=memory_of(world))


def _more_memory(planned: Planned, bucket: Bucket) -> Iterator[tuple[str, Remedy]]:
    """Looks for a memory that the bucket fits, from the need of the setting that needs least."""
    rows = planned.tables[bucket]
    size_bytes = planned.memory_bytes
    for _ in range(RAISES):
        least = _least(planned, rows).needed_bytes
        size_bytes = round_up(least if least > size_bytes else math.ceil(size_bytes * RAISED))
        plan, rows = _plan(planned, bucket, replace(planned.request, memory_bytes=size_bytes))
        if plan is not None:
            yield "--memory", Remedy(f"--memory {option_text(size_bytes)}", plan, size_bytes)
            return


def _least(planned: Planned, rows: Sequence[TriedRow]) -> TriedRow:
    """Returns the row that needs least; of those that run outside of planned steps, too."""
    return least_needed([row for row in rows if planned.request.world % row.sp == 0])


def _plan(
    planned: Planned, bucket: Bucket, request: PlanRequest
) -> tuple[BucketPlan | None, tuple[TriedRow, ...]]:
    found = plan_buckets({bucket: planned.by_bucket[bucket].priced}, request)
    return found.plans.get(bucket), found.tables[bucket]


def round_up(size_bytes: int) -> int:
    """Returns bytes rounded up to three digits, as `--memory` is written."""
    unit: int = 10 ** max(0, len(str(size_bytes)) - 3)
    return -(-size_bytes // unit) * unit


def option_text(size_bytes: int) -> str:
    """Returns bytes of three digits as an option: `1.31GB`."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g}{unit}"
    return str(size_bytes)


def needs_text(planned: Planned, found: Needs) -> str:
    """Returns a table of every bucket's needs, and lines with the options that fit."""
    asked = planned.request
    table = headed(
        f"a rank has {bytes_text(asked.memory_bytes)}; it keeps "
        f"{bytes_text(asked.resident_bytes)} whatever runs: parameters ({asked.parameters}), "
        "buffers, their gradients, the optimizer's state",
        ["bucket"],
        ["sp", "micro-batch", "recompute", "activations", "needed"],
        "",
    )
    for bucket, rows in planned.tables.items():
        missed = bucket in planned.misfits
        row = _least(planned, rows) if missed else _chosen(planned, bucket)
        over = bytes_text(row.needed_bytes - asked.memory_bytes)
        table.add_row(
            str(bucket),
            str(row.sp),
            str(row.micro_batch),
            row.recompute,
            bytes_text(row.peak_bytes),
            bytes_text(row.needed_bytes),
            f"does not fit: {over} too much" if missed else "fits",
        )
    return as_text(table, *remedy_lines(planned, found))


def _chosen(planned: Planned, bucket: Bucket) -> TriedRow:
    plan = planned.plans[bucket]
    return next(
        row
        for row in planned.tables[bucket]
        if (row.sp, row.micro_batch) == (plan.sp, plan.micro_batch)
    )


def _segments(need: BucketNeed, remedy: Remedy) -> str:
    """Says why a bucket's memory is more than its setting needs, where it is."""
    more = remedy.option.startswith("--memory") and remedy.amount > round_up(need.row.needed_bytes)
    return " (with the segments of the GPU's allocator)" if more else ""


def remedy_lines(planned: Planned, found: Needs) -> list[str]:
    """Returns a line for each option that fits, and one for all buckets that do not fit."""
    each = found.buckets
    lines = [
        f"{n.bucket} fits with {r.option}: {choice_text(r.plan)}{_segments(n, r)}"
        for n in each
        for r in n.remedies.values()
    ]
    lines += [f"{n.bucket} fits with nothing that was tried" for n in each if not n.remedies]
    if found.shared:
        lines.append(f"all of these fit with {', or with '.join(found.shared)}")
    others = len(planned.misfits) - len(each)
    lines += [f"{others} more do not fit and need less than these"] * bool(others)
    asked = planned.request
    if asked.parameters == "whole" and asked.resident_bytes > asked.memory_bytes / 2:
        ranks = "the ranks" if asked.world > 1 else "more ranks (--world)"
        lines.append(
            f"--parameters auto shares out the {bytes_text(asked.resident_bytes)} that a rank "
            f"keeps over {ranks}"
        )
    return lines
