"""Names of torch's that dcpc replaces: each is tried out, and what is off is told."""

import warnings
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

import dcpc
from dcpc.fx.torch_api import functions, patched, torch_inductor, tracing
from dcpc.fx.torch_api.patched import TorchName, fault_of, takes
from dcpc.trace import trace

NAMES = [
    name
    for module in (tracing, functions, torch_inductor)
    for value in vars(module).values()
    for name in (value.values() if isinstance(value, dict) else (value,))
    if isinstance(name, TorchName)
]
BUCKETS = dcpc.Buckets(inputs={"x": "float64[batch, n, 4]"}, sizes=[{"n": 6}])


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


kept_apply = Rounded.apply


class Learned(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.linear, self.function = nn.Linear(4, 4).double(), function

    def forward(self, x):
        return (self.function(self.linear(x)) ** 2).mean()


@contextmanager
def off(*names):
    """In its block the probes of names find something."""
    fault_of.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patched, "fault_of", lambda asked: told(asked, names))
        yield
    fault_of.cache_clear()


def strange(name):
    return "a stranger"


def told(asked, names):
    return fault_of(replace(asked, probe=strange) if asked in names else asked)


@pytest.mark.parametrize("name", NAMES, ids=str)
def test_this_torch_has_what_is_replaced_as_dcpc_expects(name):
    own = name.own
    assert name.probe(name) == ""
    assert name.own is own or name.own == own, "the probe puts back what it tries"


def test_settings_of_inductor_are_there():
    wanted = {"allow_buffer_reuse": False, "reorder_for_peak_memory": False}
    assert torch_inductor.settings(wanted) == wanted
    with pytest.warns(UserWarning, match=r"no_such_setting: got no such name.*peaks are higher"):
        assert torch_inductor.settings({**wanted, "no_such_setting": 1}) == wanted


def test_name_that_is_off_warns_once_and_is_left():
    name = TorchName("torch.nn.functional", "relu", takes("other"), "relu stays")
    own = torch.nn.functional.relu
    with pytest.warns(UserWarning, match=r"relu: got parameters .*torch's own way.*relu stays"):
        assert not name.usable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with name.replaced(lambda _: None) as done:
            assert not done
            assert torch.nn.functional.relu is own


def test_name_that_is_gone_is_told():
    name = TorchName("torch.nn.functional", "gone", takes("x"), "x stays", needed=True)
    with pytest.raises(dcpc.TraceError, match=r"functional.gone: got no such name; expected.*x st"):
        name.usable()


def test_inherited_and_added_names_are_as_before():
    for name in (functions.ASKED, tracing.PRINT):
        with name.replaced(lambda _: print):
            assert name.name in vars(name.owner)
        assert name.name not in vars(name.owner)


@pytest.mark.parametrize("apply", [Rounded.apply, kept_apply], ids=["own", "alias"])
def test_functions_are_told_where_gradients_are_on(apply):
    told = []
    x = torch.ones(2, requires_grad=True)

    def noting(cls, forward, given):
        told.append((cls, len(given)))
        return forward(*given)

    with functions.watching(noting) as done:
        apply(x)
        with torch.no_grad():
            apply(x)
    apply(x)
    assert done
    assert told == [(Rounded, 2)]  # the context and x


def test_functions_behind_tensors_are_found():
    x = torch.ones(2, requires_grad=True)
    assert functions.functions_behind([(kept_apply(x * 2) + kept_apply(x)).sum()]) == [Rounded]
    assert functions.functions_behind([x.sum(), x.detach(), kept_apply(x).detach() + x]) == []


def test_straight_through_gradient_is_refused_where_torch_does_not_say_what_runs():
    with off(functions.ASKED):
        with pytest.warns(UserWarning, match="FunctionMeta.__getattribute__: got a stranger"):
            trace(Learned(torch.sin), BUCKETS)
        with pytest.raises(dcpc.TraceError, match=r"autograd function .*Rounded: got"):
            trace(Learned(kept_apply), BUCKETS)


def test_trace_without_an_engine_to_watch_is_refused():
    with off(tracing.ENGINE), pytest.raises(dcpc.TraceError, match="_engine_run_backward: got a s"):
        trace(Learned(torch.sin), BUCKETS)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_numbers_hold_without_the_names_that_are_not_needed(backend):
    model = Learned(torch.tanh)
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    with off(*(n for n in NAMES if not n.needed)), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        compiled = dcpc.compile(model, BUCKETS, backend=backend, verify="off")
        found = torch.autograd.grad(compiled(x=x), list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    texts = [str(w.message) for w in said if "got a stranger" in str(w.message)]
    assert len(texts) == len({*texts})
    assert any("FakeTensorMode.dispatch" in text for text in texts)
    assert any("need_use_acc_helper" in text for text in texts) == (backend == "inductor")
