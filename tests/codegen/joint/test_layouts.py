"""Strides that a graph is traced with are those that the CPU's kernels make."""

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

import dcpc
from dcpc.codegen.joint.layouts import as_laid
from dcpc.commands.check import SplitModel

aten = torch.ops.aten
DENSE, TURNED = torch.rand(4, 6, 8), torch.rand(4, 8, 6).transpose(1, 2)
LAYOUTS = [DENSE, TURNED, torch.rand(6, 8, 4).permute(2, 0, 1), torch.rand(4, 6, 16)[..., ::2]]
ROW, STATS = torch.rand(6), torch.rand(4, 6, 1)

CALLS = [
    lambda g, x: (aten.elu_backward.default, (g, 1.0, 1.0, 1.0, False, x)),
    lambda g, x: (aten.hardsigmoid_backward.default, (g, x)),
    lambda g, x: (aten.hardswish_backward.default, (g, x)),
    lambda g, x: (aten.hardtanh_backward.default, (g, x, -1.0, 1.0)),
    lambda g, x: (aten.softplus_backward.default, (g, x, 1.0, 20.0)),
    lambda g, x: (aten.logit_backward.default, (g, x)),
    lambda g, x: (aten._log_softmax_backward_data.default, (g, x, -1, torch.float32)),
    lambda g, x: (aten.huber_loss_backward.default, (g, x, TURNED, 0, 1.0)),
    lambda g, x: (aten.mse_loss_backward.default, (g, x, TURNED, 0)),
    lambda g, x: (aten.smooth_l1_loss_backward.default, (g, x, TURNED, 0, 1.0)),
    lambda g, x: (aten.binary_cross_entropy.default, (g, x, None, 0)),
    lambda g, x: (aten.binary_cross_entropy.default, (g, x, None, 1)),
    lambda g, x: (aten.binary_cross_entropy_backward.default, (g, x, DENSE, None, 0)),
    lambda g, x: (aten.log_sigmoid_forward.default, (x,)),
    lambda g, x: (aten.xlogy.Tensor, (g, x)),
    lambda g, x: (aten.copysign.Tensor, (g, x)),
    lambda g, x: (
        aten.native_layer_norm_backward.default,
        (g, x, [8], STATS, STATS, None, None, [True, False, False]),
    ),
    lambda g, x: (aten._native_batch_norm_legit.no_stats, (x, None, None, True, 0.1, 1e-5)),
    lambda g, x: (
        aten.native_batch_norm_backward.default,
        (g, x, ROW, None, None, ROW, ROW, True, 1e-5, [True, True, True]),
    ),
]


@pytest.mark.parametrize("call", CALLS)
def test_fake_strides_are_the_kernels(call):
    for g, x in itertools.product(LAYOUTS, LAYOUTS):
        func, args = call(g, x)
        mode = FakeTensorMode()
        fakes = tree_map(lambda t: mode.from_tensor(t) if isinstance(t, Tensor) else t, args)  # noqa: B023
        with mode, enable_python_dispatcher():
            found = as_laid(func, fakes, func(*fakes))
        real = [t for t in tree_leaves(func(*args)) if t is not None]
        told = [t for t in tree_leaves(found) if t is not None]
        assert [t.stride() for t in told] == [t.stride() for t in real], (func, g.stride())


class Net(nn.Module):
    """Gradients come back with heads before positions, and are rows again for the linear layer."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act, self.proj = act, nn.Linear(8, 8)
        self.heads = nn.Parameter(torch.randn(2, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.proj(x)).unflatten(-1, (2, 4)).transpose(1, 2) @ self.heads
        return h.square().mean()


class Turned(nn.Module):
    """A norm of channels that are the last dim in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize(
    "act", [nn.ELU(), nn.Softplus(), nn.Hardswish(), nn.ReLU6(), nn.Hardsigmoid(), Turned()]
)
def test_gradient_of_turned_values_is_the_plain_models(act):
    torch.manual_seed(0)
    model = Net(act).double()
    buckets = dcpc.Buckets({"x": "float64[batch, seq, 8]"}, [{"seq": 9}, {"seq": 31}])
    split = SplitModel(model, buckets, {"batch": 2, "seq": 9}, sp=1)
    x = torch.randn(3, 17, 8, dtype=torch.float64)
    model(x).backward()
    wanted = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    split.run({"batch": 3, "seq": 17}, {"x": x})
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-10, atol=1e-14)
