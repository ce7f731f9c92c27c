"""Where the choice changes from one length to the next: neighbours that chose alike are merged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from dcpc.buckets import Bucket
from dcpc.ir import BucketPlan

Stretch = tuple[BucketPlan, ...]


def elements(bucket: Bucket) -> int:
    """Returns the product of a bucket's lengths, by which buckets are ordered."""
    return math.prod(size for _, size in bucket.shape_key)


def stretches(plans: Sequence[BucketPlan]) -> list[Stretch]:
    """Returns the plans by rising length, neighbours with the same choice together.

    Args:
        plans: one for each bucket, in any order.
    """
    found: list[list[BucketPlan]] = []
    for plan in sorted(plans, key=lambda p: (elements(p.bucket), p.bucket.shape_key)):
        if found and _choice(found[-1][0]) == _choice(plan):
            found[-1].append(plan)
        else:
            found.append([plan])
    return [tuple(stretch) for stretch in found]


def crossover_lines(plans: Sequence[BucketPlan]) -> list[str]:
    """Returns the merged choices by rising length, a line each, and where the degree changes."""
    if not plans:
        return []
    merged = stretches(plans)
    lines = ["choices by rising length, neighbours with the same one merged"]
    lines += [f"  {lengths_text(s)}: {choice_text(s[0])}" for s in merged]
    changes = [
        f"sp {a.sp} -> {b.sp} between {a.bucket} and {b.bucket}" for a, b in degree_changes(plans)
    ]
    text = "; ".join(changes) or f"none, sp {plans[0].sp} throughout"
    return [*lines, f"crossover lengths of the degree: {text}"]


def degree_changes(plans: Sequence[BucketPlan]) -> list[tuple[BucketPlan, BucketPlan]]:
    """Returns the neighbours by rising length between which the degree changes."""
    ordered = [plan for stretch in stretches(plans) for plan in stretch]
    pairs = itertools.pairwise(ordered)
    return [(a, b) for a, b in pairs if a.sp != b.sp]


def lengths_text(stretch: Stretch) -> str:
    """Returns the buckets of a stretch: one, or the first and the last."""
    first, last = stretch[0].bucket, stretch[-1].bucket
    return str(first) if len(stretch) == 1 else f"{first} to {last} ({len(stretch)} buckets)"


def choice_text(plan: BucketPlan) -> str:
    """Returns a plan's setting in words."""
    again = f"{plan.recompute} of {plan.steps} steps of recompute" if plan.recompute else ""
    return f"sp {plan.sp}, micro-batch {plan.micro_batch}, {again or 'nothing recomputed'}"


def _choice(plan: BucketPlan) -> tuple[int, ...]:
    """What tells choices apart; menus of other lengths have other numbers of steps."""
    steps = plan.steps if plan.recompute else 0
    return plan.sp, plan.micro_batch, plan.recompute, steps
