"""dcpc.ops.attention.cuda: which kernel runs, and who sees whom, by plain functions."""

from types import SimpleNamespace

import pytest
import torch

from dcpc.ops.attention import OnGpu, blocks, cuda, gpu_kernel
from dcpc.ops.attention.spec import Attended, Sight, empty_gradient, empty_outputs
from tests.cases.gpu_kernels import KERNELS, backward, forward, on_the_cpu


@pytest.fixture
def gpu(monkeypatch):
    """Plain functions in the place of a GPU's kernels, which take float64; a new GPU."""
    monkeypatch.setattr(cuda, "capability", lambda device: (9, 0))
    with on_the_cpu(KERNELS):
        yield monkeypatch


@pytest.fixture(params=["flash-attn", "flash", "cuDNN", "efficient"])
def kernel(request, gpu):
    """Which kernel runs, whatever the dtype is."""
    made = SimpleNamespace(_flash_attn_forward=forward, _flash_attn_backward=backward)
    gpu.setattr(cuda, "installed", made if request.param == "flash-attn" else None)
    gpu.setattr(cuda, "has_cudnn", lambda device: request.param == "cuDNN")
    name = "efficient" if request.param == "efficient" else "flash"
    gpu.setattr(cuda, "kernel_of", lambda q, k, sight: name)
    return name


CASES = [
    # before, after, start, queries, keys
    (None, None, 0, 5, 7),
    (None, 0, 0, 7, 7),
    (None, 0, 0, 3, 9),  # a first piece of the queries: keys after it are not seen by any
    (None, 0, 4, 3, 9),
    (None, 0, 6, 3, 9),
    (2, 0, 0, 8, 8),
    (2, 0, 0, 3, 9),
    (2, 0, 5, 3, 9),
    (3, 1, 2, 4, 9),
    (1, None, 3, 4, 9),
    (None, 2, 1, 4, 9),
]


@pytest.mark.parametrize(("before", "after", "start", "queries", "keys"), CASES)
@pytest.mark.parametrize("groups", [1, 2])
def test_every_query_sees_what_it_should(kernel, before, after, start, queries, keys, groups):
    torch.manual_seed(0)
    sight = Sight(0.3, before, after, start)
    if kernel == "efficient" and (before is not None or after not in (None, 0)):
        pytest.skip("the efficient kernel has no windows")
    q = torch.randn(2, 2 * groups, queries, 8, dtype=torch.float64)
    k, v = (torch.randn(2, 2, keys, 8, dtype=torch.float64) for _ in range(2))
    grad = torch.randn_like(q)
    out, lse = cuda.forward(q, k, v, sight)
    expected = blocks.forward(q, k, v, None, None, sight)
    torch.testing.assert_close((out, lse), expected, rtol=1e-12, atol=1e-12)
    wanted, _ = empty_outputs(q, v)
    assert out.stride() == wanted.stride()
    given = Attended(grad, q, k, v, out, lse)
    found = cuda.backward(given, sight)
    wanted = blocks.backward(given, None, None, sight)[:3]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert [x.stride() for x in found] == [empty_gradient(x).stride() for x in (q, k, v)]


def test_cudnn_computes_what_torch_has_it_compute(gpu):
    gpu.setattr(cuda, "has_cudnn", lambda device: True)

    def by_cudnn(q, k, sight):
        return cuda.by_cudnn(q, k, k, sight)

    q, k = (torch.zeros(2, 1, n, 8, dtype=HALF) for n in (4, 6))
    assert by_cudnn(q, q, Sight(1.0, None, 0))
    assert by_cudnn(q, k, Sight(1.0))
    assert not by_cudnn(q, k, Sight(1.0, None, 0, 2))  # causal from the last key
    assert not by_cudnn(q, q, Sight(1.0, 3, 0))
    assert not by_cudnn(q, k[:, :, :1], Sight(1.0))  # one key
    assert not by_cudnn(q, k[:1].expand(2, -1, -1, -1), Sight(1.0))
    assert not by_cudnn(*[torch.zeros(1, 1, 4, 136, dtype=HALF)] * 2, Sight(1.0))
    gpu.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    assert not by_cudnn(q, q, Sight(1.0))


