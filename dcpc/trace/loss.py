"""Finds the loss, or all tensors, in a model's output: one rule for the trace and the plain model.

returned(model, inputs, loss)   the output of forward, or of `loss=` called with it
find_outputs                    the loss in that output, or all its tensors
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from dcpc.errors import TraceError, defined_at, meant

Loss = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class MicroStatistics:
    """A model's `loss=` that asks for the new running statistics of batch norms, too.

    Attributes:
        loss: loss function of the user; None: forward returns the loss.
    """

    loss: Loss | None
    returns_statistics: ClassVar[bool] = True

    def __call__(self, outputs: Any, **inputs: Tensor) -> Any:
        """Returns the loss, as the user's function does."""
        return outputs if self.loss is None else self.loss(outputs, **inputs)


def returns_statistics(loss: Loss | None) -> bool:
    """Whether the graphs of a model with this loss return new running statistics, too."""
    return getattr(loss, "returns_statistics", False)


def own_loss(loss: Loss | None) -> Loss | None:
    """Returns the user's loss function in a `MicroStatistics`; others as they are."""
    return loss.loss if isinstance(loss, MicroStatistics) else loss


def returned(model: nn.Module, inputs: Mapping[str, Any], loss: Loss | None = None) -> Any:
    """Runs the model, and `loss` on its output, and returns the result that holds the loss.

    Args:
        model: module to call. Without `loss` it gets all inputs, with one only those that forward
            names.
        inputs: tensors by argument name.
        loss: function called with forward's output and, by name, the inputs that it takes. None:
            forward's output already holds the loss.

    Raises:
        TraceError: the result of `loss` holds no floating scalar.
    """
    loss = own_loss(loss)
    if loss is None:
        return model(**inputs)
    outputs = model(**_taken(model.forward, inputs))
    made = loss(outputs, **_taken(_called(loss), inputs, given=1))
    if not isinstance(made, AllOutputs):
        find_loss(made, f"loss={_name(loss)}{defined_at(_called(loss))}")
    return made


def check_loss(loss: Loss | None) -> None:
    """Refuses a `loss=` that is not a function of a model's outputs.

    Raises:
        TraceError: `loss` is a class, cannot be called, or is a module with parameters.
    """
    if loss is None:
        return
    if not callable(loss) or isinstance(loss, type):
        got = f"the class {loss.__name__}" if isinstance(loss, type) else type(loss).__name__
        raise TraceError(
            f"loss=: got {got}; expected a function of the model's outputs and, by name, of the "
            "inputs; pass e.g. loss=lambda logits, labels: ..., or a module without parameters"
        )
    names = [n for n, _ in loss.named_parameters()] if isinstance(loss, nn.Module) else []
    if names:
        raise TraceError(
            f"loss={_name(loss)}: got a module with {len(names)} parameters "
            f"({', '.join(names[:4])}); expected none: only the parameters of the model are "
            "trained, shared out and saved; make one module of the model and its loss, and let its "
            "forward return the loss"
        )


def check_names(model: nn.Module, names: Collection[str], loss: Loss | None) -> None:
    """Refuses inputs that neither forward nor `loss` takes, and unknown arguments of `loss`.

    Args:
        model: user's module.
        names: names of the buckets' inputs.
        loss: function as in `returned`. None: nothing is checked, as forward gets all inputs and
            reports missing ones itself.

    Raises:
        TraceError: an input is not taken, or an argument of `loss` without a default is missing.
    """
    loss = own_loss(loss)
    if loss is None:
        return
    inputs = dict.fromkeys(names)
    unknown = [n for n in _needed(_called(loss)) if n not in inputs]
    if unknown:
        raise TraceError(
            f"loss={_name(loss)} takes {', '.join(unknown)}; got inputs {', '.join(names)}; "
            "expected loss(outputs, ...) whose other arguments are inputs of the buckets by their "
            "names; rename them, add them to the buckets, or give them defaults"
        )
    taken = {**_taken(model.forward, inputs), **_taken(_called(loss), inputs, given=1)}
    left = [n for n in names if n not in taken]
    if left:
        raise TraceError(
            f"got inputs {', '.join(left)}, which neither {type(model).__name__}.forward nor "
            f"loss={_name(loss)} takes; expected each input to be taken by one of them; correct "
            "the name, or take the input out of the buckets"
        )


