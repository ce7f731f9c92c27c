"""A trace is the one that torch makes (`benchmarks.trace.by_torch`), but for the names of nodes.

Ours has fake tensors that are told, and is made functional call by call.
"""

from itertools import product

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from benchmarks.trace import by_torch, said
from dcpc.buckets import Buckets
from dcpc.fx.fakes import telling
from dcpc.trace import trace
from models.stdit import RectifiedFlow, STDiT, STDiTConfig
from tests.cases import language_models
from tests.cases.small_models import CASES, TELLING, sizes
from tests.cases.values import values

CLIPS = {
    "latents": "float32[batch, 4, frames, tokens*2, 2]",
    "noise": "float32[batch, 4, frames, tokens*2, 2]",
    "timestep": "float32[batch]",
    "text": "float32[batch, 6, 20]",
    "text_mask": "bool[batch, 6]",
    "fps": "float32[batch]",
    "pixel_height": "float32[batch]",
    "pixel_width": "float32[batch]",
}


def assert_alike(model, buckets, autocast=None):
    calls = FakeTensorMode.dispatch
    told = said(trace(model, buckets, autocast))
    assert FakeTensorMode.dispatch is calls
    with by_torch():
        assert told == said(trace(model, buckets, autocast))


# In place torch makes views again that are there already, and calls in another order: the numbers
# are compared, here for the second one and in test_functional.py. OneMore's labels are prepared
# before or after its scores: torch copies them where a view does.
ALIKE = [n for n in CASES if n not in ("InPlace", "TorchLayer", "OneMore")]


QUICK_ONES = TELLING


@pytest.mark.parametrize(
    "name", [n if n in QUICK_ONES else pytest.param(n, marks=pytest.mark.slow) for n in ALIKE]
)
def test_small_models(name):
    case = CASES[name]
    assert_alike(case.model(), Buckets(case.inputs, sizes(name)))


QUICK = (("llama", torch.bfloat16),)


@pytest.mark.parametrize(
    ("name", "autocast"),
    [
        case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow)
        for case in product(language_models.NAMES, (None, torch.bfloat16))
    ],
)
def test_language_models(name, autocast):
    buckets = Buckets(language_models.inputs(name), [{"seq": 8}, {"seq": 17}])
    assert_alike(language_models.make(name), buckets, autocast)


@pytest.mark.slow
def test_video():
    model = RectifiedFlow(STDiT(STDiTConfig(depth=1, dim=48, heads=4, text_dim=20, text_len=6)))
    buckets = Buckets(CLIPS, [{"frames": f, "tokens": t} for f in (2, 16) for t in (16, 256)])
    assert_alike(model, buckets)


class Constants(nn.Module):
    """Asks numbers of constants, which a told result would not have."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        steps = int((torch.tensor([2.0]) * 1.5).round().item())
        part = float(torch.tensor([1])[0:1].neg())
        return (self.linear(x) * steps + part).mean()


def test_numbers_of_constants_are_kept():
    assert_alike(Constants(), Buckets({"x": "float32[batch, seq, 4]"}, [{"seq": 8}]))


class Dropped(nn.Module):
    """A linear layer and dropout that is on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x):
        return nn.functional.dropout(self.linear(x), 0.5, True).square().mean()


def test_dropout_in_training():
    buckets = Buckets({"x": "float64[batch, seq, 4]"}, [{"seq": 8}, {"seq": 17}])
    assert_alike(Dropped(), buckets)


def test_modes_are_as_they_were_where_a_block_fails():
    calls = FakeTensorMode.dispatch
    with telling():
        assert FakeTensorMode.dispatch is not calls
    with pytest.raises(ZeroDivisionError), telling(), telling():
        raise ZeroDivisionError
    assert FakeTensorMode.dispatch is calls


@pytest.mark.slow
def test_a_layer_of_torchs_own_has_its_bits():
    case = CASES["TorchLayer"]
    model, buckets = case.model(), Buckets(case.inputs, sizes("TorchLayer"))
    ours = trace(model, buckets)
    with by_torch():
        torchs = trace(model, buckets)
    for point in sizes("TorchLayer"):
        found, wanted = (p.gm(*values(p, model, case.data(point)))[0] for p in (ours, torchs))
        assert found == wanted
