"""What the report says of attention: the cost of each way to split it, by bucket, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dcpc.buckets import BATCH, Bucket
from dcpc.ir import BucketPlan
from dcpc.passes.label_costs import Rates
from dcpc.passes.lowering_costs import LoweringCosts, lowering_lines
from dcpc.passes.lowerings import attentions, lowering_of, way_text
from dcpc.variants import Variants


def attention_lines(
    by_bucket: Mapping[Bucket, Variants], plans: Mapping[Bucket, BucketPlan]
) -> list[str]:
    """Returns what was chosen for each bucket's attentions, what each way costs, and crossovers.

    Nothing where no bucket is split over ranks, or none has attention.

    Args:
        by_bucket: what is made from the trace of each bucket.
        plans: the setting of every bucket.
    """
    split = [bucket for bucket, plan in plans.items() if plan.sp > 1]
    lines: list[str] = []
    for variants in {id(by_bucket[b]): by_bucket[b] for b in split}.values():
        mine = [b for b in split if by_bucket[b] is variants]
        planner = variants.planner
        if attentions(planner.program):
            lines += [_chosen(variants, b, plans[b]) for b in mine]
            costs = LoweringCosts(planner.program, planner.sharding)
            points = [
                (str(b), _sizes(b, plans[b]), plans[b].sp, real_rates(variants, plans[b].sp))
                for b in mine
            ]
            lines += lowering_lines(costs, points)
            lines += _crossovers(costs, variants, mine, plans)
    return lines


def real_rates(variants: Variants, sp: int) -> Rates:
    """Returns the machine's rates with the start of a collective, and no price for memory."""
    rates = variants.rates(sp)
    alpha_s = variants.device.link(sp).alpha_s
    return replace(rates, held_s_per_byte=0.0, link_latency_s=alpha_s)


def _sizes(bucket: Bucket, plan: BucketPlan) -> dict[str, int]:
    return {**bucket.sizes, BATCH: plan.micro_batch}


def _chosen(variants: Variants, bucket: Bucket, plan: BucketPlan) -> str:
    """Returns how many of a bucket's attentions are split which way."""
    placement = variants.placement(_sizes(bucket, plan), plan.sp)
    counts: dict[str, int] = {}
    for node in attentions(variants.program):
        chosen = placement.nodes[node.name]
        way = way_text(lowering_of(chosen), chosen.across)
        counts[way] = counts.get(way, 0) + 1
    shown = ", ".join(f"{count} by {way}" for way, count in counts.items())
    width = f"elimination of width {placement.width}"
    return f"attention of {bucket}, sp {plan.sp}: {shown} ({width})"


def _crossovers(
    costs: LoweringCosts,
    variants: Variants,
    buckets: list[Bucket],
    plans: Mapping[Bucket, BucketPlan],
) -> list[str]:
    """Returns for each degree from which length on each way is the cheapest; where one dim varies.

    The lengths are those of the buckets' range, whatever degree their plans have.
    """
    names = {n: {b.sizes[n] for b in buckets} for n in buckets[0].sizes if n != BATCH}
    varying = [n for n, lengths in names.items() if len(lengths) > 1]
    if len(varying) != 1:
        return []
    dim, lines = varying[0], []
    ends = min(names[dim]), max(names[dim])
    for sp in sorted({plans[b].sp for b in buckets}):
        rates = real_rates(variants, sp)
        for group in costs.groups:
            sizes = _sizes(buckets[0], plans[buckets[0]])
            found = costs.crossovers(group[0], sizes, dim, ends, sp, rates)
            if found:
                shown = ", ".join(f"{way} from {dim}={length}" for length, way in found)
                lines.append(f"cheapest for {group[0]} at sp {sp}: {shown}")
    return lines