def mismatch(model: nn.Module, names: Collection[str], loss: Loss | None) -> str:
    """Returns how the inputs and forward's arguments differ, with a remedy; "": they do not.

    Args:
        model: user's module.
        names: names of the buckets' inputs.
        loss: function as in `returned`.
    """
    takes = {p.name: p for p in _parameters(model.forward) or []}
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [n for n, p in takes.items() if p.default is p.empty and p.kind not in various]
    lacking = [n for n in needed if n not in names]
    taken = _taken(model.forward, dict.fromkeys(names))
    left = [n for n in names if n not in taken] if own_loss(loss) is None else []
    if not lacking and not left:
        return ""
    advice = f"add {', '.join(lacking)} to the buckets' inputs, or give it a default"
    got = [f"no {', '.join(lacking)}"] * bool(lacking)
    if left:
        got = [f"{', '.join(left)}, which it does not take", *got]
        other = "take it out, or give what a loss takes to loss=fn, with fn(outputs, labels)"
        advice = meant(left[0], [n for n in takes if n not in names], other)
    return (
        f"{type(model).__name__}.forward{defined_at(model.forward)}: got inputs of the buckets: "
        f"{', and '.join(got)}; expected its arguments ({', '.join(takes)}); {advice}"
    )


def by_position(model: nn.Module, names: Collection[str]) -> list[str]:
    """Returns the inputs in positional order: forward's positional arguments, then the others."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = [p.name for p in _parameters(model.forward) or [] if p.kind in kinds]
    first = [n for n in own if n in names]
    return [*first, *(n for n in names if n not in first)]


def modules_in(loss: Loss | None) -> list[nn.Module]:
    """Returns the modules that a loss is, closes over or reads as globals, such as a teacher."""
    loss = own_loss(loss)
    found: list[nn.Module] = []
    todo: list[Any] = [loss]
    seen: set[int] = set()
    home = None
    while todo:
        held = todo.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, nn.Module):
            found.append(held)
        elif isinstance(held, functools.partial):
            todo += [held.func, *held.args, *held.keywords.values()]
        elif inspect.ismethod(held):
            todo += [held.__self__, held.__func__]
        elif inspect.isfunction(held) and held.__module__ == (home := home or held.__module__):
            reads = inspect.getclosurevars(held)
            todo += [*reads.nonlocals.values(), *reads.globals.values()]
        elif held is loss or held is getattr(loss, "__self__", None):
            todo += getattr(held, "__dict__", {}).values()
    return found


def _called(loss: Loss) -> Callable[..., Any]:
    return loss.forward if isinstance(loss, nn.Module) else loss


def _name(loss: Loss) -> str:
    return str(getattr(loss, "__name__", type(loss).__name__))


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter] | None:
    """Returns a function's parameters, or None where Python cannot tell its signature."""
    try:
        return [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        return None


def _taken(
    function: Callable[..., Any], inputs: Mapping[str, Any], given: int = 0
) -> dict[str, Any]:
    """Returns the inputs that a function takes by name."""
    takes = _parameters(function)
    if takes is None or any(p.kind is p.VAR_KEYWORD for p in takes):
        return dict(inputs)
    names = {p.name for p in takes[given:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in inputs.items() if name in names}


def _needed(loss: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters after the first that have no default."""
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    takes = [p for p in _parameters(loss) or [] if p.kind not in various]
    return [p.name for p in takes[1:] if p.default is p.empty]


class AllOutputs(tuple[Tensor, ...]):
    """A forward's outputs when all of its tensors are wanted, and not a loss alone."""

    __slots__ = ()


def find_outputs(output: Any, who: str = "the model's forward") -> tuple[Tensor, ...]:
    """Returns the tensors that a compiled model computes: the loss alone, or all outputs.

    Args:
        output: `AllOutputs`, or any output in which `find_loss` finds a loss.
        who: name of the function that returned it, for the error's text.

    Raises:
        TraceError: the output holds no loss.
    """
    return tuple(output) if isinstance(output, AllOutputs) else (find_loss(output, who),)


def one_number(outputs: Sequence[Tensor]) -> Tensor:
    """Returns the loss, or one scalar that depends on every element of several outputs.

    Args:
        outputs: output tensors. Integer ones add their values and have no gradient.
    """
    if len(outputs) == 1 and _is_scalar(outputs[0]):
        return outputs[0]
    parts = [(_real(x) * _real(gradient_of(i, x))).sum() for i, x in enumerate(outputs)]
    return torch.stack([part.to(parts[0].dtype) for part in parts]).sum()


def gradient_of(position: int, output: Tensor) -> Tensor:
    """Returns the weights of an output in `one_number`, which are the gradient it gets in backward.

    Args:
        position: index of the output among all outputs.
        output: the output tensor. The weights have its shape.
    """
    if not output.dim():
        return torch.full_like(output, position + 1)
    # No random numbers: comparisons watch what the model draws.
    place = torch.arange(output.numel(), dtype=torch.float64, device=output.device)
    waves = torch.sin((1 + position / 3) * (place + 1)).reshape(output.shape)
    return waves.to(output.dtype) if output.is_floating_point() or output.is_complex() else waves


def _real(x: Tensor) -> Tensor:
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj())
    return x if x.is_floating_point() else x.double()


def find_loss(output: Any, who: str = "the model's forward") -> Tensor:
    """Returns the scalar loss in the output of a model's forward or of its `loss=`.

    Args:
        output: a floating scalar tensor, a mapping or dataclass with the entry `loss`, or a
            sequence whose first floating scalar is the loss.
        who: name of the function that returned it, for the error's text.

    Raises:
        TraceError: the output holds no floating scalar loss.
    """
    if isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        candidates = [output[place] for place in _scalars(output)]
    else:
        candidates = [_named(output)]
    for value in candidates:
        if isinstance(value, Tensor) and _is_scalar(value):
            return value
    raise TraceError(
        f"{who}: got {_described(output)} returned; expected a floating scalar loss, or a "
        "mapping, dataclass or tuple that has one; return the loss, alone or under the name "
        "'loss' (for a transformers model pass labels), or compile with loss=, a function of the "
        "outputs and the inputs"
    )


def loss_choice(output: Any) -> str:
    """Returns a warning if a sequence has several floating scalars (the first is taken), or ""."""
    if not isinstance(output, (tuple, list)) or isinstance(output, AllOutputs):
        return ""
    if hasattr(output, "loss"):
        return ""
    places = _scalars(output)
    if len(places) < 2:
        return ""
    return (
        f"the model's forward returned a {type(output).__name__} of {len(output)} outputs, got "
        f"{len(places)} floating scalars among them (outputs {', '.join(map(str, places))}, "
        f"counted from 0); expected one, the loss: output {places[0]} is taken as the loss, and "
        "nothing else is trained on; return the loss alone, or first, or a mapping with the key "
        "'loss'"
    )


def _scalars(output: Sequence[Any]) -> list[int]:
    return [place for place, value in enumerate(output) if _is_scalar(value)]


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and value.is_floating_point()


def _named(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", None)


def _described(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)} and dtype {output.dtype}"
    name = type(output).__name__
    kind = f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"
    if isinstance(output, Mapping):
        word, names = "key", [str(key) for key in output]
    elif dataclasses.is_dataclass(output):
        word, names = "field", [field.name for field in dataclasses.fields(output)]
    elif hasattr(output, "loss"):
        word, names = "field", ["loss"]
    elif isinstance(output, (tuple, list)):
        return f"{kind} of {len(output)} outputs, none of them a floating scalar"
    else:
        return "None" if output is None else kind
    if "loss" not in names:
        return f"{kind} without the {word} 'loss' (it has {', '.join(names) or 'none'})"
    loss = _named(output)
    inner = _described(loss) if isinstance(loss, Tensor) else repr(type(loss).__name__)
    return f"{kind} whose {word} 'loss' is {'None' if loss is None else inner}"
