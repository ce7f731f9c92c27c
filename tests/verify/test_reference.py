"""The plain model is run on other tensors, and is the user's own again afterwards."""

import pytest
import torch
from torch import nn

import dcpc
from dcpc.module_state import holding, untouched

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
