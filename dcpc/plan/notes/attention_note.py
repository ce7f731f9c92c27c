"""Report lines on attention: the cost of each way to shard it, by bucket, and the reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dcpc.buckets import BATCH, Bucket
from dcpc.ir import BucketPlan
from dcpc.passes.placement.lowering_costs import AskedAt, LoweringCosts, lowering_lines
from dcpc.passes.placement.objective import Objective
from dcpc.passes.sharding.attention_ways import attentions, lowering_of, way_text
from dcpc.plan.prices.priced import Priced
from dcpc.plan.runnable import Runnable


def attention_lines(
    by_bucket: Mapping[Bucket, Runnable], plans: Mapping[Bucket, BucketPlan]
) -> list[str]:
    """Returns lines on each bucket's attention: the chosen sharding, each way's cost, crossovers.

    Empty where no bucket is split over ranks, or the model has no attention.
    """
    split = [bucket for bucket, plan in plans.items() if plan.sp > 1]
    lines: list[str] = []
    for priced in {id(by_bucket[b]): by_bucket[b].priced for b in split}.values():
        mine = [b for b in split if by_bucket[b].priced is priced]
        small = priced.lift.small
        if attentions(small.program):
            chosen = {b: _ways(priced, b, plans[b]) for b in mine}
            lines += [_chosen(priced, b, plans[b], chosen[b]) for b in mine]
            costs = LoweringCosts(small.program, small.sharding)
            points = [_point(priced, b, plans[b], chosen[b]) for b in mine]
            lines += lowering_lines(costs, points)
            lines += dict.fromkeys(str(p.weighed) for p in points)
            lines += _crossovers(costs, priced, mine, plans)
    return lines


def _sizes(bucket: Bucket, plan: BucketPlan) -> dict[str, int]:
    return {**bucket.sizes, BATCH: plan.micro_batch}


def _ways(priced: Priced, bucket: Bucket, plan: BucketPlan) -> dict[str, str]:
    """Returns attention's name -> how a bucket's plan splits it."""
    placement = priced.placement(_sizes(bucket, plan), plan.sp)
    found = {}
    for node in attentions(priced.traced.program):
        placed = placement.nodes[node.name]
        found[node.name] = way_text(lowering_of(placed), placed.across)
    return found


def _point(priced: Priced, bucket: Bucket, plan: BucketPlan, chosen: Mapping[str, str]) -> AskedAt:
    return AskedAt(
        bucket=str(bucket),
        sizes=_sizes(bucket, plan),
        sp=plan.sp,
        weighed=Objective.of_group(priced.traced.device, plan.sp),
        chosen=chosen,
    )


def _chosen(priced: Priced, bucket: Bucket, plan: BucketPlan, ways: Mapping[str, str]) -> str:
    """Returns a line with the number of a bucket's attentions that each way shards."""
    shown = ", ".join(f"{count} by {way}" for way, count in Counter(ways.values()).items())
    found = priced.placement(_sizes(bucket, plan), plan.sp)
    search = f"elimination of width {found.width}, {found.gap:.2%} above the least cost"
    return f"attention of {bucket}, sp {plan.sp}: {shown} ({search})"


def _crossovers(
    costs: LoweringCosts, priced: Priced, buckets: list[Bucket], plans: Mapping[Bucket, BucketPlan]
) -> list[str]:
    """Returns for each degree the lengths from which each way is cheapest, if one dim varies.

    The lengths are those of the buckets' range, whatever degree their plans have.
    """
    names = {n: {b.sizes[n] for b in buckets} for n in buckets[0].sizes if n != BATCH}
    varying = [n for n, lengths in names.items() if len(lengths) > 1]
    if len(varying) != 1:
        return []
    dim, lines = varying[0], []
    ends = min(names[dim]), max(names[dim])
    for sp in sorted({plans[b].sp for b in buckets}):
        seconds = Objective(priced.traced.device)
        for group in costs.groups:
            sizes = _sizes(buckets[0], plans[buckets[0]])
            found = costs.crossovers(group[0], sizes, dim, ends, sp, seconds)
            if found:
                shown = ", ".join(f"{way} from {dim}={length}" for length, way in found)
                lines.append(f"cheapest for {group[0]} at sp {sp}: {shown}")
    return lines
