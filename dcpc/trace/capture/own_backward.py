"""Handles gradients that forward defines itself, which a graph of its calls does not contain.

    autograd.Function with a gradient  ->  TraceError: the graph has its forward's calls alone
    checkpoint(use_reentrant=True)     ->  the call that it wraps: dcpc plans recompute itself
    autograd.grad, no create_graph     ->  its results, detached
    backward, register_hook, grad_fn,
    saved_tensors_hooks                ->  TraceError

A custom op with a registered backward is one call in the graph, and keeps that backward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.modules import module as _module
from torch.overrides import TorchFunctionMode

from dcpc.errors import TraceError, running_line
from dcpc.fx.torch_api.functions import functions_behind, watching
from dcpc.fx.torch_api.tracing import CHECKPOINT, ENGINE

_GRAD_FN: Any = Tensor.grad_fn.__get__  # type: ignore[union-attr]


@contextmanager
def own_backwards() -> Iterator[Callable[[Iterable[Tensor]], None]]:
    """Refuses or rewrites code of forward that defines gradients itself, while a model is captured.

    Yields:
        A function that refuses output tensors whose gradient goes through an autograd function. It
        is needed where this torch cannot report which functions run.

    Raises:
        TraceError: forward runs code that a graph cannot express: see the module's docstring.
    """
    with ExitStack() as stack:
        watched = stack.enter_context(watching(_refuse_function))
        stack.enter_context(CHECKPOINT.replaced(_called))
        stack.enter_context(ENGINE.replaced(_run_by))
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            stack.enter_context(patch.object(Tensor, name, _refused_hook(name)))
        stack.enter_context(_refused_packing())
        stack.enter_context(_NoGraph())
        yield lambda tensors: None if watched else _refuse_functions(tensors)


def refuse_backward_hooks(model: nn.Module) -> None:
    """Refuses hooks on a module's backward, as compiled graphs run no modules.

    Raises:
        TraceError: a module has such a hook.
    """
    hooked = [name or type(m).__name__ for name, m in model.named_modules() if _hooks_backward(m)]
    if _module._global_backward_hooks or _module._global_backward_pre_hooks:
        hooked.append("every module (torch.nn.modules.module.register_module_..._hook)")
    if hooked:
        raise TraceError(
            f"got full backward hooks on {', '.join(hooked[:4])}; expected none: a compiled "
            "backward runs no modules and would never call them; remove them, or put a hook on the "
            "parameters (`parameter.register_hook`), which is called"
        )


def _hooks_backward(module: nn.Module) -> bool:
    return bool(module._backward_hooks) or bool(module._backward_pre_hooks)


class _NoGraph(TorchFunctionMode):
    """Refuses reads of `grad_fn` by the user's code, as a hook set there would never run."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == _GRAD_FN and "/torch/" not in _reader():
            raise _hooked("reads grad_fn of a tensor")
        return func(*args, **(kwargs or {}))


def _reader() -> str:
    """Returns the file of the code that reads an attribute, beyond torch function modes."""
    frame = sys._getframe(1)
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename


def _refused_packing() -> AbstractContextManager[object]:
    """Refuses hooks that replace saved tensors, except for torch's own."""
    enter = saved_tensors_hooks.__enter__

    def entered(self: saved_tensors_hooks) -> None:
        kind = type(self)
        if kind is saved_tensors_hooks or not kind.__module__.startswith("torch."):
            raise _hooked(f"enters {kind.__qualname__}")
        enter(self)

    return patch.object(saved_tensors_hooks, "__enter__", entered)


def _called(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a replacement of a reentrant checkpoint that calls its function while capturing."""

    def call(function: Callable[..., Any], preserve: bool, *operands: Any) -> Any:
        if get_proxy_mode() is not None and torch.is_grad_enabled() and _learn(operands):
            return function(*operands)
        return apply(function, preserve, *operands)

    return call


def _learn(operands: Iterable[Any]) -> bool:
    return any(isinstance(a, Tensor) and a.requires_grad for a in operands)


def _refuse_function(cls: type, operands: tuple[Any, ...]) -> None:
    # Without a mode that writes down calls this is the backward of a call that was written down.
    if get_proxy_mode() is not None and _learn(operands):
        raise _of_its_own(cls, running_line())


def _refuse_functions(tensors: Iterable[Tensor]) -> None:
    for cls in functions_behind(tensors):
        raise _of_its_own(cls, "")


def _of_its_own(cls: type, where: str) -> TraceError:
    return TraceError(
        f"forward runs the autograd function {cls.__module__}.{cls.__qualname__}{where}: "
        "got a backward of its own; expected calls whose derivative torch knows: a captured "
        "graph has the calls of its forward, and would have their gradient; make it a custom "
        "op (torch.library.custom_op, register_fake, register_autograd), or write it with "
        "detach(): `x + (x.round() - x).detach()`"
    )


def _run_by(run: Callable[..., Any]) -> Callable[..., Any]:
    def engine(
        outputs: Any,
        gradients: Any,
        keep_graph: bool,
        create_graph: bool,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if kwargs.get("accumulate_grad"):
            raise TraceError(
                f"forward runs backward(){running_line()}: got gradients added to what forward "
                "reads; expected a forward that only reads; use torch.autograd.grad"
            )
        found = run(outputs, gradients, keep_graph, create_graph, *args, **kwargs)
        return found if create_graph else _detached(found)

    return engine


def _detached(found: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple(None if t is None else t.detach() for t in found)


def _refused_hook(name: str) -> Callable[[Tensor, Any], Any]:
    def register(self: Tensor, hook: Any) -> Any:
        raise _hooked(f"calls {name} on a tensor")

    return register


def _hooked(what: str) -> TraceError:
    return TraceError(
        f"forward {what}{running_line()}: got a hook into autograd; expected calls whose "
        "derivative torch knows: a compiled backward would never call the hook; make it a custom "
        "op (torch.library.custom_op, register_fake, register_autograd), or put a hook on a "
        "parameter outside of forward"
    )
