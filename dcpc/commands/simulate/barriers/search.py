"""The planner: fluid search over loads, packing of the best, then repeated tightening."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dcpc.commands.simulate.barriers.baselines import first_fit_draft, homogeneous_draft
from dcpc.commands.simulate.barriers.bound import lower_bound
from dcpc.commands.simulate.barriers.costs import GroupCost
from dcpc.commands.simulate.barriers.fluid import Fluid, Stack, fluid
from dcpc.commands.simulate.barriers.levels import Candidate, grid, search_levels
from dcpc.commands.simulate.barriers.packing.finish import finish
from dcpc.commands.simulate.barriers.packing.pack import Draft, Packer
from dcpc.commands.simulate.barriers.packing.polish import polish
from dcpc.commands.simulate.barriers.packing.resize import exact, partitions, resize
from dcpc.commands.simulate.barriers.plan import BatchPlan
from dcpc.commands.simulate.barriers.workload import Workload, only, tabulate

MAX_STACKED = 4
SMALL = 128  # sequences
SHARES = (0.3, 0.15, 0.1)  # of all packings, to tighten the best, the second, the third
FEW_SETTINGS = 3  # so many are also tried one by one
SHRINK = (0.97, 0.99, 0.995, 0.94, 1.0)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to look; counts, not seconds, so that a plan is reproducible.

    Attributes:
        packings: how many sequences may be packed in all, times over.
        patterns: candidates to pack.
        more_steps: micro-steps beyond the fewest that memory allows.
        exchanges: of sequences between two groups; fewer in batches of more than 512.
    """

    packings: int = 40_000
    patterns: int = 16
    more_steps: int = 3
    exchanges: int = 400


def plan_batch(keys: Sequence[int], cost: GroupCost, effort: Effort | None = None) -> BatchPlan:
    """Returns micro-steps of groups for a global batch, near the least predicted seconds.

    Args:
        keys: one a sequence: its length in tokens, or its bucket.
        cost: what it costs.
        effort: how long to look.

    Raises:
        PlanError: a sequence fits at no degree, or there is none.
    """
    effort = effort or Effort()
    work = tabulate(keys, cost)
    draft = exact(work) or _search(work, effort)
    if 1 < len(cost.settings) <= FEW_SETTINGS:  # a free choice is never worse than a fixed one
        alone = (only(work, setting) for setting in range(len(cost.settings)))
        drafts = [draft, *(_search(one, effort) for one in alone if one is not None)]
        draft = min(drafts, key=lambda d: d.seconds_s(work))
    return finish(work, draft, lower_bound(work))


def _search(work: Workload, effort: Effort) -> Draft:
    """The draft that fluid search, packing and improvement reach."""
    draft = resize(work, refine(work, propose(work, effort), effort))
    for other in _simple_drafts(work):
        draft = min(draft, resize(work, other), key=lambda d: d.seconds_s(work))
    return draft


def propose(work: Workload, effort: Effort) -> list[tuple[Candidate, Fluid]]:
    """Returns the fluid model's best candidates over stacks and numbers of micro-steps."""
    found: list[tuple[Candidate, Fluid]] = []
    limit_s = float("inf")
    floor_s = float(work.area @ work.counts) / work.ranks
    for stacks in _stackings(work):
        model = fluid(work, stacks)
        g = grid(model)
        for steps in range(work.min_steps, work.min_steps + effort.more_steps + 1):
            if floor_s + steps * work.cost.fixed_s >= limit_s:
                break
            new = search_levels(g, steps, min(limit_s * 1.01, 1e30))
            if new and steps > 2:
                near = tuple(load_s for c in new[:3] for load_s in c.loads_s)
                new = search_levels(grid(model, near), steps, new[0].seconds_s * 1.01) + new
            found += [(candidate, model) for candidate in new]
            limit_s = min([limit_s, *(c.seconds_s for c in new)])
    found.sort(key=lambda pair: pair[0].seconds_s)
    return found


