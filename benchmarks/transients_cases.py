"""Calls of the ops whose transients tables tell, of two sizes each, for `benchmarks.transients`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from benchmarks.transients_probe import Call
from dcpc.symbolic_profile.ops.facts import Facts

aten, ours = torch.ops.aten, torch.ops.dcpc
HINTS = {"n": 20, "m": 302}
Size: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Operands:
    """Makes a case's tensors, of the sizes `n` and `m`.

    Attributes:
        n: samples.
        m: positions, or rows of an image.
        dtype: of numbers.
    """

    n: Size
    m: Size
    dtype: torch.dtype

    def of(self, *shape: Size) -> Tensor:
        return torch.empty(shape, dtype=self.dtype)

    def ids(self, *shape: Size) -> Tensor:
        return torch.empty(shape, dtype=torch.int64)

    def truth(self, *shape: Size) -> Tensor:
        return torch.empty(shape, dtype=torch.bool)

    def rows(self) -> Tensor:
        return self.of(self.n, self.m, 64)

    def strided(self) -> Tensor:
        return self.of(self.n, 64, self.m).transpose(1, 2)

    def image(self, channels: int = 16) -> Tensor:
        return self.of(self.n, channels, self.m, 20)

    def last(self, channels: int = 16) -> Tensor:
        return self.of(self.n, self.m, 20, channels).permute(0, 3, 1, 2)

    def video(self) -> Tensor:
        return self.of(self.n, self.m, 8, 6, 10).transpose(1, 2)

    def heads(self, heads: int = 4, width: int = 16) -> Tensor:
        return self.of(self.n, self.m, heads, width).transpose(1, 2)


Case: TypeAlias = tuple[str, Callable[[Operands], Any]]


def _convolution(x: Tensor, w: Tensor, stride: int, pad: int, dilation: int, *rest: Any) -> Any:
    dims = x.dim() - 2
    sizes = ([v] * dims for v in (stride, pad, dilation))
    turned, groups = rest or (False, 1)
    args = (*sizes, turned, [0] * dims, groups)
    out = aten.convolution(x, w, None, *args)
    return out, aten.convolution_backward(out, x, w, None, *args, [True, True, False])


def _attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, mask: Tensor | None = None) -> Any:
    given = (mask, None, None)
    out, lse = ours.attention_forward(q, k, v, *given, 0.3, *rest)
    return ours.attention_backward(out, q, k, v, *given, out, lse, 0.3, *rest)


def _flash(q: Tensor) -> Any:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(out, q, q, q, out, lse, 0.0, True)


def _layer_norm(x: Tensor, w: Tensor) -> Any:
    out, mean, rstd = aten.native_layer_norm(x, [64], w, w, 1e-5)
    return aten.native_layer_norm_backward(out, x, [64], mean, rstd, w, w, [True, True, True])


def _batch_norm(x: Tensor, w: Tensor) -> Any:
    out, m, s = aten.native_batch_norm(x, w, w, None, None, True, 0.1, 1e-5)
    return aten.native_batch_norm_backward(
        out, x, w, None, None, m, s, True, 1e-5, [True, True, True]
    )


def _group_norm(x: Tensor, w: Tensor) -> Any:
    n, c, *rest = x.shape
    size = rest[0] * rest[1]
    out, mean, rstd = aten.native_group_norm(x, w, w, n, c, size, 4, 1e-5)
    return aten.native_group_norm_backward(out, x, mean, rstd, w, n, c, size, 4, [True, True, True])


def _pool(x: Tensor, like: Tensor) -> Any:
    out, where = aten.max_pool2d_with_indices(x, [2, 2], [2, 2])
    grad = out.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if like is not x else out
    return aten.max_pool2d_with_indices_backward(
        grad, x, [2, 2], [2, 2], [0, 0], [1, 1], False, where
    )


def _average(x: Tensor, g: Tensor) -> Any:
    out = aten.avg_pool2d(x, [3, 3], [1, 1], [1, 1])
    return out, aten.avg_pool2d_backward(g, x, [3, 3], [1, 1], [1, 1], False, True, None)


def _bags(w: Tensor, i: Tensor, o: Tensor, mode: int) -> Any:
    out, bag, size, where = aten._embedding_bag(w, i, o, False, mode)
    return aten._embedding_bag_backward(out, i, o, bag, size, where, 32, False, mode, False, None)


CASES: tuple[Case, ...] = (
    ("mm", lambda o: aten.mm(o.of(o.m, 128)[:, ::2], o.of(64, 32))),
    ("mm dense", lambda o: aten.mm(o.of(o.m, 64), o.of(64, 256))),
    ("mm of all rows", lambda o: aten.mm(o.of(64, o.n * o.m), o.of(o.n * o.m, 256))),
    ("addmm", lambda o: aten.addmm(o.of(32), o.of(o.m, 128)[:, ::2], o.of(64, 32))),
    ("bmm dense", lambda o: aten.bmm(o.of(o.n, o.m, 64), o.of(o.n, 64, o.m))),
    ("bmm strided", lambda o: aten.bmm(o.of(o.n, o.m, 128)[..., ::2], o.of(o.n, 64, o.m))),
    ("softmax", lambda o: aten._softmax(o.strided(), -1, False)),
    ("safe softmax", lambda o: aten._safe_softmax(o.rows(), -1)),
    ("log softmax", lambda o: aten._log_softmax(o.strided(), -1, False)),
    ("softmax backward", lambda o: aten._softmax_backward_data(o.strided(), o.rows(), -1, o.dtype)),
    ("log softmax backward",
     lambda o: aten._log_softmax_backward_data(o.strided(), o.rows(), -1, o.dtype)),
    ("layer norm", lambda o: _layer_norm(o.strided(), o.of(64))),
    ("group norm", lambda o: _group_norm(o.image(), o.of(16))),
    ("batch norm", lambda o: _batch_norm(o.image(), o.of(16))),
    ("batch norm, channels last", lambda o: _batch_norm(o.last(), o.of(16))),
    ("rms norm", lambda o: aten._fused_rms_norm(o.rows(), [64], o.of(64), 1e-5)),
    ("embedding backward",
     lambda o: aten.embedding_dense_backward(o.strided(), o.ids(o.n, o.m), 50, -1, False)),
    ("tril", lambda o: aten.tril(o.of(o.m, o.n, 64).transpose(0, 1))),
    ("triu", lambda o: aten.triu(o.of(o.m, o.n, 64).transpose(0, 1))),
    ("mean", lambda o: aten.mean(o.rows(), [1])),
    ("logsumexp", lambda o: aten.logsumexp(o.rows(), [1])),
    ("mse", lambda o: aten.mse_loss(o.rows(), o.rows())),
    ("smooth l1", lambda o: aten.smooth_l1_loss(o.rows(), o.rows())),
    ("huber", lambda o: aten.huber_loss(o.rows(), o.rows())),
    ("gather", lambda o: aten.gather(o.rows(), 1, o.ids(o.n, 40, 64))),
    ("scatter add", lambda o: aten.scatter_add(o.rows(), 1, o.ids(o.n, 40, 64), o.of(o.n, 40, 64))),
    ("dropout", lambda o: aten.native_dropout(o.rows(), 0.5, True)),
    ("abs of complex", lambda o: aten.abs(aten.complex(o.rows(), o.rows()))),
    ("angle of complex", lambda o: aten.angle(aten.complex(o.rows(), o.rows()))),
    ("gelu backward", lambda o: aten.gelu_backward(o.strided(), o.rows())),
    ("mul by bool", lambda o: aten.mul(o.rows(), o.truth(o.n, o.m, 64))),
    ("add of dtypes", lambda o: aten.add(o.rows(), torch.empty(o.n, o.m, 64, dtype=torch.float64))),
    ("where of dtypes", lambda o: aten.where(
        o.truth(o.n, o.m, 64), o.rows(), torch.empty(o.n, o.m, 64, dtype=torch.float64))),
    ("sum of bool", lambda o: aten.sum(o.truth(o.n, o.m, 64))),
    ("cumsum of bool", lambda o: aten.cumsum(o.truth(o.n, o.m, 64), 1)),
    ("cumprod backward", lambda o: ours.cumprod_backward(o.rows(), o.rows(), 1, o.rows())),
    ("conv 1d", lambda o: _convolution(o.of(o.n, 16, o.m), o.of(32, 16, 3), 1, 1, 1)),
    ("conv 1d, partial block", lambda o: _convolution(o.of(o.n, 4, o.m), o.of(24, 4, 3), 1, 1, 1)),
    ("conv 1d, dilated", lambda o: _convolution(o.of(o.n, 16, o.m), o.of(32, 16, 3), 1, 2, 2)),
    ("conv 2d", lambda o: _convolution(o.image(32), o.of(64, 32, 3, 3), 1, 1, 1)),
    ("conv 2d, one element", lambda o: _convolution(o.image(32), o.of(64, 32, 1, 1), 1, 0, 1)),
    ("conv 2d, stride 2", lambda o: _convolution(o.image(32), o.of(64, 32, 4, 4), 2, 1, 1)),
    ("conv 2d, channels last", lambda o: _convolution(o.last(32), o.of(64, 32, 3, 3), 1, 1, 1)),
    ("conv 2d, groups",
     lambda o: _convolution(o.image(32), o.of(32, 8, 3, 3), 1, 1, 1, False, 4)),
    ("conv 2d, transposed",
     lambda o: _convolution(o.image(32), o.of(32, 16, 4, 4), 2, 1, 1, True, 1)),
    ("conv 3d", lambda o: _convolution(o.of(o.n, 8, o.m, 6, 10), o.of(16, 8, 3, 3, 3), 1, 1, 1)),
    ("flash", lambda o: _flash(o.heads())),
    ("attention", lambda o: _attention(*[o.heads()] * 3, None, None, 0, None, 0, "zero")),
    ("attention, causal", lambda o: _attention(*[o.heads()] * 3, None, 0, 0, None, 0, "zero")),
    ("attention, grouped",
     lambda o: _attention(o.heads(), *[o.heads(2)] * 2, None, 0, 0, None, 0, "zero")),
    ("attention, window", lambda o: _attention(*[o.heads()] * 3, 37, 0, 0, None, 0, "zero")),
    ("attention, wide values",
     lambda o: _attention(o.heads(), o.heads(), o.heads(4, 32), None, 0, 0, None, 0, "zero")),
    ("attention, mask", lambda o: _attention(
        *[o.heads()] * 3, None, None, 0, None, 0, "zero", mask=o.truth(o.n, 1, o.m, o.m))),
    ("cross entropy with logits",
     lambda o: aten.binary_cross_entropy_with_logits(o.strided(), o.rows(), None, None, 0)),
    ("cross entropy, reduced",
     lambda o: aten.binary_cross_entropy_with_logits(o.rows(), o.rows(), None, o.of(64), 1)),
    ("soft margin backward",
     lambda o: aten.soft_margin_loss_backward(o.rows(), o.rows(), o.rows(), 0)),
    ("scatter mean",
     lambda o: aten.scatter_reduce(o.rows(), 1, o.ids(o.n, o.m, 64), o.rows(), "mean")),
    ("index mean",
     lambda o: aten.index_reduce(o.rows(), 1, o.ids(o.m), o.rows(), "mean")),
    ("kthvalue", lambda o: aten.kthvalue(o.rows(), 4, 1)),
    ("median of strided", lambda o: aten.median(o.rows(), 1)),
    ("median of rows", lambda o: aten.median(o.rows(), 2)),
    ("nanmedian", lambda o: aten.nanmedian(o.strided(), 2)),
    ("sort", lambda o: aten.sort(o.rows(), 1)),
    ("sort of strided", lambda o: aten.sort(o.strided(), 2)),
    ("unfold backward", lambda o: aten.unfold_backward(
        o.of(o.n, o.m, 8), [o.n, o.m + 7], 1, 8, 1)),
    ("norm in float64", lambda o: aten.linalg_vector_norm(o.rows(), 2, [1], dtype=torch.float64)),
    ("distances", lambda o: aten._euclidean_dist(o.rows(), o.of(o.n, 40, 64))),
    ("cdist", lambda o: aten._cdist_forward(o.strided(), o.of(o.n, 40, 64)[:, :20], 1.0, None)),
    ("rfft of rows", lambda o: aten._fft_r2c(o.rows(), [2], 0, True)),
    ("rfft of positions", lambda o: aten._fft_r2c(o.rows(), [1], 0, True)),
    ("fft of positions",
     lambda o: aten._fft_c2c(aten.complex(o.rows(), o.rows()), [1], 0, True)),
    ("irfft", lambda o: aten._fft_c2r(aten.complex(o.rows(), o.rows()), [2], 0, 126)),
    ("irfft of two dims",
     lambda o: aten._fft_c2r(aten.complex(o.rows(), o.rows()), [1, 2], 0, 126)),
    ("trilinear", lambda o: aten._trilinear(
        o.of(o.m, 64), o.of(8, 64, 64), o.of(o.m, 64), [1, 3], [0], [1, 2], [2, 3])),
    ("bag of maxima", lambda o: _bags(o.of(32, 64), o.ids(4 * o.m), o.ids(o.m), 2)),
    ("bag of sums", lambda o: _bags(o.of(32, 64), o.ids(4 * o.m), o.ids(o.m), 0)),
    ("reflection pad 1d", lambda o: aten.reflection_pad1d(o.strided(), [1, 2])),
    ("replication pad 1d", lambda o: aten.replication_pad1d(o.strided(), [1, 2])),
    ("reflection pad 2d backward",
     lambda o: aten.reflection_pad2d_backward(o.last(), o.image(), [0, 0, 0, 0])),
    ("average pool", lambda o: _average(o.image(), o.last())),
    ("average pool, channels last", lambda o: _average(o.last(), o.last())),
    ("average pool 3d", lambda o: aten.avg_pool3d(o.video(), [3, 3, 3])),
    ("max pool", lambda o: _pool(x := o.image(), x)),
    ("max pool, gradient last", lambda o: _pool(o.image(), o.image())),
    ("adaptive pool backward",
     lambda o: aten._adaptive_avg_pool2d_backward(o.of(o.n, 16, 4, 5), o.last())),
    ("roll", lambda o: aten.roll(o.rows(), [3, 4, 1], [0, 1, 2])),
    ("im2col", lambda o: aten.im2col(o.last(), [3, 3], [1, 1], [1, 1], [1, 1])),
    ("nearest", lambda o: aten.upsample_nearest2d(o.image(), [2 * o.m, 40])),
    ("bilinear", lambda o: aten.upsample_bilinear2d(o.image(), [2 * o.m, 40], False)),
    ("bilinear, antialiased",
     lambda o: aten._upsample_bilinear2d_aa(o.image(), [2 * o.m, 40], False)),
    ("linear 1d", lambda o: aten.upsample_linear1d(o.strided(), [2 * 64], False)),
    ("nearest 1d", lambda o: aten.upsample_nearest1d(o.rows(), [2 * 64])),
    ("log sigmoid", lambda o: aten.log_sigmoid_forward(o.strided())),
    ("pixel shuffle", lambda o: aten.pixel_shuffle(o.last(), 2)),
    ("channel shuffle", lambda o: aten.channel_shuffle(o.last(), 4)),
    ("searchsorted", lambda o: aten.searchsorted(o.strided(), o.strided())),
    ("bucketize", lambda o: aten.bucketize(o.strided(), o.of(9))),
    ("masked scatter backward", lambda o: aten.masked_scatter_backward(
        o.rows(), o.truth(o.n, o.m, 64), [o.n, o.m, 64])),
)  # fmt: skip


def calls(case: Case, dtype: torch.dtype) -> list[Call]:
    """Returns a case's calls, symbolic in `n` and `m`."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    sizes, names = [], {}
    for name, hint in HINTS.items():
        source = ConstantSource(name)
        symbol = env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        sizes.append(env.create_symintnode(symbol, hint=hint, source=source))
        names[symbol] = sympy.Symbol(name, integer=True, positive=True)

    def function(n: Size, m: Size) -> Any:
        return case[1](Operands(n, m, dtype))

    with mode, enable_python_dispatcher():
        gm = make_fx(function, tracing_mode="real", _allow_non_fake_inputs=True)(*sizes)
    facts = Facts(names)
    return [Call(n, facts) for n in _kernels(gm.graph)]


def _kernels(graph: fx.Graph) -> Iterator[fx.Node]:
    plain = ("empty", "permute", "transpose", "slice", "complex", "clone", "sym_size")
    for n in graph.nodes:
        target = n.target
        kernel = isinstance(target, torch._ops.OpOverload) and not target.is_view
        if kernel and target._opname not in plain:
            yield n
