"""Handles gradients that forward defines itself, which a graph of its calls does not contain.

    autograd.Function with a gradient  ->  one call, which keeps that backward
    checkpoint(use_reentrant=True)     ->  the call that it wraps: dcpc plans recompute itself
    autograd.grad, no create_graph     ->  its results, detached
    backward, register_hook, grad_fn,
    saved_tensors_hooks                ->  TraceError

A custom op with a registered backward is one call in the graph, too. A function is first run
unrecorded, forward and backward: what no graph can say is refused where it is applied, and not
when its backward is first traced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from threading import local
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode
from torch.nn.modules import module as _module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from dcpc.errors import TraceError, running_line, users_line
from dcpc.fx.torch_api.functions import functions_behind, watching, within_transform
from dcpc.fx.torch_api.tracing import CHECKPOINT, ENGINE
from dcpc.ops.own_functions import OwnFunction, op_of, schema_type
from dcpc.trace.capture.capturable import Capturable

_GRAD_FN: Any = Tensor.grad_fn.__get__  # type: ignore[union-attr]
_THIS = local()  # whether this thread runs a function that is one call already
_OPS = "a forward and a backward of torch's ops on the tensors that it is given"


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
        watched = stack.enter_context(watching(_applied))
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


def _applied(cls: type, forward: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    # Without a mode that writes down calls this is the backward of a call that was written down.
    if get_proxy_mode() is None or _runs_within() or not _learn(given):
        return forward(*given)
    args = given[isinstance(given[0], FunctionCtx) :]
    return _as_one_call(cls, args)


def _as_one_call(cls: type, args: tuple[Any, ...]) -> Any:
    """Returns the result of an autograd function; a graph that is captured has one call for it."""
    leaves, tree = tree_flatten(args)
    operands = tuple(i for i, leaf in enumerate(leaves) if schema_type(leaf))
    given = [leaves[i] for i in operands]
    if within_transform():
        raise _refused_function(cls, "a call within a transform of torch.func", "one outside of it")
    device = next(x.device.type for x in given if isinstance(x, Tensor))
    cast = torch.is_autocast_enabled(device)
    function = OwnFunction(
        cls=cls,
        leaves=tuple(schema_type(leaf) or leaf for leaf in leaves),
        operands=operands,
        tree=tree,
        results=(),
        casts=(device, torch.get_autocast_dtype(device)) if cast else None,
        within=Capturable,
    )
    with _unseen():
        result = _tried(function, given)
        items = list(result) if isinstance(result, tuple) else [result]
        made = tuple(i for i, item in enumerate(items) if isinstance(item, Tensor))
        found = op_of(replace(function, results=made))(*given)
    for i, tensor in zip(made, found if isinstance(found, tuple) else (found,), strict=True):
        items[i] = tensor
    return tuple(items) if isinstance(result, tuple) else items[0]


def _runs_within() -> bool:
    """Returns whether an autograd function runs that the graph already has as one call."""
    return getattr(_THIS, "deep", False)


def _refused_function(cls: type, got: str, expected: str, seen: bool = True) -> TraceError:
    where = running_line() if seen else ""
    return TraceError(
        f"forward runs the autograd function {cls.__module__}.{cls.__qualname__}{where}: "
        f"got {got}; expected {expected}; change the function, or make it a custom op "
        "(torch.library.custom_op, register_fake, register_autograd), which is never looked into"
    )


@contextmanager
def _unseen() -> Iterator[None]:
    """Hides a function's calls in its block from the graph, changes of the grad mode included."""
    before, _THIS.deep = _runs_within(), True
    try:
        with _Alone(), Capturable():
            yield
    finally:
        _THIS.deep = before


def _tried(function: OwnFunction, given: Sequence[Any]) -> Any:
    """Returns a function's result on fake tensors, after its backward has run on them, too."""
    cls = function.cls
    with disable_proxy_modes_tracing(), torch.enable_grad():
        own = [x.detach() if isinstance(x, Tensor) else x for x in given]
        tensors = [x for x in own if isinstance(x, Tensor)]
        learning = [y.requires_grad_() for x, y in zip(given, own, strict=True) if _learn([x])]
        versions = [x._version for x in tensors]
        failed: Exception | None = None
        try:
            with _GivenAlone(cls, tensors):
                result = function.run(own)
                if flowing := [y for y in tree_leaves(result) if _learn([y])]:
                    tangents = [torch.empty_like(y) for y in flowing]
                    torch.autograd.grad(flowing, learning, tangents, allow_unused=True)
        except TraceError:
            raise
        except Exception as error:
            result, failed = None, error
        if [x._version for x in tensors] != versions:
            raise _refused_function(cls, "a write to a tensor that it is given", _OPS)
        if failed is not None:
            said = next(iter(str(failed).splitlines()), "")
            got = f"{type(failed).__name__}: {said}{users_line(failed)}"
            raise _refused_function(cls, got, _OPS) from failed
    return result


class _Alone(TorchFunctionMode):
    """Keeps calls from the modes that were entered before, such as the one that captures."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return func(*args, **(kwargs or {}))


class _GivenAlone(TorchDispatchMode):
    """Refuses a read of a tensor that a function neither is given nor makes."""

    def __init__(self, cls: type, given: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cls = cls
        self._known = {id(x): x for x in given}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise _refused_function(self._cls, f"random numbers ({func})", "none but those given")
        if func is torch.ops.aten._local_scalar_dense.default:
            raise _refused_function(self._cls, "a read of a value, as by .item()", _OPS)
        for x in tree_leaves((args, kwargs)):
            given = id(x) in self._known or not isinstance(x, Tensor)
            if not given and (x.ndim or isinstance(x, FakeTensor)):
                got = f"a read of a tensor {list(x.shape)} that is no argument of its apply"
                raise _refused_function(self._cls, got, _OPS)
        result = func(*args, **(kwargs or {}))
        self._known |= {id(x): x for x in tree_leaves(result) if isinstance(x, Tensor)}
        return result


def _refuse_functions(tensors: Iterable[Tensor]) -> None:
    for cls in functions_behind(tensors):
        raise _refused_function(
            cls,
            "a backward of its own, in a release of torch where dcpc cannot see it",
            "calls whose derivative torch knows",
            seen=False,
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
