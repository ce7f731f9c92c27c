"""What calls return on dense fake tensors is what torch says, and what they really return."""

from functools import cache, partial
from itertools import product

import pytest
import torch
from torch._subclasses import FakeTensorMode

from dcpc.codegen.joint.asking import AskingEnv
from dcpc.fx.fakes import dense_result, layout_of

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


def spread(n, make):
    return make(n["b"], n["t"], 4 * n["s"], 8)[:, :, 1:3]


def rows(n, make):
    return make(n["b"] * n["t"], 8)


def matrix(n, make):
    return make(6, 8).t()


def wide(n, make):
    return make(8, 8)


def deviation(n, make):
    return make(n["b"], n["t"], n["s"], 1)


def halved_deviation(n, make):
    return make(n["b"], n["t"], n["s"], 1, dtype=torch.bfloat16)


def of(*names):
    """A size of dims."""
    return lambda n, make: [n.get(name, name) for name in names]


VIEWED = (whole, swapped, heads, row, repeated, thin)
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
    *((aten.detach.default, (a,)) for a in VIEWED),
    *((aten.permute.default, (a, [2, -1, 0, 1])) for a in (whole, row, swapped)),
    *((aten.transpose.int, (a, 1, -1)) for a in VIEWED),
    *((aten.t.default, (a,)) for a in (matrix, rows, vector)),
    *((aten.unsqueeze.default, (a, d)) for a in VIEWED for d in (0, 2, -1)),
    *((aten.squeeze.dim, (a, d)) for a in (row, repeated, deviation) for d in (1, -1)),
    *((aten.select.int, (a, -1, i)) for a in (whole, heads, row) for i in (0, 3, -1)),
    *((aten.slice.Tensor, (a, -1, i, 7, 2)) for a in (whole, heads) for i in (None, 0, 3, -3)),
    (aten.slice.Tensor, (whole, 3, 1)),
    (aten.slice.Tensor, (whole, -1, -9, 20)),
    (aten.expand.default, (row, of("b", "t", "s", -1))),
    (aten.expand.default, (vector, of("b", "t", 8))),
    (aten.expand.default, (heads, [-1, -1, -1, -1, 8])),
    (aten.expand.default, (deviation, of(4, "b", "t", "s", 8))),
    (aten.view.default, (heads, of("b", "t", 4, "s", 4, 2))),
    (aten.view.default, (heads, of("b", "t", 1, 4, "s", 2, 2, 1, 2))),
    (aten.view.default, (swapped, of("b", "t", "s", 8, 1))),
    (aten.view.default, (swapped, of(1, "b", 1, "t", "s", 2, 4))),
    (aten.view.default, (repeated, of("b", "t", "s", 4, 2))),
    (aten.view.default, (row, of("b", 8))),
    (aten.view.default, (thin, of("b", 1, "t", "s", 2, 4))),
    (aten.mm.default, (rows, matrix)),
    (aten.native_layer_norm.default, (whole, [8], vector, vector, 1e-5)),
    *((aten.native_layer_norm.default, (x, [8], None, None, 1e-5)) for x in (*VIEWED, halved)),
    *((aten.linear.default, (a, wide, *b)) for a in VIEWED for b in ([], [vector])),
    *((aten.linear.default, (a, wide, vector)) for a in (rows, matrix, halved)),
    *((f.default, (a, [8], *w)) for f in (aten.layer_norm, aten.rms_norm) for a in (*VIEWED, halved)
      for w in ([], [vector])),
    (aten.layer_norm.default, (whole, [8], vector, vector, 1e-5, False)),
    (aten.rms_norm.default, (whole, [8], None, 1e-6)),
    (aten.native_layer_norm.default, (halved, [8], vector, vector, 1e-5)),
    *(
        (aten.native_layer_norm_backward.default, (g, whole, [8], deviation, deviation, w, w, m))
        for g, w, m in (
            (whole, vector, [True, True, True]),
            (whole, None, [True, False, False]),
            (whole, vector, [False, True, False]),
            (swapped, None, [True, False, False]),
            (swapped, vector, [True, True, True]),
        )
    ),
    (
        aten.native_layer_norm_backward.default,
        (halved, halved, [8], halved_deviation, halved_deviation, None, None, [True, False, False]),
    ),
    (aten.select_backward.default, (whole, of("b", "t", "s", 3, 8), 3, 1)),
    (aten.slice_backward.default, (whole, of("b", "t", "s", 16), 3, 2, 10, 1)),
    (aten._to_copy.default, (spread,), {"dtype": torch.float64, "device": torch.device("cpu")}),
    (aten._to_copy.default, (heads,), {"dtype": torch.bfloat16}),
    (aten.add.Tensor, (heads, vector)),
    (aten.mul.Tensor, (vector, thin)),
]  # fmt: skip


