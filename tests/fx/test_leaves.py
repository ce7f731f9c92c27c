"""Keys of arguments: Python calls equal what torch tells apart."""

import math

import pytest
import sympy
import torch
from torch import nn
from torch._subclasses import FakeTensorMode

import dcpc
from dcpc.codegen.joint.library import Library
from dcpc.fx.fakes import dense_result
from dcpc.fx.leaves import leaf_key, size_key, tree_key
from dcpc.trace import trace

CONFUSED = [
    *((1, 1.0), (1, True), (0.0, -0.0), (1.0, 1 + 0j), (0, False), (None, "None"), ("1", 1)),
    (torch.float32, "torch.float32"),
    (torch.contiguous_format, torch.preserve_format),
    (torch.device("cpu"), "cpu"),
    ((1, 2), [1, 2]),
    (slice(0, 1), (0, 1, None)),
    ({"dim": 1}, {"dim": True}),
    ([1, [2]], [[1], 2]),
]


@pytest.mark.parametrize(("one", "other"), CONFUSED, ids=str)
def test_what_torch_tells_apart_has_keys_of_its_own(one, other):
    assert tree_key(one) != tree_key(other)
    assert hash(tree_key(one)) is not None


def test_not_a_number_is_like_itself():
    assert leaf_key(math.nan) == leaf_key(float("nan"))


@pytest.mark.parametrize("leaf", [torch.Generator(), object(), {1}, torch.ones(2), nn.Linear(1, 1)])
def test_a_value_of_an_unknown_kind_is_refused(leaf):
    with pytest.raises(dcpc.CodegenError, match="does not know when two are equal"):
        tree_key([1, leaf])


@pytest.mark.parametrize("size", [1.0, True, "1", None])
def test_a_size_is_an_integer(size):
    with pytest.raises(dcpc.CodegenError, match="a size is"):
        size_key(size)


def test_symbolic_numbers_of_one_expression_differ_by_kind():
    library = Library({})
    n = library.env.integer("n", 7)
    half = n / 2
    assert leaf_key(n) == n.node.expr == size_key(n)
    assert len({leaf_key(n), leaf_key(half), leaf_key(half > 3), leaf_key(3)}) == 4
    same = library.number(torch.SymFloat, n.node.expr)
    assert leaf_key(same) != leaf_key(n)
    assert isinstance(same, torch.SymFloat)
    with pytest.raises(AssertionError, match="was fixed"):
        library.number(torch.SymFloat, sympy.Float(0.5))


def test_the_default_dtype_is_part_of_what_is_told():
    """An integer tensor and a float make one of it."""
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            with FakeTensorMode():
                x = torch.empty(3, dtype=torch.int64)
                assert dense_result(torch.ops.aten.mul.Tensor, (x, 2.5), {}).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("odd", [1, True, -0.0])
def test_blocks_that_differ_by_a_confusable_constant_are_not_folded_as_one(odd):
    from dcpc.plan.folding import fold

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))

        def forward(self, x):
            for i, layer in enumerate(self.layers):
                number = odd if i == 4 else float(odd) + 0.0
                x = x + torch.full_like(layer(x).cos(), number, dtype=torch.float32) * layer(x)
            return x.square().mean()

    buckets = dcpc.Buckets({"x": "float32[batch, seq, 4]"}, [{"batch": 2, "seq": 8}])
    assert fold(trace(Deep(), buckets)) is None