def refine(work: Workload, found: list[tuple[Candidate, Fluid]], effort: Effort) -> Draft:
    """Packs the best candidates and tightens the best of them."""
    budget = max(10, effort.packings // int(work.counts.sum()))
    packed: list[tuple[float, int, Draft, Packer]] = []
    packers: dict[int, Packer] = {}
    half = budget // 2
    for candidate, model in _distinct(found, effort.patterns):
        packer = packers.setdefault(id(model), Packer(model))
        draft, spent = packer.pack(list(candidate.loads_s))
        packed.append((draft.seconds_s(work), len(packed), draft, packer))
        half -= spent
        if half <= 0:
            break
    if not packed:
        packer = Packer(fluid(work))
        loads_s = [float(work.area @ work.counts) / work.ranks / work.min_steps] * work.min_steps
        draft, _ = packer.pack(loads_s)
        packed.append((draft.seconds_s(work), 0, draft, packer))
    packed.sort(key=lambda entry: entry[:2])
    exchanges = effort.exchanges * 512 // max(512, int(work.counts.sum()))
    tight = [entry[2] for entry in packed[:1]]
    for (_, _, draft, packer), share in zip(packed, SHARES, strict=False):
        tight.append(tighten(packer, draft, int(budget * share)))
        polish(work, tight[-1], exchanges)
    return min(tight, key=lambda draft: draft.seconds_s(work))


def tighten(packer: Packer, draft: Draft, tries: int) -> Draft:
    """Packs again with one micro-step's target lower, as long as the sum gets less."""
    work = packer.work
    best_s = draft.seconds_s(work)
    moved = True
    while moved and tries > 0:
        moved = False
        longest = list(draft.longest_s().values())
        trials = (
            (m, f) for f in SHRINK for m in sorted(range(len(longest)), key=lambda m: -longest[m])
        )
        for m, factor in trials:
            if tries <= 0:
                break
            loads_s = [x * (factor if i == m else 1.0 + 1e-9) for i, x in enumerate(longest)]
            new, spent = packer.pack(loads_s, hold=m, tries=2)
            tries -= spent
            if new.seconds_s(work) < best_s - 1e-9:
                best_s, draft, moved = new.seconds_s(work), new, True
                break
    return draft


def _simple_drafts(work: Workload) -> Iterator[Draft]:
    """Plans of other kinds, for batches too small to have a bulk."""
    if work.counts.sum() <= SMALL:
        yield first_fit_draft(work)
        if (same := homogeneous_draft(work)) is not None:
            yield same


def _distinct(
    found: list[tuple[Candidate, Fluid]], patterns: int
) -> Iterator[tuple[Candidate, Fluid]]:
    seen = set()
    for candidate, model in found:
        key = (id(model), len(candidate.loads_s), candidate.choice)
        if key in seen:
            continue
        seen.add(key)
        yield candidate, model
        if len(seen) >= patterns:
            return


def _stackings(work: Workload) -> list[tuple[Stack, ...]]:
    """Ways to run the few longest sequences in turn in one group; none first.

    Only sequences that need more than an eighth of the ranks: the others find ranks of their own.
    """
    fits = (work.seconds < float("inf")).any(axis=0)
    least = work.degrees[fits.argmax(axis=0)]
    long = [k for k in range(len(work.keys)) for _ in range(int(work.counts[k]))
            if least[k] > max(1, work.ranks // 8)][:MAX_STACKED]  # fmt: skip
    out: list[tuple[Stack, ...]] = []
    for parts in partitions(long):
        stacks = tuple(tuple(part) for part in parts if len(part) > 1)
        total = [sum(float(work.weights[k]) for k in part) for part in stacks]
        together = all(np.isfinite(work.seconds[:, :, part].sum(axis=2)).any() for part in stacks)
        if together and all(x <= work.capacities.max() for x in total) and stacks not in out:
            out.append(stacks)
    return sorted(out, key=len)
