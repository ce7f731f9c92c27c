"""What runs for an op of a graph is that op: torch dispatches it, and the bits are the same."""

import sys

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from dcpc.codegen.variant.boxed import BINDINGS, RUN, boxed_python

aten = torch.ops.aten
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64)
RESHAPED = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
ARITHMETIC = [getattr(aten, n).Tensor for n in ("add", "div", "mul", "sub")]
COMPARED = [getattr(aten, n) for n in ("eq", "ge", "gt", "le", "lt", "ne")]
# Op -> operands of some calls: a name is that of a tensor below, or "dtype".
GIVEN = {
    aten._log_softmax.default: [("turned", 1, False)],
    aten._log_softmax_backward_data.default: [("turned", "square", 1, "dtype")],
    aten._softmax.default: [("turned", 1, False)],
    aten._softmax_backward_data.default: [("turned", "square", 1, "dtype")],
    aten.addmm.default: [("row", "turned", "square")],
    aten.baddbmm.default: [("cube", "cube", "cube")],
    aten.bmm.default: [("cube", "cube")],
    aten.cat.default: [(["turned", "square"], 1), (["turned", "square"],)],
    aten.embedding.default: [("square", "ids"), ("square", "ids", 1, False, False)],
    aten.expand.default: [("one", [3, 3, 3])],
    aten.maximum.default: [("turned", "square")],
    aten.mean.dim: [("turned", [1], True), ("cube", [0, -1])],
    aten.minimum.default: [("turned", "square")],
    aten.mm.default: [("turned", "square")],
    aten.native_layer_norm.default: [
        ("turned", [3], "row", "row", 1e-5),
        ("turned", [3], None, None, 1e-5),
    ],
    aten.permute.default: [("cube", [0, 2, 1])],
    aten.pow.Tensor_Scalar: [("turned", 2), ("turned", 0.5)],
    aten.select.int: [("cube", 1, -1)],
    aten.squeeze.dim: [("one", 0)],
    aten.sum.dim_IntList: [("turned", [1], True), ("cube", [0, -1])],
    aten.transpose.int: [("cube", 0, -1)],
    aten.unsqueeze.default: [("turned", 1)],
    **{op: [("cube", [9, -1])] for op in RESHAPED},
    **{op: [("turned", "square"), ("cube", "row"), ("row", 0.5), ("row", 2)] for op in ARITHMETIC},
    **{op.Scalar: [("turned", 2), ("turned", 0.5)] for op in COMPARED},
    **{op.Tensor: [("turned", "square"), ("cube", "row")] for op in COMPARED},
}


class Dispatched(TorchDispatchMode):
    """Takes down which ops are dispatched."""

    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops.append(op)
        return op(*args, **(kwargs or {}))


def named(dtype):
    """Tensors by name, and the dtype."""
    made = torch.Generator().manual_seed(0)
    shapes = {"turned": (3, 3), "square": (3, 3), "row": (3,), "cube": (3, 3, 3), "one": (1, 3, 3)}
    found = {n: (torch.randn(s, generator=made) * 3).to(dtype) for n, s in shapes.items()}
    return {**found, "turned": found["turned"].t(), "ids": torch.tensor([1, 0]), "dtype": dtype}


def operands(given, of):
    """Operands of a call, tensors and dtypes in place of their names."""
    if isinstance(given, (list, tuple)):
        return [operands(x, of) for x in given]
    return of[given] if isinstance(given, str) else given


def boxed(op, arguments):
    """The function that runs for a call, and the tensors that it takes."""
    graph, given = fx.Graph(), []

    def placed(x):
        if isinstance(x, list):
            return [placed(each) for each in x]
        if isinstance(x, torch.Tensor):
            given.append(x)
            return graph.placeholder(f"x{len(given)}")
        return x

    graph.output((graph.call_function(op, tuple(placed(list(arguments)))),))
    return boxed_python(fx.GraphModule({}, graph)), given


@pytest.mark.parametrize("op", [*BINDINGS], ids=str)
def test_torchs_function_is_the_op(op):
    ran = 0
    for dtype in DTYPES:
        for given in GIVEN.get(op, [("turned",)]):
            arguments = operands(given, named(dtype))
            try:
                with Dispatched() as plain:
                    expected = op(*arguments)
            except (RuntimeError, NotImplementedError):
                continue  # torch has no such op of integers
            call, inputs = boxed(op, arguments)
            with Dispatched() as ours:
                (found,) = call(inputs)
            ran += 1
            assert ours.ops == plain.ops or op in RESHAPED
            if isinstance(found, torch.Tensor):
                found, expected = [found], [expected]
            for x, y in zip(found, expected, strict=True):
                assert (x.dtype, x.stride()) == (y.dtype, y.stride())
                assert torch.equal(x.nan_to_num(7), y.nan_to_num(7))
                assert torch.equal(x.isnan(), y.isnan())
    assert ran > 2


def test_with_a_number_in_the_first_tensors_place_the_op_itself_runs():
    arguments = 2.0, torch.ones(2)
    call, inputs = boxed(aten.mul.Tensor, arguments)
    assert torch.equal(call(inputs)[0], aten.mul.Tensor(*arguments))


def test_views_that_are_a_tensor_already_are_made_only_where_they_are_returned():
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function
    whole = call(aten.slice.Tensor, (call(aten.t.default, (call(aten.t.default, (x,)),)), 0, 0))
    whole.args = (*whole.args, sys.maxsize)
    total = call(aten.sum.dim_IntList, (call(aten.detach.default, (whole,)), [0]))
    graph.output((total, call(aten.detach.default, (x,))))
    given = torch.arange(6.0).view(2, 3)
    with Dispatched() as ours:
        found, same = boxed_python(fx.GraphModule({}, graph))([given])
    assert ours.ops == [aten.sum.dim_IntList, aten.detach.default]
    assert torch.equal(found, given.sum(0))
    assert same is not given
    assert same.data_ptr() == given.data_ptr()


def test_no_op_has_two_functions():
    assert not {*RUN} & {*BINDINGS}
