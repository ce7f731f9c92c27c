"""Kernels of the CPU that look at strides: which of them misread a dim of size 1, and the mend."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from dcpc.codegen import MISREAD, RUN

aten = torch.ops.aten
F64 = torch.float64


def laid_out(x: Tensor, draw: random.Random) -> Tensor:
    """The same elements, with channels first or last, and any strides where a dim has size 1."""
    order = draw.choice([tuple(range(x.ndim)), (0, *range(2, x.ndim), 1)])
    dense = x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])
    some = (0, 1, 4, x.numel(), *dense.stride())
    strides = [draw.choice(some) if n == 1 else s
               for n, s in zip(x.shape, dense.stride(), strict=True)]  # fmt: skip
    return dense.as_strided(x.shape, strides)


def weights(x: Tensor) -> Tensor:
    return torch.arange(1, x.shape[1] + 1, dtype=F64)


def spatial(x: Tensor, number: int) -> list[int]:
    return [number] * (x.ndim - 2)


def kernel(x: Tensor, outputs: int, inputs: int) -> Tensor:
    shape = (outputs, inputs, *spatial(x, 3))
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=F64).reshape(shape)


def batch_norm(x, training=True):
    w = weights(x)
    return RUN.get(aten.native_batch_norm.default, aten.native_batch_norm.default)(
        x, w, w * 2, w * 0.1, w * 0.3, training, 0.1, 1e-5
    )


def batch_norm_backward(g, x, training=True):
    w, dims = weights(x), [d for d in range(x.ndim) if d != 1]
    mean, scale = x.mean(dims), (x.var(dims, unbiased=False) + 1e-5).rsqrt()
    call = RUN[aten.native_batch_norm_backward.default]
    return call(g, x, w, w * 0.1, w * 0.3, mean, scale, training, 1e-5, [True] * 3)


def group_norm(x):
    n, c = x.shape[:2]
    call = RUN[aten.native_group_norm.default]
    return call(x, weights(x), weights(x), n, c, x.numel() // (n * c), 2 - c % 2, 1e-5)


def group_norm_backward(g, x):
    n, c = x.shape[:2]
    sizes = (n, c, x.numel() // (n * c), 2 - c % 2)
    _, mean, scale = aten.native_group_norm(x.contiguous(), None, None, *sizes, 1e-5)
    call = RUN[aten.native_group_norm_backward.default]
    return call(g, x, mean, scale, weights(x), *sizes, [True] * 3)


def convolution(x):
    one, zero = spatial(x, 1), spatial(x, 0)
    call = RUN[aten.convolution.default]
    return call(x, kernel(x, 2, x.shape[1]), None, one, one, one, False, zero, 1)


def convolution_backward(g, x, groups=1, last=False, call=RUN[aten.convolution_backward.default]):
    c, one, zero = x.shape[1], spatial(x, 1), spatial(x, 0)
    w = kernel(x, c, c // groups)
    w = w.movedim(1, -1).contiguous().movedim(-1, 1) if last else w
    return call(g, x, w, [c], one, one, one, False, zero, groups, [True] * 3)


def depthwise_backward(g, x):
    return convolution_backward(g, x, groups=x.shape[1])


def grouped_backward(g, x, **how):
    return convolution_backward(g, x, 2, True, **how)


def max_pool_backward(g, x):
    _, index = aten.max_pool2d_with_indices(x.contiguous(), [3, 3], [1, 1], [1, 1])
    return aten.max_pool2d_with_indices_backward(g, x, [3, 3], [1, 1], [1, 1], [1, 1], False, index)


def layer_norm_backward(g, x):
    last = [x.shape[-1]]
    _, mean, scale = aten.native_layer_norm(x.contiguous(), last, None, None, 1e-5)
    w = torch.ones(last, dtype=F64)
    return aten.native_layer_norm_backward(g, x, last, mean, scale, w, w, [True] * 3)


FORWARD = [
    batch_norm,
    lambda x: batch_norm(x, training=False),
    group_norm,
    convolution,
    lambda x: aten.constant_pad_nd(x, [1] * 4, 1.0),
    lambda x: aten.native_layer_norm(x, [x.shape[-1]], None, None, 1e-5),
]
FLAT = [  # of four dims
    lambda x: aten.max_pool2d_with_indices(x, [2, 2], [1, 1], [1, 1]),
    lambda x: aten.avg_pool2d(x, [2, 2], [1, 1], [1, 1]),
    lambda x: aten._adaptive_avg_pool2d(x, [2, 2]),
    lambda x: aten.upsample_nearest2d(x, [2 * n for n in x.shape[2:]]),
    lambda x: aten.upsample_bilinear2d(x, [2 * n for n in x.shape[2:]], False),
    lambda x: aten.upsample_bicubic2d(x, [2 * n for n in x.shape[2:]], False),
    lambda x: aten.im2col(x, [2, 2], [1, 1], [1, 1], [1, 1]),
]
BACKWARD = [
    batch_norm_backward,
    lambda g, x: batch_norm_backward(g, x, training=False),
    group_norm_backward,
    convolution_backward,
    depthwise_backward,
    layer_norm_backward,
]
FLAT_BACKWARD = [
    max_pool_backward,
    lambda g, x: aten.avg_pool2d_backward(g, x, [3, 3], [1, 1], [1, 1], False, True, None),
    lambda g, x: aten._adaptive_avg_pool2d_backward(g, x),
    lambda g, x: aten.upsample_nearest2d_backward(g, list(g.shape[2:]), list(g.shape)),
    lambda g, x: aten.upsample_bilinear2d_backward(g, list(g.shape[2:]), list(g.shape), False),
]


def shapes(ndims):
    every = (s for n in ndims for s in itertools.product((1, 2, 3)[: 7 - n], repeat=n))
    return [s for s in every if 1 in s]


def wrong(call, operands, ndims, tries, wider=1):
    """Shapes and strides at which a call gives other numbers than of dense operands."""
    draw, found = random.Random(0), []
    for shape in shapes(ndims):
        torch.manual_seed(0)
        wide = (shape[0], shape[1] * wider, *shape[2:])
        dense = [torch.randn(wide, dtype=F64) for _ in range(operands)]
        expected = _tensors(call(*dense))
        for _ in range(tries):
            given = [laid_out(x, draw) for x in dense]
            for got, want in zip(_tensors(call(*given)), expected, strict=True):
                if not torch.allclose(got, want, rtol=1e-9, atol=1e-9):
                    found.append((shape, [x.stride() for x in given]))
    return found


def _tensors(result):
    every = result if isinstance(result, (tuple, list)) else (result,)
    return [x for x in every if isinstance(x, Tensor)]


@pytest.mark.parametrize(
    ("calls", "operands", "ndims", "wider"),
    [
        (FORWARD, 1, (4, 5), 1),
        (FLAT, 1, (4,), 1),
        (BACKWARD, 2, (4, 5), 1),
        (FLAT_BACKWARD, 2, (4,), 1),
        ([grouped_backward], 2, (4, 5), 4),
    ],
)
def test_no_kernel_that_runs_misreads_a_dim_of_size_1(calls, operands, ndims, wider):
    for call in calls:
        assert not wrong(call, operands, ndims, 4, wider)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_no_kernel_that_runs_misreads_weights_with_strides(last):
    # Of every other element of a tensor, as of `table[:, 0]`.
    format = torch.channels_last if last else torch.contiguous_format
    g, x = (torch.randn(2, 4, 3, 5, dtype=F64).contiguous(memory_format=format) for _ in range(2))
    w, wide = weights(x), torch.full((4, 2), 1e6, dtype=F64)
    wide[:, 0] = w
    sizes, n, c = (1e-5, [True] * 3), 2, 4
    halves = torch.stack([torch.rand(n, 2, dtype=F64)] * 2, -1)

    def every(v, of_groups):
        norms = (aten.native_batch_norm_backward, aten.native_group_norm_backward)
        batch, group = (RUN[op.default] for op in norms)
        for train in (True, False):
            yield from batch(g, x, v, v, v, v, v, train, *sizes)
            yield from RUN.get(o := aten.native_batch_norm.default, o)(x, v, v, v, v, False, 0.1, 1)
        yield from group(g, x, of_groups, of_groups, v, n, c, 15, 2, [True] * 3)
        yield from RUN[aten.native_group_norm.default](x, v, v, n, c, 15, 2, 1e-5)

    expected = every(w, halves[..., 0].contiguous())
    for got, want in zip(every(wide[:, 0], halves[..., 0]), expected, strict=True):
        torch.testing.assert_close(got, want)


def batch_norm_of_torch(g, x):
    w, dims = weights(x), (0, 2, 3)
    mean, scale = x.mean(dims), (x.var(dims, unbiased=False) + 1e-5).rsqrt()
    op = aten.native_batch_norm_backward.default
    return op(g, x, w, w * 0.1, w * 0.3, mean, scale, True, 1e-5, [True] * 3)


def convolution_of_torch(g, x):
    return grouped_backward(g, x, call=aten.convolution_backward.default)


@pytest.mark.parametrize(("call", "wider"), [(batch_norm_of_torch, 1), (convolution_of_torch, 4)])
def test_a_kernel_that_is_mended_needs_it(call, wider):
    # If a later torch reads these layouts right, its entry in MISREAD can go.
    assert len(MISREAD) == 2
    assert wrong(call, 2, (4,), 6, wider)
