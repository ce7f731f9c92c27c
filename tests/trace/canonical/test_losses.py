"""Losses of classes with a class that is ignored, 0 (the usual number of padding) among them."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from dcpc import Buckets
from dcpc.trace import trace

V = 7
INPUTS = {"x": f"float64[batch, seq, {V}]", "y": "int64[batch, seq]"}
WEIGHTS = torch.arange(1, V + 1, dtype=torch.float64) / V


class Net(nn.Module):
    """A layer, and a loss of its outputs beside another that trains alone where it is lost."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.loss = nn.Linear(V, V).double(), loss

    def forward(self, x, y):
        z = self.net(x)
        return self.loss(z, y).sum() + z.square().mean()


def flat(z, y, **given):
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), **given)


def module(z, y, **given):
    return nn.CrossEntropyLoss(WEIGHTS, **given)(z.transpose(1, 2), y)


def smoothed(z, y, **given):
    return flat(z, y, label_smoothing=0.1, weight=WEIGHTS, **given)


def one(z, y, **given):
    return F.cross_entropy(z[0, 0], y[0, 2], **given)


def nll(z, y, **given):
    return F.nll_loss(z.log_softmax(-1).flatten(0, 1), y.flatten(), **given)


def nll_module(z, y, **given):
    return nn.NLLLoss(WEIGHTS, **given)(z.log_softmax(-1).transpose(1, 2), y)


def data(seq, ignored, only):
    generator = torch.Generator().manual_seed(seq)
    y = torch.randint(0, V, (3, seq), generator=generator)
    y[:, slice(None) if only else slice(0, None, 4)] = ignored
    return torch.randn(3, seq, V, dtype=torch.float64, generator=generator), y


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("form", [flat, module, smoothed, one, nll, nll_module])
@pytest.mark.parametrize("ignored", [0, -1])
def test_ignored_class_has_no_loss_and_the_others_have_theirs(ignored, form, reduction):
    model = Net(lambda z, y: form(z, y, ignore_index=ignored, reduction=reduction))
    program = trace(model, Buckets(INPUTS, [{"seq": 4}, {"seq": 9}]))
    parameters = dict(model.named_parameters())
    own = {p: parameters[n] for p, n in program.parameters.items()} | dict(program.constants)
    for seq, only in ((9, False), (5, True)):  # of rows without any class the mean is no number
        x, y = data(seq, ignored, only)
        inputs = {p: {"x": x, "y": y}[n] for p, n in program.inputs.items()}
        loss, expected = fx.Interpreter(program.gm).run(*(own | inputs).values())[0], model(x, y)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-14, equal_nan=True)
        got = torch.autograd.grad(loss, [*parameters.values()])
        wanted = torch.autograd.grad(expected, [*parameters.values()])
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-13, equal_nan=True)
