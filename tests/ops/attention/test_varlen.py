"""dcpc.ops.attention.varlen: packed sequences by one call of a GPU's kernel, by plain functions."""

import pytest
import torch

from dcpc.ops.attention import blocks, cuda, varlen, whole
from dcpc.ops.attention.spec import Attended, Sight, empty_gradient, empty_outputs
from tests.cases.gpu_kernels import KERNELS, on_the_cpu


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    """Plain functions in the place of a GPU's kernels, which take float64; a new GPU."""
    monkeypatch.setattr(cuda, "capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "kernel_of", lambda q, k, sight: "flash")
    with on_the_cpu(KERNELS):
        yield monkeypatch


SHARED = torch.tensor([[1, 1, 1, 2, 2, 3, 4, 4, 4]])
OWN = torch.tensor([[1, 1, 1, 2, 2, 3, 4, 4, 4], [7, 7, 5, 5, 5, 5, 5, 5, 0]])  # ids may fall
SINGLE = torch.arange(9)[None]
CAUSAL, ALL, WINDOW = Sight(0.3, None, 0), Sight(0.3), Sight(0.3, 2, 1)


def _laid(layout, *sizes):
    b, h, s, d = sizes
    if layout == "bshd":
        return torch.randn(b, s, h, d, dtype=torch.float64).transpose(1, 2)
    return torch.randn(*sizes, dtype=torch.float64)


@pytest.mark.parametrize("segment", [SHARED, OWN, SINGLE], ids=["shared", "own", "single"])
@pytest.mark.parametrize("sight", [CAUSAL, ALL, WINDOW], ids=["causal", "all", "window"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("groups", [1, 2])
def test_a_query_sees_its_own_sequence_alone(segment, sight, layout, groups):
    torch.manual_seed(0)
    q = _laid(layout, 2, 2 * groups, 9, 8)
    k, v = (_laid(layout, 2, 2, 9, 8) for _ in range(2))
    grad = torch.randn_like(q)
    ends = varlen.ends_of(q, k, segment, sight)
    out, lse = varlen.forward(q, k, v, ends, sight)
    ids = whole.ids_of(segment, q, sight)
    expected = blocks.forward(q, k, v, None, None, sight, ids)
    torch.testing.assert_close((out, lse), expected, rtol=1e-12, atol=1e-12)
    assert out.stride() == empty_outputs(q, v)[0].stride()
    given = Attended(grad, q, k, v, out, lse)
    found = varlen.backward(given, ends, sight)
    wanted = blocks.backward(given, None, None, sight, ids)[:3]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    assert [x.stride() for x in found] == [empty_gradient(x).stride() for x in (q, k, v)]


def test_a_sequence_in_several_runs_or_a_piece_of_queries_is_not_for_it():
    q = torch.zeros(1, 1, 4, 8)
    apart = torch.tensor([[1, 2, 1, 2]])
    assert varlen.ends_of(q, q, apart, CAUSAL) is None
    together = torch.tensor([[1, 1, 2, 2]])
    assert varlen.ends_of(q, q, together, CAUSAL) == [[0, 2, 4]]
    assert varlen.ends_of(q[:, :, :2], q, together, CAUSAL) is None
    assert varlen.ends_of(q, q, together, CAUSAL._replace(turn=2, second=2)) is None


def test_backward_holds_no_more_rows_than_there_are_and_one_sequences(gpu):
    calls = []
    op = torch.ops.aten._flash_attention_backward.default

    def noting(*args, **kwargs):
        calls.append(args[1].shape[0])
        return op(*args, **kwargs)

    gpu.setattr(varlen, "aten", _Ops(noting))
    long = torch.arange(900) // 300
    segment = torch.cat([long, 3 + torch.arange(40)])[None]  # three long ones, forty single ones
    q, k, v, out, grad = (torch.zeros(1, 1, 940, 8, dtype=torch.float64) for _ in range(5))
    ends = varlen.ends_of(q, k, segment, CAUSAL)
    given = Attended(grad, q, k, v, out, torch.zeros(1, 1, 940, dtype=torch.float64))
    varlen.backward(given, ends, CAUSAL)
    # 128 rows more for each: two long ones, a long one and four single ones, then eight a call
    assert calls == [600, 304, 8, 8, 8, 8, 4]


class _Ops:
    def __init__(self, backward):
        self._flash_attention_backward = type("", (), {"default": staticmethod(backward)})