def named(call):
    return "-".join([str(call[0]), *(getattr(a, "__name__", str(a)) for a in call[1])])


@pytest.mark.parametrize("call", CALLS, ids=named)
def test_layout_is_torchs_and_the_kernels(call):
    func, operands, kwargs = (*call, {})[:3]
    env, sizes = numbers()
    mode = FakeTensorMode(shape_env=env)

    def given(n, make):
        return [a(n, make) if callable(a) else a for a in operands]

    with mode:
        args = given(sizes, torch.empty)
        with env.noting() as asked:
            found = dense_result(func, tuple(args), kwargs)
        assert not asked
        if found is None:
            pytest.skip("torch has to tell")
        try:
            theirs = func(*args, **kwargs)
        except RuntimeError as e:  # 2.11's own linear, of a wide input that repeats rows
            if "Cannot call numel() on tensor with symbolic sizes" not in str(e):
                raise
            pytest.skip("torch itself cannot tell")
    reals = func(*given(SIZES, torch.ones), **kwargs)
    assert type(found) is type(theirs) or isinstance(theirs, torch.Tensor)
    of_each = zip(*map(listed, (found, theirs, reals, args[:1])), strict=False)
    for told, their, real, source in of_each:
        assert layout_of(told)[:-1] == layout_of(their)[:-1]
        assert told.dtype == real.dtype
        assert tuple(map(at_hints, told.stride())) == real.stride()
        assert at_hints(told.storage_offset()) == real.storage_offset()
        assert lies_in(told, source) == lies_in(their, source)


def test_a_view_with_a_dim_of_one_has_the_kernels_strides_where_torchs_fake_one_has_not():
    env, n = numbers()
    with FakeTensorMode(shape_env=env):
        told = dense_result(aten.view.default, (row(n, torch.empty), [n["b"], 1, 2, 4]), {})
    assert told.stride() == row(SIZES, torch.ones).view(SIZES["b"], 1, 2, 4).stride()


def lies_in(tensor, other):
    return tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


def listed(value):
    return [t for t in (value if isinstance(value, list | tuple) else [value]) if t is not None]


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


def arguments_of(func, tensors):
    """The op's arguments; defaults are left out."""
    tensors = iter(tensors)
    needed = [str(a.type) for a in func._schema.arguments if not a.has_default_value()]
    return [next(tensors) if t == "Tensor" else FILLED.get(t) for t in needed]


def unlike_its_kernel(func, layouts, dtype, mode, make_real, make_fake):
    """Whether a call is told another layout; None where nothing is told, or the op does not run."""
    asked = [(place, layout, dtype) for place, layout in enumerate(layouts)]
    try:
        real = func(*arguments_of(func, (make_real(*a) for a in asked)))
    except (RuntimeError, TypeError, ValueError):
        return None
    with mode:
        found = dense_result(func, (*arguments_of(func, (make_fake(*a) for a in asked)),), {})
    if found is None:
        return None
    strides = tuple(map(at_hints, found.stride()))
    return (found.dtype, strides) != (real.dtype, real.stride())


@pytest.mark.slow
def test_every_pointwise_op_is_told_the_layout_of_its_kernel():
    told, wrong = 0, []
    env, sizes = numbers()
    mode = FakeTensorMode(shape_env=env)

    @cache  # thousands of calls take the same few tensors
    def real(place, layout, dtype):
        return layout(SIZES, partial(torch.ones, dtype=dtype))

    @cache
    def fake(place, layout, dtype):
        return layout(sizes, partial(torch.empty, dtype=dtype))

    for func in pointwise_ops():
        tensors = sum(str(a.type) == "Tensor" for a in func._schema.arguments)
        for layouts in product(LAYOUTS, repeat=tensors):
            dtypes = (torch.float32, torch.bool, torch.int64)
            tried = (unlike_its_kernel(func, layouts, t, mode, real, fake) for t in dtypes)
            unlike = next((u for u in tried if u is not None), None)
            told += unlike is False
            wrong += [(str(func), [a.__name__ for a in layouts])] if unlike else []
    assert not wrong
    assert told > 2000
