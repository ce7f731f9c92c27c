"""What calls return on dense fake tensors is what torch says, and what they really return."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from dcpc.codegen.asking import AskingEnv, layout_of
from dcpc.codegen.dense import dense_result

aten = torch.ops.aten
SIZES = {"b": 3, "t": 5, "s": 7}


def numbers():
    env = AskingEnv()
    return env, {name: env.integer(name, size) for name, size in SIZES.items()}


def whole(n, make):
    b, t, s = n["b"], n["t"], n["s"]
    return make(b, t, s, 8)


def swapped(n, make):
    return make(n["b"], n["s"], n["t"], 8).transpose(1, 2)


def heads(n, make):
    return make(n["b"], n["t"], n["s"], 3, 4, 8).unbind(3)[1].transpose(2, 3)


def row(n, make):
    return make(n["b"], 1, 1, 48).chunk(6, -1)[2]


def repeated(n, make):
    return make(n["b"], n["t"], 1, 8).expand(-1, -1, n["s"], -1)


def vector(n, make):
    return make(8)


def number(n, make):
    return make([])


def halved(n, make):
    return make(n["b"], n["t"], n["s"], 8, dtype=torch.bfloat16)


def counted(n, make):
    return make(n["b"], n["t"], n["s"], 8, dtype=torch.int32)


def thin(n, make):
    return make(n["b"], n["t"], n["s"], 8, 1).squeeze(-1).unsqueeze(1)


CALLS = [
    *((aten.mul.Tensor, (a, b)) for a in (whole, swapped, row) for b in (whole, row, vector)),
    *((aten.add.Tensor, (a, swapped)) for a in (whole, swapped, repeated, number, halved)),
    *((aten.div.Tensor, (a, whole)) for a in (counted, halved, repeated)),
    *((aten.pow.Tensor_Scalar, (a, 2)) for a in (whole, swapped, heads, row, repeated, counted)),
    *((aten.gelu.default, (a,)) for a in (whole, swapped, heads, thin, halved)),
    *((aten.gt.Scalar, (a, 0.5)) for a in (whole, heads, counted)),
    *((aten.clone.default, (a,)) for a in (whole, swapped, heads)),
    *((aten.sum.dim_IntList, (a, [1, -1], k)) for a in (whole, counted, thin) for k in (0, 1)),
    *((aten.mean.dim, (a, [0])) for a in (whole, halved)),
    (aten.where.self, (lambda n, make: whole(n, make) > 0, whole, number)),
    (aten.add.Tensor, (heads, vector)),
    (aten.mul.Tensor, (vector, thin)),
]  # fmt: skip


def named(call):
    return "-".join([str(call[0]), *(getattr(a, "__name__", str(a)) for a in call[1])])


@pytest.mark.parametrize("call", CALLS, ids=named)
def test_layout_is_torchs_and_the_kernels(call):
    func, operands = call
    env, sizes = numbers()
    mode = FakeTensorMode(shape_env=env)

    def given(n, make):
        return [a(n, make) if callable(a) else a for a in operands]

    with mode:
        args = given(sizes, torch.empty)
        with env.noting() as asked:
            found = dense_result(func, tuple(args), {})
        assert not asked
        if found is None:
            pytest.skip("torch has to tell")
        theirs = func(*args)
    assert layout_of(found)[:-1] == layout_of(theirs)[:-1]
    real = func(*given(SIZES, torch.ones))
    assert found.dtype == real.dtype
    assert tuple(at_hints(s) for s in found.stride()) == real.stride()


def at_hints(size):
    return size.node.hint if isinstance(size, torch.SymInt) else size


def test_views_and_products_of_rows():
    env, n = numbers()
    rows = n["b"] * n["t"]
    with FakeTensorMode(shape_env=env):
        x, weight, bias = torch.empty(n["b"], n["t"], 8), torch.empty(8, 6), torch.empty(6)
        with env.noting() as asked:
            flat = dense_result(aten.view.default, (x, [rows, 8]), {})
            product = dense_result(aten.addmm.default, (bias, flat, weight), {})
            split = dense_result(aten.view.default, (product, [n["b"], n["t"], 2, 3]), {})
        assert not asked
        assert layout_of(split) == layout_of((bias + x.view(rows, 8) @ weight).view_as(split))
        assert flat.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert dense_result(aten.view.default, (x, [n["s"], 8]), {}) is None
        assert dense_result(aten.view.default, (x.transpose(0, 1), [rows, 8]), {}) is None
        assert dense_result(aten.add.Tensor, (x, torch.empty(n["s"], n["t"], 8)), {}) is None
