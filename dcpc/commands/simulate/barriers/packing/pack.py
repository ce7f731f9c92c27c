"""From loads to groups: heads where the fluid model puts them, then the longest sequence first.

Each remaining sequence goes to the group with most room, in seconds of time or memory, whichever is
less. What finds no room within the target loads goes where it lengthens the step least, and what
finds no memory starts a micro-step of its own.
"""

import heapq
from dataclasses import dataclass, field
from math import inf

import numpy as np

from dcpc.commands.simulate.barriers.fluid import Fluid, losses
from dcpc.commands.simulate.barriers.packing.ranks import FreeRanks
from dcpc.commands.simulate.barriers.workload import Workload

FEW = 6  # sequences left over that are not worth packing again
TRIES = 8  # groups that a sequence is offered to before it counts as left over


@dataclass(slots=True)
class Draft:
    """Groups under construction, one entry of each list a group.

    Attributes:
        step: its micro-step.
        first: its first rank.
        degree: index into `Workload.degrees`.
        setting: index of its row.
        kinds: what it runs.
        load_s: so far.
        room: capacity left.
        cost: seconds of each kind in it.
    """

    step: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    degree: list[int] = field(default_factory=list)
    setting: list[int] = field(default_factory=list)
    kinds: list[list[int]] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)
    room: list[float] = field(default_factory=list)
    cost: list[list[float]] = field(default_factory=list)

    def open(self, work: Workload, step: int, first: int, degree: int, setting: int,
             cost: list[float]) -> int:  # fmt: skip
        """Adds an empty group; returns its number."""
        self.step.append(step)
        self.first.append(first)
        self.degree.append(degree)
        self.setting.append(setting)
        self.kinds.append([])
        self.load_s.append(0.0)
        self.room.append(float(work.capacities[setting, degree]))
        self.cost.append(cost)
        return len(self.step) - 1

    def add(self, group: int, kind: int, weight: float) -> None:
        """Puts one sequence of a kind into a group."""
        self.kinds[group].append(kind)
        self.load_s[group] += self.cost[group][kind]
        self.room[group] -= weight

    def longest_s(self) -> dict[int, float]:
        """The slowest group's load, by micro-step; empty ones left out."""
        out: dict[int, float] = {}
        for step, kinds, load_s in zip(self.step, self.kinds, self.load_s, strict=True):
            if kinds and load_s >= out.get(step, 0.0):
                out[step] = load_s
        return out

    def seconds_s(self, work: Workload) -> float:
        """Predicted seconds of the whole step."""
        longest = self.longest_s()
        return sum(longest.values()) + len(longest) * work.cost.fixed_s


