"""Detects autograd functions that are applied, and those through which gradients would flow.

`Function.apply` is Python in some releases and C in others, and users keep it under names of their
own. Each release asks the class for its backward and then for its forward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from dcpc.fx.torch_api.patched import TorchName

# torch's own, by which a checkpoint without reentrance keeps what it is given: no gradient goes
# through it. Some releases have it.
_KEEPS = getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)
# Takes an autograd function, its forward and what that is given; returns forward's result.
Applied = Callable[[type, Callable[..., Any], tuple[Any, ...]], Any]


@contextmanager
def watching(applied: Applied) -> Iterator[bool]:
    """Calls `applied` for an autograd function's forward; yields whether torch allows it."""
    with ASKED.put(_telling(applied)) as done:
        yield done


def functions_behind(tensors: Iterable[Tensor]) -> list[type]:
    """Returns the autograd functions through which gradients of tensors flow, each once."""
    with torch._C.DisableTorchFunction():
        todo = [t.grad_fn for t in tensors if t.grad_fn is not None]
    seen = set(todo)
    while todo:
        further = {node for node, _ in todo.pop().next_functions if node is not None} - seen
        seen |= further
        todo += further
    kinds = (type(node) for node in seen if isinstance(node, BackwardCFunction))
    return [*dict.fromkeys(getattr(kind, "_forward_cls", kind) for kind in kinds)]


def within_transform() -> bool:
    """Returns whether this runs within `vmap`, `grad`, `jvp` or the like of `torch.func`."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _telling(applied: Applied) -> Callable[[type, str], Any]:
    begun = threading.local()  # the class whose backward was asked for last, gradients being on

    def read(cls: type, name: str) -> Any:
        found = type.__getattribute__(cls, name)
        if name == "_backward_cls":
            begun.by = cls if torch.is_grad_enabled() else None
        elif name == "forward" and getattr(begun, "by", None) is cls and cls is not _KEEPS:
            begun.by = None
            return _announced(cls, found, applied)
        return found

    return read


def _announced(cls: type, found: Callable[..., Any], applied: Applied) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return applied(cls, lambda *given: found(*given, **kwargs), args)

    return forward


def _asks(name: TorchName) -> str:
    class Probed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0]

    seen: list[type] = []

    def noting(cls: type, forward: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        seen.append(cls)
        return forward(*args)

    apply = Probed.apply
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones((), device="cpu", requires_grad=True)
        with name.holding(_telling(noting)):
            apply(x)  # type: ignore[no-untyped-call]
        return "" if seen == [Probed] else "no question for its forward"


ASKED = TorchName(
    "torch.autograd.function",
    "FunctionMeta.__getattribute__",
    _asks,
    "a model is refused whose gradient goes through any autograd function, those of ops included",
)
