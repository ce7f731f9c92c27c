"""A plan for a CPU in half precision says whose kernels it counts."""

import pytest
import torch
from torch import nn

import dcpc
from dcpc.symbolic_profile import halves


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x).square().mean()


@pytest.mark.parametrize(
    ("dtype", "device", "told"),
    [("bfloat16", "cpu", True), ("float32", "cpu", False), ("bfloat16", "h200", False)],
)
def test_report_names_what_onednn_computes_where_bytes_depend_on_it(dtype, device, told):
    buckets = dcpc.Buckets({"x": f"{dtype}[batch, seq, 8]"}, [{"seq": 16}])
    model = Net().to(getattr(torch, dtype))
    report = dcpc.api.plan(model, buckets, memory=1e9, world=1, device=device).report()
    assert (f"in half precision are this processor's, where oneDNN {halves()}" in report) == told
