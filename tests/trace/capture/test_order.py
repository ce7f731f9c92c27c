"""What depends on no parameter has one order, whoever made it first."""

import pytest
import torch
from torch import fx

from dcpc.trace.capture.order import order_preparations


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
        ("cos", "at"),
        ("sin", "at"),
        ("cos_1", "sin"),
        ("mul", "weight", "cos_1"),
        ("mul_1", "mul", "cos"),
    ]


def test_the_first_block_begins_as_the_others_do():
    """What all blocks read is made before what the first makes for itself and reads at once."""
    graph = fx.Graph()
    weight, at = graph.placeholder("weight"), graph.placeholder("at")
    shared = graph.call_function(torch.cos, (at,))
    value = weight
    for _ in range(3):
        own = graph.call_function(torch.sin, (at,))
        value = graph.call_function(torch.mul, (value, own))
        value = graph.call_function(torch.add, (value, shared))
    graph.output(value)
    order_preparations(graph, ["weight"])
    made = [n.target for n in graph.nodes if n.op == "call_function"]
    assert made == [torch.cos, *[torch.sin, torch.mul, torch.add] * 3]
