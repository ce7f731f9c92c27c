"""Random ops whose numbers are known: the plain model and a graph draw alike.

torch's dropout draws from a hidden stream, dcpc's from a seed, so a loss with dropout cannot be
compared. Under `KnownDraws` each draw of the plain model is a fixed function of the tensor's shape,
and `known_uniform` / `known_normal` are the same function for `dcpc::uniform` and `dcpc::normal`.
Dropout keeps where the number is at least p, so `bernoulli` of a number is 1 where it is at least
1 - p; of a tensor it is 1 where the number is below the element.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_GOLDEN = (math.sqrt(5) - 1) / 2
# One number for all places, for ranks whose pieces of a tensor are compared with the whole.
_ALIKE = 0.7548776662


def known_uniform(size: Sequence[int], alike: bool, dtype: torch.dtype, device: Any) -> Tensor:
    """Returns numbers in [0, 1) that depend on the place in the tensor, or are all alike."""
    if alike:
        return torch.full(tuple(size), _ALIKE, dtype=dtype, device=device)
    count = torch.arange(1, math.prod(size) + 1, dtype=torch.float64, device=device)
    return (count * _GOLDEN).frac().to(dtype).reshape(tuple(size))


def known_normal(size: Sequence[int], alike: bool, dtype: torch.dtype, device: Any) -> Tensor:
    """Returns numbers between -1.7 and 1.7, of the same places."""
    return (known_uniform(size, alike, dtype, device) - 0.5) * math.sqrt(12)


def known_draws(alike: bool) -> dict[Any, Callable[..., Tensor]]:
    """Returns, for each random op of dcpc's, a function that draws known numbers in its place.

    With `alike` all numbers of a tensor are equal.
    """

    def drawn(known: Callable[..., Tensor], size: Sequence[int], *place: Any) -> Tensor:
        return known(size, alike, *place[3:])  # without seed, salt and index

    ops = torch.ops.dcpc
    known = {ops.uniform.default: known_uniform, ops.normal.default: known_normal}
    return {op: partial(drawn, function) for op, function in known.items()}


class KnownParts(TorchDispatchMode):
    """Every random op of dcpc's graphs draws the numbers that `KnownDraws` has the model draw."""

    def __init__(self, alike: bool) -> None:
        """Takes whether the numbers of one tensor are all alike."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = known_draws(alike)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op; one that draws numbers is replaced."""
        return self._known.get(func, func)(*args, **(kwargs or {}))


class KnownDraws(TorchDispatchMode):
    """Every random op of the plain model draws known numbers."""

    def __init__(self, alike: bool) -> None:
        """Takes whether the numbers of one tensor are all alike."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.alike, self.drew = alike, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op; one that draws numbers is replaced."""
        if torch.Tag.nondeterministic_seeded not in func.tags or _is_certain(func, args, kwargs):
            return func(*args, **(kwargs or {}))
        self.drew += 1
        rule = _RULES.get(func)
        if rule is None:
            raise NotImplementedError(f"{func} draws numbers that are not known")
        return rule(self.alike, args, kwargs or {})


def _is_certain(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of an op that may draw numbers draws none: attention without dropout."""
    named = zip((a.name for a in func._schema.arguments), args, strict=False)
    given = {a.name: a.default_value for a in func._schema.arguments if a.name == "dropout_p"}
    given |= {**dict(named), **(kwargs or {})}
    return given.get("dropout_p", 1.0) == 0.0 and func not in _RULES


def _uniform_like(x: Tensor, alike: bool) -> Tensor:
    dtype = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    return known_uniform(x.shape, alike, dtype, x.device)


def _dropout_mask(alike: bool, args: Any, kwargs: Any) -> Tensor:
    """`noise.bernoulli_(1 - p)`, which is how torch's dropout draws."""
    x, keep = args[0], args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    found: Tensor = x.copy_(_uniform_like(x, alike) >= 1 - keep)
    return found


def _native_dropout(alike: bool, args: Any, kwargs: Any) -> tuple[Tensor, Tensor]:
    x, p, train = args
    if not train:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    kept = _uniform_like(x, alike) >= p
    return torch.where(kept, x * (1.0 / (1.0 - p) if p < 1 else 0.0), 0.0), kept


def _bernoulli(alike: bool, args: Any, kwargs: Any) -> Tensor:
    """`bernoulli(x)`, and `bernoulli(x, p)`, which in place is how torch's dropout draws."""
    x = args[0]
    p = args[1] if len(args) > 1 else kwargs.get("p")
    drawn = _uniform_like(x, alike)
    found: Tensor = (drawn < x if p is None else drawn >= 1 - p).to(x.dtype)
    return found


def _made(known: Any, like: bool) -> Any:
    def rule(alike: bool, args: Any, kwargs: Any) -> Tensor:
        size = args[0].shape if like else args[0]
        dtype = kwargs.get("dtype") or (args[0].dtype if like else torch.get_default_dtype())
        device = kwargs.get("device") or (args[0].device if like else "cpu")
        found: Tensor = known(size, alike, dtype, device)
        return found

    return rule


_RULES: dict[Any, Any] = {
    aten.bernoulli_.float: _dropout_mask,
    aten.native_dropout.default: _native_dropout,
    aten.bernoulli.default: _bernoulli,
    aten.bernoulli.p: _bernoulli,
    aten.rand.default: _made(known_uniform, like=False),
    aten.rand_like.default: _made(known_uniform, like=True),
    aten.randn.default: _made(known_normal, like=False),
    aten.randn_like.default: _made(known_normal, like=True),
}
