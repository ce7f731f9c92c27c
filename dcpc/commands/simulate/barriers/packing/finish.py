"""From a draft to the plan that users get: positions in the batch, runs, and what binds."""

from dcpc.commands.simulate.barriers.packing.pack import Draft
from dcpc.commands.simulate.barriers.plan import BatchPlan, Group, MicroStep
from dcpc.commands.simulate.barriers.workload import Workload


def finish(work: Workload, draft: Draft, bound_s: float) -> BatchPlan:
    """Returns the draft as a plan: longest micro-step first, groups by rank."""
    positions = [iter(members) for members in work.members]
    by_step: dict[int, list[Group]] = {}
    for g in sorted(range(len(draft.step)), key=lambda g: (draft.step[g], draft.first[g])):
        if draft.kinds[g]:
            by_step.setdefault(draft.step[g], []).append(_group(work, draft, g, positions))
    fixed_s = work.cost.fixed_s
    steps = [
        MicroStep(tuple(groups), fixed_s + max(group.load_s for group in groups))
        for groups in by_step.values()
    ]
    steps.sort(key=lambda step: -step.seconds_s)
    seconds_s = sum(step.seconds_s for step in steps)
    bound_s = min(bound_s, seconds_s)  # equal but for rounding
    return BatchPlan(work.ranks, tuple(steps), seconds_s, bound_s, _binds(work, steps))


def _group(work: Workload, draft: Draft, g: int, positions: list) -> Group:  # type: ignore[type-arg]
    degree, setting = int(work.degrees[draft.degree[g]]), draft.setting[g]
    kinds = sorted(draft.kinds[g])
    return Group(
        first_rank=draft.first[g],
        degree=degree,
        setting=work.cost.settings[setting],
        sequences=tuple(next(positions[k]) for k in kinds),
        lengths=tuple(int(work.keys[k]) for k in kinds),
        load_s=float(work.seconds[setting, draft.degree[g], kinds].sum()),
    )


def _binds(work: Workload, steps: list[MicroStep]) -> str:
    """A sentence: what the longest micro-step waits for, and how full memory is."""
    longest = steps[0]
    slowest = max(longest.groups, key=lambda group: group.load_s)
    key_weight = max(slowest.lengths)
    seconds_s = sum(step.seconds_s for step in steps)
    total = float(work.weights @ work.counts)
    full = total / (work.rank_capacity * work.ranks * len(steps))
    load_s = longest.seconds_s - work.cost.fixed_s
    busy_s = sum(group.degree * group.load_s for group in longest.groups)
    busy = busy_s / (work.ranks * load_s) if load_s > 0 else 1.0
    parts = [
        f"{len(steps)} micro-steps, {work.min_steps} forced by memory ({full:.0%} full), "
        f"fixed costs {len(steps) * work.cost.fixed_s:.2f} of {seconds_s:.2f} s",
        f"the longest waits {load_s:.2f} s for sequence {key_weight} at sp={slowest.degree}, "
        f"its ranks {busy:.0%} busy",
    ]
    return "; ".join(parts)
