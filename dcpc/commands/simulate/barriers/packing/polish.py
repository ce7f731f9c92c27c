"""Exchanges of a few sequences between two groups, until the slowest group of each step is stuck.

Lengths are multiples of something, so that loads of one-rank groups are nearly a lattice, and
longest first leaves them up to one short sequence apart. The quadratic part differs by composition:
giving two sequences for one of nearly their tokens moves a load by less than the lattice.
"""

from collections import Counter
from itertools import combinations

import numpy as np

from dcpc.commands.simulate.barriers.costs import FloatArray, IntArray
from dcpc.commands.simulate.barriers.packing.pack import Draft
from dcpc.commands.simulate.barriers.workload import Workload

PARTNERS = 12  # groups with which the slowest may exchange before it counts as stuck
DISTINCT = 8  # kinds of a group that take part: its shortest
LONGEST = 2  # and its longest
MANY = 6  # at most so many of its two shortest at once
ENOUGH = 1e-4  # of the load: a smaller gain is not worth an exchange


class Polisher:
    """Exchanges on one draft, in place."""

    def __init__(self, work: Workload, draft: Draft) -> None:
        self.work = work
        self.draft = draft
        self.none = len(work.keys)  # a kind that costs nothing
        self.weights = np.append(work.weights, 0.0)
        self._cost: dict[tuple[int, int], FloatArray] = {}
        self._options: dict[int, tuple[IntArray, IntArray]] = {}
        self.by_step: dict[int, list[int]] = {}
        for g, step in enumerate(draft.step):
            self.by_step.setdefault(step, []).append(g)

    def run(self, exchanges: int) -> None:
        """Exchanges at most so often in all, steps in turn."""
        for step in self.draft.longest_s():
            left = exchanges // len(self.by_step)
            while left > 0 and self._relieve(step):
                left -= 1

    def _relieve(self, step: int) -> bool:
        """Lowers the slowest group of a step by one exchange; False if none is found."""
        load_s = self.draft.load_s
        members = self.by_step[step]
        slowest = max(members, key=load_s.__getitem__)
        partners = sorted((g for g in members if g != slowest), key=load_s.__getitem__)
        if any(self._exchange(slowest, g, None) for g in partners[:PARTNERS]):
            return True
        longest = self.draft.longest_s()
        others = [g for m, limit_s in longest.items() if m != step for g in self.by_step[m]
                  if load_s[g] < limit_s]  # fmt: skip
        others.sort(key=lambda g: load_s[g] - longest[self.draft.step[g]])
        return any(
            self._exchange(slowest, g, longest[self.draft.step[g]]) for g in others[:PARTNERS]
        )

    def _exchange(self, g: int, h: int, limit_s: float | None) -> bool:
        """Makes the best exchange that lowers g and leaves h below g, or below `limit_s`."""
        draft = self.draft
        give, times_given = self._choices(g)
        take, times_taken = self._choices(h)
        cost_g, cost_h = self._costs(g), self._costs(h)

        def change(value: FloatArray) -> FloatArray:  # what g loses, [given, taken]
            given = (value[give] * times_given).sum(axis=1)
            taken = (value[take] * times_taken).sum(axis=1)
            lost: FloatArray = given[:, None] - taken[None, :]
            return lost

        g_s = draft.load_s[g] - change(cost_g)
        h_s = draft.load_s[h] + change(cost_h)
        moved = change(self.weights)
        fits = (moved <= draft.room[h]) & (-moved <= draft.room[g])
        score = np.maximum(g_s, h_s) if limit_s is None else np.where(h_s <= limit_s, g_s, np.inf)
        score[~fits | np.isnan(score)] = np.inf
        a, b = np.unravel_index(score.argmin(), score.shape)
        if not score[a, b] < draft.load_s[g] * (1 - ENOUGH):
            return False
        self._move(g, h, give[a].tolist(), times_given[a].tolist())
        self._move(h, g, take[b].tolist(), times_taken[b].tolist())
        draft.load_s[g], draft.load_s[h] = float(g_s[a, b]), float(h_s[a, b])
        self._options.pop(g, None)
        self._options.pop(h, None)
        return True

    def _move(self, source: int, target: int, kinds: list[int], times: list[int]) -> None:
        for kind, n in zip(kinds, times, strict=True):
            if kind == self.none:
                continue
            weight = float(self.weights[kind])
            for _ in range(n):
                self.draft.kinds[source].remove(kind)
                self.draft.kinds[target].append(kind)
                self.draft.room[source] += weight
                self.draft.room[target] -= weight

    def _choices(self, g: int) -> tuple[IntArray, IntArray]:
        """What a group can give: kinds and how many of each, [choice, 2].

        Nothing, one sequence, two, or one and several of the shortest.
        """
        if g not in self._options:
            have = Counter(self.draft.kinds[g])
            some = sorted(have, reverse=True)
            some = [*some[:DISTINCT], *some[DISTINCT:][-LONGEST:]]
            found = {(self.none, self.none, 1, 1)}
            found |= {(k, self.none, 1, 1) for k in some}
            found |= {(a, b, 1, 1) for a, b in combinations(some, 2)}
            for short in some[:2]:
                for n in range(2, min(have[short], MANY) + 1):
                    found |= {(short, k, n, 1) for k in [self.none, *some] if k != short}
            rows = np.array(sorted(found), dtype=np.int64)
            self._options[g] = (rows[:, :2], rows[:, 2:])
        return self._options[g]

    def _costs(self, g: int) -> FloatArray:
        """Seconds of each kind in a group, 0 for none."""
        key = (self.draft.setting[g], self.draft.degree[g])
        if key not in self._cost:
            self._cost[key] = np.append(self.work.seconds[key], 0.0)
        return self._cost[key]


def polish(work: Workload, draft: Draft, exchanges: int) -> None:
    """Improves a draft in place."""
    Polisher(work, draft).run(exchanges)
