"""Groups as a tree: changes leave each sequence once, its ranks apart, and no worth out of date."""

from itertools import combinations
from random import Random

import numpy as np
import pytest

from dcpc.runtime.planner.packed.evolution import Cycle
from dcpc.runtime.planner.packed.fluid import ShortFluid
from dcpc.runtime.planner.packed.layouts_search import search
from dcpc.runtime.planner.packed.tree import ROOT, Tree
from dcpc.runtime.planner.packed.ways import BinKind, PackedWork

TOKEN_S, SQUARE_S = 2e-3, 2e-5


def work_of(seed, rows=1, aligned=False, ranks=24):
    """Lengths with a heavy tail on groups of a few degrees; rows of 200 tokens on each rank."""
    lengths = (30 * (1 + np.random.default_rng(seed).pareto(1.1, 120))).clip(max=3000)
    kinds = []
    for d in (1, 2, 3, 4, 6, 8, 16):
        at = [25 * 2**n for n in range(8)]
        curve = tuple((n, (TOKEN_S + SQUARE_S * n + 4e-4 * (d > 1)) / d) for n in at)
        for count in {1, rows}:
            kinds.append(BinKind(0, len(kinds), d, count, 200 * d // count, 0.5, curve))
    return PackedWork(lengths.astype(int).tolist(), kinds, ranks, 8, aligned)


def check(tree, work, step_s):
    """Compares a tree with one that is computed anew."""
    groups = tree.groups
    placed = sorted(s for g in groups.values() for long in g.bins for s in long)
    assert placed == list(range(work.long))
    for number, group in groups.items():
        inner = [groups[n] for n in group.inner]
        assert all(g.outer == number for g in inner)
        assert group.free == group.degree - sum(g.degree for g in inner) >= 0
        assert number == ROOT or all(tree.holds(long, group.kind) for long in group.bins)
    tree.now = groups
    known = tree.worth(ROOT, step_s)
    for group in groups.values():
        group.worth.clear()
    assert tree.worth(ROOT, step_s) == known
    laid = tree.laid(step_s)
    assert laid is None or tree.has_ranks()
    if laid is not None:
        blocks = [
            (set(range(g.first, g.first + int(work.degree[g.kind]))), g.open) for g in laid.groups
        ]
        assert len(blocks) == len(groups) - 1
        for (one, is_open), (other, _) in combinations(blocks, 2):
            assert one.isdisjoint(other) or (one >= other and not is_open)


@pytest.mark.parametrize(("rows", "aligned"), [(1, False), (2, False), (1, True)])
def test_changes_keep_a_tree_whole(rows, aligned):
    for seed in range(2):
        work = work_of(seed, rows, aligned)
        best = min(search(work).drafts, key=lambda draft: float(draft.ends_s().max()))
        line = Cycle(work.with_long(0.5), best, Random(seed), 12)
        check(line.tree, line._work, line.step_s)
        for _ in range(12):
            line.turn()
            check(line.tree, line._work, line.step_s)
        assert line.best.ends_s().max() <= best.ends_s().max()


def test_a_change_that_is_not_made_leaves_no_trace():
    work = work_of(0)
    best = search(work).drafts[0]
    line = Cycle(work.with_long(0.5), best, Random(0), 1)
    tree, step_s = line.tree, line.step_s
    before, worth = dict(tree.groups), tree.worth(ROOT, step_s)
    tried = 0
    for _ in range(400):
        tree.now = dict(tree.groups)
        if line._change():
            tried += tree.worth(ROOT, step_s) != worth
    tree.now = dict(tree.groups)
    assert tried > 50
    assert tree.groups == before
    check(tree, line._work, step_s)


def test_a_tree_is_worth_what_its_layout_takes_up():
    """One group of two ranks for a sequence of 300 tokens; the other ranks run short ones alone."""
    work = PackedWork([300, *[50] * 60], work_of(0).kinds, 4)
    draft = search(work).drafts[0]
    fluid = ShortFluid(work.with_long(1.0), 100.0)
    tree = Tree(fluid, draft)
    (group,) = (g for n, g in tree.groups.items() if n != ROOT)
    step_s = float(draft.ends_s().max())
    rank = float(fluid.rank_tokens(np.array(step_s)))
    own = step_s - group.need_s
    found, _ = fluid.group_tokens(np.array([own]), np.array([group.room]), np.array([group.kind]))
    expected = (4 - group.degree) * rank + float(found[0])
    assert tree.worth(ROOT, step_s) == pytest.approx(expected, rel=1e-9)
