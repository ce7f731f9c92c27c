"""Spellings of attention that become one op, and those that must not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import dcpc
from dcpc.ir import Program
from dcpc.trace import trace

BUCKETS = dcpc.Buckets(inputs={"x": "float64[batch, seq, 8]"}, sizes=[{"seq": 12}, {"seq": 20}])
OP = torch.ops.dcpc.attention.default


class Attends(nn.Module):
    def __init__(self, how) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how, self.qkv = how, nn.Linear(8, 24).double()
        self.bias = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 2)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.how(q, k, v, self.bias).square().mean()


def repeat(x: Tensor) -> Tensor:
    few = x[:, :2]
    wide = few[:, :, None].expand(-1, -1, 2, -1, -1)
    return wide.reshape(x.shape)


def baddbmm(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    unread = q.new_zeros(1)
    scores = torch.baddbmm(unread, q, k.transpose(1, 2), beta=0, alpha=0.5)
    return torch.bmm(scores.softmax(-1), v)


def five_dims(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (t.unsqueeze(1) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


HITS = {
    "fused": lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "repeated": lambda q, k, v, b: F.scaled_dot_product_attention(q, repeat(k), repeat(v)),
    "five dims": five_dims,
    "spelled": lambda q, k, v, b: (q @ k.mT / 2**0.5).softmax(-1) @ v,
    "scaled queries, bias": lambda q, k, v, b: (q * 0.3 @ k.mT + b).softmax(-1) @ v,
    "bias, then scaled": lambda q, k, v, b: ((q @ k.mT + b) * 0.3).softmax(-1) @ v,
    "baddbmm": baddbmm,
}  # fmt: skip
MISSES = {
    "lower precision": lambda q, k, v, b: (q @ k.mT).softmax(-1, dtype=torch.float32).double() @ v,
    "weights read twice": lambda q, k, v, b: (w := (q @ k.mT).softmax(-1)) @ v + w.mean(),
    "softmax over queries": lambda q, k, v, b: (q @ k.mT).softmax(-2) @ v,
    "a fill not low": lambda q, k, v, b: (q @ k.mT).masked_fill(b > 0, -3.0).softmax(-1) @ v,
}  # fmt: skip


def calls(how) -> tuple[list[fx.Node], Program, Attends]:
    model = Attends(how)
    program = trace(model, BUCKETS)
    return [n for n in program.gm.graph.nodes if n.target is OP], program, model


def run(program, model: Attends, x: Tensor) -> Tensor:
    own = [model.get_parameter(n) for n in program.parameters.values()]
    constants = list(program.constants.values())
    return fx.Interpreter(program.gm).run(*own, *constants, x)[0]


@pytest.mark.parametrize("name", HITS)
def test_spelling_becomes_one_op_of_the_same_numbers(name):
    (node,), program, model = calls(HITS[name])
    assert all(n.meta["val"].ndim == 4 for n in node.all_input_nodes)
    heads = [n.meta["val"].shape[1] for n in node.args[:3]]
    assert heads[1] == (2 if name == "repeated" else heads[0])
    x = torch.randn(3, 15, 8, dtype=torch.float64)
    losses = run(program, model, x), model(x)
    torch.testing.assert_close(*losses, rtol=1e-13, atol=0)
    want = torch.autograd.grad(losses[1], list(model.parameters()), allow_unused=True)
    got = torch.autograd.grad(losses[0], list(model.parameters()), allow_unused=True)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("name", MISSES)
def test_other_things_stay_as_they_are(name):
    nodes, program, model = calls(MISSES[name])
    assert not nodes
    x = torch.randn(3, 15, 8, dtype=torch.float64)
    torch.testing.assert_close(run(program, model, x), model(x), rtol=1e-6, atol=0)