HALF, SINGLE = torch.bfloat16, torch.float32
ALL, CAUSAL, LATER = Sight(1.0), Sight(1.0, None, 0, 0), Sight(1.0, None, 0, 2)
WINDOW, AHEAD = Sight(1.0, 2, 0, 0), Sight(1.0, None, 1, 0)
# dtype, width, sight, capability -> kernel
TABLE = [
    (HALF, 64, ALL, (8, 0), "flash"),
    (HALF, 64, CAUSAL, (9, 0), "flash"),
    (HALF, 64, LATER, (9, 0), "flash"),
    (torch.float16, 64, WINDOW, (9, 0), "flash"),
    (HALF, 256, AHEAD, (10, 0), "flash"),
    (HALF, 200, CAUSAL, (9, 0), "flash"),
    (HALF, 200, CAUSAL, (8, 6), "efficient"),
    (HALF, 224, CAUSAL, (8, 9), "efficient"),
    (HALF, 200, WINDOW, (12, 0), "blocks"),
    (HALF, 256, CAUSAL, (8, 6), "flash"),
    (HALF, 192, CAUSAL, (8, 6), "flash"),
    (HALF, 264, CAUSAL, (9, 0), "efficient"),
    (HALF, 63, CAUSAL, (9, 0), "blocks"),
    (HALF, 60, CAUSAL, (9, 0), "blocks"),  # rows of 120 bytes
    (HALF, 64, CAUSAL, (7, 5), "blocks"),
    (SINGLE, 64, ALL, (8, 0), "efficient"),
    (SINGLE, 64, LATER, (9, 0), "efficient"),
    (SINGLE, 4, CAUSAL, (9, 0), "efficient"),
    (SINGLE, 6, CAUSAL, (9, 0), "blocks"),
    (SINGLE, 64, WINDOW, (9, 0), "blocks"),
    (SINGLE, 64, AHEAD, (9, 0), "blocks"),
    (torch.float64, 64, CAUSAL, (9, 0), "blocks"),
]


@pytest.mark.parametrize(("dtype", "width", "sight", "capability", "expected"), TABLE)
def test_the_table_says_which_kernel_runs(gpu, dtype, width, sight, capability, expected):
    assert gpu_kernel(OnGpu(dtype, width, sight, capability)) == expected
    gpu.setattr(cuda, "capability", lambda device: capability)
    q, k = (torch.zeros(1, 4, n, width, dtype=dtype) for n in (4, 9))
    assert cuda.kernel_of(q, k, sight) == expected


def test_what_no_kernel_says_alike_is_left_to_the_blocks(gpu):
    q, k = (torch.zeros(1, 4, n, 8, dtype=HALF) for n in (4, 6))
    assert not cuda.able(q, k, Sight(1.0, None, -1, 0))  # the first query sees no key
    assert not cuda.able(q, k, Sight(1.0, 1, None, 6))  # the last ones see none
    assert not cuda.able(q.float(), k.float(), Sight(1.0, None, 0, 4))  # beyond the last key
    assert cuda.able(q, k, Sight(1.0, None, 0, 4))


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 9)])
def test_a_row_of_the_table_runs_its_kernel(gpu, queries, keys):
    called = []
    for name in ("_flash_attention_forward", "_efficient_attention_forward"):
        op = getattr(torch.ops.aten, name).default
        gpu.setattr(cuda.aten, name, SimpleNamespace(default=_noting(op, name, called)))
    gpu.setattr(cuda, "installed", None)
    for dtype in (HALF, SINGLE):
        q, k = (torch.ones(1, 2, n, 8, dtype=dtype) for n in (queries, keys))
        cuda.forward(q, k, k, Sight(1.0, None, 0, keys - queries))
    assert called == ["_flash_attention_forward", "_efficient_attention_forward"]


def _noting(op, name, called):
    def call(*args, **kwargs):
        called.append(name)
        return op(*args, **kwargs)

    return call


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, and no stub of one")
@pytest.mark.parametrize(("before", "after", "start", "queries", "keys"), CASES)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [HALF, SINGLE])
def test_a_gpus_kernels_lay_results_as_promised(before, after, start, queries, keys, groups, dtype):
    sight = Sight(0.3, before, after, start)
    place = {"dtype": dtype, "device": "cuda"}
    q = torch.zeros(2, queries, 2 * groups, 64, **place).transpose(1, 2)
    k, v = (torch.zeros(2, 2, keys, 64, **place) for _ in range(2))
    if not cuda.able(q, k, sight):
        pytest.skip("blocks")
    out, lse = cuda.forward(q, k, v, sight)
    made = out, lse, *cuda.backward(Attended(torch.zeros_like(q), q, k, v, out, lse), sight)
    wanted = *empty_outputs(q, v), *(empty_gradient(x) for x in (q, k, v))
    facts = [[(x.shape, x.stride(), x.dtype, x.device) for x in each] for each in (made, wanted)]
    assert facts[0] == facts[1]
