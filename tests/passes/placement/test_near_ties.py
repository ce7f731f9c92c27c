"""Placements taken again where they cost hardly more than the best."""

from functools import cache
from math import inf

import pytest
import torch

from dcpc.buckets import Buckets
from dcpc.ir import Fold, Placement, Program
from dcpc.passes.placement.near_ties import NearTies
from dcpc.passes.placement.placement import PlacementModel, place
from dcpc.passes.sharding.sharding import Sharding, analyse
from dcpc.plan.folding import fold
from dcpc.trace import trace
from models.gpt import GPT, GPTConfig
from tests.cases.analysed import TIGHT, options_of

LENGTHS = ({"batch": 1, "seq": 8192}, {"batch": 4, "seq": 64}, {"batch": 2, "seq": 1001})
INPUTS = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}


@cache
def gpt(folded: bool) -> tuple[Program, Sharding, Fold | None]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, dim=32, n_layers=4, n_heads=4))
    program = trace(model, Buckets(INPUTS, [{"seq": 16}, {"seq": 8192}]))
    if not folded:
        return program, analyse(program), None
    small = fold(program, 3)
    assert small is not None, "equal layers are not found"
    return small.program, analyse(small.program), small.copies({})


class Placing:
    """One model, placed with what was placed of it before."""

    def __init__(self, tolerance: float, folded: bool = False) -> None:
        self.program, self.sharding, self.fold = gpt(folded)
        self.model = PlacementModel(self.program, self.sharding)
        self.near = NearTies(self.model, self.fold, tolerance)

    def __call__(self, sizes: dict[str, int], sp: int, near: bool = True) -> Placement:
        known = self.near if near else None
        given = self.program, self.sharding, sizes, sp, TIGHT, self.model, self.fold
        return place(*given, known)

    def again(self, placement: Placement, sizes: dict[str, int], sp: int) -> float:
        """The cost of a placement's options at other sizes."""
        symbols, catalogue = self.program.symbols, self.model.catalogue
        choice = self.near.know(options_of(self.model, placement.nodes))
        numbers = catalogue.numbers({symbols[n]: s for n, s in sizes.items()})
        shares = catalogue.shares(numbers, sp)
        return choice.cost(catalogue.prices(numbers, shares, sp, TIGHT), shares, sp)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("sizes", LENGTHS)
@pytest.mark.parametrize("sp", [2, 4, 8])
def test_cost_of_a_choice_is_that_of_the_network(sizes, sp, folded):
    placing = Placing(0.0, folded)
    best = placing(sizes, sp, near=False)
    assert placing.again(best, sizes, sp) == pytest.approx(best.cost_s, rel=1e-12)


def test_known_choice_is_taken_when_it_is_near():
    placing = Placing(10.0)
    first = placing({"batch": 1, "seq": 8192}, 4)
    second = placing({"batch": 1, "seq": 8190}, 4)
    assert second.nodes == first.nodes
    assert second.cost_s != first.cost_s, "it costs what it costs at these sizes"
    assert placing({"batch": 1, "seq": 8192}, 2).nodes == first.nodes, "at another degree"


def test_best_is_taken_when_no_known_choice_is_near():
    placing = Placing(1e-4)
    placing({"batch": 4, "seq": 64}, 4)
    sizes = {"batch": 1, "seq": 8192}
    assert placing(sizes, 4).nodes == placing(sizes, 4, near=False).nodes


def test_cost_is_within_the_tolerance_of_the_best():
    tolerance = 0.05
    placing = Placing(tolerance)
    for seq in (64, 100, 1000, 1001, 4096, 8192):
        for sp in (2, 3, 4):
            sizes = {"batch": 2, "seq": seq}
            best = placing(sizes, sp, near=False).cost_s
            found = placing(sizes, sp)
            assert best * (1 - 1e-12) <= found.cost_s <= best * (1 + tolerance)
            assert found.cost_s == pytest.approx(best * (1 + found.gap), rel=1e-12)


def test_choice_is_of_no_use_when_a_split_factor_has_one_element():
    placing = Placing(0.0)
    split_batch = placing({"batch": 8, "seq": 64}, 4, near=False)
    assert any(p.output.sharded and p.output.dim == 0 for p in split_batch.nodes.values())
    assert placing.again(split_batch, {"batch": 1, "seq": 64}, 4) == inf


def test_placement_is_the_best_when_nothing_else_is_asked():
    placing = Placing(10.0)
    sizes = {"batch": 1, "seq": 8192}
    best = placing(sizes, 4, near=False)
    placing({"batch": 4, "seq": 64}, 4)
    assert placing(sizes, 4, near=False).nodes == best.nodes
