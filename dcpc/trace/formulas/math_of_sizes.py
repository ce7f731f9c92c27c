"""Replaces functions of `math` by symbolic ones for lengths, which Python would turn into numbers.

    math.sqrt(n)    ->  torch's symbolic square root; cos, sin, tan, cosh, sinh, tanh likewise
    math.log(n)     ->  log2(n) * log(2), as torch has a symbolic log2 alone; to another base, too
    math.exp(n)     ->  e ** n
    math.isqrt(n)   ->  floor(sqrt(n))

Of numbers they are Python's own. So are names that other code than the model's own modules
imported (`from math import sqrt`): these fix the length.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinFunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from dcpc.fx.torch_api.tracing import OP_TYPES

_NAMED = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "log2")


def _log(x: Any, base: Any = math.e) -> Any:
    return torch._sym_log2(x) * (math.log(2) / math.log(base))  # type: ignore[attr-defined]


def _log10(x: Any) -> Any:
    return _log(x, 10)


def _log1p(x: Any) -> Any:
    return _log(x + 1)


def _exp(x: Any) -> Any:
    return math.e ** torch.sym_float(x)


def _isqrt(x: Any) -> Any:
    return math.floor(torch.sym_sqrt(x))


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{name: getattr(torch, f"_sym_{name}") for name in _NAMED},
    **{"log": _log, "log10": _log10, "log1p": _log1p, "exp": _exp, "isqrt": _isqrt},
}


def _either(of_sizes: Callable[..., Any], of_numbers: Callable[..., Any]) -> Callable[..., Any]:
    def function(x: Any, /, *rest: Any) -> Any:
        symbolic = isinstance(x, torch.SymInt | torch.SymFloat)
        return (of_sizes if symbolic else of_numbers)(x, *rest)

    return function


class _OneOfThese(type):
    """Metaclass that makes `isinstance(f, SymbolicFunction)` true for the values of `FUNCTIONS`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return any(instance is function for function in FUNCTIONS.values())


class SymbolicFunction(metaclass=_OneOfThese):
    """Type of the number functions that a graph may call: `torch._sym_log2` and the like."""


class _TypeOfTensors(type):
    """Metaclass with which `_TypeOf` is `type`, but that a fake tensor's type is a tensor's."""

    def __call__(cls, *given: Any, **more: Any) -> Any:
        found = type(*given, **more)
        if len(given) > 1 or not issubclass(found, FakeTensor | FunctionalTensor):
            return found
        return nn.Parameter if isinstance(given[0], nn.Parameter) else torch.Tensor

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, type)


class _TypeOf(metaclass=_TypeOfTensors):
    """What forward gets for `type`."""


@contextmanager
def math_of_sizes(model: nn.Module) -> Iterator[None]:
    """Makes the functions of `math` accept symbolic lengths, process-wide, within its block.

    It also lets torch.export accept calls of these functions; by itself it accepts only `sym_sqrt`.
    In the files of the model's own modules `type(x)` of a tensor is as without a trace.
    """
    kept = {name: getattr(math, name) for name in FUNCTIONS}
    changed = {own: _either(FUNCTIONS[name], own) for name, own in kept.items()}

    def more(allowed: Callable[..., tuple[type[Any], ...]]) -> Callable[..., tuple[type[Any], ...]]:
        return lambda verifier: (*allowed(verifier), SymbolicFunction)

    files = {"math", *(type(module).__module__ for module in model.modules())}
    places = [
        (vars(sys.modules[file]), name, value)
        for file in sorted(files & sys.modules.keys())
        for name, value in vars(sys.modules[file]).items()
        if isinstance(value, BuiltinFunctionType) and value in changed
    ]
    theirs = [f for f in files & sys.modules.keys() - {"math"} if not f.startswith("torch.")]
    typed = [vars(sys.modules[f]) for f in theirs if not hasattr(sys.modules[f], "type")]
    try:
        for space in typed:
            space["type"] = _TypeOf
        for space, name, own in places:
            space[name] = changed[own]
        with OP_TYPES.replaced(more):
            yield
    finally:
        for space, name, own in places:
            space[name] = own
        for space in typed:
            del space["type"]
