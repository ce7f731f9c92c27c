"""A placement is the minimum: by brute force, and by `tests.cases.placement_oracle`'s MILP."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.ir import Program
from dcpc.passes.placement.placement import place
from dcpc.passes.sharding.sharding import analyse
from tests.cases.analysed import CPU, GPU, LONG, TIGHT, gpt, llama
from tests.cases.placement_oracle import Oracle, on_machine
from tests.cases.random_programs import BATCH, SEQ, WIDTH, ProgramBuilder, random_program

aten = torch.ops.aten


def test_all_is_replicated_when_nothing_can_be_split():
    b = ProgramBuilder()
    x = b.linear(b.input((BATCH, SEQ, WIDTH)), 1)
    program = b.program(b.call(aten.median.default, (x,), ()))
    for sizes, sp in (({"batch": 1, "seq": 1}, 4), (LONG, 1)):
        found = place(program, analyse(program), sizes, sp, CPU)
        assert not any(p.output.sharded or p.output.partial for p in found.nodes.values())


def tiny_program() -> Program:
    """A value with two consumers, one of which needs a dim whole that is good to split before."""
    b = ProgramBuilder()
    shape = (BATCH, SEQ, WIDTH)
    y = b.linear(b.input(shape), WIDTH)
    over_seq = b.call(aten.softmax.int, (y, 1), shape)
    return b.program(b.call(aten.mul.Tensor, (over_seq, b.linear(y, WIDTH)), shape))


@pytest.mark.parametrize("link", [1e6, 1e9, 1e12])
@pytest.mark.parametrize(("batch", "seq", "sp"), [(1, 64, 4), (1, 7, 2), (2, 5, 3)])
def test_cost_equals_brute_force_over_all_alternatives(link, batch, seq, sp):
    program = tiny_program()
    sharding = analyse(program)
    sizes, rates = {"batch": batch, "seq": seq}, on_machine(1e9, 1e9, link, 1e-7, 1e-8)
    found = place(program, sharding, sizes, sp, rates)
    oracle = Oracle(program, sharding, sizes, sp, rates)
    usable = {
        n: [a for a in alternatives if oracle.usable(n, a)]
        for n, alternatives in sharding.alternatives.items()
    }
    best = min(
        oracle.cost(dict(zip(usable, some, strict=True))) for some in product(*usable.values())
    )
    assert found.cost_s == pytest.approx(best, rel=1e-12)
    assert oracle.cost(found.nodes) == pytest.approx(best, rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([1, 2, 3, 8]), st.sampled_from([2, 7, 64, 999]),
    st.integers(2, 4), st.sampled_from([1e6, 1e8, 1e10]),
)  # fmt: skip
def test_cost_equals_milp_on_random_programs(seed, batch, seq, sp, link):
    program = random_program(seed, calls=6)
    sharding = analyse(program)
    sizes, rates = {"batch": batch, "seq": seq}, on_machine(1e9, 1e9, link, 1e-7, 1e-8)
    found = place(program, sharding, sizes, sp, rates)
    oracle = Oracle(program, sharding, sizes, sp, rates)
    assert found.cost_s == pytest.approx(oracle.minimum(), rel=1e-9)
    assert oracle.cost(found.nodes) == pytest.approx(found.cost_s, rel=1e-12)


@pytest.mark.parametrize("model", [gpt, llama])
@pytest.mark.parametrize("rates", [CPU, GPU, TIGHT], ids=["cpu", "gpu", "tight"])
@pytest.mark.parametrize("sizes", [LONG, {"batch": 3, "seq": 37}], ids=["long", "odd"])
def test_cost_equals_milp_on_a_model(model, rates, sizes):
    program, sharding = model()
    found = place(program, sharding, sizes, 4, rates)
    oracle = Oracle(program, sharding, sizes, 4, rates)
    assert found.cost_s == pytest.approx(oracle.minimum(), rel=1e-9)
    assert oracle.cost(found.nodes) == pytest.approx(found.cost_s, rel=1e-12)


def test_fullest_rank_is_counted_when_a_cut_piece_is_longer():
    b = ProgramBuilder()
    x = b.linear(b.input((BATCH, SEQ + 1, WIDTH)), WIDTH)
    cut = b.call(aten.slice.Tensor, (x, 1, 0, -1), (BATCH, SEQ, WIDTH))
    program = b.program(b.call(aten.relu.default, (cut,), (BATCH, SEQ, WIDTH)))
    sharding = analyse(program)
    # 9 rows over 4 ranks: 3, 2, 2, 2; the cut one: 3, 2, 2, 1, not 2, 2, 2, 2
    sizes = {"batch": 1, "seq": 8}
    found = place(program, sharding, sizes, 4, on_machine(1e6, 1e9, 1e12, 1e-12, 1e-12))
    oracle = Oracle(program, sharding, sizes, 4, on_machine(1e6, 1e9, 1e12, 1e-12, 1e-12))
    assert max(oracle.share(f) for f in sharding.factors[cut.name][1]) == 3 / 8
    assert oracle.cost(found.nodes) == pytest.approx(found.cost_s, rel=1e-12)
