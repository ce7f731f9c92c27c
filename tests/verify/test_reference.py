"""The plain model is run on other tensors, and is the user's own again afterwards."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dcpc
from dcpc.trace.capture.module_state import holding, untouched
from dcpc.verify.float64 import Float64Throughout, float64_throughout

BUCKETS = dcpc.Buckets({"x": "float32[batch, seq, 4]"}, [{"seq": 6}, {"seq": 9}])


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.again = self.inner

    def forward(self, x):
        return self.again(torch.tanh(self.inner(x))).square().mean()


def test_modules_hold_their_own_tensors_after_verification():
    model = TwoNames()
    before = dict(model.named_parameters(remove_duplicate=False))
    values = {n: p.detach().clone() for n, p in before.items()}
    compiled = dcpc.compile(model, BUCKETS, backend="eager")
    assert "NOT compared" not in compiled.report()
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[n] is p for n, p in before.items())
    assert all(torch.equal(after[n], v) for n, v in values.items())
    assert all(p.grad is None for p in after.values())


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
def test_recurrent_layers_compute_with_what_they_hold(make):
    rnn, x = make(4, 4), torch.randn(3, 2, 4)
    own = rnn(x)[0]
    others = {id(p): 2 * p.detach() for p in rnn.parameters()}
    with holding(rnn, others):
        assert not torch.allclose(rnn(x)[0], own)
    assert torch.equal(rnn(x)[0], own)


def test_others_are_held_within_the_block_alone():
    model = TwoNames()
    mine = model.inner.weight
    other = torch.zeros(4, 4)
    with holding(model, {id(mine): other}):
        assert model.again.weight is other
    assert model.inner.weight is mine


def test_what_a_forward_leaves_in_its_module_is_put_back():
    model = TwoNames()
    model.seen, model.config = [1], {"a": 1}
    with untouched(model):
        model.seen.append(2)
        model.config["b"], model.table = 3, torch.zeros(1)
    assert (model.seen, model.config, hasattr(model, "table")) == ([1], {"a": 1}, False)


class Watched(nn.Module):
    """Each call looks, from another thread, at what holds for the whole process."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        with ThreadPoolExecutor(1) as other:
            SEEN.append(other.submit(lambda: (torch.get_default_dtype(), torch.rand(3))).result())
        scale = torch.arange(1, x.shape[1] + 1) / 3 + torch.tensor(0.1)
        return (self.inner(x) * scale[:, None] * torch.full((), 0.3)).square().mean()


SEEN = []


def test_another_thread_sees_no_other_defaults_and_keeps_its_random_numbers():
    """A dataset is read by the loader's thread while a variant is compared."""
    SEEN.clear()
    torch.manual_seed(5)
    compiled = dcpc.compile(Watched(), BUCKETS, backend="eager")
    assert "NOT compared" not in compiled.report()
    assert len(SEEN) > 2
    assert {dtype for dtype, _ in SEEN} == {torch.float32}
    torch.manual_seed(5)
    Watched()
    assert all(torch.equal(drawn, torch.rand(3)) for _, drawn in SEEN)


def made_without_a_dtype(n: int, i: torch.Tensor) -> list[torch.Tensor]:
    b = i > 2
    return [
        torch.zeros(n), torch.ones(2, n), torch.full((n,), 0.1), torch.full((n,), 3), torch.eye(n),
        torch.arange(n), torch.arange(n) / 7, torch.arange(0.0, 1.0, 0.1), torch.linspace(0, 1, n),
        torch.tensor(0.1), torch.tensor([1, 2]), torch.tensor([[0.1, 2]]), torch.as_tensor(0.3),
        torch.tensor(True), i / 3, i * 0.1, i + 0.1, i.sqrt(), torch.sin(i), 1e4**i, i**-0.5,
        torch.where(b, 0.1, 0.7), torch.where(b, i, 0.1), b * 0.3, b / 3, i.float() / 3,
        i.mean(dtype=torch.float32),
        i.sum(), i.cumsum(0, dtype=torch.float32), torch.exp(-(i / 7)), torch.outer(i, 1 / i),
        torch.zeros(n, dtype=torch.float32) + 0.1, torch.zeros_like(i, dtype=torch.float16),
        i.new_tensor(0.7),
        i.new_zeros(n), torch.hann_window(n), torch.scalar_tensor(0.1), torch.empty(n).fill_(0.1),
        torch.logspace(0, 1, n), torch.sigmoid(b), torch.softmax(i, 0, dtype=torch.float32),
        i.half(),
        F.one_hot(i), torch.polar(torch.ones(n), torch.arange(n) / 3),
        F.softplus(i / 3),
    ]  # fmt: skip


def test_float64_throughout_gives_what_the_default_dtype_would():
    i = torch.arange(1, 6)
    with float64_throughout():
        got = made_without_a_dtype(5, i)
    assert torch.get_default_dtype() == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        with Float64Throughout():
            expected = made_without_a_dtype(5, i)
    finally:
        torch.set_default_dtype(torch.float32)
    for number, (mine, theirs) in enumerate(zip(got, expected, strict=True)):
        assert mine.dtype == theirs.dtype, number
        assert torch.equal(mine, theirs), number
