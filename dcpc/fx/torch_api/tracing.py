"""Names that dcpc replaces in torch while it captures a model."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from dcpc.fx.torch_api.functions import ASKED
from dcpc.fx.torch_api.patched import ABSENT, TorchName, calls, has_owner, takes


def _ones(*size: int, learns: bool = False) -> torch.Tensor:
    return torch.ones(size, device="cpu", requires_grad=learns)


@torch.inference_mode(False)
@torch.enable_grad()
def _differentiate() -> None:
    x = _ones(learns=True)
    torch.autograd.grad(x * 2, x)


@torch.inference_mode(False)
@torch.enable_grad()
def _make_again() -> None:
    checkpoint(torch.sin, _ones(learns=True), use_reentrant=True)


def _add_fakes() -> None:
    with FakeTensorMode():
        _ones(2) + 1


def _is_engine(outputs: Any, gradients: Any, keep: Any, create: Any, *_: Any, **more: Any) -> bool:
    return keep is False and create is False and more.get("accumulate_grad") is False


def _is_checkpoint(function: Any, preserve: Any, *operands: Any) -> bool:
    return function is torch.sin and preserve is True and len(operands) == 1


def _is_dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> bool:
    return isinstance(mode, FakeTensorMode) and isinstance(args, tuple)


def _says(asked: Callable[[], bool]) -> Callable[[TorchName], str]:
    """Returns a probe of a flag that a public function of torch reads."""

    def probe(name: TorchName) -> str:
        told = []
        for value in (True, False):
            with name.holding(value):
                told.append(asked())
        return "" if told == [True, False] else f"{told[0]} of a flag that is True"

    return probe


class _Asking(TorchFunctionMode):
    """Passes every call on, as `Capturable` does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


_weighted: Callable[..., Any] = F.l1_loss


@cache
def drops_weights() -> bool:
    """Whether `F.l1_loss` drops its weights when it passes a call on to a mode."""
    with _Asking():
        found = _weighted(_ones(2), _ones(2) * 2, weight=_ones(2) * 3, reduction="sum")
    return float(found) != 6


@cache
def fixes_soft_targets() -> bool:
    """Whether `F.cross_entropy` with probabilities fixes the number of rows."""
    dims = [DimDynamic.DYNAMIC, DimDynamic.STATIC]
    mode = FakeTensorMode(shape_env=(env := ShapeEnv()))
    rows = mode.from_tensor(_ones(5, 3), symbolic_context=StatelessSymbolicContext(dims))
    with mode:
        F.cross_entropy(rows, rows)
    return bool(env.guards)


def _rounds_down(name: TorchName) -> str:
    """Returns how torch's integer quotient differs from rounding down, "" if it does not."""
    found = [-4, 3] if name.own is ABSENT else [name.own(-7, 2), name.own(7, 2)]
    return "" if found == [-4, 3] else f"{found} for -7 / 2 and 7 / 2"


def _swaps_code(name: TorchName) -> str:
    def probed(input, target, size_average=None, reduce=None, reduction="mean", weight=None):  # type: ignore[no-untyped-def]
        return "probed"

    with name.holding(probed.__code__):
        found = _weighted(_ones(2), _ones(2), weight=_ones(2))
    return "" if found == "probed" else "a result of other code"


ENGINE = TorchName(
    "torch.autograd",
    "_engine_run_backward",
    calls(_differentiate, _is_engine),
    "a gradient that forward takes cannot be told from one that it differentiates again",
    needed=True,
)
CHECKPOINT = TorchName(
    "torch.utils.checkpoint",
    "CheckpointFunction.apply",
    calls(_make_again, _is_checkpoint),
    "checkpoint(use_reentrant=True) within a model is refused",
)
DISPATCH = TorchName(
    "torch._subclasses.fake_tensor",
    "FakeTensorMode.dispatch",
    calls(_add_fakes, _is_dispatch),
    "a trace takes longer",
)
COMPILING = TorchName(
    "torch.compiler",
    "_is_compiling_flag",
    _says(torch.compiler.is_compiling),
    "a model that asks whether it is compiled may be refused",
)
EXPORTING = TorchName(
    "torch.compiler",
    "_is_exporting_flag",
    _says(torch.compiler.is_exporting),
    "a model that asks whether it is exported may be refused",
)
OP_TYPES = TorchName(
    "torch._export.verifier",
    "Verifier.allowed_op_types",
    takes("self"),
    "a model that takes math.log or the like of a length is refused",
)
SUGGESTIONS = TorchName(
    "torch.fx.experimental.symbolic_shapes",
    "DimConstraints.prettify_results",
    takes(
        "self",
        "original_signature",
        "dynamic_shapes",
        "constraint_violation_error",
        "forced_specializations",
    ),
    "a model that pads lengths to pairs may be refused",
)
SPECIALISED = TorchName(
    "torch.fx.experimental.symbolic_shapes",
    "ShapeEnv._set_replacement",
    takes("self", "a", "tgt", "msg"),
    "the report does not say which line takes a dim for a number",
)
QUOTIENTS = {
    name: TorchName(
        "torch.utils._sympy.reference",
        f"PythonReferenceAnalysis.{name}",
        has_owner,
        "a model that rounds quotients of lengths may be refused",
        added=True,
    )
    for name in ("int_truediv", "floor_to_int", "ceil_to_int", "round_to_int")
}
PRINT = TorchName(
    "torch.export._trace",
    "print",
    has_owner,
    "torch prints a graph where it cannot capture a model",
    added=True,
)
POOLED = TorchName(
    "torch._meta_registrations",
    "div_rtn",
    _rounds_down,
    "a model that pools may be refused",
    added=True,
)
L1_CODE = TorchName(
    "torch.nn.functional",
    "l1_loss.__code__",
    _swaps_code,
    "a weighted l1_loss would lose its weights",
    needed=True,
)


def open_pools() -> AbstractContextManager[bool]:
    """Makes torch compute a pool's output size by a quotient alone.

    torch 2.11 also compares the remainder with 0, which fixes whether the length is even.
    """
    return POOLED.put(operator.floordiv)


def try_names() -> None:
    """Probes each name that a trace replaces, while warnings are still shown.

    Raises:
        TraceError: a probe fails for a name that is needed.
    """
    own = (ENGINE, CHECKPOINT, DISPATCH, COMPILING, EXPORTING, OP_TYPES, SUGGESTIONS, PRINT, ASKED)
    rarer = (SPECIALISED, POOLED, *QUOTIENTS.values(), *((L1_CODE,) if drops_weights() else ()))
    for name in (*own, *rarer):
        name.usable()
