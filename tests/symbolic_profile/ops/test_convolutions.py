"""Convolutions on the CPU: torch's own kernel to the byte in float64, oneDNN within a bound."""

import pytest
import torch
from torch import Tensor, nn

import dcpc
from dcpc.commands.check import SplitModel
from dcpc.symbolic_profile import evaluator
from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.transients import transient_bytes
from examples.allocator import measured_peak_bytes
from tests.cases.joint_graphs import measure_call


class Net(nn.Module):
    """Windows of several elements, strides, holes, groups, and the way back up."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.holes = nn.Conv1d(4, 8, 3, padding=1), nn.Conv1d(8, 8, 3, dilation=2)
        self.down = nn.Conv1d(8, 16, 4, stride=2)
        self.up = nn.ConvTranspose1d(16, 8, 4, stride=2)
        self.parts = nn.Conv1d(8, 4, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.holes(torch.relu(self.wide(x))))
        return self.parts(torch.relu(self.up(torch.tanh(self.down(x))))).square().mean()


@pytest.mark.parametrize(("dtype", "above"), [("float64", 0.12), ("float32", 2.2)])
def test_peak_is_never_above_what_is_predicted(dtype, above):
    # A lone sample's groups are no copies: the one place where float64 is below the prediction.
    sizes = [{"batch": 1, "length": 129}, {"batch": 3, "length": 51}, {"batch": 17, "length": 17}]
    buckets = dcpc.Buckets({"x": f"{dtype}[batch, 4, length*2]"}, sizes)
    split = SplitModel(Net().to(getattr(torch, dtype)), buckets, sizes[0], sp=1)
    at = evaluator(split.study.profile(0))
    for point in sizes:
        variant, integers = split.runnable.variant(split.placement, 0, point, 0)
        given = torch.randn(point["batch"], 4, 2 * point["length"], dtype=getattr(torch, dtype))
        named = {**split.held(), **dict.fromkeys(split.program.inputs, given)}
        tensors = [named[p] for p in variant.placeholders]
        split.model.zero_grad()
        measured = measured_peak_bytes(lambda v=variant, t=tensors, i=integers: v(t, i).backward())
        predicted = at.peak_bytes(split.study.local_sizes(point))
        assert -0.005 <= predicted / measured - 1 <= above * torch.get_num_threads()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [38, 202, 402])
@pytest.mark.parametrize(
    ("weight", "stride", "transposed"),
    [((64, 32, 3, 3), 1, False), ((64, 32, 4, 4), 2, False), ((32, 16, 4, 4), 2, True),
     ((32, 24, 2, 2), 2, True)],
)  # fmt: skip
def test_transient_is_within_its_bound(weight, stride, transposed, rows, dtype):
    def both(x, w):
        args = ([stride] * 2, [1, 1], [1, 1], transposed, [0, 0], 1)
        out = torch.ops.aten.convolution(x, w, None, *args)
        mask = [True, True, False]
        return torch.ops.aten.convolution_backward(out, x, w, None, *args, mask)

    facts = Facts({})
    x, w = torch.rand(2, 32, rows, 20, dtype=dtype), torch.rand(weight, dtype=dtype)
    for m in measure_call(both, x, w):
        table_bytes = int(transient_bytes(m.node, facts, torch.get_num_threads()).doit())
        assert m.transient_bytes <= table_bytes, m.node.format_node()
