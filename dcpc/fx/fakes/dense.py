"""Computes the results of common calls on dense fake tensors from expressions of their sizes.

torch evaluates each size and stride in turn, which takes most of the time of tracing. The results
computed here hold at any sizes, and no guard is added.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from dcpc.fx.fakes.made import empty, is_told
from dcpc.fx.fakes.view_fakes import VIEW_OPS, view_result
from dcpc.fx.gpu_ops import is_asked
from dcpc.fx.leaves import leaf_key, size_key
from dcpc.fx.torch_api.tags import is_pointwise

aten = torch.ops.aten

_FORMATS = (None, torch.contiguous_format, torch.preserve_format)
_ALSO_POINTWISE = (aten._to_copy.default, aten.clone.default)
# Tagged pointwise, but their kernels lay results otherwise, or return an operand.
_OTHERWISE = {
    aten.conj_physical, aten._conj_physical, aten.float_power, aten.ldexp, aten.masked_fill,
    aten.mvlgamma, aten.rrelu, aten.threshold_backward,
}  # fmt: skip
_ALWAYS_DENSE = (aten.pow.Scalar,)
_REDUCTIONS = (aten.sum.dim_IntList, aten.mean.dim)

_dtypes: dict[tuple[Any, ...], torch.dtype] = {}


def dense_result(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Returns the fake result of a call on dense tensors, or None where torch must compute it.

    It must be called within the fake tensors' mode.
    """
    if func in VIEW_OPS:
        return None if kwargs else view_result(func, args)
    if func in _DENSE:
        return None if kwargs else _DENSE[func](*args)
    if func in _REDUCTIONS:
        return _reduced(func, args, kwargs)
    return _pointwise(func, args, kwargs) if _is_pointwise(func) else None


@functools.cache
def _is_pointwise(func: torch._ops.OpOverload) -> bool:
    """Whether an op makes one new tensor of its operands' broadcast shape."""
    schema = func._schema
    aliased = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
    listed = is_pointwise(func) and func.overloadpacket not in _OTHERWISE
    listed = listed and not schema.name.startswith("aten::special_")  # not looked at
    listed = listed or func in _ALSO_POINTWISE
    return listed and [str(r.type) for r in schema.returns] == ["Tensor"] and not aliased


