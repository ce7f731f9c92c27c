"""Every line of the rule table on random shapes, dtypes and arguments: pieces against the whole."""

from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from dcpc.passes.sharding.rules import rule_table
from tests.passes.sharding.rule_cases import CASES, Source
from tests.passes.sharding.rule_check import check_call

LINES = {op: line for op, line in rule_table().items() if not line.reason}
NEVER_SPLIT = {"aten.scalar_tensor"}  # a single number
# Splits of an op that are checked at the least, and as many calls that were drawn in another dtype.
QUICK, THOROUGH = 1, 3
SIMPLE = {"pointwise", "elementwise_loss", "generator"}
GONE = {"aten.cholesky"}  # from torch 2.14 on; torch.linalg has it
THERE = [
    op for op in sorted(LINES)
    if op not in GONE or hasattr(torch.ops.aten, op.removeprefix("aten."))
]  # fmt: skip


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lowered graphs are interpreted here; making Python code of each would take half the time."""
    monkeypatch.setattr(fx.GraphModule, "recompile", lambda self: None)


def check_line(op: str, examples: int, least: int) -> None:
    """Fails unless an op's pieces are the whole, in calls of which some can be split."""
    ran: Counter[object] = Counter()

    def body(data: st.DataObject) -> None:
        case, p = CASES[op](Source(data.draw, op)), data.draw(st.sampled_from((2, 3)))
        ran["split"] += check_call(case, p)
        for dtype in (torch.int64, torch.bool):  # the strategies draw floats, most of them
            other = case.recast(dtype) if ran[dtype] < least else None
            if other is not None:
                ran[dtype] += bool(check_call(other, p))

    def run(examples: int) -> None:
        settings(
            max_examples=examples, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        )(given(st.data())(body))()  # fmt: skip

    assert op in CASES, f"no strategy draws calls of {op}; add one to rule_cases/ beside this"
    run(examples)
    if ran["split"] < least and op not in NEVER_SPLIT:
        run(80)  # what is drawn first depends on the order of sets, so on the hash seed
    enough = ran["split"] >= least or op in NEVER_SPLIT
    assert enough, f"only {ran['split']} splits of {op}; draw calls that its rule can split"


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("op", sorted(LINES))
def test_pieces_are_the_whole(op: str):
    if op not in THERE:
        pytest.skip(f"this torch has no {op}")
    check_line(op, 2 if LINES[op].kind in SIMPLE else 4, QUICK)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
def test_pieces_of_more_draws_are_the_whole():
    for op in THERE:
        check_line(op, 8 if LINES[op].kind in SIMPLE else 12, THOROUGH)


def test_every_line_is_tested():
    assert not LINES.keys() - CASES.keys()
    assert not CASES.keys() - LINES.keys()
