"""FLOPs against torch's FlopCounterMode, and what no op may do: cost nothing in silence."""

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - registers a grouped product
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from dcpc.symbolic_profile import evaluator, profile_partition
from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.flops import cost_of
from tests.cases.joint_graphs import case, step

aten = torch.ops.aten


def kept_pairs(queries: int, keys: int, causal: bool) -> int:
    mask = torch.ones(queries, keys)
    return int((mask.tril() if causal else mask).sum())


def attention_flops(q, k, v, dropout=0.0, causal=False, **_):
    (b, h, s, d), width = q, v[3]
    return 2 * b * h * kept_pairs(s, k[2], causal) * (d + width)


def attention_backward_flops(g, q, k, v, out, lse, dropout, causal, **_):
    (b, h, s, d), width = q, v[3]
    return 2 * b * h * kept_pairs(s, k[2], causal) * (3 * d + 2 * width)


CPU_ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


@pytest.mark.parametrize("model", ["gpt", "llama", "mixed"])
def test_flops_are_those_of_torchs_counter(model):
    at = evaluator(profile_partition(case(model).partition))
    for batch, seq in [(2, 17), (3, 90)]:
        with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
            step(case(model), batch, seq)
        assert at.flops({"batch": batch, "seq": seq}) == counter.get_total_flops()


@pytest.mark.parametrize("mask", [(True, True), (False, True)])
def test_convolution_backward_counts_what_is_asked(mask):
    x, w = torch.randn(2, 4, 12, 12), torch.randn(8, 4, 3, 3)
    g = torch.randn(2, 8, 10, 10)

    def backward(g, x, w):
        options = ([8], [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        return [t for t in aten.convolution_backward(g, x, w, *options, [*mask, True])
                if t is not None]  # fmt: skip

    with FlopCounterMode(display=False) as counter:
        backward(g, x, w)
    assert sum(costs(backward, g, x, w)) == counter.get_total_flops()


def costs(function, *tensors):
    gm, facts = make_fx(function, tracing_mode="fake")(*tensors), Facts({})
    found = [cost_of(n, facts) for n in gm.graph.nodes if n.op == "call_function"]
    return [int(c.flops) for c in found if c is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_cost_what_a_product_of_each_row_costs(dtype):
    x = torch.randn(24, 16, dtype=dtype).requires_grad_()
    w = torch.randn(4, 8, 16, dtype=dtype).requires_grad_()
    ids, offsets = torch.arange(24) // 7, torch.tensor([7, 14, 21, 24], dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        y = torch.bmm(w[ids], x.unsqueeze(-1))
        torch.autograd.grad(y.square().sum(), (x, w))
    op = (
        torch._grouped_mm if dtype == torch.bfloat16 else torch.ops.transformers.grouped_mm_fallback
    )

    def backward(x, w, offsets):
        y = op(x, w.transpose(-1, -2), offsets)
        return torch.autograd.grad(y.square().sum(), (x, w))

    gm, facts = make_fx(backward, tracing_mode="fake")(x, w, offsets), Facts({})
    found = [c for n in gm.graph.nodes if (c := cost_of(n, facts)) and c.op_class == "matmul"]
    assert sum(int(c.flops) for c in found) == counter.get_total_flops()


def test_view_costs_nothing():
    assert costs(lambda x: x.view(-1).unsqueeze(0).expand(4, -1), torch.randn(3, 4)) == []


def test_pointwise_counts_its_elements():
    assert costs(lambda x: x + 1, torch.randn(3, 4)) == [12]


def test_broadcast_operand_is_read_once():
    gm = make_fx(lambda x: x.expand(100, 8) + 1, tracing_mode="fake")(torch.randn(8))
    facts = Facts({})
    (add,) = [c for n in gm.graph.nodes if (c := cost_of(n, facts)) is not None]
    assert add.bytes_moved == 4 * 8 + 4 * 800


def test_embedding_reads_the_rows_it_returns():
    table, ids = torch.randn(100_000, 8), torch.zeros(6, dtype=torch.long)
    gm = make_fx(lambda t, i: aten.embedding(t, i), tracing_mode="fake")(table, ids)
    facts = Facts({})
    (lookup,) = [c for n in gm.graph.nodes if (c := cost_of(n, facts)) is not None]
    assert lookup.bytes_moved == 2 * 4 * 6 * 8 + 8 * 6


def test_unknown_op_is_unpriced_but_not_free():
    gm = make_fx(lambda x: torch.linalg.inv(x), tracing_mode="fake")(torch.eye(5))
    facts = Facts({})
    found = [c for n in gm.graph.nodes if (c := cost_of(n, facts)) is not None]
    assert found[0].op_class == "unpriced"
    assert found[0].flops == 25
