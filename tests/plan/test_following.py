"""A model that changes after it was compiled is followed, or refused by what changed."""

import pytest
import torch
from torch import nn

import dcpc
from dcpc.trace.capture.module_state import ModuleState

BUCKETS = dcpc.Buckets(inputs={"x": "float64[batch, n, 4]"}, sizes=[{"n": 6}])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 4)
        self.b = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0))
        self.register_buffer("scale", torch.ones(4))
        self.table, self.listed = torch.ones(4).double(), [torch.ones(4).double()]
        self.settings = {"power": 2, "note": "none"}
        self.act = torch.sin
        self.double()

    def forward(self, x):
        h = self.act(self.b(self.a(x))) * self.scale * self.table * self.listed[0]
        return h.pow(self.settings["power"]).mean()


def data():
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return {"x": x}


def error(model, compiled):
    """The largest relative error of loss and gradients against the plain model's."""
    found = []
    for run in (compiled, model):
        model.zero_grad()
        loss = run(**data())
        loss.backward()
        zero = torch.zeros(())
        grads = [zero if p.grad is None else p.grad.clone() for p in model.parameters()]
        found.append([loss.detach(), *grads])
    return max(
        float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in zip(*found, strict=True)
    )


def set_at(name, value):
    owner, _, leaf = name.rpartition(".")
    return lambda model: setattr(model.get_submodule(owner), leaf, value())


def linear():
    return nn.Linear(4, 4).double()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.a.weight.data.mul_(2),
        lambda m: m.load_state_dict({n: t + 1 for n, t in m.state_dict().items()}),
        lambda m: m.load_state_dict({n: t + 1 for n, t in m.state_dict().items()}, assign=True),
        lambda m: m.a.requires_grad_(False),
        lambda m: m.a.weight.register_hook(lambda g: g * 2),
        lambda m: m.table.mul_(3),
        lambda m: m.listed[0].mul_(3),
        lambda m: m.scale.mul_(3),
        lambda m: m.settings.update(note="some"),
        lambda m: m.eval(),
        set_at("b.0", linear),
        set_at("a.weight", lambda: nn.Parameter(torch.ones(4, 4).double())),
    ],
)
def test_change_that_the_graphs_stand_for_is_followed(change):
    model = Net()
    compiled = dcpc.compile(model, BUCKETS, backend="eager", verify="off")
    assert error(model, compiled) < 1e-10
    change(model)
    assert error(model, compiled) < 1e-10


def weights_frozen(model):
    model.a.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        (set_at("b.1.p", lambda: 0.2), r"got b.1.p: 0.0 -> 0.2; expected .*compile it again"),
        (set_at("b.0", lambda: nn.Sequential(linear())), r"got b.0: Linear -> Sequential;"),
        (set_at("act", lambda: torch.cos), r"got act: .*sin -> .*cos;"),
        (set_at("a.forward", lambda: torch.cos), r"a.forward: .*cos is new"),
        (set_at("table", lambda: torch.zeros(4).double()), r"table: another float64\[4\]"),
        (lambda m: m.listed.append(1) or m.listed.pop(0), r"listed\[0\]: float64.* -> 1"),
        (lambda m: m.settings.update(power=3), r"got settings\['power'\]: 2 -> 3"),
        (set_at("b.0.weight", lambda: None), r"b.0.weight: float64.* -> None"),
        (lambda m: setattr(m, "scale", m.scale.float()), r"scale: float64"),
        (
            lambda m: setattr(m.a.weight, "data", m.a.weight.data.t()),
            r"a.weight: .* of strides \[1",
        ),
        (lambda m: m.bfloat16(), r"a.weight: float64\[4, 4\] trains .* -> bfloat16.* and 1 more"),
        (lambda m: setattr(m.b[0], "weight", m.a.weight), r"b.0.weight: .*tied to a.weight"),
        (lambda m: m.a.register_forward_hook(lambda *_: None), r"a: forward hooks .*<lambda>.*"),
        (lambda m: m.a.register_forward_pre_hook(print), r"a: forward pre-hooks \(print\)"),
        (lambda m: m.a.register_full_backward_hook(print), r"a: backward hooks \(print\)"),
        (lambda m: nn.utils.parametrizations.orthogonal(m.a), r"a: Linear -> ParametrizedLinear"),
    ],
)
def test_change_that_the_graphs_do_not_have_is_refused_by_name(change, pattern):
    model = Net()
    compiled = dcpc.compile(model, BUCKETS, backend="eager", verify="off")
    change(model)
    with pytest.raises(dcpc.DispatchError, match=f"the model changed since it was.*{pattern}"):
        compiled(**data())


def test_parameter_that_learns_since_is_refused_and_one_frozen_again_runs():
    model = Net()
    model.a.requires_grad_(False)
    compiled = dcpc.compile(model, BUCKETS, backend="eager", verify="off")
    model.a.weight.requires_grad_(True)
    with pytest.raises(dcpc.DispatchError, match=r"got a.weight: .*frozen on cpu -> .*trains"):
        compiled(**data())
    model.a.requires_grad_(False)
    assert error(model, compiled) < 1e-10


def test_class_whose_forward_is_another_is_refused(monkeypatch):
    class Own(Net):
        def forward(self, x):
            return super().forward(x)

    model = Own()
    compiled = dcpc.compile(model, BUCKETS, backend="eager", verify="off")
    monkeypatch.setattr(Own, "forward", lambda self, x: self.a(x).sum())
    with pytest.raises(dcpc.DispatchError, match=r"class .*Own.forward: .*forward -> .*lambda"):
        compiled(**data())


def test_train_step_refuses_a_changed_model():
    model = Net()
    compiled = dcpc.compile(model, BUCKETS, backend="eager", verify="off")
    samples = [{"x": data()["x"][0]}] * 2
    loader = dcpc.DataLoader(samples, compiled, tokens_per_step=6)
    (first, second) = loader
    compiled.train_step(first)
    model.settings["power"] = 3
    with pytest.raises(dcpc.DispatchError, match=r"settings\['power'\]: 2 -> 3"):
        compiled.train_step(second)


def test_model_that_changes_at_every_call_is_named_once():
    model = Net()
    compiled = dcpc.compile(model, BUCKETS, backend="eager", verify="off")
    for step in range(2):
        model.settings["note"] = step
        compiled(**data())
    model.settings["note"] = 2
    with pytest.warns(UserWarning, match=r"changed 3 times .*settings\['note'\]: 'none' -> 2"):
        compiled(**data())


def test_state_tells_what_a_trace_reads_and_no_values():
    model = Net()
    state = ModuleState(model)
    model.a.weight.data.add_(1)
    model.scale.add_(1)
    assert state.holds(model)
    model.settings = dict(model.settings)
    assert not state.holds(model)
    assert state.changes(ModuleState(model)) == []
    model.b[1].p = True  # equal to 1, and another kind
    now = ModuleState(model)
    model.b[1].p = 1
    assert now.changes(ModuleState(model)) == ["b.1.p: True -> 1"]


class Counts(Net):
    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.kept = 0, [], None

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.shape[1])
        self.kept = x
        return super().forward(x) * self.calls


def test_forward_that_changes_its_module_is_told():
    model = Counts()
    with pytest.warns(UserWarning, match=r"forward changes .*calls: 0 -> 1; .*seen") as said:
        dcpc.compile(model, BUCKETS, backend="eager", verify="off")
    assert "kept" not in str(said[0].message)