def _pointwise(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    leaves = tree_leaves((args, dict(kwargs)))
    operands = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    wide = [t for t in operands if t.ndim and is_told(t)]
    if not wide or not all(map(is_told, operands)):
        return None
    if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
        return None
    kwargs = dict(kwargs)
    elsewhere = len({t.device for t in operands} | {kwargs.pop("device", wide[0].device)}) > 1
    if elsewhere or kwargs.get("memory_format") not in _FORMATS:
        return None
    try:
        shape = _broadcast([t.shape for t in wide])
        plain = func in _ALWAYS_DENSE or kwargs.get("memory_format") == torch.contiguous_format
        order = [*range(len(shape))] if plain else _order(shape, wide)
    except _DependsOnSizesError:
        return None
    made = empty([shape[i] for i in order], _dtype_of(func, args, kwargs), *_place(wide[0]))
    if order == sorted(order):
        return made
    return made.permute([order.index(i) for i in range(len(order))])


class _DependsOnSizesError(Exception):
    """Raised where the result depends on the values of the sizes."""


def _broadcast(shapes: Sequence[Sequence[Any]]) -> list[Any]:
    found: list[Any] = []
    for position in range(-max(map(len, shapes)), 0):
        sizes = {size_key(s[position]): s[position] for s in shapes if len(s) >= -position}
        if len(sizes) > 1:
            sizes.pop(1, None)
        if len(sizes) > 1:
            raise _DependsOnSizesError
        found += sizes.values()
    return found


def _order(shape: Sequence[Any], operands: Sequence[Tensor]) -> list[int]:
    """Returns the dims of the result in memory order, outermost first.

    The first operand whose strides distinguish two dims decides their order.

    Source: torch's TensorIterator, `reorder_dimensions`.
    """
    dims = range(len(shape))
    if all(map(_is_dense, operands)):
        return list(dims)
    sizes = [size_key(size) for size in shape]
    strides = [_strides(sizes, t) for t in operands]
    order = list(reversed(dims))  # innermost first
    for i in range(1, len(order)):
        moved = i
        for j in range(i - 1, -1, -1):
            found = _compare(order[j], order[moved], sizes, strides)
            if found > 0:
                order[moved], order[j] = order[j], order[moved]
                moved = j
            elif found < 0:
                break
    return order[::-1]


def _compare(a: int, b: int, sizes: Sequence[Any], strides: Sequence[Sequence[Any]]) -> int:
    """Returns 1 if dim a is outside dim b, -1 if it is inside, 0 if no operand decides."""
    for own in strides:
        if own[a] == 0 or own[b] == 0:
            continue
        if own[a] != own[b]:
            return -1 if _at_least(own[b], own[a]) else 1
        if not _at_least(sizes[b], sizes[a]):
            return 1
    return 0


def _strides(sizes: Sequence[Any], operand: Tensor) -> list[Any]:
    """Returns an operand's strides in the result's dims, 0 where it is broadcast."""
    missing = len(sizes) - operand.ndim
    own = zip(map(size_key, operand.shape), operand.stride(), sizes[missing:], strict=True)
    found = [0 if size == 1 and whole != 1 else size_key(n) for size, n, whole in own]
    return [0] * missing + found


def _at_least(one: Any, other: Any) -> bool:
    """Whether a positive number is at least another at any sizes, as it is a multiple of it."""
    ratio = sympy.sympify(one) / other
    if ratio.is_integer:
        return True
    if (1 / ratio).is_integer:
        return False
    if ratio.is_number:
        return bool(ratio > 1)
    raise _DependsOnSizesError


def _dtype_of(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.dtype:
    """Returns the dtype of an op's result for operands of these dtypes."""
    leaves = tree_leaves((args, dict(kwargs)))
    kinds = ((x.dtype, x.ndim) if isinstance(x, Tensor) else leaf_key(x) for x in leaves)
    # An integer tensor and a float make one of the default dtype.
    key = (func, torch.get_default_dtype(), len(args), *kwargs, *kinds)
    if key not in _dtypes:
        with _disable_current_modes(), torch._C._DisableAutocast():
            tiny_args, tiny_kwargs = map_aggregate((args, dict(kwargs)), _tiny)
            _dtypes[key] = func(*tiny_args, **tiny_kwargs).dtype
    return _dtypes[key]


def _tiny(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return torch.empty((1,) * leaf.ndim, dtype=leaf.dtype, device="meta")


# ------------------------------------------------------------------ reductions, products and norms


def _reduced(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    source, over, keeps = (*args, False)[:3]
    if not is_told(source) or not source.ndim or not over or not _is_dense(source):
        return None
    gone = {dim % source.ndim for dim in over}
    left = [(i, size) for i, size in enumerate(source.shape) if keeps or i not in gone]
    shape = [1 if i in gone else size for i, size in left]
    return empty(shape, _dtype_of(func, args, kwargs), *_place(source))


def _mm(left: Any, right: Any) -> Tensor | None:
    if not _are_alike(left, right):
        return None
    (rows, shared), (inner, columns) = left.shape, right.shape
    if size_key(shared) != size_key(inner):
        return None
    return empty([rows, columns], left.dtype, *_place(left))


def _addmm(bias: Any, left: Any, right: Any) -> Tensor | None:
    if not _are_alike(bias, left, right) or bias.ndim != 1:
        return None
    fits = size_key(right.shape[1]) == size_key(bias.shape[0])
    return _mm(left, right) if fits else None


def _linear(x: Any, weight: Any, bias: Any = None) -> Tensor | None:
    if not _are_alike(x, weight, *[] if bias is None else [bias]) or x.ndim < 2 or weight.ndim != 2:
        return None
    columns, inner = weight.shape
    if size_key(x.shape[-1]) != size_key(inner):
        return None
    return empty([*x.shape[:-1], columns], x.dtype, *_place(x))


def _whole_norm(x: Any, _: Any, weight: Any = None, *rest: Any) -> Tensor | None:
    """Returns the result of layer norm or RMS norm."""
    bias = rest[0] if rest and isinstance(rest[0], Tensor) else None
    return empty(x.shape, x.dtype, *_place(x)) if _is_norm(x, weight, bias) else None


def _norm(x: Any, normalized: Sequence[Any], weight: Any, bias: Any, _: float) -> Any:
    """Returns the results of layer norm: the output, and mean and 1 / deviation of each row."""
    if not _is_norm(x, weight, bias):
        return None
    rows = x.ndim - len(normalized)
    kept = [*x.shape[:rows], *[1] * len(normalized)]
    return tuple(empty(shape, x.dtype, *_place(x)) for shape in (x.shape, kept, kept))


def _norm_backward(
    gradient: Any, x: Any, normalized: Any, mean: Any, deviation: Any, *rest: Any
) -> Any:
    weight, bias, wanted = rest
    if not _is_norm(x, gradient, mean, deviation, weight, bias):
        return None
    shapes = zip(wanted, (x.shape, normalized, normalized), strict=True)
    return tuple(empty(s, x.dtype, *_place(x)) if wants else None for wants, s in shapes)


def _is_norm(x: Any, *others: Any) -> bool:
    """Whether all operands have one dtype that the kernel's statistics keep; None is skipped."""
    if not _are_alike(x, *(t for t in others if t is not None)):
        return False
    kept = x.device.type == "cpu" and not is_asked()  # a GPU's statistics are float32 at least
    return x.dtype in (torch.float32, torch.float64) or kept


def _rms_norm(x: Any, normalized: Sequence[Any], weight: Any, _: float | None) -> Any:
    """Returns the results of RMS norm: the output, and one number a row in float32 or better."""
    if not _are_alike(x, *[] if weight is None else [weight]):
        return None
    rows = [*x.shape[: x.ndim - len(normalized)], *[1] * len(normalized)]
    wide = torch.promote_types(x.dtype, torch.float32)
    return empty(x.shape, x.dtype, *_place(x)), empty(rows, wide, *_place(x))


def _rms_norm_backward(
    gradient: Any, x: Any, normalized: Any, row: Any, weight: Any, wanted: Sequence[bool]
) -> Any:
    if not is_told(row) or not _are_alike(x, gradient, *[] if weight is None else [weight]):
        return None
    shapes = zip(wanted, (x.shape, normalized), strict=True)
    return tuple(empty(s, x.dtype, *_place(x)) if wants else None for wants, s in shapes)


def _spread(gradient: Any, sizes: Sequence[Any], *_: Any) -> Tensor | None:
    """Returns the gradient of a view of a part: zeros, with the gradient at the part."""
    if not is_told(gradient):
        return None
    return empty(sizes, gradient.dtype, *_place(gradient))


def _are_alike(*tensors: Any) -> bool:
    """Whether these are fake tensors of one dtype and device."""
    return all(map(is_told, tensors)) and len({(t.device, t.dtype) for t in tensors}) == 1


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous at any sizes."""
    expected = sympy.Integer(1)
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        own = size_key(size)
        if own != 1 and size_key(stride) != expected:
            return False
        expected = expected * own
    return True


def _place(tensor: FakeTensor) -> tuple[torch.device, FakeTensorMode]:
    return tensor.device, tensor.fake_mode


_DENSE: Mapping[Any, Callable[..., Any]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.linear.default: _linear,
    aten.layer_norm.default: _whole_norm,
    aten.rms_norm.default: _whole_norm,
    aten.native_layer_norm.default: _norm,
    aten.native_layer_norm_backward.default: _norm_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
    aten.select_backward.default: _spread,
    aten.slice_backward.default: _spread,
}
