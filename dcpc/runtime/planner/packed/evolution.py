"""Trees of long sequences that small changes lead to: a search that goes on while there is time.

A turn tries many changes by chance: a group of another degree or on other ranks, a sequence or all
of a micro-batch elsewhere. A change that loses tokens of short sequences is made as well, the more
rarely the more it loses and the later in a cycle (simulated annealing). Each cycle is twice as long
as the one before, and begins with the best micro-batches. Its target is below the best known step:
a tree that lacks nothing by then is filled, and the target goes on to fewer seconds.

Chance is drawn from numbers that are the same each time: equal turns give equal micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, inf
from random import Random

from dcpc.runtime.planner.packed.filling import PackedDraft, filled
from dcpc.runtime.planner.packed.fluid import ShortFluid
from dcpc.runtime.planner.packed.tree import ROOT, Bins, Long, Tree
from dcpc.runtime.planner.packed.ways import PackedWork

# The share of a cheapest micro-batch beyond which a sequence counts as long, of cycles in turn.
_SHARES = (1.0, 0.5)
# Changes that a turn tries; turns of the first cycle.
_CHANGES, _CYCLE = 64, 8
# What share of the batch's tokens may be lost once in e times, at a cycle's begin and end.
_HOT, _COLD = 2e-3, 5e-6
# The target is this share below the best step; by how much of what a tree has to spare it falls.
_BELOW, _EAGER, _MOST_BELOW = 5e-4, 0.7, 0.02
# Steps in which a cycle's best tree is filled, by its target.
_LONGER = (1.0, 1.0005, 1.001, 1.002)
# How often another kind is tried, other ranks, else sequences in another group: beside others, in
# one more micro-batch, else in a new group.
_KIND, _RANKS, _BESIDE, _LAUNCH = 0.25, 0.2, 0.17, 0.16
# Rather one sequence than all of a micro-batch, kinds near in number or that just hold, all ranks.
_SINGLE, _NEAR, _ROOT = 0.7, 3.0, 0.5


def evolved(work: PackedWork, best: PackedDraft, turns: Iterable[int], seed: int) -> PackedDraft:
    """Returns the micro-batches found that end earliest, or `best`."""
    random, cycle = Random(seed), 0
    works: list[PackedWork] = []
    line: Cycle | None = None
    for _ in turns:
        works = works or [own for own in map(work.with_long, _SHARES) if own.long]
        if not works:
            return best
        if line is None:
            line = Cycle(works[cycle % len(works)], best, random, _CYCLE << cycle)
            cycle += 1
        going_on, best = line.turn(), line.best
        line = line if going_on else None
    return best


class Cycle:
    """Turns from the best micro-batches so far, and the tree that they change.

    Attributes:
        best: micro-batches that end earliest.
        tree: the long sequences.
        step_s: seconds that are aimed at.
    """

    def __init__(self, work: PackedWork, best: PackedDraft, random: Random, turns: int) -> None:
        self.best, self._best_s = best, float(best.ends_s().max())
        self._work, self._random = work, random.random
        self._tokens, self._length = work.tokens.tolist(), work.lengths.tolist()
        self.tree = Tree(ShortFluid(work, self._best_s), best)
        self._turns, self._turn = turns, 0
        self.step_s, self._highest = self._best_s * (1 - _BELOW), -inf
        self._keep()

    def turn(self) -> bool:
        """Tries some changes; False: the cycle is over."""
        tree = self.tree
        share = (1 - self._turn / self._turns) ** 2
        heat = (_COLD + share * (_HOT - _COLD)) * sum(self._length)
        for _ in range(_CHANGES):
            tree.now = dict(tree.groups)
            if self._change():
                loss = self._worth - tree.worth(ROOT, self.step_s)
                kept = loss <= 0 or self._random() < exp(-loss / heat)
                if kept and tree.has_ranks():
                    self._keep()
        self._turn += 1
        if self._turn == self._turns:
            tree.now = self._top
            for longer in _LONGER:
                self._fill(self.step_s * longer)
        return self._turn < self._turns

    def _keep(self) -> None:
        """Makes the change, and fills the tree where it lacks nothing."""
        tree = self.tree
        tree.groups = tree.now
        self._numbers = [number for number in tree.groups if number != ROOT]
        while (worth := tree.worth(ROOT, self.step_s)) >= self._work.short_tokens:
            self._fill(self.step_s)
            spare_s = (worth - self._work.short_tokens) / self._work.tokens_in_s
            known_s = min(self._best_s, self.step_s) * (1 - _BELOW)
            guess_s = max(self.step_s - _EAGER * spare_s, self.step_s * (1 - _MOST_BELOW))
            self.step_s, self._highest = min(known_s, guess_s), -inf
        self._worth = worth
        if worth > self._highest:
            self._highest, self._top = worth, tree.groups

    def _fill(self, step_s: float) -> None:
        laid = self.tree.laid(step_s)
        draft = self.best if laid is None else filled(laid)
        ends_s = float(draft.ends_s().max())
        if ends_s < self._best_s:
            self.best, self._best_s = draft, ends_s

    def _picked(self, count: int, rather_first: float = 1.0) -> int:
        return int(count * self._random() ** rather_first)

    def _any(self) -> int:
        return self._numbers[self._picked(len(self._numbers))]

    def _somewhere(self) -> int:
        return ROOT if self._random() < _ROOT else self._any()

    def _change(self) -> bool:
        """Changes the tree by chance; False: it cannot be changed so."""
        tree, what, number = self.tree, self._random(), self._any()
        group = tree.groups[number]
        if what < _KIND:
            kinds = len(self._tokens)
            more = 1 + self._picked(kinds, _NEAR)
            kind = group.kind + (more if self._random() < 0.5 else -more)
            if not 0 <= kind < kinds or not all(tree.holds(long, kind) for long in group.bins):
                return False
            return tree.move(number, kind, group.outer)
        if what < _KIND + _RANKS:
            at = outer = self._somewhere()
            while at not in (ROOT, number):
                at = tree.groups[at].outer
            return at != number and outer != group.outer and tree.move(number, group.kind, outer)
        i = self._picked(len(group.bins))
        taken, kept = group.bins[i], group.bins[:i] + group.bins[i + 1 :]
        if len(taken) > 1 and self._random() < _SINGLE:
            x = self._picked(len(taken))
            taken, kept = taken[x : x + 1], (*kept, taken[:x] + taken[x + 1 :])
            if not tree.holds(kept[-1], group.kind):
                return False
        return self._elsewhere(number, taken, kept, what - _KIND - _RANKS)

    def _elsewhere(self, number: int, taken: Long, kept: Bins, where: float) -> bool:
        """Takes sequences from a group, which keeps others, to another place."""
        tree, into = self.tree, where < _BESIDE + _LAUNCH
        other = self._any() if into else self._somewhere()
        bins = kept if other == number else tree.groups[other].bins
        if into and where < _BESIDE and bins:
            j = self._picked(len(bins))
            taken, bins = bins[j] + taken, bins[:j] + bins[j + 1 :]
        total = sum([self._length[s] for s in taken])
        holding = [j for j, tokens in enumerate(self._tokens) if tokens >= total]
        new = holding[self._picked(len(holding), _NEAR)] if holding else -1
        kind = tree.groups[other].kind if into else new
        if kind < 0 or not tree.holds(taken, kind) or (other == number and not kept):
            return False
        if not into or other != number:
            tree.fill(number, kept)
        if not into:
            return tree.add(kind, (taken,), other)
        tree.fill(other, (*bins, taken))
        return True
