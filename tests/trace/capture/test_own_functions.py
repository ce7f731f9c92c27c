"""Autograd functions of a model's: its own loss and gradients, split and recomputed."""

import warnings

import pytest
import torch
from torch.autograd import Function

import dcpc
from dcpc.commands.check import SplitModel
from dcpc.ops.own_functions import is_function
from dcpc.passes.sharding.sharding import analyse
from dcpc.trace import trace
from tests.cases.own_functions import FUNCTIONS, Model

INPUTS = {"x": "float64[batch, n, 4]", "ids": "int64[batch, n]"}
BUCKETS = dcpc.Buckets(inputs=INPUTS, sizes=[{"n": 6}, {"n": 13}])
POINTS = ({"batch": 2, "n": 12}, {"batch": 1, "n": 7})
QUICK = ("reversed", "clipped", "normed")


def data(batch: int, n: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    x = torch.randn(batch, n, 4, dtype=torch.float64, generator=g)
    return {"x": x, "ids": torch.randint(0, 6, (batch, n), generator=g)}


def errors(name: str, sps: tuple[int, ...], backend: str = "eager") -> dict[str, float]:
    """Relative errors of one function's model, over ranks that run in this process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        split = SplitModel(Model(FUNCTIONS[name]), BUCKETS, POINTS[0], sp=1)
        found = {}
        for sp in sps:
            some = split.of(backend, sp)
            for at in POINTS:
                for recompute in ("none", "all"):
                    error = some.difference(at, data(**at), recompute, in_step=True).worst
                    found[f"sp {sp} {at} recompute {recompute}"] = error
    return {k: e for k, e in found.items() if not e < 1e-10}


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FUNCTIONS],
)
def test_gradients_are_the_functions_own_on_one_rank_and_split(name):
    assert not errors(name, (1, 2))


@pytest.mark.slow
def test_gradients_are_the_functions_own_on_four_ranks_and_by_inductor():
    assert not errors("loop", (4,))
    assert not errors("several", (1, 2), "inductor")


def test_function_is_one_call_and_its_ops_are_in_the_joint_graph():
    program = trace(Model(FUNCTIONS["loop"]), BUCKETS)
    calls = [n.target for n in program.gm.graph.nodes if is_function(n.target)]
    assert (len(calls), len(set(calls))) == (6, 4), "another number is another op"
    split = SplitModel(Model(FUNCTIONS["gelu"]), BUCKETS, POINTS[0], sp=1)
    joint = {str(n.target) for n in split.traced.lowering(split.placement).joint.gm.graph.nodes}
    assert "aten.tanh.default" in joint
    assert not any("dcpc_function" in t for t in joint)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("clipped", '{rule: "a b c -> a b c"}'),
        ("centered", '{rule: "a b c -> a b c", whole: b}'),
        ("product", '{rule: "a b d, c d -> a b c", sum: d}'),
        ("normed", ""),
    ],
)
def test_rule_holds_in_backward_too(name, rule):
    sharding = analyse(trace(Model(FUNCTIONS[name]), BUCKETS))
    lines = [line for lines in sharding.derived.values() for line in lines]
    assert [line.partition(": ")[2] for line in lines] == [rule] * bool(rule)
    whole = [r.whole_gradient for n, r in sharding.rules.items() if n.startswith(name)]
    assert whole == [name in ("clipped", "normed")]


class Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, g):
        return g * 2


class ReadsNumber(Function):
    @staticmethod
    def forward(ctx, x):
        return x / x.abs().max().item()

    @staticmethod
    def backward(ctx, g):
        return g


class ReadsModel(Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x + 1

    @staticmethod
    def backward(ctx, g):
        return g * ctx.module.scale, None


class Drops(Function):
    @staticmethod
    def forward(ctx, x):
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx, g):
        return g


class Pointers(Function):
    @staticmethod
    def forward(ctx, x):
        return x + x.numpy().sum()

    @staticmethod
    def backward(ctx, g):
        return g


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda m, x, ids: Dirty.apply(x * 1), "a write to a tensor that it is given"),
        (lambda m, x, ids: ReadsNumber.apply(x), r"a read of a value, as by .item\(\)"),
        (lambda m, x, ids: ReadsModel.apply(x, m), r"a read of a tensor \[4\] that is no argument"),
        (lambda m, x, ids: Drops.apply(x), r"random numbers \(aten.rand_like"),
        (lambda m, x, ids: Pointers.apply(x), "RuntimeError: .*"),
    ],
    ids=["dirty", "item", "module", "random", "numpy"],
)
def test_function_that_no_graph_says_is_refused_where_it_is_applied(function, got):
    with pytest.raises(dcpc.TraceError, match=rf"test_own_functions.py:\d+.*got {got}.*custom_op"):
        trace(Model(function), BUCKETS)
