"""What Inductor keeps of a graph: values in registers, values in memory, values in another's."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.fused.fusion import Kernel, fuse

aten = torch.ops.aten
X, W = torch.randn(40, 64), torch.randn(64, 64)


def steps(function, *tensors):
    """What runs of a function's calls, and its nodes by name."""
    graph = make_fx(function, tracing_mode="fake")(*tensors).graph
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    outputs = graph.output_node().all_input_nodes
    before = str(graph)
    found = fuse(nodes, outputs, Facts({}))
    assert str(graph) == before
    return found


def kernels(found) -> list[list[str]]:
    return [[n.name for n in k.makes] for k in found if isinstance(k, Kernel)]


def test_pointwise_chain_between_matmuls_is_one_value():
    def function(x, w):
        y = aten.mm(x, w)
        return aten.mm(aten.mul(aten.neg(aten.relu(y)), 2.0), w)

    found = steps(function, X, W)
    assert kernels(found) == [["mul"]]
    (kernel,) = (k for k in found if isinstance(k, Kernel))
    assert [n.name for n in kernel.all_input_nodes] == ["mm"]
    assert kernel.in_place == {kernel.makes[0]: kernel.all_input_nodes[0]}


def test_memory_of_a_value_that_is_read_again_is_not_taken():
    def function(x, w):
        y = aten.mm(x, w)
        return aten.mm(aten.neg(y), w) + aten.mm(y, w)

    first, *_ = (k for k in steps(function, X, W) if isinstance(k, Kernel))
    assert [n.name for n in first.makes] == ["neg"]
    assert not first.in_place


def test_cheap_value_is_computed_twice_and_a_heavy_one_kept():
    def function(one):
        def call(x, w):
            y = one(aten.mm(x, w))
            return aten.mm(aten.mul(y, 2.0), w), aten.mm(aten.mul(y, 3.0), w)

        return call

    cheap = kernels(steps(function(aten.neg), X, W))
    heavy = kernels(steps(function(aten.exp), X, W))
    assert cheap == [["mul"], ["mul_1"]]
    assert heavy == [["exp", "mul"], ["mul_1"]]


def test_kernels_do_not_reach_across_a_library_call():
    def function(x, w):
        a = aten.neg(x)
        y = aten.mm(a, w)
        return aten.mul(aten.neg(a), 2.0) + y, aten.sum(x, [1])

    found = [getattr(s, "name", "") for s in steps(function, X, W)]
    assert found.index("neg") < found.index("mm") < found.index("add")


def test_reduction_and_what_reads_it_are_loops_of_one_kernel():
    def function(x, w):
        y = aten.exp(aten.mm(x, w))
        return aten.mm(aten.div(y, aten.sum(y, [1], True)), w)

    # exp is read by the sum and, once that has ended, again: it stays in memory, and so does the
    # sum. It takes mm's memory, and the quotient nobody's: two read exp.
    (kernel,) = (s for s in steps(function, X, W) if isinstance(s, Kernel))
    assert [n.name for n in kernel.makes] == ["exp", "sum_1", "div"]
    assert {n.name: t.name for n, t in kernel.in_place.items()} == {"exp": "mm"}


def test_sum_over_rows_is_a_kernel_apart():
    def function(x, w):
        y = aten.mm(x, w)
        return aten.sum(aten.mul(y, x), [0]), aten.sum(aten.mul(y, x), [1])

    assert kernels(steps(function, X, W)) == [["sum_1"], ["sum_2"]]


def test_second_reshape_of_a_pointwise_value_is_a_copy():
    def function(x, w):
        y = aten.relu(x)
        z = aten.view(aten.view(y, [8, 5, 64]), [40, 64])
        return aten.mm(z, w), aten.mul(y, x)

    assert kernels(steps(function, X, W)) == [["relu", "view_1"], ["mul"]]


def test_what_is_made_of_positions_alone_has_no_memory_and_is_as_heavy_to_its_readers():
    def function(table, w):
        i = aten.arange(40)
        index = aten.clamp(aten.mul(aten.log(aten.add(i, 1)), 8.0), 0, 39).to(torch.int64)
        row = aten.embedding(table, index)
        return aten.mm(aten.add(row, 1.0), w), aten.mm(aten.mul(row, index.unsqueeze(1)), w)

    # The index is read twice and is heavy, but reads nothing: whoever reads it makes it again. So
    # the rows found with it are heavy as well, and these are kept.
    names = kernels(steps(function, X, W))
    assert names == [["embedding", "add_1"], ["mul_1"]]


@pytest.mark.parametrize(("sources", "times"), [(1, 2), (2, 1)])
def test_operand_of_two_of_our_ops_that_is_made_of_one_value_is_made_for_each(sources, times):
    mask = torch.randn(1, 4, 40, 40)
    q = torch.randn(1, 40, 4, 16).transpose(1, 2)

    def function(q, mask, other):
        hidden = aten.where(aten.gt(mask, 0), other if sources > 1 else mask, -1e9)
        rest = (1.0, None, None, 0, None, 0, "zero")
        ops = torch.ops.dcpc
        first, _ = ops.attention_forward(q, q, q, hidden, None, None, *rest)
        return ops.attention_forward(first, q, q, hidden, None, None, *rest)[0]

    found = steps(function, q, mask, torch.randn(1, 4, 40, 40))
    assert kernels(found) == [["where"]] * times
    calls = [getattr(s, "name", "") for s in found if not isinstance(s, Kernel)]
    assert calls.index("attention_forward") < calls.index("attention_forward_1")