class Packer:
    """Packs one batch for many vectors of loads; keeps what they share."""

    def __init__(self, model: Fluid) -> None:
        self.model = model
        self.work = model.work
        self.weights: list[float] = model.work.weights.tolist()
        self.area: list[float] = model.work.area.tolist()
        self.degrees: list[int] = model.work.degrees.tolist()
        self.bulk = [k for k in model.bulk_kinds.tolist()
                     for _ in range(int(model.work.counts[k]))]  # fmt: skip
        self._cost: dict[tuple[int, int], list[float]] = {}

    def cost(self, setting: int, degree: int) -> list[float]:
        """Seconds of each kind at a degree (index)."""
        key = (setting, degree)
        if key not in self._cost:
            self._cost[key] = self.work.seconds[setting, degree].tolist()
        return self._cost[key]

    def pack(self, loads_s: list[float], hold: int = -1, tries: int = 4) -> tuple[Draft, int]:
        """Returns a draft with every sequence in a group, near these loads if they suffice.

        Args:
            loads_s: target of each micro-step.
            hold: the micro-step whose target is kept when the others' have to be raised.
            tries: how often to raise them before the rest goes wherever it does least harm.

        Returns:
            The draft, and how many times the batch was packed.
        """
        spent = 0
        while True:
            spent += 1
            draft = Draft()
            free = [FreeRanks.all(self.work.ranks, self.work.cost.node_ranks) for _ in loads_s]
            waiting = self._place_heads(draft, free, loads_s)
            self._open_base(draft, free, loads_s)
            left = self._fill(draft, [*waiting, *self.bulk], loads_s)
            if len(left) <= FEW or spent >= tries:
                break
            raised = len(loads_s) - (hold >= 0)
            area_s = sum(self.area[k] for k in left) / self.work.ranks / max(1, raised)
            loads_s = [x if i == hold else x + 1.02 * area_s for i, x in enumerate(loads_s)]
        left = self._squeeze(draft, left)
        self._append_steps(draft, left, len(loads_s))
        return draft, spent

    def _place_heads(self, draft: Draft, free: list[FreeRanks], loads_s: list[float]) -> list[int]:
        """Opens a group for each head that needs one; returns the kinds of the others."""
        table = losses(self.model, np.array(loads_s))
        loss, at, setting = table.loss.tolist(), table.degree.tolist(), table.setting.tolist()
        waiting = []
        left = [float(f.count()) for f in free]  # ranks, less what waiting heads will take
        for x, stack in enumerate(self.model.stacks):
            order = sorted(range(len(loads_s)), key=loss[x].__getitem__)
            for _ in range(int(self.model.counts[x])):
                group = None
                for m in order:
                    degree, row = at[x][m], setting[x][m]
                    need = self.degrees[degree]
                    if loss[x][m] == inf or need > left[m] + 1e-9:
                        continue
                    if degree == self.model.base and len(stack) == 1:
                        left[m] -= need * self._share(stack[0], degree, row, loads_s[m])
                        break  # as good as bulk
                    if (first := free[m].take(need)) is not None:
                        left[m] -= need
                        cost = self.cost(row, degree)
                        group = draft.open(self.work, m, first, degree, row, cost)
                        break
                for k in stack:
                    if group is None:
                        waiting.append(k)
                    else:
                        draft.add(group, k, self.weights[k])
        return waiting

    def _share(self, kind: int, degree: int, setting: int, load_s: float) -> float:
        """How much of a group a sequence makes useless to others like it, at most 1."""
        share = max(
            self.cost(setting, degree)[kind] / load_s,
            self.weights[kind] / float(self.work.capacities[setting, degree]),
        )
        return 1.0 if share > 0.5 else share

    def _open_base(self, draft: Draft, free: list[FreeRanks], loads_s: list[float]) -> None:
        """Makes groups of the base degree of all free ranks."""
        base = self.model.base
        need = self.degrees[base]
        _, rows = self.model.absorbed(np.array(loads_s))
        for m, ranks in enumerate(free):
            row = int(rows[m])
            for low, high in zip(ranks.low, ranks.high, strict=True):
                for first in range(low, high - need + 1, need):
                    draft.open(self.work, m, first, base, row, self.cost(row, base))

    def _fill(self, draft: Draft, items: list[int], loads_s: list[float]) -> list[int]:
        """Longest first into the group with most room; returns what did not fit."""
        model, weights = self.model, self.weights
        pace = [float(model.pace[s, d]) for s, d in zip(draft.setting, draft.degree, strict=True)]
        per_weight = [p / model.density if model.density > 0 else inf for p in pace]
        target = [loads_s[m] for m in draft.step]
        load_s, room, cost, kinds = draft.load_s, draft.room, draft.cost, draft.kinds

        def key(g: int) -> float:
            spare_s = target[g] - load_s[g]
            held_s = room[g] * per_weight[g] if per_weight[g] < inf else inf
            return -(spare_s if spare_s < held_s else held_s)

        heap = [(key(g), g) for g in range(len(target))]
        heapq.heapify(heap)
        left = []
        for k in items:
            weight = weights[k]
            tried: list[tuple[float, int]] = []
            while heap and len(tried) < TRIES:
                g = heap[0][1]
                if load_s[g] + cost[g][k] <= target[g] and weight <= room[g]:
                    kinds[g].append(k)
                    load_s[g] += cost[g][k]
                    room[g] -= weight
                    heapq.heapreplace(heap, (key(g), g))
                    break
                tried.append(heapq.heappop(heap))
            else:
                left.append(k)
            for entry in tried:
                heapq.heappush(heap, entry)
        return left

    def _squeeze(self, draft: Draft, items: list[int]) -> list[int]:
        """Puts each where it lengthens the step least; returns what no group has memory for."""
        left = []
        longest = draft.longest_s()
        for k in items:
            weight = self.weights[k]
            best, at = (inf, inf), -1
            for g, room in enumerate(draft.room):
                if room >= weight and draft.cost[g][k] < inf:
                    load_s = draft.load_s[g] + draft.cost[g][k]
                    now_s = longest.get(draft.step[g])
                    more_s = load_s + self.work.cost.fixed_s if now_s is None else load_s - now_s
                    value = (max(0.0, more_s), load_s)
                    if value < best:
                        best, at = value, g
            if at < 0:
                left.append(k)
                continue
            draft.add(at, k, weight)
            m = draft.step[at]
            longest[m] = max(longest.get(m, 0.0), draft.load_s[at])
        return left

    def _append_steps(self, draft: Draft, items: list[int], step: int) -> None:
        """First fit into further micro-steps, each sequence at its cheapest degree."""
        free: FreeRanks | None = None
        for k in sorted(items):
            weight = self.weights[k]
            fits = (g for g in range(len(draft.step)) if draft.room[g] >= weight
                    and draft.cost[g][k] < inf and draft.step[g] >= step)  # fmt: skip
            at = next(fits, None)
            if at is None:
                area = self.work.seconds[:, :, k] * self.work.degrees
                row, degree = (int(i) for i in np.unravel_index(area.argmin(), area.shape))
                first = free.take(self.degrees[degree]) if free else None
                if first is None:
                    step = step + 1 if free else step
                    free = FreeRanks.all(self.work.ranks, self.work.cost.node_ranks)
                    first = free.take(self.degrees[degree])
                assert first is not None, "a whole cluster has room for one group"
                at = draft.open(self.work, step, first, degree, row, self.cost(row, degree))
            draft.add(at, k, weight)
