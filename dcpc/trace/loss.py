"""The loss in what a model's forward returned: one rule, for the trace and for the plain model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from dcpc.errors import TraceError


def find_loss(output: Any) -> Tensor:
    """Returns the scalar loss in what a model's forward returned.

    Args:
        output: a floating scalar tensor; or a mapping or dataclass with a `loss`; or a sequence
            whose first floating scalar is the loss.

    Raises:
        TraceError: there is none.
    """
    if isinstance(output, (tuple, list)) and not hasattr(output, "loss"):
        candidates = [output[place] for place in _scalars(output)]
    else:
        candidates = [_named(output)]
    for value in candidates:
        if isinstance(value, Tensor) and _is_scalar(value):
            return value
    raise TraceError(
        f"the model's forward returned {_described(output)}; expected a floating scalar loss, or a "
        "mapping, dataclass or tuple that has one; return the loss, alone or under the name "
        "'loss' (for a transformers model pass labels)"
    )


def loss_choice(output: Any) -> str:
    """Returns which of a sequence's floating scalars is taken as the loss; "" if it has just one.

    Args:
        output: in which `find_loss` finds one.
    """
    if not isinstance(output, (tuple, list)) or hasattr(output, "loss"):
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
