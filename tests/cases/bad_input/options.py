"""Kinds: models and options of compile, plan, materialize, microbatch and sharding rules."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import dcpc
from dcpc.api import plan
from dcpc.errors import (
    BucketError,
    DispatchError,
    GroupError,
    PlanError,
    ProfileError,
    RuleError,
    TraceError,
)
from tests.cases.bad_input.kinds import INPUTS, QUICK, Ground, Kind, Model, buckets


class Logits(Model):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class Detached(Model):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids, labels).detach()


class OnValues(Model):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return super().forward(ids, labels) * (2 if ids.sum().item() > 3 else 1)


class NoLabels(Model):
    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.embed(ids).mean()


class TwoDtypes(Model):
    def __init__(self) -> None:
        super().__init__()
        self.head.double()


class FewPositions(Model):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(6, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(x).square().mean() + 0 * labels.sum()


class Helpless(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def _under_meta(ground: Ground) -> None:
    with torch.device("meta"):
        dcpc.compile(Model(), buckets(), **QUICK)


def _option(name: str, error: type[dcpc.DcpcError], **options: Any) -> Kind:
    return Kind(name, error, lambda g: dcpc.compile(Model(), buckets(), **(QUICK | options)))


def _model(
    name: str, make: Any, error: type[dcpc.DcpcError] = TraceError, advice: str = ""
) -> Kind:
    return Kind(name, error, lambda g: dcpc.compile(make(), buckets(), **QUICK), advice)


def _specs(name: str, ids: str, labels: str = INPUTS["labels"]) -> Kind:
    inputs = {"ids": ids, "labels": labels}
    given = dcpc.Buckets(inputs, [{"seq": 4}, {"seq": 8}])
    return Kind(name, TraceError, lambda g: dcpc.compile(Model(), given, **QUICK))


def _world(name: str, world: Any) -> Kind:
    return Kind(name, PlanError, lambda g: plan(Model(), buckets(), world=world, backend="eager"))


def _materialized(init: Any = None, make: Any = Model) -> None:
    with torch.device("meta"):
        model = make()
    dcpc.materialize(dcpc.compile(model, buckets(), **QUICK), init)


def _unmaterialized(ground: Ground) -> None:
    with torch.device("meta"):
        model = Model()
    ids = torch.zeros(1, 4, dtype=torch.int64)
    dcpc.compile(model, buckets(), **QUICK)(ids, ids)


class Cost:
    """Of a micro-batch."""

    def seconds(self, count: Any, longest: Any) -> Any:
        return 0.01 + 1e-6 * count * longest

    def peak_bytes(self, count: Any, longest: Any) -> Any:
        return 4e6 + 2e3 * count * longest


class NanCost(Cost):
    def seconds(self, count: Any, longest: Any) -> Any:
        return math.nan * count * longest


class OddCost(Cost):
    def peak_bytes(self, count: Any, longest: Any) -> Any:
        return np.ones(5)


COST = Cost()


def _split(name: str, lengths: Any, cost: Any = COST, **options: Any) -> Kind:
    return Kind(name, PlanError, lambda g: dcpc.microbatch(lengths, cost, **options))


def _rule(name: str, op: Any, rule: Any, **more: Any) -> Kind:
    return Kind(name, RuleError, lambda g: dcpc.register_sharding_rule(op, rule, **more))


_CAPTURE = (
    "follow the hint after the source line: `torch.where` instead of `if` on values, buckets "
    "within a table's length, a number for a recurrent layer's dim"
)
_LOSS = (
    "return the loss, alone or as `loss`; pass labels to a transformers model; or compile with "
    "[`loss=`](train.md#the-loss)"
)

OPTIONS = {
    "Models": (
        _model("a class for a model", lambda: Model),
        _model("a function for a model", lambda: Model.forward),
        _model("a wrapped model", lambda: nn.DataParallel(Model())),
        Kind("a compiled model", TraceError, lambda g: dcpc.compile(g.compiled, buckets())),
        Kind("no buckets", BucketError, lambda g: dcpc.compile(Model(), {"seq": 4}), ""),
        _model("no loss", Logits, advice=_LOSS),
        _model("a loss that is detached", Detached),
        _model("control flow on values", OnValues, advice=_CAPTURE),
        _model("an input that forward lacks", NoLabels),
        _model("fewer positions than a bucket is long", FewPositions),
        _model("products of two dtypes", TwoDtypes),
        _specs("ids that are floats", "float32[batch, seq]"),
        _specs("labels of another length", INPUTS["ids"], "int64[batch, seq+1]"),
        Kind("a call before materialize", DispatchError, _unmaterialized,
             "call `dcpc.materialize(compiled)` on every rank before the optimizer is made"),
        Kind("compile under torch.device('meta')", PlanError, _under_meta),
        Kind("materialize of a module", DispatchError, lambda g: dcpc.materialize(Model())),
        Kind("materialize twice", DispatchError, lambda g: dcpc.materialize(g.compiled)),
        Kind("init= of another type", DispatchError, lambda g: _materialized(3)),
        Kind("a module without reset_parameters", DispatchError,
             lambda g: _materialized(make=Helpless),
             "give its class a `reset_parameters`, or pass a function of a module as `init=`: "
             "[train](parameters.md#start-without-the-whole-model)"),
    ),
    "Options of compile and plan": (
        _option("an option that is mistyped", PlanError, memry=1e9),
        Kind("an option by position", PlanError, lambda g: dcpc.compile(Model(), buckets(), 1e9)),
        _option("memory below 0", PlanError, memory=-1),
        _option("memory that is no number", PlanError, memory="lots"),
        _option("memory that is NaN", PlanError, memory=math.nan),
        _option("an unknown device", ProfileError, device="abacus"),
        _option("a number for a device", ProfileError, device=3),
        _option("a device of torch's", ProfileError, device="cuda:0"),
        _option("a degree beside the ranks", PlanError, sp=3),
        _option("degrees of two types", PlanError, sp=[1, "a"]),
        _option("an unknown recompute", PlanError, recompute="al"),
        _option("an unknown backend", PlanError, backend="induktor"),
        _option("an optimizer's name", PlanError, optimizer="adam"),
        _option("optimizer bytes below 0", PlanError, optimizer_bytes=-1),
        _option("optimizer bytes as text", PlanError, optimizer_bytes="1GB"),
        _option("both an optimizer and its bytes", PlanError, optimizer=torch.optim.SGD,
                optimizer_bytes=3),
        _option("unknown parameters=", PlanError, parameters="most"),
        _option("a block of one rank", PlanError, parameters="rounds", block=1),
        _option("a block without rounds", PlanError, parameters="step", block=2),
        _option("an unknown attention", PlanError, attention="spiral"),
        _option("an autocast that is no dtype", PlanError, autocast="int8"),
        _option("a calibration that is not there", ProfileError, calibration="/none.json"),
        _option("derive_rules of another type", PlanError, derive_rules="yes"),
        _option("a loss that cannot be called", TraceError, loss=3),
        _option("an unknown verify", PlanError, verify="maybe"),
        _option("a group by name", GroupError, group="world"),
        _world("no ranks", 0),
        _world("half a rank", 1.5),
        _world("ranks as text", "2"),
    ),
    "dcpc.microbatch": (
        _split("no samples", []),
        _split("an empty numpy array", np.array([])),
        _split("an array of two dims", np.ones((2, 2), dtype=int)),
        _split("fractions of tokens", [1.5]),
        _split("lengths below 1", [3, -1]),
        _split("texts", ["a"]),
        _split("lists of several lengths", [[1], [2, 3]]),
        _split("lengths that are huge", [10**30]),
        _split("no cost", [1, 2], None),
        _split("a cost that is NaN", [1, 2], NanCost()),
        _split("a cost of another shape", [1, 2], OddCost()),
        _split("a sample that does not fit", [1, 2], memory_bytes=1.0),
        _split("memory that is NaN", [1, 2], memory_bytes=math.nan),
        _split("no stages", [1, 2], stages=0),
        _split("replicas as text", [1, 2], replicas="x"),
    ),
    "Sharding rules": (
        _rule("an op without a namespace", "relu", "a -> a"),
        _rule("an op that is no text", 3, "a -> a"),
        _rule("a rule that is no text", "my::op", 3),
        _rule("a rule without an output", "my::op", "a b"),
        _rule("a rule with brackets that do not end", "my::op", "(a -> a"),
        _rule("an unknown name in whole=", "my::op", "a -> a", whole="c"),
        _rule("a name that is lost", "my::op", "a b -> a"),
        _rule("an unknown linear=", "my::op", "a -> a", linear="two"),
        _rule("a name in whole= and sum=", "my::op", "a b -> a", whole="b", sum="b"),
    ),
}  # fmt: skip
