"""Has a model compute in float64 throughout, in this thread alone.

`torch.set_default_dtype` would do for tensors that name no dtype, but it holds for the whole
process: a dataset that is read in another thread meanwhile would draw other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from dcpc.ops.tiled import in_float64

aten = torch.ops.aten

LOW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = (Tensor.float, Tensor.half, Tensor.bfloat16)
# They make a tensor of Python's numbers before torch's dispatcher is asked: in the default dtype.
_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray)
_DRAWS = (aten.rand.default, aten.randn.default)


@contextmanager
def float64_throughout() -> Iterator[None]:
    """Has casts to a lower floating dtype be casts to float64, and makes tensors of float64."""
    with in_float64(), Float64Throughout(), _Float64Results():  # type: ignore[no-untyped-call]
        yield


class Float64Throughout(TorchFunctionMode):
    """Every cast to a lower floating dtype is one to float64.

    Libraries compute norms, rotary tables and losses in float32 also in a float64 model. There a
    sum over ranks differs from the plain model's by float32's rounding, which says nothing about
    the split; without these casts it may differ by float64's alone.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls the function with float64 where a lower dtype is asked for."""
        if func in _CASTS:
            func = Tensor.double
        args, kwargs = float64_dtypes(args, kwargs or {})
        out = func(*args, **kwargs)
        numbers = func in _OF_NUMBERS and not (args and isinstance(args[0], Tensor))
        if numbers and out.is_floating_point():
            return func(*args, **{**kwargs, "dtype": torch.float64})
        return out


class _Float64Results(TorchDispatchMode):
    """Runs each op as if the default dtype were float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op."""
        return float64_result(func, args, kwargs or {})


def float64_dtypes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Returns arguments with float64 in place of every lower floating dtype."""
    return tuple(map(_widened, args)), {name: _widened(value) for name, value in kwargs.items()}


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in LOW else value


def float64_result(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns an ATen op's result as if float64 were the default dtype.

    The default dtype counts where no operand has a floating one: for zeros, a range or a quotient
    of integers, not for operands of float32.
    """
    if func is aten.lift_fresh.default and args[0].dtype in LOW:
        return args[0].double()  # Python's numbers, of which a function of torch's made a tensor
    if args and isinstance(args[0], Tensor) and args[0].is_floating_point():
        return func(*args, **kwargs)  # most calls
    operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if any(x.is_floating_point() or x.is_complex() for x in operands):
        return func(*args, **kwargs)
    if func in _DRAWS:
        return func(*args, **{**kwargs, "dtype": torch.float64})
    out = func(*args, **kwargs)
    if not isinstance(out, Tensor) or out.dtype not in LOW:
        return out
    if any(a.name == "dtype" and a.kwarg_only for a in func._schema.arguments):
        return func(*args, **{**kwargs, "dtype": torch.float64})
    if not operands or func._schema.is_mutable:
        return out
    return func(*tree_map(_as_float64, args), **tree_map(_as_float64, kwargs))


def _as_float64(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) else value


class InFloat64(nn.Module):
    """A model whose forward runs in float64; parameters keep their names' ends.

    It is there to be traced, where a call that names no dtype takes the process's: its forward
    changes that. Only `dcpc check`, a process of its own, and tests use it.
    """

    def __init__(self, model: nn.Module) -> None:
        """Keeps the model."""
        super().__init__()
        self.model = model
        self.train(model.training)

    def forward(self, **inputs: Tensor) -> Any:
        """Returns the model's outputs."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with Float64Throughout():
                return self.model(**inputs)
        finally:
            torch.set_default_dtype(before)
