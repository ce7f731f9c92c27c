"""Attention of tensors that lie in any way: kernels are called below torch's checks."""

import pytest
import torch
from torch import Tensor

import dcpc.ops.attention  # noqa: F401 - registers the op
from dcpc.ops.attention import cuda
from dcpc.ops.attention.kernels import DEMANDS, laid
from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.transients import transient_bytes
from tests.cases.joint_graphs import measure_call

OP = torch.ops.dcpc.attention.default
SIZES = {"q": (2, 4, 9, 6), "k": (2, 2, 11, 6), "v": (2, 2, 11, 6), "grad": (2, 4, 9, 6)}
LAYOUTS = {
    "last dim outermost": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "transposed": lambda x: x.mT.contiguous().mT,
    "every second": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "from the second on": lambda x: torch.cat([x[..., :1], x], -1)[..., 1:],
    "unbound": lambda x: torch.stack([x, x, x], -1).unbind(-1)[1],
    "backwards, of rows": lambda x: x.repeat_interleave(3, 2)[:, :, ::3],
    "width expanded": lambda x: x[..., :1].expand(x.shape),
    "rows expanded": lambda x: x[:, :, :1].expand(x.shape),
    "heads expanded": lambda x: x[:, :1].expand(x.shape),
    "overlapping": lambda x: x.flatten(2)[..., : x.shape[2] + 5].unfold(-1, 6, 1),
}
WAYS = {
    "plain": {},
    "causal, later": {"after": 0, "start": 2},
    "two runs": {"after": 0, "turn": 4, "start": 1, "second": 6},
    "blocks": {"before": 3, "after": 1},
    "packed": {"after": 0, "segment": (torch.arange(11) // 6)[None]},
}


def results(tensors: dict[str, Tensor], way: dict) -> list[Tensor]:
    given = {**way}
    segment = given.pop("segment", None)
    leaves = [tensors[n].detach().requires_grad_() for n in "qkv"]
    out = OP(*leaves, None, None, segment, scale=0.4, **given)
    return [out, *torch.autograd.grad(out, leaves, tensors["grad"])]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", SIZES)
@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_those_of_dense_tensors(way, which, layout):
    torch.manual_seed(0)
    tensors = {n: torch.randn(size, dtype=torch.float64) for n, size in SIZES.items()}
    tensors[which] = LAYOUTS[layout](tensors[which])
    dense = {n: x.clone(memory_format=torch.contiguous_format) for n, x in tensors.items()}
    for a, b in zip(results(tensors, WAYS[way]), results(dense, WAYS[way]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_lies_in_any_way(layout):
    tensors = {n: torch.randn(size).bfloat16() for n, size in SIZES.items()}
    tensors = {n: LAYOUTS[layout](x) for n, x in tensors.items()}
    dense = {n: x.clone(memory_format=torch.contiguous_format) for n, x in tensors.items()}
    for a, b in zip(results(tensors, {}), results(dense, {}), strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fake_output_is_laid_out_as_the_real_one(layout):
    tensors = [LAYOUTS[layout](torch.randn(SIZES[n])) for n in "qkv"]
    real = OP(*tensors, scale=1.0)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = OP(*map(mode.from_tensor, tensors), scale=1.0)
    assert real.stride() == fake.stride()


@pytest.mark.parametrize("layout", ["transposed", "every second"])
def test_copies_are_in_the_table_of_bytes(layout):
    q, k, v = (LAYOUTS[layout](torch.randn(2, 2, 40, 8)) for _ in range(3))

    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rest = (None, None, None, 1.0, None, 0, 0, None, 0, "zero")
        out, lse = torch.ops.dcpc.attention_forward(q, k, v, *rest)
        return torch.ops.dcpc.attention_backward(
            torch.ones_like(out), q, k, v, *rest[:3], out, lse, *rest[3:]
        )[0]

    for m in measure_call(both, q, k, v):
        if "attention" in str(m.node.target):
            predicted = transient_bytes(m.node, Facts({}), torch.get_num_threads()).doit()
            assert m.transient_bytes <= int(predicted) + 24


def test_a_gpu_s_kernel_gets_rows_at_multiples_of_16_bytes():
    x = torch.randn(1, 2, 5, 16).half()
    asks = DEMANDS["cuda"].aligned_bytes
    wide = torch.cat([x, x[..., :1]], -1)
    for odd in (torch.cat([x, x], -1)[..., 1:17], wide[..., :16], x.mT.contiguous().mT):
        found = laid("cuda", odd)
        assert found.equal(odd)
        assert found.stride(-1) == 1
        assert found.data_ptr() % asks == 0
        assert found.stride(2) * 2 % asks == 0
    assert laid("cuda", x) is x


def test_sizes_that_do_not_go_together_are_never_a_kernel_s():
    q, k = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 6)
    with pytest.raises(AssertionError, match=r"queries \[1, 2, 5, 8\], keys \[1, 2, 5, 6\]"):
        OP(q, k, k, scale=1.0)
    with pytest.raises(AssertionError, match="keys"):
        cuda.forward(q, k, k, None)
    with pytest.raises(AssertionError, match="float64"):
        OP(q, q.double(), q, scale=1.0)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-3])
@pytest.mark.parametrize("way", WAYS)
def test_scale_of_any_sign(way, scale):
    """A causal kernel scales scores of -inf."""
    torch.manual_seed(0)
    given = {**WAYS[way]}
    segment = given.pop("segment", None)
    q, k, v = (torch.randn(SIZES[n], dtype=torch.float64, requires_grad=True) for n in "qkv")
    found = OP(q, k, v, None, None, segment, scale=scale, **given)
    want = OP(q * scale, k, v, None, None, segment, scale=1.0, **given)
    gradients = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (found, want))
    for a, b in zip((found, *next(gradients)), (want, *next(gradients)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_float32_mask_of_half_precision_is_not_rounded():
    q, k, v = (torch.randn(1, 2, 16, 8).bfloat16() for _ in range(3))
    mask = torch.randn(1, 2, 16, 16) * 100
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.5)
    assert OP(q, k, v, mask, scale=0.5).equal(want)
