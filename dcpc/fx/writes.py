"""Expresses writes to tensors by ops that return new tensors.

torch's own kernels write to what they made themselves: `narrow(y, 1, 1, 4).mul_(2)` in the backward
of `irfft`. A graph that is cut in two and partly run again must not.

    t.mul_(2)   ->   v = mul(t, 2), and t is v from here on
    t = p[0]    ->   p is select_scatter(p, v, 0, 0) from here on, and so on for what p is part of
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dcpc.errors import CodegenError

aten = torch.ops.aten

# Results that lie in their operand's memory, of which torch promises that nobody reads it through
# another: a write to one of them changes no other.
APART = {
    aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten._unsafe_view.default,
}  # fmt: skip
# Views that only set a conj or neg bit, which ops of a graph ignore -> ops that compute the values.
PLAIN = {
    aten._conj.default: aten._conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}


@dataclass(frozen=True, slots=True)
class View:
    """A call whose results share their operand's storage.

    Attributes:
        func: op that was called.
        args: arguments, the operand first.
        kwargs: keyword arguments.
        results: tensors that it returned.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Tensor, ...]


def functional_of(func: Any) -> Any:
    """Returns the functional form of an op that writes to its operands.

    Raises:
        CodegenError: torch has no such op.
    """
    name = func._schema.name.split("::")[1]
    in_place = name.endswith("_")
    packet = getattr(aten, name.removesuffix("_"), None)
    wanted = [
        (a.name, str(a.type)) for a in func._schema.arguments if in_place or not _is_written(a)
    ]
    for overload in () if packet is None else (getattr(packet, o) for o in packet.overloads()):
        found = [(a.name, str(a.type)) for a in overload._schema.arguments]
        if found == wanted and not overload._schema.is_mutable:
            return overload
    raise CodegenError(
        f"{func} writes to its operand, and torch has no op that returns what it writes; replace "
        "the call that it is part of in the model's code"
    )


def by_position(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns a call's arguments by position with defaults, as `functional_of` may have others."""
    more = []
    for argument in func._schema.arguments[len(args) :]:
        if argument.kwarg_only or argument.name in kwargs or not argument.has_default_value():
            break
        more.append(argument.default_value)
    return (*args, *more)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Returns the operands that a call writes to, in order."""
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return [given[a.name] for a in func._schema.arguments if _is_written(a)]


class WriteLog(TorchDispatchMode):
    """Records all writes in its block, also those through views and `.data`.

    Attributes:
        places: addresses of the storages that were written to.
        meta_shapes: shapes of the written tensors on the meta device, which have no address.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: set[int] = set()
        self.meta_shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs a call, and records its writes."""
        for target in written(func, args, kwargs or {}):
            for tensor in target if isinstance(target, list | tuple) else (target,):
                if tensor.is_meta:
                    self.meta_shapes.append(tuple(tensor.shape))
                else:
                    self.places.add(tensor.untyped_storage().data_ptr())
        return func(*args, **(kwargs or {}))


def without_results(func: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a call's keyword arguments without those that it writes to (`out=`)."""
    names = {a.name for a in func._schema.arguments if _is_written(a)}
    return {name: value for name, value in kwargs.items() if name not in names}


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def times_written(tensor: Tensor) -> int:
    """Returns a tensor's version counter; 0 for an inference tensor, which has none."""
    return 0 if tensor.is_inference() else tensor._version


def whole(view: View, result: Tensor, value: Tensor) -> Tensor:
    """Returns a view's operand with a value in place of one of the view's results.

    Raises:
        CodegenError: the view's op has no rule.
    """
    rule = _WHOLE.get(view.func)
    if rule is None:
        raise CodegenError(
            f"a write through {view.func} cannot be followed: expected one through slices, "
            "transposes and reshapes; replace the call that it is part of in the model's code"
        )
    index = next(i for i, made in enumerate(view.results) if made is result)
    operand, *rest = view.args
    if view.func in _PARTS:
        return rule(operand, value, view.results, index, *rest, **view.kwargs)
    return rule(operand, value, *rest, **view.kwargs)


def is_scattered(view: View | None) -> bool:
    """Whether a write to the results of a view copies the value into the view's operand."""
    return view is not None and view.func in _SCATTERS | _PARTS


def as_copied(target: Tensor, source: Tensor) -> Tensor:
    """Returns a tensor's value after `copy_`: the source in its dtype and shape."""
    if source.dtype != target.dtype or source.device != target.device:
        source = aten._to_copy.default(source, dtype=target.dtype, device=target.device)
    return aten.expand.default(source, target.shape)  # type: ignore[no-any-return]


def _same(operand: Tensor, value: Tensor) -> Tensor:
    return value


def _reshaped(operand: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    # Not `reshape` itself: below autograd nobody takes it apart.
    return aten.reshape.default.decompose(value, operand.shape)  # type: ignore[no-any-return]


def _permuted(operand: Tensor, value: Tensor, dims: Sequence[int]) -> Tensor:
    ndim = len(dims)
    back = sorted(range(ndim), key=lambda i: dims[i] % ndim)
    return aten.permute.default(value, back)  # type: ignore[no-any-return]


def _of_split(
    operand: Tensor, value: Tensor, parts: Sequence[Tensor], index: int, _: Any, dim: int = 0
) -> Tensor:
    start: Any = sum(p.shape[dim] for p in parts[:index])
    stop = start + parts[index].shape[dim]
    return aten.slice_scatter.default(operand, value, dim, start, stop)  # type: ignore[no-any-return]


def _of_unbind(
    operand: Tensor, value: Tensor, parts: Sequence[Tensor], index: int, dim: int = 0
) -> Tensor:
    return aten.select_scatter.default(operand, value, dim, index)  # type: ignore[no-any-return]


_SCATTERS: dict[Any, Callable[..., Tensor]] = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
    aten.as_strided.default: aten.as_strided_scatter.default,
}
_PARTS: dict[Any, Callable[..., Tensor]] = {
    aten.split.Tensor: _of_split,
    aten.split_with_sizes.default: _of_split,
    aten.unbind.int: _of_unbind,
}
# view op -> function of (operand, value, *other arguments): the operand with the value written in
_WHOLE: dict[Any, Callable[..., Tensor]] = {
    **_SCATTERS,
    **_PARTS,
    aten.detach.default: _same,
    aten.alias.default: _same,
    aten.lift_fresh.default: _same,
    aten.t.default: lambda operand, value: aten.t.default(value),
    aten.transpose.int: lambda operand, value, a, b: aten.transpose.int(value, a, b),
    aten.permute.default: _permuted,
    aten.view.default: _reshaped,
    aten._reshape_alias.default: _reshaped,
    aten.unsqueeze.default: _reshaped,
    aten.squeeze.default: _reshaped,
    aten.squeeze.dim: _reshaped,
    aten.squeeze.dims: _reshaped,
    aten.view_as_real.default: lambda operand, value: aten.view_as_complex.default(value),
    aten.view_as_complex.default: lambda operand, value: aten.view_as_real.default(value),
}
