"""Ops of other libraries: FLOPs, bytes and memory are those of the calls in their kernels."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.fx.own_ops import counted, is_own
from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.flops import cost_of
from dcpc.symbolic_profile.ops.transients import transient_bytes
from tests.cases.joint_graphs import measure_call

OPS = "test_own_ops"
INPUTS = {"x": "float64[batch, seq, 64]", "y": "float64[batch, seq, 64]"}


@torch.library.custom_op(f"{OPS}::mm", mutates_args=())
def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w.t())


@torch.library.custom_op(f"{OPS}::mm_backward", mutates_args=())
def product_backward(g: Tensor, x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    g = g * (1 - y * y)
    return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2)


@torch.library.custom_op(f"{OPS}::numpy_relu", mutates_args=())
def numpy_relu(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy().clip(0))


product.register_fake(lambda x, w: x.new_empty(*x.shape[:-1], w.shape[0]))
product_backward.register_fake(lambda g, x, w, y: (torch.empty_like(x), torch.empty_like(w)))
numpy_relu.register_fake(torch.empty_like)
product.register_autograd(
    lambda ctx, g: product_backward(g, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
)
numpy_relu.register_autograd(
    lambda ctx, g: torch.where(ctx.saved_tensors[0] > 0, g, 0),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


class Own(nn.Module):
    """A layer of an op of the library's; none of its operands but `w` takes a gradient."""

    def __init__(self, relu=False) -> None:
        super().__init__()
        self.w, self.out = nn.Parameter(torch.randn(256, 64)), nn.Linear(256, 64)
        self.relu = relu
        self.double()

    def forward(self, x, y):
        h = product(x, self.w)
        return F.mse_loss(self.out(numpy_relu(h) if self.relu else h), y)


def planned(**more):
    buckets = dcpc.Buckets(INPUTS, [{"seq": 64}, {"seq": 128}])
    options = {"world": 1, "device": "cpu", "backend": "eager", "memory": 1e8}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = dcpc.api.plan(Own(**more), buckets, **options)
    return found, [str(w.message) for w in told if "without a cost" in str(w.message)]


def test_flops_are_those_of_the_kernels_products_whatever_the_name():
    found, told = planned()
    each = 2 * 256 * 64  # of a product; the op makes the gradient of x, which nothing reads
    assert f"FLOPs = {6 * each}·batch·seq" in found.report(full=True)
    assert told == []


def test_an_op_whose_kernel_makes_no_calls_is_told_with_its_share_of_the_bytes():
    found, (told,) = planned(relu=True)
    assert f"{OPS}.numpy_relu.default" in told
    share = int(re.search(r"that all calls move they have (\d+)%", told)[1])
    assert 5 <= share <= 10
    assert "ops without a cost" in found.report(full=True)


@pytest.mark.parametrize("rows", [8, 64])
def test_memory_beside_results_is_the_allocators(rows):
    def both(x, w):
        y = product(x, w)
        return product_backward(y, x, w, y)

    x, w = torch.rand(2, rows, 64), torch.rand(256, 64)
    own = [m for m in measure_call(both, x, w) if is_own(m.node.target)]
    assert len(own) == 2
    for m in own:
        expected = int(transient_bytes(m.node, Facts({}), 1).doit())
        assert 0 <= m.transient_bytes - expected <= 12  # a scalar, as a tensor
        assert expected > 0
        assert cost_of(m.node, Facts({})).flops % (2 * 2 * rows * 256 * 64) == 0


def test_a_peak_at_other_calls_by_size_is_the_larger_of_them():
    found, _ = planned()
    assert "peak bytes = 4608·batch·seq + Max(" in found.report(full=True)


def test_counts_of_one_run():
    op = getattr(torch.ops, OPS).mm.default
    flops, moved_bytes, *held = counted(op, (torch.ones(8, 4), torch.ones(3, 4)), {})
    assert flops == 2 * 8 * 4 * 3
    assert moved_bytes == 4 * ((8 * 4 + 4 * 3 + 8 * 3) + 2 * 8 * 3)
    assert max(held) == 4 * 8 * 3
