"""A recorded plan looked at again: its timeline as text, and the plan that dcpc makes now."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from dcpc.errors import PlanError
from dcpc.runtime.planner.plan_file import PlanFile
from dcpc.runtime.planner.plans import PlannedMicroBatch, StepPlan, timeline
from dcpc.runtime.planner.table import PlanTable

_WIDTH = 72


def replay(recorded: PlanFile, table: PlanTable | None = None) -> str:
    """Returns the recorded plan as text, and its comparison with a plan made now.

    Args:
        recorded: plan with the table and the samples it was made from.
        table: table of the model as it is now; None: the recorded one.

    Raises:
        PlanError: `table` is another one than the plan was made from.
    """
    if table is not None and table.hash != recorded.table.hash:
        raise PlanError(
            f"replay: got a plan made from plan table {recorded.table.hash}; expected table "
            f"{table.hash}, which this model, buckets, world, memory and device have now; record "
            "a new plan, or replay the file alone"
        )
    plan = recorded.plan
    if plan.pipelines:
        verdict = "not planned again: the file does not have the costs of stages"
        return "\n".join([*_stages(plan), *_predicted(plan), verdict]) + "\n"
    if any(mb.dims for mb in plan.micro_batches) and recorded.lengths is None:
        verdict = "not planned again: the file does not say which sequences a packed row has"
    else:
        again = recorded.again(recorded.lengths)
        verdict = f"planned again: {_compared(plan.packed(recorded.rows), again)}"
    return "\n".join([*_lines(plan, recorded.table.world), verdict]) + "\n"


def _compared(plan: StepPlan, again: StepPlan) -> str:
    """Says how a plan made now differs from the recorded one."""
    if again.micro_batches == plan.micro_batches:
        return "the same"

    def settings(found: StepPlan) -> Counter[PlannedMicroBatch]:
        counts = [(len(mb.sample_ids),) for mb in found.micro_batches]
        pairs = zip(found.micro_batches, counts, strict=True)
        return Counter(replace(mb, sample_ids=count, rows=()) for mb, count in pairs)

    if settings(again) == settings(plan):
        return "the same micro-batches; which samples of a bucket are in which differs"
    change = f"{again.makespan_s / plan.makespan_s - 1:+.1%}"
    if change in ("+0.0%", "-0.0%"):
        return f"other micro-batches, which take as long, {again.makespan_s:.4g} s"
    return f"{again.makespan_s:.4g} s, {change}"


def _lines(plan: StepPlan, world: int) -> list[str]:
    samples = sum(len(mb.sample_ids) for mb in plan.micro_batches)
    begins, busy_s, end_s = timeline(plan.micro_batches, world, plan.block)
    lines = [
        f"{samples} samples in {len(plan.micro_batches)} micro-batches on {world} ranks, mode "
        f"{plan.mode}, plan table {plan.table}",
        "",
        f"{'begin':>9} {'end':>9}  ranks",
    ]
    for mb, begin_s in zip(plan.micro_batches, begins, strict=True):
        ranks = str(mb.ranks[0]) if mb.sp == 1 else f"{mb.ranks[0]}-{mb.ranks[-1]}"
        lines.append(
            f"{begin_s:9.4f} {begin_s + mb.seconds_s:9.4f}  {ranks:9} {len(mb.sample_ids)} of "
            f"{mb.bucket}, sp {mb.sp}, recompute step {mb.menu_step}"
            + (f", padded to {mb.shape}" if mb.dims else "")
        )
    lines += ["", *_chart(plan, begins, world), ""]
    for rank in range(world):
        idle_s = plan.makespan_s - busy_s[rank]
        lines.append(
            f"rank {rank}: busy {busy_s[rank]:.4f} s, idle {idle_s:.4f} s, ends {end_s[rank]:.4f} s"
        )
    predicted, *rest = _predicted(plan)
    rounds = f"ranks free of each other {plan.free_s:.4g} s, in rounds {plan.lockstep_s:.4g} s"
    return [*lines, predicted, rounds, *rest]


def _predicted(plan: StepPlan) -> list[str]:
    return [
        f"predicted {plan.makespan_s:.4g} s, imbalance {plan.imbalance:.1%}",
        f"lower bound {plan.bound_s:.4g} s, gap {plan.gap:.1%}",
        f"what binds: {plan.binds}",
    ]


def _stages(plan: StepPlan) -> list[str]:
    """Returns the micro-batches of each pipeline, and the actions of its stages."""
    every = plan.micro_batches
    samples = sum(len(mb.sample_ids) for mb in every)
    width = len(plan.busy_s) // len(plan.pipelines)
    lines = [
        f"{samples} samples in {len(every)} micro-batches on {len(plan.pipelines)} pipelines of "
        f"{width} ranks, plan table {plan.table}",
        "",
    ]
    for number, text in enumerate(plan.pipelines):
        mine = [mb for mb in every if mb.ranks[0] == number * width]
        lines += [f"pipeline {number}, ranks {number * width} to {(number + 1) * width - 1}"]
        lines += [f"  {i}: {len(mb.sample_ids)} of {mb.bucket}" for i, mb in enumerate(mine)]
        for stage, row in enumerate(text.split(";")):
            order, _, settings = row.partition(":")
            lines.append(f"  stage {stage}: {order}; recompute steps {settings}")
        lines.append("")
    busy = ", ".join(f"{busy_s:.4g}" for busy_s in plan.busy_s)
    return [*lines, f"ranks are busy for {busy} s"]


def _chart(plan: StepPlan, begins: tuple[float, ...], world: int) -> list[str]:
    """Returns a line a rank: each micro-batch's letter over its seconds, `.` where idle."""
    scale = _WIDTH / plan.makespan_s if plan.makespan_s > 0 else 0.0
    rows = [["."] * _WIDTH for _ in range(world)]
    for i, (mb, begin_s) in enumerate(zip(plan.micro_batches, begins, strict=True)):
        first, last = round(begin_s * scale), round((begin_s + mb.seconds_s) * scale)
        for rank in mb.ranks:
            rows[rank][first:last] = chr(ord("a") + i % 26) * (last - first)
    return [f"{rank:>4} |{''.join(row)}|" for rank, row in enumerate(rows)]
