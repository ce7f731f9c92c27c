"""Spellings of attention that become one op, and those that must not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import dcpc
from dcpc.ir import Program
from dcpc.trace import trace
from tests.cases.exactness import compiled_error

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


def filled(scores: Tensor) -> Tensor:
    hidden = torch.ones(scores.shape[2], scores.shape[3], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -1e4).softmax(-1)


MISSES = {
    "lower precision": lambda q, k, v, b: (q @ k.mT).softmax(-1, dtype=torch.float32).double() @ v,
    "weights read twice": lambda q, k, v, b: (w := (q @ k.mT).softmax(-1)) @ v + w.mean(),
    "softmax over queries": lambda q, k, v, b: (q @ k.mT).softmax(-2) @ v,
    "scores reach its fill": lambda q, k, v, b: filled(3e4 * q @ k.mT) @ v,
    "a vector of values": lambda q, k, v, b: (q @ k.mT).softmax(-1) @ v[0, 0, :, 0],
    "a vector of keys": lambda q, k, v, b: (q @ k[0, 0, 0]).softmax(-1) @ v[0, 0],
    "a vector of queries": lambda q, k, v, b: (q[0, 0, 0] @ k[0, 0].mT).softmax(-1) @ v[0, 0],
    "divided by 0": lambda q, k, v, b: (q @ k.mT * 0 / 0).softmax(-1) @ v,
    "a length added": lambda q, k, v, b: (q @ k.mT + q.shape[2]).softmax(-1) @ v,
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


class Memory(nn.Module):
    """Attends to keys that are a parameter, and the first of all inputs of the graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.keys, self.values = (
            nn.Parameter(torch.randn(s, dtype=torch.float64)) for s in ((8, 5), (5, 8))
        )

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.keys).softmax(-1) @ self.values + x.shape[1]).square().mean()


def test_keys_that_are_a_parameter_are_turned_below_all_inputs():
    model = Memory()
    assert OP in {n.target for n in trace(model, BUCKETS).gm.graph.nodes}
    compiled = dcpc.compile(model, BUCKETS, backend="eager", verify="off")
    x = torch.randn(3, 15, 8, dtype=torch.float64)
    assert compiled_error(compiled, compiled.model, {"x": x}) < 1e-10


@pytest.mark.filterwarnings("ignore:scores are replaced by")
@pytest.mark.parametrize("name", MISSES)
def test_other_things_stay_as_they_are(name):
    nodes, program, model = calls(MISSES[name])
    assert not nodes
    x = torch.randn(3, 15, 8, dtype=torch.float64)
    got, want = run(program, model, x), model(x)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0, equal_nan=True)


def test_fill_that_scores_may_reach_is_named():
    with pytest.warns(UserWarning, match="replaced by -10000, which others may reach"):
        calls(MISSES["scores reach its fill"])


