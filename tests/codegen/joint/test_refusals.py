"""What torch refuses while a derivative is traced is an error of dcpc that names the call."""

import pytest
import torch
from torch import nn

import dcpc
from dcpc.errors import CodegenError


@torch.library.custom_op("dcpc_refusals::half", mutates_args=())
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2


@half.register_fake
def _(x):
    return torch.empty_like(x)


class Halved(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x):
        return half(self.lin(x)).square().mean()


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_error_in_a_backward_names_its_call(kind):
    def backward(ctx, g):
        raise kind("no such gradient")

    half.register_autograd(backward)
    buckets = dcpc.Buckets({"x": "float32[batch, seq, 8]"}, [{"seq": 5}])
    with pytest.raises(CodegenError, match=r"backward of dcpc_refusals.half.*no such gradient"):
        dcpc.compile(Halved(), buckets, backend="eager", sp=1, verify="off")
