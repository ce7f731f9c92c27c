"""Ops that return several tensors, each of which is checked, and those with the same rules."""

from typing import Any

import torch

from tests.passes.sharding.rule_cases.source import DTYPES, Source, aten, strategy
from tests.passes.sharding.rule_check import Case


@strategy("aten.sort", "aten.cummax", "aten.cummin")
def ordered(source: Source) -> Case:
    shape = source.shape()
    op = getattr(source.packet, "default")  # noqa: B009 - packets make their overloads on demand
    return Case(op, (source.tensor(*shape, dtypes=DTYPES), source.dim(shape)))


@strategy("aten.msort", "aten.fliplr", "aten.flipud")
def fixed_dim(source: Source) -> Case:
    return Case(source.packet.default, (source.tensor(*source.shape(2, 4)),))


@strategy("aten.topk")
def topk(source: Source) -> Case:
    shape = source.shape()
    dim = source.dim(shape)
    k = source.size(1, shape[dim])
    return Case(aten.topk.default, (source.tensor(*shape), k, dim, source.flag()))


@strategy("aten.diff")
def diff(source: Source) -> Case:
    shape = source.shape()
    n, dim = source.size(1, 2), source.dim(shape)
    if source.flag():
        return Case(aten.diff.default, (source.tensor(*shape), n, dim))
    before = list(shape)
    before[dim] = source.size(1, 3)
    dtypes = (torch.float64,)  # of one dtype with what comes before
    given = [source.tensor(*s, dtypes=dtypes) for s in (shape, before)]
    return Case(aten.diff.default, (given[0], n, dim, given[1]))


@strategy("aten.kthvalue", "aten.mode", "aten.median", "aten.nanmedian")
def one_of_a_row(source: Source) -> Case:
    shape = source.shape()
    x, dim, keep = source.tensor(*shape), source.dim(shape), source.flag()
    if source.op == "aten.kthvalue":
        return Case(aten.kthvalue.default, (x, source.size(1, shape[dim]), dim, keep))
    if source.op == "aten.mode":
        return Case(aten.mode.default, (x, dim, keep))
    if source.size() == 1:
        return Case(source.packet.default, (x,))
    return Case(source.packet.dim, (x, dim, keep))


@strategy("aten.aminmax")
def aminmax(source: Source) -> Case:
    shape = source.shape()
    dim = source.dim(shape) if source.size() > 1 else None
    return Case(aten.aminmax.default, (source.tensor(*shape),), {"dim": dim, "keepdim": dim == 0})


@strategy("aten.var_mean", "aten.std_mean")
def var_mean(source: Source) -> Case:
    shape = source.shape()
    dims = sorted({source.dim(shape) % len(shape) for _ in "ab"})
    kwargs = {"correction": 0, "keepdim": source.flag()}
    return Case(source.packet.correction, (source.floats(*shape), dims), kwargs)


@strategy("aten.quantile", "aten.nanquantile")
def quantile(source: Source) -> Case:
    shape = source.shape(1, 3)
    x, keep = source.floats(*shape), source.flag()
    if source.flag():
        return Case(source.packet.scalar, (x, 0.3, source.dim(shape), keep))
    q = torch.rand(source.shape(0, 1), dtype=torch.float64, generator=source.generator)
    return Case(source.packet.default, (x, q, source.dim(shape), keep))


@strategy("aten.frexp")
def frexp(source: Source) -> Case:
    return Case(aten.frexp.Tensor, (source.floats(*source.shape(0)),))


@strategy("aten.native_layer_norm", "aten._fused_rms_norm")
def norm(source: Source) -> Case:
    shape = source.shape(2, 4)
    kept = shape[source.size(1, len(shape) - 1) :]
    x, weight = source.floats(*shape), source.maybe(source.floats(*kept))
    if source.op == "aten._fused_rms_norm":
        return Case(source.packet.default, (x, kept, weight, 1e-5))
    bias = source.maybe(source.floats(*kept))
    return Case(aten.native_layer_norm.default, (x, kept, weight, bias, 1e-5))


