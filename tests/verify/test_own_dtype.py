"""Kernels that there are in the model's own dtype alone: a wrong one passes float64, and is found.

The table of a GPU's kernels is asked on the CPU, and plain functions stand for the kernels.
"""

import math

import pytest
import torch
from torch import nn

import dcpc
from dcpc.errors import VerifyError
from dcpc.ops.attention import cuda, kernels
from dcpc.verify.comparisons import Comparisons
from dcpc.verify.exactness import OWN_TIMES, own_error
from dcpc.verify.reference import LossAndGradients
from models.gpt import GPT, GPTConfig
from tests.cases.gpu_kernels import KERNELS, flash_backward, flash_forward, on_the_cpu

TEXT = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
HALF = torch.bfloat16


def sees_ahead(*args, window_size_right, **kwargs):
    """A wrong kernel: each query sees a key after its own."""
    return flash_forward(*args, window_size_right=window_size_right + 1, **kwargs)


def half_the_keys(*args, **kwargs):
    """A wrong backward: the gradient of the keys is half of what it should be."""
    dq, dk, dv = flash_backward(*args, **kwargs)
    return dq, dk / 2, dv


@pytest.fixture
def as_gpu(monkeypatch):
    monkeypatch.setattr(kernels, "GPU_DEVICE", "cpu")
    monkeypatch.setattr(cuda, "capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "installed", None)


def compiled(dtype):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=64, dim=32, n_layers=1, n_heads=2)).to(dtype)
    buckets = dcpc.Buckets(TEXT, [{"seq": 24}])
    return dcpc.compile(model, buckets, memory=1e9, verify="full", backend="eager")


def test_a_right_kernel_passes_and_the_report_says_how_far_it_is_off(as_gpu):
    with on_the_cpu(KERNELS):
        report = compiled(HALF).report()
    (line,) = [x for x in report.splitlines() if x.startswith("  sp 1")]
    assert "(own dtype)" in line


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("_flash_attention_forward", sees_ahead),
        ("_flash_attention_backward", half_the_keys),
    ],
)
def test_a_wrong_kernel_is_found_in_the_models_own_dtype(as_gpu, monkeypatch, name, wrong):
    # As where there is no time for the trace in its own dtypes, which is held to less.
    monkeypatch.setattr(Comparisons, "trace", lambda self, traced: None)
    with on_the_cpu({**KERNELS, name: wrong}):
        compiled(torch.float64)  # no kernel of the table: blocks
        with pytest.raises(VerifyError, match=r"does not compute in torch.bfloat16 what it does"):
            compiled(HALF)


def test_nothing_is_compared_twice_where_float64_runs_the_same_kernels():
    line = next(x for x in compiled(HALF).report().splitlines() if x.startswith("  sp 1"))
    assert "own dtype" not in line


class Small(nn.Module):
    """A norm and a product."""

    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x):
        return self.out(self.norm(x)).float().pow(2).mean()


@pytest.fixture(scope="module")
def by_inductor():
    torch.manual_seed(0)
    buckets = dcpc.Buckets({"x": "bfloat16[batch, seq, 16]"}, [{"seq": 24}])
    made = dcpc.compile(Small().to(HALF), buckets, memory=1e9, backend="inductor")
    made(x=torch.randn(2, 24, 16, dtype=HALF)).backward()
    return made


@pytest.mark.slow
def test_what_inductor_compiled_in_half_precision_is_compared_at_its_first_call(by_inductor):
    lines = [x for x in by_inductor.report().splitlines() if "what inductor made" in x]
    assert len(lines) == 1
    assert "(own dtype)" in lines[0]


def of(loss, **gradients):
    return LossAndGradients(torch.tensor(loss), {n: torch.tensor(g) for n, g in gradients.items()})


@pytest.mark.parametrize(("off", "right"), [(0.03, True), (0.05, False)])
def test_what_is_allowed_follows_from_what_the_plain_model_loses(off, right):
    exact = of(1.0, a=[1.0, 2.0], b=[1.0, 1.0])
    plain = of(1.0, a=[1.0, 2.02], b=[1.0, 1.01])  # a hundredth of each
    found = of(1.0, a=[1.0, 2.0], b=[1.0, 1.0 + off])
    error, over = own_error(found, plain, exact, torch.float16)
    assert error.where == "b"
    assert OWN_TIMES == 4, "of the hundredth"
    assert over == ([] if right else ["b"])


def test_not_a_number_is_wrong():
    exact = plain = of(1.0, a=[1.0])
    error, over = own_error(of(1.0, a=[float("nan")]), plain, exact, HALF)
    assert error.worst == math.inf
    assert over == ["a"]
