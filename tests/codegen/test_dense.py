"""What calls return on dense fake tensors is what torch says, and what they really return."""

from functools import partial
from itertools import product

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


def turned(n, make):
    return make(n["b"], n["s"], n["t"], 3, 8).unbind(3)[1].transpose(1, 2)


LAYOUTS = (whole, swapped, turned, row, repeated, vector)
FILLED = {"number": 0.5, "Scalar": 0.5, "float": 0.5, "int": 1, "bool": False}


def pointwise_ops():
    names = (n for n in dir(aten) if not n.startswith("special_"))
    packets = (getattr(aten, n) for n in names)
    for packet in (p for p in packets if hasattr(p, "overloads")):
        for func in (getattr(packet, o) for o in packet.overloads()):
            returns = [str(r.type) for r in func._schema.returns]
            if torch.Tag.pointwise in func.tags and returns == ["Tensor"]:
                yield func


def arguments_of(func, layouts, n, make):
    """The op's arguments, tensors of these layouts; defaults are left out."""
    layouts = iter(layouts)
    needed = [str(a.type) for a in func._schema.arguments if not a.has_default_value()]
    return [next(layouts)(n, make) if t == "Tensor" else FILLED.get(t) for t in needed]


def unlike_its_kernel(func, layouts, dtype):
    """Whether a call is told another layout; None where nothing is told, or the op does not run."""
    try:
        real = func(*arguments_of(func, layouts, SIZES, partial(torch.ones, dtype=dtype)))
    except (RuntimeError, TypeError, ValueError):
        return None
    env, sizes = numbers()
    with FakeTensorMode(shape_env=env):
        args = arguments_of(func, layouts, sizes, partial(torch.empty, dtype=dtype))
        found = dense_result(func, tuple(args), {})
    if found is None:
        return None
    strides = tuple(map(at_hints, found.stride()))
    return (found.dtype, strides) != (real.dtype, real.stride())


@pytest.mark.slow
def test_every_pointwise_op_is_told_the_layout_of_its_kernel():
    told, wrong = 0, []
    for func in pointwise_ops():
        tensors = sum(str(a.type) == "Tensor" for a in func._schema.arguments)
        for layouts in product(LAYOUTS, repeat=tensors):
            dtypes = (torch.float32, torch.bool, torch.int64)
            tried = (unlike_its_kernel(func, layouts, dtype) for dtype in dtypes)
            unlike = next((u for u in tried if u is not None), None)
            told += unlike is False
            wrong += [(str(func), [a.__name__ for a in layouts])] if unlike else []
    assert not wrong
    assert told > 2000
