"""Records the state of a model's modules that a trace reads, and finds later changes.

    layers.3.dropout.p       0.1                      values, by their text
    layers.3.weight          float64[4, 4] trains     parameters and buffers, but for their numbers
    layers.3                 Linear, object 140211    modules, functions, other tensors: which one
    layers.3: forward hooks  log, object 140212
    class Block.forward      Block.forward, object 140213

Values are of a closed list of kinds; what is of none of them is told by which object it is, and by
its attributes. Not looked into: what functions close over, numpy arrays that are written to,
containers of over `MOST` items, and objects more than `DEPTH` objects away from a module.
"""

from __future__ import annotations

import enum
import functools
import operator
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module

from dcpc.fx.writes import times_written

MOST = 10_000
DEPTH = 3

_VALUES = (
    *(bool, int, float, complex, str, bytes, type(None), type(...), slice, range, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
_MAPPINGS = (dict, types.MappingProxyType)
_CONTAINERS = (*_MAPPINGS, list, tuple, set, frozenset, deque)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)
_HOOKS = {
    "_forward_hooks": "forward hooks",
    "_forward_hooks_with_kwargs": "forward hooks with kwargs",
    "_forward_hooks_always_called": "forward hooks always called",
    "_forward_pre_hooks": "forward pre-hooks",
    "_forward_pre_hooks_with_kwargs": "forward pre-hooks with kwargs",
    "_backward_hooks": "backward hooks",
    "_backward_pre_hooks": "backward pre-hooks",
}
# Saving and loading do not affect the computation. Recurrent layers have their
# parameters again as weak references, new ones whenever a parameter is set.
_NOT_READ = {
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks"),
    *("_load_state_dict_post_hooks", "_non_persistent_buffers_set", "_is_full_backward_hook"),
    "_flat_weight_refs",
}
_FACTS = operator.attrgetter("requires_grad", "dtype", "device", "shape")


class Entry(NamedTuple):
    """One fact that a trace reads.

    Attributes:
        text: text of the fact.
        which: key that distinguishes objects of equal text; None: they count as the same.
    """

    text: str
    which: object = None


_NO_HOOKS = Entry("none", ())


class ModuleState:
    """The state of a model that a trace reads.

    Attributes:
        entries: facts by name, in the order of the modules.
        kinds: dtype, device, shape and strides of each tensor, by name.
        parameters: parameters of the model, each once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.parameters = model, [*model.parameters()]
        self._visit = visit = _Visit(model)
        self.entries, self.kinds = visit.entries, visit.kinds
        self._objects, self._attributes = list(visit.watched_objects()), visit.attributes()
        self._facts = visit.tensor_facts()
        self._slots = visit.slot_values()

    def holds(self, model: nn.Module) -> bool:
        """Whether every object is the same one as before; if not, `entries` may still be equal.

        It takes about 1 us for each module and half of one for each tensor, as it runs at every
        call.
        """
        return (
            model is self._model
            and not any(self._visit.empty)
            and self._visit.attributes() == self._attributes
            # Each ends with the watched list itself, so a longer one differs at its end.
            and all(map(operator.is_, self._visit.watched_objects(), self._objects))
            and self._visit.tensor_facts() == self._facts
            and all(map(operator.is_, self._visit.slot_values(), self._slots))
        )

    def changes(self, now: ModuleState, besides: Collection[str] = ()) -> list[str]:
        """Returns the differences of a later state from this one, a line each, outermost first."""
        found: list[str] = []
        replaced: list[str] = []
        for name in {**self.entries, **now.entries}:
            before, after = self.entries.get(name), now.entries.get(name)
            if (
                before == after
                or name in besides
                or any(name.startswith(prefix) for prefix in replaced)
            ):
                continue
            shown = name or "the model"
            if before is None or after is None:
                there = before or after
                assert there is not None, "a name is of one of the states"
                found.append(f"{shown}: {there.text} is {'new' if before is None else 'gone'}")
            elif before.text == after.text:
                found.append(f"{shown}: another {after.text}")
            else:
                found.append(f"{shown}: {before.text} -> {after.text}")
            if before is None or after is None or before.which != after.which:
                replaced += [f"{name}.", f"{name}[", f"{name}: "]
        return found

    def added_hooks(self, now: ModuleState) -> list[str]:
        """Returns the hooks of modules that a later state has and this one has not."""
        found = []
        for name, entry in now.entries.items():
            if name.partition(": ")[2] in _HOOKS.values():
                ours = self.entries.get(name, _NO_HOOKS)
                if set(_hooks_of(entry)) - set(_hooks_of(ours)):
                    found.append(f"{name} ({entry.text})")
        return found


class _Visit:
    """Visits a model and all objects that it holds, each once, and records whatever can change.

    Attributes:
        entries: see `ModuleState`.
        kinds: see `ModuleState`.
        empty: live containers that were empty, as those of hooks mostly are.
    """

    def __init__(self, model: nn.Module) -> None:
        self.empty: list[Collection[Any]] = []
        self.entries: dict[str, Entry] = {}
        self.kinds: dict[str, tuple[object, ...]] = {}
        self._seen: set[int] = set()  # ids of objects
        self._watched: list[Collection[Any]] = []  # live containers; of mappings keys and values
        self._named: list[Mapping[str, Any]] = []  # attributes of modules and classes, by name
        self._tensors: list[Tensor] = []
        self._loose: list[Tensor] = []  # no parameters or buffers: a trace takes them as they are
        self._slotted: list[tuple[Any, str]] = []
        for name, hooks in (
            ("forward hooks", _module._global_forward_hooks),
            ("forward pre-hooks", _module._global_forward_pre_hooks),
        ):
            self._hooks(f"every module: {name}", hooks)
        registered = (*model.named_parameters(), *model.named_buffers())
        self._names = {id(t): name for name, t in registered}
        self._module("", model)

    def watched_objects(self) -> Iterator[object]:
        """Yields the current items of all watched containers, then the list of containers."""
        return chain(chain.from_iterable(self._watched), (self._watched,))

    def attributes(self) -> list[str]:
        """Returns the names of all attributes: equal texts are one name, unlike equal objects."""
        return [*chain.from_iterable(self._named)]

    def tensor_facts(self) -> list[object]:
        """Returns the facts that a trace relies on: dtype, device, shape and strides of tensors."""
        tensors, loose = self._tensors, self._loose
        facts = [*map(_FACTS, tensors), *map(Tensor.stride, tensors)]
        return [*facts, *map(_FACTS, loose), *map(times_written, loose)]

    def slot_values(self) -> list[object]:
        """Returns the current value of each watched slot."""
        return [getattr(owner, name, None) for owner, name in self._slotted]

    def _add(self, name: str, text: str, which: object = None) -> None:
        self.entries[name] = Entry(text, which)

    def _watch(self, container: Collection[Any]) -> None:
        (self._watched if container else self.empty).append(container)
        if container and isinstance(container, _MAPPINGS):
            self._watched.append(container.values())

    def _watch_attributes(self, owner: object) -> None:
        self._named.append(vars(owner))
        self._watched.append(vars(owner).values())

    def _module(self, name: str, module: nn.Module) -> None:
        self._add(name, type(module).__name__, id(module))
        if self._is_known(module):
            return
        self._watch_attributes(module)
        self._class(type(module))
        for attribute, value in vars(module).items():
            inner = f"{name}.{attribute}".lstrip(".")
            if attribute in ("_parameters", "_buffers", "_modules"):
                self._watch(value)
                for key, held in value.items():
                    self._value(f"{name}.{key}".lstrip("."), held, 0)
            elif attribute in _HOOKS:
                self._hooks(f"{name}: {_HOOKS[attribute]}", value)
            elif attribute not in _NOT_READ:
                self._value(inner, value, 0)

    def _hooks(self, name: str, hooks: Mapping[int, Any]) -> None:
        # By its keys, as each hook has a unique number.
        (self._watched if hooks else self.empty).append(hooks)
        called = [h for h in hooks.values() if not isinstance(h, bool)]
        if hooks:
            texts = ", ".join(getattr(h, "__qualname__", type(h).__name__) for h in called)
            self._add(name, texts or f"{len(hooks)}", tuple(map(_same_function, called)))

    def _class(self, kind: type) -> None:
        """Adds the attributes of a class and its bases, except for `nn.Module` and `object`."""
        for base in kind.__mro__:
            name = f"class {base.__qualname__}"
            if base in (nn.Module, object) or self._is_known(base):
                continue
            self._watch_attributes(base)
            for attribute, value in vars(base).items():
                if not attribute.startswith("__") or attribute in ("__call__", "__getattr__"):
                    self._value(f"{name}.{attribute}", value, DEPTH)

    def _value(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, Tensor):
            self._tensor(name, value)
        elif isinstance(value, nn.Module):
            self._module(name, value)
        elif isinstance(value, _VALUES):
            self._add(name, repr(value), type(value))
        elif isinstance(value, _CONTAINERS):
            self._container(name, value, depth)
        elif isinstance(value, _FUNCTIONS):
            self._add(name, getattr(value, "__qualname__", repr(value)), id(value))
        elif isinstance(value, types.MethodType):
            text = getattr(value, "__qualname__", "method")
            self._add(name, text, (id(value.__func__), id(value.__self__)))
        elif isinstance(value, functools.partial):
            self._add(name, "partial")
            self._value(f"{name}.func", value.func, depth)
            self._container(f"{name}.args", (value.args, value.keywords), depth)
        elif isinstance(value, weakref.ref):
            self._add(name, "weakref", id(value()))
        else:
            self._object(name, value, depth)

    def _tensor(self, name: str, tensor: Tensor) -> None:
        learns = "trains" if tensor.requires_grad else "frozen"
        learns = f" {learns}" if isinstance(tensor, nn.Parameter) or tensor.requires_grad else ""
        dtype = str(tensor.dtype).removeprefix("torch.")
        dense = "" if tensor.is_contiguous() else f" of strides {list(tensor.stride())}"
        text = f"{dtype}{list(tensor.shape)}{dense}{learns} on {tensor.device}"
        registered = self._names.get(id(tensor))
        which: object = None
        if registered is None:
            which = (id(tensor), times_written(tensor))
        elif registered != name:
            text = f"{text}, tied to {registered}"
        self._add(name, text, (type(tensor), which))
        self.kinds[name] = (tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        if not self._is_known(tensor):
            (self._loose if registered is None else self._tensors).append(tensor)

    def _container(self, name: str, value: Any, depth: int) -> None:
        kind = type(value).__name__
        if len(value) > MOST:
            self._add(name, f"{kind} of {len(value)}", id(value))
            return
        self._add(name, kind)
        if self._is_known(value):
            return
        self._watch(value)
        if isinstance(value, _MAPPINGS):
            self._add(name, f"{kind} of {', '.join(map(repr, value))}")
            for key, item in value.items():
                self._value(f"{name}[{key!r}]", item, depth)
        elif isinstance(value, set | frozenset):
            self._add(name, f"{kind} of {', '.join(sorted(map(repr, value)))}")
        else:
            for number, item in enumerate(value):
                self._value(f"{name}[{number}]", item, depth)

    def _object(self, name: str, value: Any, depth: int) -> None:
        self._add(name, type(value).__name__, id(value))
        if self._is_known(value) or depth >= DEPTH:
            return
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict) and len(held) <= MOST:
            self._watch(held)
            for attribute, item in held.items():
                self._value(f"{name}.{attribute}", item, depth + 1)
        for base in type(value).__mro__:
            slots = vars(base).get("__slots__", ())
            for attribute in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, attribute) and not attribute.startswith("__"):
                    self._slotted.append((value, attribute))
                    self._value(f"{name}.{attribute}", getattr(value, attribute), depth + 1)

    def _is_known(self, value: object) -> bool:
        """Whether an object was visited before; marks it as visited."""
        known = id(value) in self._seen
        self._seen.add(id(value))
        return known


def _same_function(hook: Any) -> object:
    """Returns a key that is equal for one function: a bound method is a new object at each read."""
    if isinstance(hook, types.MethodType):
        return id(hook.__func__), id(hook.__self__)
    return id(hook)


def _hooks_of(entry: Entry) -> tuple[object, ...]:
    assert isinstance(entry.which, tuple), "hooks are told apart one by one"
    return entry.which


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Restores the modules' attributes that forward changed, such as a cache, after its block."""
    torchs = vars(nn.Module()).keys()
    before = []
    for module in model.modules():
        own = {k: v for k, v in vars(module).items() if k not in torchs}
        filled = [(v, copy(v)) for v in own.values() if type(v) in (list, dict, set)]
        before.append((module, own, filled))
    try:
        yield
    finally:
        for module, own, filled in before:
            for name in [k for k in vars(module) if k not in torchs and k not in own]:
                del vars(module)[name]
            vars(module).update(own)
            for container, content in filled:
                container.clear()
                container.extend(content) if isinstance(container, list) else container.update(
                    content
                )


@contextmanager
def holding(model: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Puts other tensors in place of a model's parameters and buffers, within its block.

    `torch.func.functional_call` cannot be used: with a module that has two names it leaves its own
    tensors in place (torch 2.13), as it swaps them twice and takes the first ones for the model's.
    """
    before: list[tuple[Any, Any, Any]] = []
    try:
        before += put_in_place(model, others)
        yield
    finally:
        for held, key, value in before:
            held[key] = value


def put_in_place(model: nn.Module, others: Mapping[int, Tensor]) -> list[tuple[Any, Any, Any]]:
    """Puts other tensors in place of a model's parameters and buffers, for good.

    Returns:
        The replaced tensors, as (container, key, tensor).
    """
    before: list[tuple[Any, Any, Any]] = []
    places: list[tuple[Any, Any]]
    for module in model.modules():
        lists = [v for v in vars(module).values() if type(v) is list]  # an RNN's weights
        places = [(held, enumerate(held)) for held in lists]
        places += [(held, held.items()) for held in (module._parameters, module._buffers)]
        for held, items in places:
            before += [(held, key, value) for key, value in items if id(value) in others]
    for held, key, value in before:
        held[key] = others[id(value)]
    return before
