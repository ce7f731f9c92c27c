"""Traces equal models once, for files whose tests compile one model with many options.

Half of a compile is the trace, which no option changes. A file has the fixture `one_trace`
(tests/conftest.py) or a block of `traced_once`; none does that plants a fault in a trace, or whose
subject is one.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from dcpc.buckets import Buckets
from dcpc.ir import Program
from dcpc.plan import traced

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
OWN = {"_parameters", "_buffers", "_modules", "training"}


class OneTrace:
    """In place of `trace`: returns the program of an equal model again.

    Models are equal if their modules are: class, mode, plain attributes, tensors as a trace sees
    them, and the same other attributes. A trace that warns is made each time.

    Args:
        trace: what traces a model.
    """

    def __init__(self, trace: Callable[..., Program]) -> None:
        self._trace, self._made = trace, dict[Hashable, tuple[Program, list[object]]]()

    def __call__(
        self, model: nn.Module, buckets: Buckets, autocast: torch.dtype | None = None,
        loss: Any = None,
    ) -> Program:  # fmt: skip
        kept: list[object] = [loss]  # so that no other object gets its id
        key = (
            _of_model(model, kept), repr((buckets.inputs, buckets.buckets, buckets.static)),
            autocast, id(loss), torch.get_default_dtype(),
        )  # fmt: skip
        if key in self._made:
            return self._made[key][0]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            program = self._trace(model, buckets, autocast, loss)
        for one in caught:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        if not caught:
            self._made[key] = program, kept
        return program


@contextmanager
def traced_once() -> Iterator[None]:
    """Traces equal models once within its block."""
    with mock.patch.object(traced, "trace", OneTrace(traced.trace)):
        yield


def _of_model(model: nn.Module, kept: list[object]) -> Hashable:
    first: dict[int, str] = {}
    tensors = [*model.named_parameters(remove_duplicate=False)]
    tensors += [*model.named_buffers(remove_duplicate=False)]
    found = [(n, first.setdefault(id(t), n), _of_tensor(t)) for n, t in tensors]
    modules = [
        (name, type(m), m.training, *((a, _of_value(v, kept)) for a, v in vars(m).items()
                                      if a not in OWN))
        for name, m in model.named_modules(remove_duplicate=False)
    ]  # fmt: skip
    return tuple(found), tuple(modules)


def _of_tensor(t: Tensor) -> Hashable:
    return type(t), t.shape, t.stride(), t.dtype, t.device, t.requires_grad, t.layout


def _of_value(value: object, kept: list[object]) -> Hashable:
    if type(value) in PLAIN:
        return type(value), value
    if isinstance(value, dict):
        return type(value), *((k, _of_value(v, kept)) for k, v in value.items())
    if isinstance(value, (list, tuple, set)):
        return type(value), *(_of_value(v, kept) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), *(_of_value(getattr(value, f.name), kept) for f in fields(value))
    kept.append(value)
    return id(value)
