"""Runs systems on the same samples and sums up the steps: seconds, tokens, idling, bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dcpc.commands.simulate.model_rows import ModelCosts
from dcpc.commands.simulate.timeline import StepTimeline, of_step
from dcpc.runtime.planner.plans import StepPlan, rounds, step_plan
from dcpc.symbolic_profile import as_text, bytes_text, headed, seconds_text


@dataclass(frozen=True, slots=True)
class SimulatedOutcome:
    """Totals of a system on the samples.

    Attributes:
        name: name of the system.
        steps: number of optimizer steps.
        seconds_s: seconds of all steps.
        tokens: tokens trained, padding left out.
        samples: samples trained.
        dropped: samples never trained.
        idle_share: idle share of all ranks' time.
        wire_bytes: bytes sent by all ranks in all steps.
        bound_s: least seconds of all steps by this cost; 0: not known.
        shown: timelines of the first steps.
    """

    name: str
    steps: int
    seconds_s: float
    tokens: int
    samples: int
    dropped: int
    idle_share: float
    wire_bytes: float
    bound_s: float
    shown: tuple[StepTimeline, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all ranks."""
        return self.tokens / self.seconds_s if self.seconds_s > 0 else 0.0

    @property
    def step_s(self) -> float:
        """Mean seconds of a step."""
        return self.seconds_s / self.steps if self.steps else 0.0


@dataclass(slots=True)
class _Sum:
    """Steps so far."""

    shown: list[StepTimeline]
    steps: int = 0
    seconds_s: float = 0.0
    idle_s: float = 0.0
    wire_bytes: float = 0.0
    bound_s: float = 0.0
    bounded: bool = True

    def add(self, line: StepTimeline, wire_bytes: float, bound_s: float, most: int) -> None:
        self.steps += 1
        self.seconds_s += line.end_s
        self.idle_s += line.end_s * line.idle_share
        self.wire_bytes += wire_bytes
        self.bound_s += bound_s
        self.bounded &= bound_s > 0
        if len(self.shown) < most:
            self.shown.append(line)

    def outcome(self, name: str, tokens: int, samples: int, given: int) -> SimulatedOutcome:
        return SimulatedOutcome(
            name=name,
            steps=self.steps,
            seconds_s=self.seconds_s,
            tokens=tokens,
            samples=samples,
            dropped=given - samples,
            idle_share=self.idle_s / self.seconds_s if self.seconds_s else 0.0,
            wire_bytes=self.wire_bytes,
            bound_s=self.bound_s if self.bounded else 0.0,
            shown=tuple(self.shown),
        )


def of_steps(
    name: str,
    plans: Iterable[StepPlan],
    costs: ModelCosts,
    tokens: Mapping[int, int],
    shown: int = 4,
) -> SimulatedOutcome:
    """Returns the totals of a system's steps."""
    wire = {
        (b.bucket, r.sp, r.micro_batch, r.menu_step): r.wire_bytes
        for b in costs.buckets
        for r in (*b.full, *b.least)
    }
    total, trained = _Sum([]), set[int]()
    for plan in plans:
        if costs.block and not plan.block:
            again = step_plan(plan.micro_batches, costs.world, costs.block)
            plan = replace(again, bound_s=plan.bound_s)
        sent = costs.reduction_wire_bytes
        if plan.block:
            every = rounds([mb.ranks for mb in plan.micro_batches], costs.world)
            sent += costs.gather_wire_bytes * len(every)
        for mb in plan.micro_batches:
            if mb.micro_batch:
                row = wire[mb.bucket, mb.sp, mb.micro_batch, mb.menu_step]
                sent += row * len(mb.sample_ids) / mb.micro_batch
            elif costs.packing is not None:  # a pack
                packed = sum(tokens[i] for i in mb.sample_ids)
                sent += packed * costs.packing.token_wire_bytes
            assert trained.isdisjoint(mb.sample_ids), f"{name} trains a sample twice"
            trained.update(mb.sample_ids)
        bound_s = plan.bound_s + costs.reduction_s if plan.bound_s > 0 else 0.0
        total.add(of_step(plan, costs.reduction_s), sent, bound_s, shown)
    return total.outcome(name, sum(tokens[i] for i in trained), len(trained), len(tokens))


def of_batches(
    name: str, plans: Iterable[tuple[StepPlan, Sequence[int]]], comm_bytes: float, shown: int = 4
) -> SimulatedOutcome:
    """Returns the totals of a system's plans of global batches of lengths."""
    total, tokens, samples = _Sum([]), 0, 0
    for plan, lengths in plans:
        trained = [i for mb in plan.micro_batches for i in mb.sample_ids]
        assert sorted(trained) == list(range(len(lengths))), f"{name}: each sequence once"
        sent = sum(
            comm_bytes * lengths[i]
            for mb in plan.micro_batches if mb.sp > 1
            for i in mb.sample_ids
        )  # fmt: skip
        total.add(of_step(plan), sent, plan.bound_s, shown)
        tokens += sum(lengths)
        samples += len(lengths)
    return total.outcome(name, tokens, samples, samples)


def outcomes_text(title: str, outcomes: Sequence[SimulatedOutcome]) -> str:
    """Returns a table, each system's tokens a second and dcpc's relative to them."""
    numbers = ["steps", "mean step", "tokens/s", "dcpc is", "imbalance", "sent a step",
               "over bound", "dropped"]  # fmt: skip
    table = headed(title, ["system"], numbers)
    best = next((o.tokens_per_s for o in outcomes if o.name == "dcpc"), 0.0)
    for o in outcomes:
        table.add_row(*_cells(o, best, o.name == "dcpc"))
    return as_text(table, width=140)


def _cells(o: SimulatedOutcome, best: float, own: bool) -> Iterator[str]:
    yield o.name
    yield str(o.steps)
    yield seconds_text(o.step_s)
    yield f"{o.tokens_per_s:,.0f}"
    yield f"{best / o.tokens_per_s:.2f}x" if o.tokens_per_s else "-"
    yield f"{o.idle_share:.1%}"
    yield bytes_text(o.wire_bytes / max(1, o.steps))
    yield f"{o.seconds_s / o.bound_s - 1:.1%}" if own and o.bound_s > 0 else "-"
    yield str(o.dropped)
