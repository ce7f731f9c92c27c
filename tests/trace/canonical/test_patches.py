"""Convolutions of patches become products of rows; other convolutions stay."""

import copy

import pytest
import torch
from torch import Tensor, nn

from dcpc.buckets import Buckets
from dcpc.trace import trace


class MeanSquare(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


CASES = {
    "1d with a rest": (nn.Conv1d(3, 5, 4, 4), "float64[batch, 3, seq]", (2, 3, 13)),
    "2d without bias": (nn.Conv2d(3, 5, (2, 3), (2, 3), bias=False), "float64[batch, 3, seq, 9]",
                        (2, 3, 13, 9)),
    "3d": (nn.Conv3d(3, 5, (1, 2, 2), (1, 2, 2)), "float64[batch, 3, seq, seq*2, 6]",
           (2, 3, 13, 26, 6)),
    "overlapping": (nn.Conv2d(3, 5, 2, 1), "float64[batch, 3, seq, 9]", (2, 3, 13, 9)),
    "padded": (nn.Conv1d(3, 5, 2, 2, padding=1), "float64[batch, 3, seq]", (2, 3, 13)),
    "grouped": (nn.Conv1d(4, 6, 2, 2, groups=2), "float64[batch, 4, seq]", (2, 4, 13)),
}  # fmt: skip
KEPT = ("overlapping", "padded", "grouped")


@pytest.mark.parametrize("name", CASES)
def test_patches_are_rows_of_a_product_with_the_same_numbers(name):
    layer, spec, shape = CASES[name]
    model = MeanSquare(copy.deepcopy(layer))
    program = trace(model, Buckets(inputs={"x": spec}, sizes=[{"seq": 8}, {"seq": 40}]))
    ops = [str(n.target) for n in program.gm.graph.nodes if n.op == "call_function"]
    assert any("conv" in op for op in ops) == (name in KEPT)
    assert any("linear" in op for op in ops) == (name not in KEPT)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    held = {p: model.get_parameter(n) for p, n in program.parameters.items()}
    names = [n.name for n in program.gm.graph.nodes if n.op == "placeholder"]
    got = program.gm(*[held.get(n, x) for n in names])[0]
    torch.testing.assert_close(got, model(x), rtol=1e-12, atol=0)
