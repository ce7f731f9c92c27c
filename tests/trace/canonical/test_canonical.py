"""The canonical graph has the module's loss and gradients, at sizes never traced."""

import re
from functools import cache

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from dcpc.buckets import Buckets
from dcpc.trace import trace

V = 7
INPUTS = {"x": "float64[batch, seq, 7]", "y": "int64[batch, seq]"}


class Net(nn.Module):
    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(V, V).double()
        self.loss = loss

    def forward(self, x, y):
        return self.loss(self.net(x), y)


def data(batch, seq):
    generator = torch.Generator().manual_seed(batch + seq)
    y = torch.randint(0, V, (batch, seq), generator=generator)
    y[:, ::3] = -100
    y[:, -1] = 2
    return torch.randn(batch, seq, V, dtype=torch.float64, generator=generator), y


def captured(model):
    return trace(model, Buckets(inputs=INPUTS, sizes=[{"seq": 4}, {"seq": 9}]))


def run(program, model, x, y):
    parameters = dict(model.named_parameters())
    values = {**{p: parameters[n] for p, n in program.parameters.items()}, **program.constants}
    values |= {p: {"x": x, "y": y}[n] for p, n in program.inputs.items()}
    return fx.Interpreter(program.gm).run(*values.values())[0]


def ops(program):
    return [str(n.target) for n in program.gm.graph.nodes if n.op == "call_function"]


def weights():
    return torch.linspace(0.5, 1.5, V, dtype=torch.float64)


def in_place(z, y):
    z = z.clone()
    z[:, 1:] = 0.5
    z[:, 0] += 1
    return z.square_().mean()


def without_gradient(z, y):
    with torch.no_grad():
        scale = z.abs().amax()
    return (z / scale).square().mean() + (z.detach() * z).mean()


def without_autocast(z, y):
    with torch.autocast("cpu", enabled=False):
        rows = F.cross_entropy(z.double().flatten(0, 1), y.flatten(), reduction="none")
        return rows.view(y.shape).square().mean()


LOSSES = {
    "no reduction, in a block of its own": without_autocast,
    "mean": lambda z, y: z.square().mean(),
    "mean of a dim": lambda z, y: z.mean(1).square().mean() + z.mean((0, 1), keepdim=True).sum(),
    "mse": lambda z, y: F.mse_loss(z, z.detach() * 2),
    "mse sum": lambda z, y: F.mse_loss(z, z.detach() * 2, reduction="sum"),
    "l1": lambda z, y: F.l1_loss(z, z.detach() * 2 + 1),
    "smooth l1": lambda z, y: F.smooth_l1_loss(z, z.detach() * 2, beta=0.3),
    "huber": lambda z, y: F.huber_loss(z, z.detach() * 2, delta=0.3),
    "bce": lambda z, y: F.binary_cross_entropy_with_logits(z, (z > 0).double()),
    "bce weighted": lambda z, y: F.binary_cross_entropy_with_logits(
        z, (z > 0).double(), pos_weight=weights()
    ),
    "kl": lambda z, y: F.kl_div(z.log_softmax(-1), z.detach().softmax(-1), reduction="batchmean"),
    "poisson": lambda z, y: F.poisson_nll_loss(z, z.detach().abs()),
    "cross entropy": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten()),
    "cross entropy sum": lambda z, y: F.cross_entropy(
        z.flatten(0, 1), y.flatten(), reduction="sum"
    ),
    "ignore index": lambda z, y: F.cross_entropy(
        z.flatten(0, 1), y.flatten().clamp(min=0), ignore_index=2
    ),
    "smoothing": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "class weights": lambda z, y: F.cross_entropy(z.flatten(0, 1), y.flatten(), weights()),
    "targets of two dims": lambda z, y: F.cross_entropy(z.transpose(1, 2), y),
    "soft targets": lambda z, y: F.cross_entropy(
        z.flatten(0, 1), z.detach().flatten(0, 1).softmax(-1)
    ),
    "class weights sum": lambda z, y: F.cross_entropy(
        z.flatten(0, 1), y.flatten(), weights(), reduction="sum"
    ),
    "class weights, smoothing, ignore index": lambda z, y: F.cross_entropy(
        z.transpose(1, 2), y.clamp(min=0), weights(), ignore_index=2, label_smoothing=0.2
    ),
    "soft targets, class weights, smoothing": lambda z, y: F.cross_entropy(
        z.transpose(1, 2), z.detach().softmax(-1).transpose(1, 2), weights(), label_smoothing=0.2
    ),
    "no reduction": lambda z, y: F.cross_entropy(
        z.transpose(1, 2), y.clamp(min=0), reduction="none"
    ).sum(),
    "no reduction, flat rows": lambda z, y: (
        F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none") * (y != 3).flatten()
    ).sum(),
    "no reduction, flat rows, mean": lambda z, y: (
        F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none") * 2.0
    ).mean(),
    "no reduction, flat rows, in rows of their own": lambda z, y: (
        F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none").view(y.shape) * (y != 3)
    ).sum(1).square().mean(),
    "no reduction, flat rows of probabilities": lambda z, y: (
        F.cross_entropy(z.flatten(0, 1), z.flatten(0, 1).softmax(1), reduction="none").view(y.shape)
    ).square().mean(),
    "nll, no reduction": lambda z, y: F.nll_loss(
        z.log_softmax(-1).flatten(0, 1), y.flatten(), reduction="none"
    ).square().mean(),
    "nll": lambda z, y: F.nll_loss(z.log_softmax(-1).flatten(0, 1), y.flatten()),
    "nll, class weights": lambda z, y: F.nll_loss(
        z.log_softmax(-1).flatten(0, 1), y.flatten(), weights()
    ),
    "margin ranking": lambda z, y: F.margin_ranking_loss(z[..., 0], z[..., 1], z[..., 2].sign()),
    "margin ranking, no reduction": lambda z, y: F.margin_ranking_loss(
        z[..., 0], z[..., 1], z[..., 2].sign(), margin=0.2, reduction="none"
    ).square().mean(),
    "hinge embedding, sum": lambda z, y: F.hinge_embedding_loss(
        z, z.detach().sign(), margin=0.5, reduction="sum"
    ),
    "gaussian, some variances clamped": lambda z, y: F.gaussian_nll_loss(
        z, z.detach() + 1, z.square(), full=True, eps=0.1
    ),
    "gaussian, a variance a row, sum": lambda z, y: F.gaussian_nll_loss(
        z, z.detach() + 1, z.square().sum(-1), reduction="sum"
    ),
    "along a dim, one index a row": lambda z, y: torch.take_along_dim(
        z, y.clamp(min=0)[..., None], -1
    ).square().mean(),
    "along a dim, one row of values": lambda z, y: z[:, :1].take_along_dim(
        z.argsort(-1), 2
    ).square().mean(),
    "pool of a line": lambda z, y: F.max_pool1d(
        z.transpose(1, 2), 3, stride=2, padding=1
    ).square().mean(),
    "deviation and mean": lambda z, y: sum(
        x.square().mean() for x in torch.std_mean(z, -1, keepdim=True)
    ),
    "hinge embedding": lambda z, y: F.hinge_embedding_loss(z, z.detach().sign(), margin=0.5),
    "cosine embedding": lambda z, y: F.cosine_embedding_loss(
        z.flatten(0, 1), z.detach().flatten(0, 1) + 1, (y.flatten() > 0) * 2 - 1
    ),
    "triplet": lambda z, y: F.triplet_margin_loss(z, z + 1, z.detach() - 1, swap=True),
    "multi margin": lambda z, y: F.multi_margin_loss(z.flatten(0, 1), y.flatten().clamp(min=0)),
    "chunks": lambda z, y: sum(
        c.square().mean() * (i + 1) for i, c in enumerate((*z.chunk(3, -1), *z.split([2, 5], -1)))
    ),
    "unbind": lambda z, y: sum(c.square().mean() * (i + 1) for i, c in enumerate(z.unbind(-1))),
    "squeeze": lambda z, y: z[..., :1].squeeze().square().mean() + z.squeeze(0).mean(),
    "batch norm": lambda z, y: F.batch_norm(
        z.transpose(1, 2), weights(), weights() + 1, weights() - 1, None
    ).square().mean(),
    "in place": in_place,
    "without gradient": without_gradient,
    "cat of empty": lambda z, y: torch.cat([z.new_empty(0), z.flatten()]).square().mean(),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_canonical_graph_has_the_modules_loss_and_gradients(name):
    model, program = Net(LOSSES[name]), captured_loss(name)
    for batch, seq in ((3, 9), (2, 5), (1, 4)):
        x, y = data(batch, seq)
        expected = model(x, y)
        loss = run(program, model, x, y)
        assert loss.shape == ()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14)
        wanted = torch.autograd.grad(expected, list(model.parameters()))
        got = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-13)


