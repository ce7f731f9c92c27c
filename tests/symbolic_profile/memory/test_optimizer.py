"""An optimizer's state by its formula against what one step of it really keeps."""

import functools

import pytest
import torch
from torch import nn, optim

from dcpc.errors import PlanError
from dcpc.symbolic_profile import state_bytes, step_bytes
from dcpc.symbolic_profile.memory.optimizer import STATES, STEPS
from examples.allocator import measured_peak_bytes

SCALARS_BYTES = 4096  # counts of steps, and what Python's numbers become

CASES = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.AdamW, {"foreach": True}),
    (optim.Adamax, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"momentum": 0.9}),
    (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    (optim.Adagrad, {}),
    (optim.Adadelta, {}),
    (optim.ASGD, {}),
    (optim.Rprop, {}),
    (optim.Adafactor, {}),
    (optim.Muon, {}),
]


class Lion(optim.Optimizer):
    """A class of a user's own: one tensor like the parameter, and a count."""

    def __init__(self, params, lr=1e-4):
        super().__init__(params, {"lr": lr})

    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state["average"] = torch.zeros_like(p)
                state["count"] = torch.zeros((), dtype=torch.int64)


class Rows(Lion):
    """One number a row: no function of the number of elements."""

    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p]["rows"] = torch.zeros(p.shape[0])


def parameters(dtype=torch.float32, dims=(2, 1, 3, 2)):
    shapes = {1: (5,), 2: (4, 6), 3: (2, 3, 7)}
    made = [nn.Parameter(torch.ones(shapes[d], dtype=dtype)) for d in dims]
    for p in made:
        p.grad = torch.full_like(p, 0.5)
    return made


def kept_bytes(optimizer) -> dict[int, int]:
    """What each parameter's state takes after a step."""
    optimizer.step()
    return {
        id(p): sum(t.nbytes for t in state.values() if isinstance(t, torch.Tensor))
        for p, state in optimizer.state.items()
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "options"), CASES, ids=lambda x: str(x))
def test_formula_is_what_a_step_keeps(kind, options, dtype):
    params = parameters(dtype, (2, 2) if kind is optim.Muon else (2, 1, 3, 2))
    made = functools.partial(kind, **options)
    real = dict.fromkeys(map(id, params), 0) | kept_bytes(made(params))
    assert state_bytes(made, params) == real
    assert state_bytes(made(params), params) == real


def test_every_formula_is_under_test():
    assert set(STATES) - {kind for kind, _ in CASES} == {optim.LBFGS}


def test_history_of_lbfgs_when_it_is_full():
    p = nn.Parameter(torch.linspace(1, 2, 50, dtype=torch.float64))
    made = functools.partial(optim.LBFGS, history_size=3, lr=1e-2, max_iter=1)
    optimizer = made([p])

    def closure():
        optimizer.zero_grad()
        loss = (p**4).sum() + (p[1:] * p[:-1]).sum()
        loss.backward()
        return loss

    for _ in range(8):
        optimizer.step(closure)
    state = optimizer.state[p]
    held = [*state["old_dirs"], *state["old_stps"], state["d"], state["prev_flat_grad"]]
    assert state_bytes(made, [p]) == {id(p): sum(t.nbytes for t in held)}


def test_each_group_has_its_own_options_and_frozen_parameters_no_state():
    first, second, frozen = parameters(dims=(2, 1, 2))
    frozen.requires_grad_(False)
    groups = [{"params": [first], "momentum": 0.9}, {"params": [second]}]
    optimizer = optim.SGD(groups, lr=0.1)
    found = state_bytes(optimizer, [first, second, frozen])
    assert found == {id(first): first.nbytes, id(second): 0}


def test_class_without_a_formula_is_measured():
    params = parameters(dims=(2, 1, 3))
    assert state_bytes(Lion, params) == {id(p): p.nbytes + 8 for p in params}
    assert state_bytes(Lion(params), params) == kept_bytes(Lion(params))


@pytest.mark.parametrize("made", [Rows, lambda params: 3, lambda params: 1 / 0])
def test_what_is_no_formula_asks_for_the_bytes(made):
    with pytest.raises(PlanError, match="pass optimizer_bytes= instead"):
        state_bytes(made, parameters())


def stepped(made, params: list[nn.Parameter]) -> int:
    """Bytes that the second step took."""
    optimizer = made(params)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        peak_bytes = measured_peak_bytes(optimizer.step)
    return peak_bytes


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", list(STEPS))
def test_step_takes_no_more_than_its_formula(kind, decay, together):
    """And no less than half of it: what one parameter leaves to the next depends on their order."""
    options = {} if kind is optim.Muon else {"foreach": together}
    options |= {} if kind is optim.Rprop else {"weight_decay": decay}
    params = [nn.Parameter(torch.ones(n, 200)) for n in (20, 90, 50, 10)]
    made = functools.partial(kind, **options)
    predicted = step_bytes(made, params, together=False)
    measured = stepped(made, params)
    assert measured <= predicted + SCALARS_BYTES
    assert measured >= predicted / 2


def test_step_that_is_fused_takes_nothing_and_one_together_is_asked_for():
    params = parameters(dims=(2, 2))
    every = sum(p.nbytes for p in params)
    assert step_bytes(functools.partial(optim.Adam, fused=True), params, together=True) == 0
    assert step_bytes(optim.Adam, params, together=True) == every
    single = functools.partial(optim.Adagrad, foreach=False)
    assert step_bytes(single(params), params, together=True) < 2 * every
    assert step_bytes(optim.Adagrad, params, together=True) == 2 * every
    assert step_bytes(Lion, params, together=True) == 0
