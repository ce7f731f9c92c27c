"""The least seconds of a step whose micro-batches are packed: layouts of shorter steps in turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from dcpc.runtime.planner.packed.evolution import evolved
from dcpc.runtime.planner.packed.filling import PackedDraft, filled
from dcpc.runtime.planner.packed.fluid import ShortFluid
from dcpc.runtime.planner.packed.layout import Layout
from dcpc.runtime.planner.packed.room_bound import averaged_bound, packed_bound
from dcpc.runtime.planner.packed.ways import PackedWork

# The step's seconds are looked for as finely as this, first this far above the bound.
_FINELY, _FIRST = 0.003, 0.02
# How much of what a layout has to spare the next one has less, and how near to one that is known.
_EAGER, _NEAR = 1.0, 0.2
# Longer steps that are tried for a filling that ends earlier.
_LONGER = (1.0, 1.004, 1.01, 1.02)
# Share of a cheapest micro-batch beyond which a sequence counts as long, besides the usual one.
_FEW_LONG = 1.0
# What chance is drawn from where the search goes on.
_SEED = 0


@dataclass(frozen=True, slots=True)
class Searched:
    """Result of a search.

    Attributes:
        work: sequences of the batch.
        drafts: micro-batches to choose from.
        bound_s: lower bound of the step's seconds.
    """

    work: PackedWork
    drafts: tuple[PackedDraft, ...]
    bound_s: float

    def further(self, turns: Iterable[int]) -> Searched:
        """Returns these drafts, and after them the best of an evolution where that ends earlier."""
        best = min(self.drafts, key=lambda draft: float(draft.ends_s().max()))
        if float(best.ends_s().max()) <= self.bound_s:
            return self
        found = evolved(self.work, best, turns, _SEED)
        return self if found is best else replace(self, drafts=(*self.drafts, found))


def search(work: PackedWork) -> Searched:
    """Returns micro-batches of a batch to choose from, and a lower bound of its seconds."""
    least_s = averaged_bound(work)
    # In so long a step one group could run all sequences one by one.
    longest_s = float(work.alone_s().min(axis=0).sum()) + least_s
    found = [_found(own, least_s, longest_s) for own in (work, work.with_long(_FEW_LONG))]
    bound_s = packed_bound(work, min(ends_s for _, ends_s in found))
    return Searched(work, tuple(draft for draft, _ in found), bound_s)


def _found(work: PackedWork, least_s: float, longest_s: float) -> tuple[PackedDraft, float]:
    """Returns the filling that ends first, of the shortest layout and some longer ones; its end."""
    fluid = ShortFluid(work, longest_s)
    layout = _shortest(fluid, least_s)
    best, best_s = filled(layout), float("inf")
    for factor in _LONGER:
        if layout.step_s * factor >= best_s:
            break
        longer = layout if factor == 1 else Layout(fluid, layout.step_s * factor)
        if longer.spare >= 0:
            draft = filled(longer)
            ends_s = float(draft.ends_s().max())
            if ends_s < best_s:
                best, best_s = draft, ends_s
    return best, best_s


def _shortest(fluid: ShortFluid, bound_s: float) -> Layout:
    """Returns the layout of the shortest step found that holds the batch, as a liquid."""
    work = fluid.work
    tokens_in_s = work.tokens_in_s
    low_s, step_s, more = bound_s, bound_s * (1 + _FIRST), _FIRST
    layout = Layout(fluid, step_s)
    while layout.spare < 0:
        low_s, more = step_s, 2 * more
        guess_s = step_s - _EAGER * layout.spare / tokens_in_s
        step_s = min(max(guess_s, step_s * (1 + _FIRST)), step_s * (1 + more))
        layout = Layout(fluid, step_s)
    while layout.step_s > low_s * (1 + _FINELY):
        near_s = _NEAR * (layout.step_s - low_s)
        guess_s = layout.step_s - _EAGER * layout.spare / tokens_in_s
        step_s = min(max(guess_s, low_s + near_s), layout.step_s - near_s)
        other = Layout(fluid, step_s)
        if other.spare >= 0:
            layout = other
        else:
            low_s = step_s
    return layout
