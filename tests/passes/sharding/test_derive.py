"""Rules derived by running an op on random pieces: found, refused, right where they are used."""

import warnings
from functools import cache
from typing import Any

import pytest
import sympy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from dcpc.api import plan
from dcpc.buckets import Buckets
from dcpc.ir import TensorInfo
from dcpc.passes.sharding import rules
from dcpc.passes.sharding.derive import Derived, derive
from dcpc.passes.sharding.sharding import analyse
from dcpc.trace import trace
from tests.passes.sharding import user_ops
from tests.passes.sharding.rule_cases import CASES, Source
from tests.passes.sharding.rule_check import check_pieces, program_of

B, S = (sympy.Symbol(name, integer=True, positive=True) for name in ("batch", "seq"))
ours, aten = torch.ops.dcpctest, torch.ops.aten


def found(
    op: Any, operands: list[tuple[Any, ...]], output: tuple[Any, ...], *rest: Any, result: int = 0,
    integers: tuple[int, ...] = (),
) -> Derived | str:  # fmt: skip
    """What is derived for op(operands, *rest); float32 in the graph but for `integers`."""
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"x{i}") for i in range(len(operands))]
    length = graph.placeholder("length")
    given = [length if x is S else x for x in rest]
    call = graph.call_function(op, (*placeholders, *given))
    call.meta["val"] = [torch.empty(0)] * 3
    dtypes = [torch.int64 if i in integers else torch.float32 for i in range(len(operands))]
    info = [
        TensorInfo(tuple(map(sympy.sympify, shape)), dtype, True)
        for shape, dtype in zip((*operands, output), (*dtypes, torch.float32), strict=True)
    ]
    return derive(call, result, info[:-1], info[-1], {"length": S})


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ((ours.rowwise.default, [(B, S, 48), (48,)], (B, S, 48)),
         'op: {rule: "a b c, c -> a b c", whole: c}'),
        ((ours.scan.default, [(B, S, 48)], (B, S, 48), 0.9),
         'op: {rule: "a b c -> a b c", whole: b, linear: first}'),
        ((ours.contract.default, [(B, S, 48), (64, 48)], (B, S, 64)),
         'op: {rule: "a b d, c d -> a b c", sum: d, linear: one}'),
        ((ours.halves.default, [(B, S, 2 * S)], (B, S), S),
         'op: {rule: "a b c -> a b", whole: c, linear: first}'),
        ((aten.mm.default, [(S, 4096), (4096, 11008)], (S, 11008)),  # too large to run as it is
         'op: {rule: "a c, c b -> a b", sum: c, linear: one}'),
        ((aten.layer_norm.default, [(B, S, 768)], (B, S, 768), [768]),
         'op: {rule: "a b c -> a b c", whole: c}'),
        ((aten.add.Tensor, [(B, S), (B, S)], (B, S)),
         'op: {rule: "a b, a b -> a b", linear: all}'),
        ((aten.sum.default, [(B, S)], ()), 'op: {rule: "a b -> ", sum: a b, linear: first}'),
    ],
)  # fmt: skip
def test_rule_is_found(args: tuple[Any, ...], line: str):
    result = found(*args)
    assert isinstance(result, Derived), result
    assert result.line("op") == line
    assert result.takes_empty


def test_indices_stay_inside_the_table():
    table = [(100, 48), (B, S)]
    result = found(aten.embedding.default, table, (B, S, 48), integers=(1,))
    assert isinstance(result, Derived), result
    assert result.line("op") == 'op: {rule: "d c, a b -> a b c", whole: d, linear: first}'


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        (ours.mix.default, "no dim of its result"),
        (ours.rarely.default, "no dim of its result"),
        (ours.noisy.default, "draws random numbers"),
        (aten.bernoulli.default, "draws random numbers"),
        (aten.relu_.default, "writes to its input"),
        (aten.inverse.default, "does not run"),
        (torch.ops.dcpc.all_reduce.default, "are not run on their own"),
        (torch.add, "no registered op"),
    ],
)
def test_op_without_a_rule_says_why(op: Any, reason: str):
    result = found(op, [(B, S, 48)], (B, S, 48))
    assert isinstance(result, str)
    assert reason in result


def test_derived_alike_each_time_and_without_a_trace_in_the_random_state():
    torch.manual_seed(3)
    expected, results = torch.rand(2), []
    for seed in (3, 4):
        torch.manual_seed(seed)
        results.append(found(ours.scan.default, [(B, S, 4)], (B, S, 4), 0.5))
        found(ours.noisy.default, [(B, S, 4)], (B, S, 4))
        if seed == 3:
            assert torch.equal(torch.rand(2), expected)
    assert results[0] == results[1]


# ------------------------------------------------------------------- derived against what is proved

