"""Inductor's cache behind torch.compile(backend="dcpc"): a graph of one length is none of all."""

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._inductor.utils import fresh_cache

from dcpc.dynamo import backend


@pytest.mark.slow
def test_a_length_that_inductor_takes_for_a_number_is_guarded_behind_its_cache():
    """A convolution's backward is compiled for one length, and no input is that length itself."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Conv1d(8, 8, 3, padding=1).double()
    options = {"fallback": "error", "verify": "off"}
    compiled = torch.compile(model, backend=backend, dynamic=True, options=options)
    with fresh_cache():
        for length in (9, 16, 9):
            x = torch.randn(2, 8, length, dtype=torch.float64, requires_grad=True)
            learning = (x, *model.parameters())
            mine, theirs = (
                torch.autograd.grad(call(x).square().sum(), learning) for call in (compiled, model)
            )
            for got, want in zip(mine, theirs, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch._dynamo.reset()