def with_scale(scale: float, causal: bool = False):
    def attends(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        n = q.shape[2]
        seen = torch.ones(n, n, dtype=torch.bool).tril()
        numbers = torch.zeros(n, n, dtype=q.dtype).masked_fill(~seen, float("-inf"))
        y = F.scaled_dot_product_attention(q, k, v, seen, scale=scale)
        y = y + F.scaled_dot_product_attention(q, k, v, numbers, scale=scale)
        return y + (q @ k.mT * scale).masked_fill(~seen, float("-inf")).softmax(-1) @ v

    return attends


def columns(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """The width of a head is a named dim, and so is what it scales by."""
    return F.scaled_dot_product_attention(q.mT, k.mT, v.mT)


def without_a_key(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    at = torch.arange(q.shape[2])
    seen = (at <= at[:, None]) & (at > 2)
    y = F.scaled_dot_product_attention(q, k, v, seen, dropout_p=1e-12)
    numbers = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, float("-inf"))
    return y + F.scaled_dot_product_attention(q, k, v, numbers, dropout_p=1e-12, scale=-0.3)


def innermost_last(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    q, k, v = (t.mT.contiguous().mT for t in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    y = y + F.scaled_dot_product_attention(k, q, v[..., :1].expand(v.shape))
    q, k, v = torch.stack([q, k, v], -1).unbind(-1)
    return y + F.scaled_dot_product_attention(q, k, v)


WHOLE = {
    "negative scale": with_scale(-0.5),
    "scale of 0": with_scale(0.0),
    "width of a named dim": columns,
    "dropout, no key": without_a_key,
    "last dim not innermost": innermost_last,
}


@pytest.mark.parametrize("name", WHOLE)
def test_compiled_numbers_are_the_model_s(name):
    model = Attends(WHOLE[name])
    compiled = dcpc.compile(model, BUCKETS, backend="eager", verify="off")
    x = torch.randn(3, 20, 8, dtype=torch.float64)
    leaves = list(model.qkv.parameters())
    loss, want = compiled(x=x), model(x)
    torch.testing.assert_close(loss, want, rtol=1e-10, atol=0)
    gradients = (torch.autograd.grad(y, leaves) for y in (loss, want))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)


def seen_by(q: Tensor, before: int) -> Tensor:
    distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
    return (distance >= 0) & (distance < before)


BITS = {
    "causal": lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "numbers": lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, b.detach()[None].float()),
}
NEAR = {
    "causal mask": lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, seen_by(q, 99)),
    "window": lambda q, k, v, b: F.scaled_dot_product_attention(q, k, v, seen_by(q, 5)),
    "wide values": lambda q, k, v, b: F.scaled_dot_product_attention(q, k, torch.cat([v, v], -1)),
    "negative scale": lambda q, k, v, b: F.scaled_dot_product_attention(
        q, k, v, seen_by(q, 99), scale=-0.5
    ),
    "spelled": lambda q, k, v, b: (q @ k.mT * 0.5).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", BITS | NEAR)
def test_bits_of_the_plain_model_under_autocast(name):
    """Or as near to float64 as these are, where another kernel computes them."""
    inputs = {"x": "float32[batch, seq, 8]"}
    buckets = dcpc.Buckets(inputs=inputs, sizes=[{"seq": 48}, {"seq": 64}])
    model, exact = Attends((BITS | NEAR)[name]).float(), Attends((BITS | NEAR)[name])
    compiled = dcpc.compile(model, buckets, backend="eager", autocast=torch.bfloat16, verify="off")
    x = torch.randn(8, 64, 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        want = model(x)
    found = [torch.autograd.grad(y, model.qkv.weight)[0] for y in (compiled(x=x), want)]
    if name in BITS:
        assert found[0].equal(found[1])
        return
    (truth,) = torch.autograd.grad(exact(x.double()), exact.qkv.weight)
    far = [float((g - truth).norm() / truth.norm()) for g in found]
    assert far[0] < 1.2 * far[1] < 0.1


ROWS = 3  # samples of each sample of the input, which share a mask


def rows_of(x: Tensor) -> Tensor:
    """`[b, h, s, d]` -> [b, ROWS, h, s, d], no two alike."""
    return torch.stack([x * (1 + 0.1 * i) for i in range(ROWS)], 1)


def biased(share, join: bool):
    """Attention of ROWS samples each, biased by what all of them share."""

    def attends(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        given = q @ k.mT * 0.3 + bias
        q, k, v = (rows_of(x) for x in (q, k, v))
        if join:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=share(given))

    return attends


def spelled_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    given = (q @ k.mT * 0.3 + bias)[:, None]
    q, k, v = (rows_of(x) for x in (q, k, v))
    return (q @ k.mT * 0.5 + given).softmax(-1) @ v


def six_dims(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Of two dims that become samples, the mask has the first and the second, not the third."""
    given = rows_of(q @ k.mT * 0.3 + bias)[:, :, None]
    q, k, v = (torch.stack([rows_of(x), rows_of(x) * 0.7], 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=given)


def hidden_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A truth mask by sample, which positions alone do not make."""
    seen = (k.detach().sum((1, 3))[:, None, :] > 0) | torch.eye(q.shape[2], dtype=torch.bool)
    q, k, v = (rows_of(x) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])


def causal_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    at = torch.arange(q.shape[2])
    seen = (at <= at[:, None]).expand(q.shape[0], 1, 1, -1, -1)
    return F.scaled_dot_product_attention(*(rows_of(x) for x in (q, k, v)), attn_mask=seen)


# name -> (attention, how many samples share a row of its mask)
SHARED = {
    "five dims": (biased(lambda m: m[:, None], join=False), ROWS),
    "reshaped": (
        biased(lambda m: m[:, None].expand(-1, ROWS, -1, -1, -1).flatten(0, 1), join=True), ROWS,
    ),
    "interleaved": (biased(lambda m: m.repeat_interleave(ROWS, 0), join=True), ROWS),
    "spelled": (spelled_rows, ROWS),
    "six dims": (six_dims, 2),
    "truth": (hidden_rows, ROWS),
    "causal": (causal_rows, ROWS),
    # These are no rows that samples after each other share.
    "tiled": (biased(lambda m: m.repeat(ROWS, 1, 1, 1), join=True), 1),
    "expanded in front": (
        biased(lambda m: m[None].expand(ROWS, -1, -1, -1, -1).flatten(0, 1), join=True), 1,
    ),
    "by row": (biased(lambda m: rows_of(m[:1])[:, :, :, :1, :1], join=False), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_mask_that_samples_share_is_not_repeated(name):
    how, sharers = SHARED[name]
    (node,), program, model = calls(how)
    info = [program.info[n.name].shape for n in node.all_input_nodes]
    assert info[3][0] * sharers == info[0][0]
    x = torch.randn(2, 15, 8, dtype=torch.float64)
    losses = run(program, model, x), model(x)
    torch.testing.assert_close(*losses, rtol=1e-13, atol=0)
    leaves = list(model.parameters())
    both = [torch.autograd.grad(loss, leaves, allow_unused=True) for loss in losses]
    for got, want in zip(*both, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-14)