TELLING = (
    "aten.softmax", "aten.cumsum", "aten.linear", "aten.layer_norm", "aten.matmul", "aten.mul",
    "aten.embedding", "aten.flip", "aten.amax", "aten.cat", "aten.tril",
    "aten.group_norm", "aten.conv1d", "aten.roll", "aten.topk", "aten.scatter_add", "aten.where",
)  # fmt: skip


def splits(monkeypatch: pytest.MonkeyPatch, op: str, examples: int) -> int:
    """Derives the rule of random calls of an op and holds it against other draws; counts splits."""
    table = rules.rule_table()
    monkeypatch.setattr(rules, "rule_table", lambda: {k: v for k, v in table.items() if k != op})
    monkeypatch.setattr(fx.GraphModule, "recompile", lambda self: None)
    count = 0

    def body(data: st.DataObject) -> None:
        nonlocal count
        case = CASES[op](Source(data.draw, op)).results()[0]
        program = program_of(case)
        sharding = analyse(program)
        for chosen in sharding.alternatives[program.loss]:
            size = sharding.rules[program.loss].sizes.get(chosen.name, 0)
            if chosen.factor >= 0 and (not chosen.nonempty or size >= 2):
                check_pieces(case, program, sharding, chosen, 2, case.run())
                count += 1

    settings(
        max_examples=examples, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(HealthCheck),
    )(given(st.data())(body))()  # fmt: skip
    return count


def test_derived_rules_hold_where_proved_ones_exist(monkeypatch: pytest.MonkeyPatch):
    assert not [op for op in TELLING if not splits(monkeypatch, op, 3)]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_no_op_of_the_table_gets_a_wrong_rule(monkeypatch: pytest.MonkeyPatch):
    lines = {op: line for op, line in rules.rule_table().items() if not line.reason}
    ops = sorted(op for op in lines if not op.startswith("dcpc.") and lines[op].kind != "generator")
    assert sum(splits(monkeypatch, op, 3) > 0 for op in ops) > 0.7 * len(ops)


# ------------------------------------------------------------------------------------- in a program


class Model(nn.Module):
    """Uses user ops between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(8))
        self.weight = nn.Parameter(torch.ones(6, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = user_ops.scan(user_ops.rowwise(self.first(x), self.scale), 0.5)
        y = user_ops.mix(y)
        return user_ops.contract(y, self.weight).square().sum()


@cache
def program_of_model() -> Any:
    buckets = Buckets(inputs={"x": "float32[batch, seq, 8]"}, sizes=[{"seq": 8}, {"seq": 16}])
    return trace(Model(), buckets)


def test_analysis_uses_derived_rules_and_leaves_the_graph():
    program = program_of_model()
    before = program.gm.print_readable(print_output=False)
    sharding = analyse(program)
    assert program.gm.print_readable(print_output=False) == before
    assert set(sharding.derived) == {"dcpctest.rowwise", "dcpctest.scan", "dcpctest.contract"}
    free = {n: {a.name for a in sharding.alternatives[n] if a.factor >= 0} for n in sharding.rules}
    assert free["rowwise"] == {"a", "b"}
    assert free["scan"] == {"a", "c"}
    assert free["contract"] == {"a", "b", "c", "d"}
    assert not free["mix"]
    assert [n for nodes in sharding.replicated.values() for n in nodes] == ["mix"]


def planned_warnings(derive_rules: bool) -> list[str]:
    buckets = Buckets(inputs={"x": "float32[batch, seq, 8]"}, sizes=[{"seq": 8}, {"seq": 16}])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan(Model(), buckets, world=2, sp=2, backend="eager", derive_rules=derive_rules)
    return [str(w.message) for w in said if "sharding rule" in str(w.message)]


def test_one_warning_an_op_has_the_line_to_add():
    texts = planned_warnings(derive_rules=True)
    assert len(texts) == 4
    scan = next(text for text in texts if text.startswith("dcpctest.scan"))
    assert 'dcpctest.scan: {rule: "a b c -> a b c", whole: b, linear: first}' in scan
    assert "not proved" in scan
    assert "no sharding rule for dcpctest.mix, and none was derived: no dim" in " ".join(texts)
    assert all("none was derived" not in text for text in planned_warnings(derive_rules=False))


def test_switched_off_nothing_is_run():
    sharding = analyse(program_of_model(), derive_rules=False)
    assert not sharding.derived
    assert len(sharding.replicated) == 4


def test_a_line_written_as_printed_is_the_rule():
    """What a user registers from the warning has the same names as what was derived."""
    program = program_of_model()
    derived = analyse(program)
    rules.register_sharding_rule("dcpctest::scan", "a b c -> a b c", whole="b", linear="first")
    registered = analyse(program)
    assert registered.rules["scan"] == derived.rules["scan"]
    assert "dcpctest.scan" not in registered.derived
