"""What a placement counts is what the profile counts of the graphs that are lowered from it."""

from dataclasses import replace

import numpy as np
import pytest
import sympy
import torch

import dcpc
from dcpc.api import plan
from dcpc.passes.placement.choices import choice_of
from dcpc.passes.placement.label_costs import WHOLE, Catalogue, Change, Kind
from dcpc.passes.placement.node_options import PlacementModel
from dcpc.passes.placement.objective import TIE_S, Objective
from dcpc.symbolic_profile import CollectiveFit, Device, Fits, Link, calibrated, find
from models.gpt import GPT, GPTConfig
from tests.cases import language_models
from tests.cases.analysed import options_of

NEVER = 1e30  # a rate at which nothing takes any time
AT = {"batch": 1, "seq": 4096}


def only(products: bool) -> Device:
    """A device on which products alone take time, or what is sent alone."""
    link = Link(0.0, NEVER if products else 1e9)
    return replace(
        find("cpu"), flops_per_s=((torch.float32, 1e9 if products else NEVER),),
        vector_flops_per_s=NEVER, memory_bytes_per_s=NEVER, launch_s=0.0, inside=link, across=link,
    )  # fmt: skip


@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize("attention", ["heads", "gathered", "ring", "hybrid"])
def test_products_and_what_is_sent_are_the_reports(attention, products):
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, dim=128, n_layers=2, n_heads=8, n_kv_heads=4))
    buckets = dcpc.Buckets(inputs=language_models.inputs("gpt"), sizes=[{"seq": AT["seq"]}])
    device = only(products)
    planned = plan(model, buckets, world=4, sp=4, device=device, backend="eager", recompute="none",
                   memory=1e15, attention=attention)  # fmt: skip
    priced = planned.runnable.priced
    program = priced.traced.program
    placement = priced.placement(AT, 4)
    model = PlacementModel(program, priced.traced.sharding)
    choice = choice_of(model, None, options_of(model, placement.nodes))
    numbers = model.catalogue.numbers(program.dims(AT))
    shares = model.catalogue.shares(numbers, 4)
    prices = model.catalogue.prices(numbers, shares, 4, Objective(device))
    counted = choice.cost(prices, shares, 4)
    assert counted == pytest.approx(priced.at(placement).predict(0, AT).seconds_s, rel=2e-3)


def test_each_collective_has_its_own_fit_and_held_bytes_their_price():
    names = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")
    per_byte = {name: 10.0**-i for i, name in enumerate(names)}
    fits = Fits(
        (), tuple(CollectiveFit(f"dcpc::{n}", 4, 7.0, s) for n, s in per_byte.items()), (), 0.0,
        0.0, 0.0,
    )  # fmt: skip
    catalogue = Catalogue()
    rows = sympy.Symbol("rows")
    value = catalogue.value((rows,), torch.float32)
    piece = 1  # made up: a quarter, beside the whole
    kinds = {
        "all_to_all": (Kind.ALL_TO_ALL, piece, piece),
        "all_gather": (Kind.ALL_GATHER, piece, WHOLE),
        "reduce_scatter": (Kind.REDUCE_SCATTER, WHOLE, piece),
        "all_reduce": (Kind.ALL_REDUCE, WHOLE, WHOLE),
    }
    at = {
        name: catalogue.change(Change(kind, value, have, want, True))
        for name, (kind, have, want) in kinds.items()
    }
    numbers, shares = catalogue.numbers({rows: 100}), np.array([1.0, 0.25])
    objective = Objective(calibrated(find("cpu"), fits), held_s_per_byte=1e3, tie_s=TIE_S)
    found = catalogue.prices(numbers, shares, 4, objective).changes_s
    starts = 2 * TIE_S  # forward and backward, not 7 seconds each
    gather_s, scatter_s = 300 * per_byte["all_gather"], 300 * per_byte["reduce_scatter"]
    assert found[at["all_to_all"]] == pytest.approx(2 * 75 * per_byte["all_to_all"] + starts)
    assert found[at["reduce_scatter"]] == pytest.approx(gather_s + scatter_s + starts)
    assert found[at["all_gather"]] == pytest.approx(gather_s + scatter_s + starts + 300 * 1e3)
    assert found[at["all_reduce"]] == pytest.approx(2 * 600 * per_byte["all_reduce"] + starts)
    with_starts = catalogue.prices(numbers, shares, 4, replace(objective, tie_s=None)).changes_s
    assert with_starts[at["all_reduce"]] == pytest.approx(found[at["all_reduce"]] + 14 - starts)
