"""What rules are made of: notation bound to shapes, factors and their common refinement."""

from math import prod
from pathlib import Path

import pytest
import sympy
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

import dcpc
from dcpc.errors import RuleError
from dcpc.ir import TensorInfo
from dcpc.passes.sharding.factors import FactorTable, quotient
from dcpc.passes.sharding.notation import Pattern, bind
from dcpc.passes.sharding.op_kinds import regroup
from dcpc.passes.sharding.rule_types import OpSharding
from dcpc.passes.sharding.rules import op_sharding, rule_table

aten = torch.ops.aten
SETTINGS = settings(max_examples=60, deadline=None, derandomize=True, database=None)
BATCH, SEQ = (sympy.Symbol(n, integer=True, positive=True) for n in ("batch", "seq"))
SIZES = st.sampled_from([sympy.Integer(n) for n in (1, 2, 3, 4, 6)] + [BATCH, SEQ, 2 * SEQ])
Shape = list[sympy.Expr]


@st.composite
def two_groupings(draw: st.DrawFn) -> tuple[Shape, Shape]:
    """One list of sizes, cut into dims in two ways."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=5))

    def dims() -> Shape:
        shape: Shape = []
        for size in sizes:
            joins = shape and draw(st.booleans())
            shape[-1:] = [shape[-1] * size] if joins else [*shape[-1:], size]
        return shape

    return dims(), dims()


@SETTINGS
@given(two_groupings())
def test_regroup_gives_every_dim_the_product_of_its_names(shapes: tuple[Shape, Shape]):
    left, right, sizes, whole = regroup(*map(tuple, shapes))
    for dims, shape in zip((left, right), shapes, strict=True):
        assert [prod(sizes[n] for n in dim) for dim in dims] == shape
    shared = [n for dim in left for n in dim if n not in whole]
    assert shared == [n for dim in right for n in dim if n not in whole]  # and in the same order


def test_one_size_in_two_spellings_is_one_factor():
    table, half = FactorTable(), sympy.floor(SEQ / 2)
    two = (2 * SEQ - 2 * half) / (SEQ - half)
    left, right = (
        [table.new(SEQ), table.new(sympy.expand(two))],
        [table.new(SEQ), table.new(sympy.Integer(2))],
    )
    for _ in range(30):  # once each took twice the time of the one before
        assert table.unify(left, right)
    assert table.atoms(left) == table.atoms(right)
    assert len(table.atoms(left)) == 2


def test_rows_and_columns_of_one_factor_unify_with_two():
    table = FactorTable()
    row, column, n = (table.new(SEQ) for _ in range(3))
    assert table.unify([row, row], [column, n])
    assert table.atoms([row]) == table.atoms([column]) == table.atoms([n])


def test_regroup_keeps_what_has_no_counterpart_whole():
    left, right, _, whole = regroup((BATCH, sympy.Integer(6)), (BATCH, sympy.Integer(4)))
    assert left[0] == right[0]
    assert {*left[1], *right[1]} == whole


def total(table: FactorTable, keys: list[int]) -> sympy.Expr:
    return prod((table.size(k) for k in table.atoms(keys)), start=sympy.Integer(1))


@SETTINGS
@given(st.lists(two_groupings(), min_size=1, max_size=4), st.data())
def test_unify_keeps_products_and_refines_alike(pairs: list, data: st.DataObject):
    table = FactorTable()
    made: list[tuple[list[int], sympy.Expr]] = []
    agreed: list[tuple[list[int], list[int]]] = []
    for shapes in pairs:
        keys = [[table.new(s) for s in shape] for shape in shapes]
        made += [(k, prod(s)) for k, s in zip(keys, shapes, strict=True)]
        other = data.draw(st.sampled_from(made))[0]
        for left, right in (keys, (keys[0], other)):
            if table.unify(left, right):
                agreed.append((left, right))
    for keys, size in made:
        assert sympy.expand(total(table, keys) - size) == 0
    for left, right in agreed:  # what was the same stays the same, however it was split since
        assert table.atoms(left) == table.atoms(right)


@SETTINGS
@given(two_groupings())
def test_unify_of_two_groupings_of_one_list(shapes: tuple[Shape, Shape]):
    table = FactorTable()
    left, right = ([table.new(s) for s in shape if s != 1] for shape in shapes)
    if table.unify(left, right):
        assert table.atoms(left) == table.atoms(right)


@pytest.mark.parametrize(
    ("a", "b", "ratio"),
    [(6 * SEQ, 2 * SEQ, 3), (BATCH * SEQ, SEQ, BATCH), (SEQ, 2, None), (2 * SEQ, 3, None)],
)
def test_quotient_only_where_it_divides_always(a: object, b: object, ratio: object):
    assert quotient(sympy.sympify(a), sympy.sympify(b)) == ratio


@SETTINGS
@given(st.lists(st.integers(1, 4), max_size=3), st.integers(1, 4), st.integers(1, 4), st.data())
def test_bind_gives_every_dim_its_names(lead: list[int], i: int, o: int, data: st.DataObject):
    fewer = lead[data.draw(st.integers(0, len(lead))) :]
    second = [data.draw(st.sampled_from((1, n))) for n in fewer]
    shapes = [[*lead, i], [*second, o, i], [*lead, o]]
    exact = [tuple(map(sympy.Integer, s)) for s in shapes]
    names, output, sizes = bind(Pattern.parse("*n i, *n o i -> *n o"), exact[:2], exact[2])
    for dims, shape in zip((*names, output), exact, strict=True):
        assert [prod(sizes[n] for n in dim) for dim in dims] == list(shape)
    assert 1 not in sizes.values()


def test_bind_reads_a_product_of_names():
    pattern = Pattern.parse("b (k g) d, b k s d -> b (k g) s")
    shapes = [(BATCH, sympy.Integer(6), SEQ), (BATCH, sympy.Integer(2), SEQ, SEQ)]
    names, _, sizes = bind(pattern, shapes, (BATCH, sympy.Integer(6), SEQ))
    assert names[0][1] == ("k", "g")
    assert sizes["g"] == 3


@pytest.mark.parametrize("text", ["a b", "a -> (b", "*a *b -> a", "A -> A"])
def test_notation_that_cannot_be_read_names_the_rule(text: str):
    with pytest.raises(RuleError, match="sharding rule"):
        Pattern.parse(text)


def test_bind_refuses_sizes_that_disagree():
    with pytest.raises(RuleError, match="expected"):
        bind(Pattern.parse("a, a -> a"), [(SEQ,), (BATCH,)], (SEQ,))


def sharding_of(op: object, *args: object) -> OpSharding:
    """The rule of a call; a shape becomes a tensor of it, a symbol an integer node."""
    graph, info = fx.Graph(), {}
    given: list[object] = []
    for n, arg in enumerate(args):
        made = graph.placeholder(f"a{n}") if isinstance(arg, (tuple, sympy.Symbol)) else arg
        if isinstance(arg, tuple):
            info[f"a{n}"] = TensorInfo(tuple(map(sympy.sympify, arg)), torch.float64, False)
        given.append(made)
    keywords = {"rounding_mode": given.pop()} if isinstance(given[-1], str) else {}
    node = graph.call_function(op, tuple(given), keywords)
    info[node.name] = info["a0"]
    return op_sharding(node, info)


def test_a_number_that_is_added_is_not_added_on_every_rank():
    assert sharding_of(aten.add.Tensor, (SEQ,), (SEQ,)).linear == "all"
    assert sharding_of(aten.add.Tensor, (SEQ,), 0).linear == "first"
    assert sharding_of(aten.add.Tensor, (SEQ,), 1).linear == "none"
    assert sharding_of(aten.add.Tensor, (SEQ,), SEQ).linear == "none"


def test_a_division_that_rounds_passes_no_partial_sum():
    assert sharding_of(aten.div.Tensor, (SEQ,), (SEQ,)).linear == "first"
    assert sharding_of(aten.div.Tensor_mode, (SEQ,), (SEQ,), "floor").linear == "none"


def test_a_line_with_a_reason_replicates_without_a_warning():
    rule = sharding_of(aten.cov.default, (3, 3))
    assert rule.deliberate
    assert "order or the memory" in rule.reason
    assert not rule.sizes
    assert not sharding_of(aten.xlogy.Tensor, (SEQ,), (SEQ,)).reason
    missing = sharding_of(aten.special_bessel_j0.default, (SEQ,))
    assert missing.reason == "no sharding rule for aten.special_bessel_j0"
    assert not missing.deliberate


def test_a_line_is_one_of_rule_kind_and_reason():
    with pytest.raises(RuleError, match="whole/sum"):
        dcpc.register_sharding_rule("mylib::scan", "b l -> b l", whole="d")
    with pytest.raises(RuleError, match="say sum="):
        dcpc.register_sharding_rule("mylib::scan", "b l -> b")
    assert "mylib.scan" not in rule_table()


def test_no_op_has_two_lines():
    text = (
        Path(dcpc.__file__)
        .with_name("passes")
        .joinpath("sharding", "sharding_rules.yaml")
        .read_text()
    )
    keys = [line.split(":")[0] for line in text.splitlines() if line and line[0] not in "# "]
    assert sorted(keys) == sorted(set(keys))
    assert set(keys) == set(yaml.safe_load(text))