def test_means_are_sums_over_a_global_count():
    found = ops(captured(Net(LOSSES["mse"])))
    assert not any("mean" in op for op in found)
    assert {"aten.mse_loss.default", "aten.sum.dim_IntList", "aten.div.Tensor"} <= set(found)


def test_mean_over_a_fixed_dim_stays():
    assert "aten.mean.dim" in ops(captured(Net(lambda z, y: z.mean(-1).sum())))


def test_cross_entropy_has_one_loss_a_row():
    program = captured(Net(LOSSES["cross entropy"]))
    rows = next(n for n in program.gm.graph.nodes if "cross_entropy" in str(n.target))
    batch, seq = program.symbols["batch"], program.symbols["seq"]
    assert program.info[rows.name].shape == (batch * seq,)


TAKEN_APART = "cross|smooth|weights|targets|nll|margin|triplet|hinge|cosine"
REDUCED = [name for name in LOSSES if re.search(TAKEN_APART, name)]


@cache
def captured_loss(name):
    return captured(Net(LOSSES[name]))


@pytest.mark.parametrize("name", REDUCED)
def test_no_loss_reduces_more_than_one_number_a_row(name):
    program = captured_loss(name)
    for node in program.gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and "loss" in schema.name and program.info[node.name].shape == ():
            scores = node.args[0]
            assert node.target is torch.ops.aten.nll_loss_nd.default, node.format_node()
            assert program.info[scores.name].shape[-1] == 1, node.format_node()


@pytest.mark.parametrize("name", ["cross entropy", "class weights", "nll, class weights"])
def test_losses_are_equal_to_the_last_bit(name):
    model, program = Net(LOSSES[name]), captured_loss(name)
    for batch, seq in ((3, 9), (8, 16)):
        x, y = data(batch, seq)
        assert torch.equal(run(program, model, x, y), model(x, y))


@pytest.mark.parametrize("name", ["in place", "chunks", "mse", "without gradient"])
def test_no_op_of_the_graph_writes_to_its_input(name):
    program = captured(Net(LOSSES[name]))
    for node in program.gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        assert schema is None or not schema.is_mutable, node.format_node()
        assert node.op != "get_attr", node.format_node()


def test_no_gradient_flows_out_of_no_grad():
    program = captured(Net(without_gradient))
    held = [n for n in program.gm.graph.nodes if n.target is torch.ops.aten.detach.default]
    assert len(held) == 2
    assert not any(program.info[n.name].requires_grad for n in held)
