"""Runs dcpc's graphs node by node, in float64 and with known random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from dcpc.codegen import MISREAD, RUN
from dcpc.ops.tiled import in_float64
from dcpc.verify.draws import known_draws
from dcpc.verify.float64 import float64_dtypes, float64_result

Watch = Callable[[fx.Node, Any], None]
Make = Callable[[Any, Any, Any], Any]


def calls(*, wide: bool, alike: bool) -> Make:
    """Returns a function that runs a call of a graph for the comparison with the plain model."""
    run: dict[Any, Any] = {**RUN, **known_draws(alike)}

    def made(target: Any, args: Any, kwargs: Any) -> Any:
        function = run.get(target, target)
        if not wide:
            return function(*args, **kwargs)
        args, kwargs = float64_dtypes(args, kwargs)
        if isinstance(function, torch._ops.OpOverload) and function.namespace == "aten":
            return float64_result(function, args, kwargs)
        with in_float64():
            return function(*args, **kwargs)

    return made


class RightKernels(TorchDispatchMode):
    """Autograd's calls of kernels that misread some layouts, made with layouts they read right.

    Attributes:
        misread: ops that gave other numbers in the layout that autograd handed them.
    """

    def __init__(self) -> None:
        """Begins with no op."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.misread: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op."""
        out = func(*args, **(kwargs or {}))
        if func not in MISREAD or not MISREAD[func](*args):
            return out
        # Of new tensors: what runs is made to read layouts right by other code, which is on trial.
        right = func(*(dense(x) for x in args), **(kwargs or {}))
        if any(_is_other(a, b) for a, b in zip(out, right, strict=True)):
            self.misread.add(str(func))
        return right


def dense(x: Any) -> Any:
    """Returns a copy of a tensor in the layout of a new one, and anything else as it is."""
    return x.clone(memory_format=torch.contiguous_format) if isinstance(x, Tensor) else x


def _is_other(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two results differ by more than rounding in the lowest dtype."""
    if a is None or b is None or not b.numel():
        return False
    return not bool((a - b).abs().max() <= 0.05 * b.abs().max())


class Replay(fx.Interpreter):
    """Runs a graph by the function of `calls`, and shows each node's value."""

    def __init__(self, gm: fx.GraphModule, call: Make, watch: Watch | None = None) -> None:
        """Keeps the graph."""
        super().__init__(gm)
        self.call, self.watch = call, watch

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Makes one call."""
        return self.call(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Runs one node."""
        value = super().run_node(n)
        if self.watch is not None:
            self.watch(n, value)
        return value


def in_order(gm: fx.GraphModule, values: Mapping[str, Any]) -> list[Any]:
    """Returns the values of a graph's placeholders, in their order."""
    return [values[n.name] for n in gm.graph.nodes if n.op == "placeholder"]
