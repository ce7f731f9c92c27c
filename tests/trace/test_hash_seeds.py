"""Ranks have hash seeds of their own, and find the same graphs and plans."""

import pytest
import torch
from torch import fx

from benchmarks.zoo_seeds import SEEDS, run
from dcpc.trace.order import order_preparations


@pytest.mark.parametrize("layers", [("a", "b"), ("b", "a")])
def test_what_is_prepared_has_one_order_whoever_made_it_first(layers):
    """Here one is longer than the other, so that names and places move as well."""
    graph, made = fx.Graph(), {}
    weight, at = graph.placeholder("weight"), graph.placeholder("at")
    for layer in layers:
        made[layer] = graph.call_function(torch.cos if layer == "a" else torch.sin, (at,))
        if layer == "b":
            made[layer] = graph.call_function(torch.cos, (made[layer],))
    first = graph.call_function(torch.mul, (weight, made["b"]))
    graph.output(graph.call_function(torch.mul, (first, made["a"])))
    order_preparations(graph, ["weight"])
    graph.lint()
    calls = [(n.name, *(a.name for a in n.args)) for n in graph.nodes if n.op == "call_function"]
    assert calls == [
        ("sin", "at"),
        ("cos", "sin"),
        ("cos_1", "at"),
        ("mul", "weight", "cos"),
        ("mul_1", "mul", "cos_1"),
    ]


def test_every_hash_seed_makes_the_same_graphs_and_plans():
    each = [run(["tests.trace.seeded"], seed, 300.0) for seed in SEEDS[:2]]
    assert {*each[0]} == {"alternating"}
    assert all(found == each[0] for found in each), each


@pytest.mark.slow
def test_every_hash_seed_makes_the_same_of_modernbert():
    own = ["benchmarks.zoo_seeds", "--print", "--more", "--only", "ModernBERT"]
    each = [run(own, seed, 600.0) for seed in SEEDS]
    assert {*each[0]} == {"ModernBERT"}
    assert all(found == each[0] for found in each), each


@pytest.mark.slow
def test_every_hash_seed_makes_the_same_of_the_zoo():
    each = [run(["benchmarks.zoo_seeds", "--print", "--more"], seed, 7200.0) for seed in SEEDS]
    assert len(each[0]) > 70
    assert [n for n, found in each[0].items() if any(e[n] != found for e in each)] == []
