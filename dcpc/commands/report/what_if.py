"""Plans of the same traces for other memory, other numbers of ranks and lengths between buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table

from dcpc.buckets import Bucket
from dcpc.ir import BucketPlan
from dcpc.plan.choose import degree_changes
from dcpc.plan.options import degrees
from dcpc.plan.planning import Planned, PlanRequest, plan_buckets
from dcpc.plan.progress_bar import tracked
from dcpc.symbolic_profile import as_text, bytes_text, seconds_text
from dcpc.trace import casting

# A crossover is looked for until the lengths on both sides are this close.
CLOSE = 0.01


@dataclass(frozen=True, slots=True)
class WhatIf:
    """Plans with other memory or ranks."""

    memory_bytes: int
    world: int
    plans: Mapping[Bucket, BucketPlan | None]

    @property
    def title(self) -> str:
        """Memory and ranks, as a heading."""
        ranks = "1 rank" if self.world == 1 else f"{self.world:,} ranks"
        return f"{bytes_text(self.memory_bytes)} on {ranks}"


def what_if(planned: Planned, memory_bytes: int | None = None, world: int | None = None) -> WhatIf:
    """Returns the plans of the same traces for other memory or another number of ranks.

    Args:
        planned: plan to vary; not changed.
        memory_bytes: memory of a rank; default: as planned.
        world: ranks; default: as planned. Degrees are its divisors where they were the world's
            divisors before, else those that were asked for and are not more than it.
    """
    asked = planned.request
    world = asked.world if world is None else world
    sps = asked.sps
    if world != asked.world and sps == degrees("auto", asked.world):
        sps = degrees("auto", world)
    request = replace(
        asked,
        sps=tuple(sp for sp in sps if sp <= world),
        memory_bytes=asked.memory_bytes if memory_bytes is None else memory_bytes,
        world=world,
    )
    with as_traced(planned):
        plans = {bucket: _plan(planned, bucket, request) for bucket in planned.by_bucket}
    return WhatIf(request.memory_bytes, world, plans)


def _plan(planned: Planned, bucket: Bucket, request: PlanRequest, like: Bucket | None = None) -> (
    BucketPlan | None
):  # fmt: skip
    priced = planned.by_bucket[bucket if like is None else like].priced
    if not any(request.world % sp == 0 for sp in request.sps):
        return None
    return plan_buckets({bucket: priced}, request).plans.get(bucket)


@contextmanager
def as_traced(planned: Planned) -> Iterator[None]:
    """Has traces within no autocast of their own: a program has its casts already."""
    if planned.autocast is None:
        yield
        return
    with casting("cpu", None), casting("cuda", None):
        yield


def degree_crossings(planned: Planned) -> dict[tuple[Bucket, Bucket], tuple[Bucket, Bucket]]:
    """Returns where the degree changes, looked for between the buckets.

    Returns:
        Neighbouring buckets of different degrees -> the longest length known to have the first
        one's degree and the shortest known to have another, at most 1% apart. Only where one dim
        tells all buckets apart and the two share a trace: between lengths of several dims there is
        no one way.
    """
    found: dict[tuple[Bucket, Bucket], tuple[Bucket, Bucket]] = {}
    names = {name for bucket in planned.plans for name, _ in bucket.shape_key}
    if len(names) != 1:
        return found
    with as_traced(planned):
        changes = degree_changes(list(planned.plans.values()))
        for a, b in tracked(changes, "look for where the degree changes,", lambda c: c[0].bucket):
            same_batch = a.bucket.batch == b.bucket.batch
            shared = planned.by_bucket[a.bucket] is planned.by_bucket[b.bucket]
            if same_batch and shared:
                found[a.bucket, b.bucket] = _bisect(planned, a, b, *names)
    return found


def _bisect(planned: Planned, a: BucketPlan, b: BucketPlan, dim: str) -> tuple[Bucket, Bucket]:
    low, high = a.bucket[dim], b.bucket[dim]
    while high - low > max(1, CLOSE * low):
        middle = (low + high) // 2
        bucket = Bucket.of({**a.bucket.sizes, dim: middle})
        plan = _plan(planned, bucket, planned.request, like=a.bucket)
        if plan is not None and plan.sp == a.sp:
            low = middle
        else:
            high = middle
    return (
        Bucket.of({**a.bucket.sizes, dim: low}),
        Bucket.of({**b.bucket.sizes, dim: high}),
    )


def crossing_lines(
    planned: Planned, crossings: Mapping[tuple[Bucket, Bucket], tuple[Bucket, Bucket]]
) -> list[str]:
    """Returns a line for each crossover that was looked for between buckets."""
    plans = planned.plans
    return [
        f"sp {plans[a].sp} up to {low}, sp {plans[b].sp} from {high}: found between the buckets"
        for (a, b), (low, high) in crossings.items()
    ]


def cell_text(plan: BucketPlan | None) -> str:
    """Returns a setting in a few words, with its seconds a sample."""
    if plan is None:
        return "does not fit"
    seconds = seconds_text(plan.seconds_s / plan.micro_batch)
    return f"sp {plan.sp}, batch {plan.micro_batch}, {plan.recompute}, {seconds}"


def what_if_text(cases: Sequence[WhatIf]) -> str:
    """Returns a table of each case's choice for each bucket, with the seconds of a sample."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("bucket", no_wrap=len(cases) < 3)
    for case in cases:
        table.add_column(case.title)
    for bucket in cases[0].plans:
        table.add_row(str(bucket), *(cell_text(case.plans[bucket]) for case in cases))
    return "what if: sp, micro-batch, recompute, time of a sample\n" + as_text(table)
