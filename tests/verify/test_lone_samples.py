"""One sample: what long buckets run at, and where torch's own batch norms go wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcpc
from dcpc.codegen import RUN
from dcpc.errors import VerifyError
from dcpc.verify.references import Budget

aten = torch.ops.aten
IMAGES = dcpc.Buckets(
    {"image": "float64[batch, 3, h, w]", "label": "int64[batch]"},
    [{"h": 4, "w": 5}, {"h": 8, "w": 6}],
)


class Pooled(nn.Module):
    """Attention of the first pixel over all, after a norm: XCiT's layouts."""

    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), norm
        self.k, self.out = nn.Linear(8, 8), nn.Linear(8, 5)

    def forward(self, image, label):
        x = self.norm(self.conv(image)).flatten(2).transpose(1, 2)
        a = (x[:, :1] @ self.k(x).transpose(1, 2)).softmax(-1)
        return F.cross_entropy(self.out(a @ x)[:, 0], label)


def slope(model, inputs, weight):
    """The derivative of the loss along one element, from two losses."""
    step, losses = 1e-6, []
    with torch.no_grad():
        for sign in (1, -2):
            weight.view(-1)[0] += sign * step
            losses.append(float(model(**inputs)))
        weight.view(-1)[0] += step
    return (losses[0] - losses[1]) / (2 * step)


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(8), nn.BatchNorm2d(8).eval()])
@pytest.mark.parametrize("samples", [1, 2])
def test_gradient_through_a_batch_norm_is_that_of_the_loss(norm, samples):
    torch.manual_seed(0)
    model = Pooled(norm).double()
    with pytest.warns(UserWarning, match="native_batch_norm_backward.*wrong gradients"):
        compiled = dcpc.compile(model, IMAGES, backend="eager")
    assert "misreads a layout" in compiled.report()
    inputs = {"image": torch.randn(samples, 3, 8, 6, dtype=torch.float64),
              "label": torch.randint(5, (samples,))}  # fmt: skip
    compiled(**inputs).backward()
    expected = slope(model, inputs, model.conv.weight)
    assert float(model.conv.weight.grad.view(-1)[0]) == pytest.approx(expected, rel=1e-5)


class Bent(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh().square().mean()


@pytest.mark.parametrize("wrong_with", [1, 2])
def test_graphs_are_compared_with_one_sample_and_with_two(monkeypatch, wrong_with):
    # A kernel that is wrong for one number of samples; a trace is differentiated by autograd.
    def faulty(g, y):
        return aten.tanh_backward.default(g, y) * (2 if g.shape[0] == wrong_with else 1)

    monkeypatch.setitem(RUN, aten.tanh_backward.default, faulty)
    # A loaded machine may leave no time for what "auto" compares besides.
    monkeypatch.setattr(Budget, "has_spare_time", True)
    monkeypatch.setattr(Budget, "allows", lambda self, seconds_s, extra: True)
    buckets = dcpc.Buckets({"x": "float32[batch, seq, 4]"}, [{"seq": 6}])
    with pytest.raises(VerifyError, match=rf"forward and backward at sp 1.*batch: {wrong_with}"):
        dcpc.compile(Bent(), buckets, backend="eager")
