"""Layouts that other wishes lead to: a search that goes on for as many turns as there is time for.

Two lines of descent, of few and of more sequences that count as long, share one target, seconds
below the best known step. A turn changes the wishes of a line: one of its longest sequences by each
degree in turn, or some sequences by chance, in order or degree. Of two layouts for the target that
is better which has more to spare; one that lacks nothing is filled, and where it ends earlier, the
target goes on to fewer seconds.

Chance is drawn from numbers that are the same each time: equal turns give equal micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dcpc.runtime.planner.packed.filling import PackedDraft, filled
from dcpc.runtime.planner.packed.fluid import ShortFluid
from dcpc.runtime.planner.packed.kinds import Floats, PackedWork
from dcpc.runtime.planner.packed.layout import Layout, Wishes

# The lines: the share of a cheapest micro-batch beyond which a sequence counts as long.
_SHARES = (0.5, 1.0)
# The target is this share below the best step; by how much of what a layout has to spare it falls.
_BELOW, _EAGER, _MOST_BELOW = 0.001, 0.7, 0.02
# Turns that try degrees one by one; longest sequences whose degrees, and how many of them.
_ORDERLY, _LONGEST, _DEGREES = 0.5, 8, 12
# Changes of a turn by chance at most; how many of them are of the order, and by how much (in logs
# of tokens); how many take a wish back; how much rather the longest are changed.
_CHANGES, _REORDERS, _FARTHER, _FORGETS, _LONGER = 3, 0.4, 0.5, 0.3, 4.0
# Tokens that another degree than the wished one costs.
_AGAINST = 1e5


def evolved(work: PackedWork, best: PackedDraft, turns: Iterable[int], seed: int) -> PackedDraft:
    """Returns the micro-batches found that end earliest, or `best`."""
    best_s = float(best.ends_s().max())
    target_s, random = best_s * (1 - _BELOW), np.random.default_rng(seed)
    lines: list[_Line] = []
    for _ in turns:
        if not lines:
            each = [work.with_long(share) for share in _SHARES]
            lines = [_Line(own, best_s, random) for own in each if own.long]
        if not lines:
            return best
        layout = lines[int(random.integers(len(lines)))].turn(target_s)
        if layout.spare >= 0:
            draft = filled(layout)
            ends_s = float(draft.ends_s().max())
            if ends_s < best_s:
                best, best_s = draft, ends_s
            guess_s = layout.step_s - _EAGER * layout.spare / layout.work.tokens_in_s
            least_s = layout.step_s * (1 - _MOST_BELOW)
            known_s = min(best_s, layout.step_s) * (1 - _BELOW)
            target_s = min(known_s, max(guess_s, least_s))
    return best


class _Line:
    """The wishes of the best layout so far, and those derived from them."""

    def __init__(self, work: PackedWork, most_s: float, random: np.random.Generator) -> None:
        self.work = work
        self._fluid, self._random = ShortFluid(work, most_s), random
        self._keys = np.log(work.lengths[: work.long])
        self._against = np.zeros((work.long, len(work.kinds)))
        self._spare, self._step_s = -np.inf, np.inf
        self._orderly = [(s, d) for s in range(min(work.long, _LONGEST)) for d in self._degrees(s)]
        self._next = 0

    def turn(self, step_s: float) -> Layout:
        """Returns a layout by changed wishes, the line's from now on where it has more to spare."""
        if step_s != self._step_s:
            self._step_s = step_s
            self._spare = self._laid(self._keys, self._against, -np.inf).spare
        keys, against = self._keys.copy(), self._against.copy()
        if self._random.random() < _ORDERLY:
            sequence, degree = self._orderly[self._next]
            self._next = (self._next + 1) % len(self._orderly)
            against[sequence] = np.where(self.work.degree == degree, 0.0, _AGAINST)
        else:
            for _ in range(int(self._random.integers(1, _CHANGES + 1))):
                self._change(keys, against)
        layout = self._laid(keys, against, self._spare)
        if layout.spare >= self._spare:
            self._keys, self._against, self._spare = keys, against, layout.spare
        return layout

    def _change(self, keys: Floats, against: Floats) -> None:
        random, work = self._random, self.work
        sequence = int(work.long * random.random() ** _LONGER)
        if random.random() < _REORDERS:
            keys[sequence] += _FARTHER * random.normal()
            return
        against[sequence] = 0.0
        if random.random() >= _FORGETS:
            fits = np.isfinite(work.load_s[:, sequence])
            degree = random.choice(np.unique(work.degree[fits]))
            against[sequence] = np.where(work.degree == degree, 0.0, _AGAINST)

    def _degrees(self, sequence: int) -> list[int]:
        fits = np.isfinite(self.work.load_s[:, sequence])
        return [int(d) for d in np.unique(self.work.degree[fits])[:_DEGREES]]

    def _laid(self, keys: Floats, against: Floats, least: float) -> Layout:
        order = np.argsort(-keys, kind="stable")
        return Layout(self._fluid, self._step_s, Wishes(order, against), least)
