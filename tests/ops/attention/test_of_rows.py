"""`dcpc::attention_of_rows` against `dcpc::attention` of the padded batch."""

import pytest
import torch
from torch import Tensor

import dcpc.ops.attention  # noqa: F401 - registers the op
from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.transients import transient_bytes
from tests.cases.joint_graphs import measure_call

OPS = torch.ops.dcpc
LENGTH, WIDTH = 150, 8


def valid(kind: str) -> Tensor:
    """`[3, LENGTH]`, which rows are valid; of the second sample none."""
    found = torch.zeros(3, LENGTH, dtype=torch.bool)
    found[0, :140] = True
    found[2, 20:23] = True
    if kind == "holes":
        found[0, 1::3] = False
        found[2, 21] = False
    if kind == "every row":
        found[:] = True
    return found


def operands(heads: tuple[int, int], mask_heads: int, queries: int) -> list[Tensor]:
    made = torch.Generator().manual_seed(heads[1])

    def floats(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=made).requires_grad_()

    q, k, v = (floats(3, h, LENGTH, WIDTH) for h in (heads[0], heads[1], heads[1]))
    return [q, k, v, floats(3, mask_heads, queries, LENGTH)]


def packed(x: Tensor, rows: Tensor) -> Tensor:
    """`[3, h, LENGTH, d]` -> [1, h, rows, d]."""
    return x.transpose(1, 2).flatten(0, 1)[rows].transpose(0, 1)[None]


@pytest.mark.parametrize("kind", ["runs", "holes", "every row"])
@pytest.mark.parametrize(
    ("heads", "mask_heads", "queries"),
    [((4, 4), 4, LENGTH), ((4, 2), 4, LENGTH), ((4, 4), 1, LENGTH), ((2, 2), 2, 1)],
)
@pytest.mark.parametrize("learns", [True, False])
def test_rows_are_those_of_the_padded_batch(kind, heads, mask_heads, queries, learns):
    keep = valid(kind)
    rows = keep.flatten().nonzero().squeeze(1)
    given = operands(heads, mask_heads, queries)
    given[3].requires_grad_(learns)
    hidden = torch.where(keep[:, None, None], given[3], float("-inf"))
    out = OPS.attention(*given[:3], hidden, scale=0.3)
    want = packed(out, rows)
    small = (packed(x, rows) for x in given[:3])
    got = OPS.attention_of_rows(*small, hidden, None, rows, scale=0.3)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    g = torch.randn(want.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = given if learns else given[:3]
    both = [torch.autograd.grad(x, leaves, g, retain_graph=True) for x in (got, want)]
    for a, b in zip(*both, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_mask_of_all_samples_has_the_sum_of_their_gradients(dtype):
    keep = valid("runs")
    rows = keep.flatten().nonzero().squeeze(1)
    given = operands((2, 2), 2, LENGTH)
    bias = given[3][:1].detach().requires_grad_()
    want = packed(
        OPS.attention(*given[:3], torch.where(keep[:, None, None], bias, -1e300), scale=1.0), rows
    )
    (exact,) = torch.autograd.grad(want.sum() + want.square().sum(), bias)
    low = bias.detach().to(dtype).requires_grad_()
    small = [packed(x, rows).detach().to(dtype) for x in given[:3]]
    got = OPS.attention_of_rows(*small, low, None, rows, scale=1.0)
    (found,) = torch.autograd.grad(got.sum() + got.square().sum(), low)
    assert found.dtype == dtype
    limit = 1e-4 if dtype == torch.float32 else 0.1
    assert float((found - exact).abs().max() / exact.abs().max()) < limit


@pytest.mark.parametrize("kind", ["runs", "holes", "every row"])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_holds_no_more_than_the_table_says(kind, heads, learns, dtype):
    rows = valid(kind).flatten().nonzero().squeeze(1)
    *given, mask = (x.detach().to(dtype) for x in operands(heads, heads[0], LENGTH))
    rest = (0.3, None, None, 0, None, 0, "zero")

    def both(q: Tensor, k: Tensor, v: Tensor, m: Tensor, at: Tensor) -> Tensor:
        out, lse = OPS.attention_of_rows_forward(q, k, v, m, None, at, *rest)
        op = OPS.attention_of_rows_mask_backward if learns else OPS.attention_of_rows_backward
        return op(out, q, k, v, m, None, at, out, lse, *rest)[0]

    small = [packed(x, rows) for x in given]
    found = [m for m in measure_call(both, *small, mask, rows) if "of_rows" in str(m.node.target)]
    assert len(found) == 2
    for m in found:
        predicted = int(transient_bytes(m.node, Facts({}), torch.get_num_threads()).doit())
        assert m.transient_bytes <= predicted
        if kind == "holes":  # which alone have their part of the mask copied
            assert predicted <= 12 * m.transient_bytes