@strategy("aten.native_batch_norm", "aten._native_batch_norm_legit")
def batch_norm(source: Source) -> Case:
    shape = [source.size(2), source.size(2), *source.shape(0, 2)]
    x, affine = source.floats(*shape), [source.maybe(source.floats(shape[1]))] * 2
    if source.op == "aten._native_batch_norm_legit":
        return Case(source.packet.no_stats, (x, *affine, True, 0.1, 1e-5))
    training = source.flag()
    statistics = [None, None] if training else [source.floats(shape[1]).abs() for _ in "mv"]
    return Case(aten.native_batch_norm.default, (x, *affine, *statistics, training, 0.1, 1e-5))


@strategy(*(f"aten.max_pool{n}d_with_indices" for n in (1, 2, 3)))
def pooled(source: Source) -> Case:
    count = int(source.op.removesuffix("d_with_indices")[-1])
    kernel = [source.size(1, 3) for _ in range(count)]
    stride = kernel if source.flag() else [source.size(1, 2)] * count
    padding = [source.size(0, min(1, k // 2)) for k in kernel]
    shape = [*source.shape(1, 2), *(k * source.size(1, 3) for k in kernel)]
    return Case(source.packet.default, (source.floats(*shape), kernel, stride, padding))


@strategy(*(f"aten.adaptive_max_pool{n}d" for n in (1, 2, 3)))
def adaptive(source: Source) -> Case:
    count = int(source.op[-2])
    shape = [*source.shape(1, 2), *(source.size() for _ in range(count))]
    sizes = [source.size(1, 3) for _ in range(count)]
    return Case(source.packet.default, (source.floats(*shape), sizes))


SPLITS = ("chunk", "unsafe_chunk", "split", "unsafe_split")


@strategy("aten.unbind", "aten.tensor_split", *(f"aten.{name}" for name in SPLITS))
def parts(source: Source) -> Case:
    shape = source.shape()
    dim = source.dim(shape)
    x = source.tensor(*shape, dtypes=DTYPES)
    if source.op == "aten.unbind":
        return Case(aten.unbind.int, (x, dim))
    if source.op == "aten.tensor_split":
        if source.flag():
            return Case(aten.tensor_split.indices, (x, [1, source.size(1, shape[dim])], dim))
        return Case(aten.tensor_split.sections, (x, source.size(1, 3), dim))
    name = "Tensor" if "split" in source.op else "default"
    return Case(getattr(source.packet, name), (x, source.size(1, 4), dim))


@strategy("aten.split_with_sizes", "aten.unsafe_split_with_sizes")
def parts_of_sizes(source: Source) -> Case:
    shape = source.shape()
    dim, lengths = source.dim(shape), source.shape(1, 3, 4)
    shape[dim] = sum(lengths)
    x = source.tensor(*shape, dtypes=DTYPES)
    return Case(source.packet.default, (x, lengths, dim))


@strategy("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")
def recurrent(source: Source) -> Case:
    gates = {"aten.lstm": 4, "aten.gru": 3}.get(source.op, 1)
    batch, length, width, hidden = (source.size(1, 5) for _ in range(4))
    layers, both, first = source.size(1, 2), source.flag(), source.flag()
    directions = 2 if both else 1
    params: list[torch.Tensor] = []
    for layer in range(layers):
        given = width if layer == 0 else hidden * directions
        for _ in range(directions):
            shapes = [[gates * hidden, given], [gates * hidden, hidden], *[[gates * hidden]] * 2]
            params += [source.floats(*shape) for shape in shapes]
    shape = [batch, length, width] if first else [length, batch, width]
    states: Any = [source.floats(layers * directions, batch, hidden) for _ in "hc"]
    states = states if source.op == "aten.lstm" else states[0]
    args = (source.floats(*shape), states, params, True, layers, 0.0, False, both, first)
    return Case(source.packet.input, args)


@strategy("aten.gru_cell", "aten.rnn_tanh_cell", "aten.rnn_relu_cell", "aten.lstm_cell")
def cell(source: Source) -> Case:
    batch, width, hidden = source.size(2), source.size(), source.size()
    gates = hidden * {"aten.lstm_cell": 4, "aten.gru_cell": 3}.get(source.op, 1)
    state: Any = source.floats(batch, hidden)
    if source.op == "aten.lstm_cell":
        state = [state, source.floats(batch, hidden)]
    weights = [source.floats(gates, width), source.floats(gates, hidden)]
    biases = [source.floats(gates), source.floats(gates)]
    return Case(source.packet.default, (source.floats(batch, width), state, *weights, *biases))


TRANSFORMS = ("fft_fft", "fft_ifft", "fft_rfft", "fft_irfft", "fft_hfft", "fft_ihfft")
REAL = ("fft_rfft", "fft_ihfft", "_fft_r2c")


def signal(source: Source, shape: list[int]) -> torch.Tensor:
    x = source.floats(*shape)
    real = source.op.removeprefix("aten.").rstrip("2n") in REAL
    back = source.op.startswith(("aten._fft_c2",))
    return torch.complex(x, source.floats(*shape)) if back or (not real and source.flag()) else x


@strategy(*(f"aten.{name}" for name in TRANSFORMS))
def transform(source: Source) -> Case:
    shape = source.shape()
    dim = source.dim(shape)
    shape[dim] = source.size(2)
    length = source.pick(None, shape[dim], 4)
    return Case(source.packet.default, (signal(source, shape), length, dim))


@strategy(*(f"aten.{name}{n}" for name in TRANSFORMS for n in "2n"))
def transform_of_dims(source: Source) -> Case:
    shape = [*source.shape(1, 2), *(source.size(2) for _ in "hw")]
    return Case(source.packet.default, (signal(source, shape), None, source.pick([-2, -1], [-1])))


@strategy("aten._fft_c2c", "aten._fft_r2c", "aten._fft_c2r")
def transform_kernel(source: Source) -> Case:
    shape = [*source.shape(1, 2), source.size(2)]
    last = 2 * shape[-1] - 2 if source.op == "aten._fft_c2r" else source.flag()
    return Case(source.packet.default, (signal(source, shape), [len(shape) - 1], 0, last))


@strategy("aten.fft_fftshift", "aten.fft_ifftshift")
def shifted(source: Source) -> Case:
    shape = source.shape()
    return Case(source.packet.default, (source.tensor(*shape), [source.dim(shape)]))


def positive(source: Source, *shape: int) -> torch.Tensor:
    """Positive definite matrices, so that every decomposition exists."""
    x = source.floats(*shape, shape[-1])
    return x @ x.mT + torch.eye(shape[-1], dtype=torch.float64)


MATRIX_OPS = (
    "linalg_inv", "inverse", "linalg_cholesky", "cholesky", "linalg_det", "det", "linalg_slogdet",
    "slogdet", "logdet", "linalg_qr", "linalg_svd", "linalg_svdvals", "linalg_eigh",
    "linalg_eigvalsh", "linalg_matrix_exp", "matrix_exp", "linalg_pinv", "pinverse",
    "linalg_lu_factor", "linalg_inv_ex", "linalg_cholesky_ex",
)  # fmt: skip


@strategy(*(f"aten.{name}" for name in MATRIX_OPS))
def matrices(source: Source) -> Case:
    x = positive(source, *source.shape(1, 2), source.size(1, 4))
    op = aten.linalg_pinv.atol_rtol_float if source.op == "aten.linalg_pinv" else None
    return Case(op or source.packet.default, (x,))


@strategy("aten.linalg_matrix_power", "aten.matrix_power")
def power(source: Source) -> Case:
    x = positive(source, *source.shape(1, 2), source.size(1, 4))
    return Case(source.packet.default, (x, source.pick(2, 3, -1)))


@strategy("aten.linalg_solve", "aten.linalg_solve_triangular")
def solve(source: Source) -> Case:
    lead, n = source.shape(1, 2), source.size(1, 4)
    a, b = positive(source, *lead, n), source.floats(*lead, n, source.size(2, 3))
    if source.op == "aten.linalg_solve":
        return Case(aten.linalg_solve.default, (a, b))
    return Case(aten.linalg_solve_triangular.default, (a.triu(), b), {"upper": True})


@strategy("aten.linalg_matrix_norm")
def matrix_norm(source: Source) -> Case:
    shape = source.shape(3, 4)
    args = (source.floats(*shape), source.pick("fro", "nuc"), [-2, -1], source.flag())
    return Case(aten.linalg_matrix_norm.str_ord, args)
