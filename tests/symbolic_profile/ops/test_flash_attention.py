"""What the CPU's flash attention takes, against the table that predicts it."""

import pytest
import torch

from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.onednn import multiplies
from dcpc.symbolic_profile.ops.transients import transient_bytes
from tests.cases.joint_graphs import measure_call
from tests.cases.kernel_bytes import tiles_may_be_hidden

aten = torch.ops.aten
SCALARS_BYTES = 24


@pytest.mark.parametrize(
    "shape", [(2, 100, 100, 64), (1, 300, 600, 32), (1, 33, 57, 24), (3, 200, 613, 33)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_takes_what_the_table_says(dtype, shape):
    """Exact, but for products that oneDNN makes in half precision: its scratch has a bound."""
    heads, rows, keys, width = shape

    def both(q, k, v, grad):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, False)[0]

    given = (torch.randn(1, n, heads, width, dtype=dtype) for n in (rows, keys, keys, rows))
    found = measure_call(both, *(x.transpose(1, 2) for x in given))
    forward, backward = (m for m in found if "flash" in str(m.node.target))
    threads, facts = torch.get_num_threads(), Facts({})
    predicted = [int(transient_bytes(m.node, facts, threads).doit()) for m in (forward, backward)]
    assert forward.transient_bytes <= predicted[0] + SCALARS_BYTES
    assert backward.transient_bytes <= predicted[1] + SCALARS_BYTES
    if not tiles_may_be_hidden():
        assert abs(predicted[0] - forward.transient_bytes) <= SCALARS_BYTES
    if not multiplies(dtype):
        assert abs(predicted[1] - backward.transient_bytes) <= SCALARS_BYTES


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_mask_of_numbers_is_copied_where_its_keys_do_not_lie_together(apart, samples):
    mask = torch.randn(samples, 4, 100, 90)
    mask = mask.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if apart else mask
    rest = (1.0, None, None, 0, None, 0, "zero")

    def both(q, k, v, m):
        out, lse = torch.ops.dcpc.attention_forward(q, k, v, m, None, None, *rest)
        operands = (out, q, k, v, m, None, None, out, lse)
        return torch.ops.dcpc.attention_backward(*operands, *rest)[0]

    given = (torch.randn(2, n, 4, 16).transpose(1, 2) for n in (100, 90, 90))
    found = [m for m in measure_call(both, *given, mask) if "attention" in str(m.node.target)]
    for m in found:
        table = transient_bytes(m.node, Facts({}), torch.get_num_threads())
        assert abs(int(table.doit()) - m.transient_bytes) <= SCALARS_BYTES
        mask_bytes = mask.numel() * mask.itemsize  # once, however many samples see it
        assert m.transient_bytes // mask_bytes == (1 if apart else 0)
