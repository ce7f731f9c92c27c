"""Attention on one device: dcpc's op beside those of torch and flash-attn, both directions."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_machine import Machine
from dcpc.ops.attention import blocks
from dcpc.ops.attention.spec import Attended, Sight

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKWARD = 2.5  # FLOPs of backward for one of forward: five products for two


@dataclass(frozen=True, slots=True)
class Shape:
    """Of q, k and v, `[batch, heads, length, width]`, causal."""

    batch: int
    heads: int
    length: int
    width: int

    @property
    def flops(self) -> float:
        """Of forward: half of all pairs."""
        return 2.0 * self.batch * self.heads * self.length**2 * self.width


@dataclass(frozen=True, slots=True)
class Speed:
    """One way to compute one shape; None where it cannot.

    Attributes:
        name: of the way.
        shape: what was computed.
        forward: FLOP/s.
        backward: FLOP/s.
    """

    name: str
    shape: Shape
    forward: float | None
    backward: float | None

    def row(self) -> tuple[str | float | None, ...]:
        """A line of the table, in TFLOP/s."""
        s = self.shape
        given = f"{s.batch} x {s.heads} x {s.length} x {s.width}"
        rates = (None if r is None else r / 1e12 for r in (self.forward, self.backward))
        return (f"{given} {self.name}", *rates)


def _torchs(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def _flash_attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    given = (x.transpose(1, 2) for x in (q, k, v))
    out: Tensor = flash_attn_func(*given, causal=True)
    return out.transpose(1, 2)


def _ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scale = 1 / math.sqrt(q.shape[-1])
    out: Tensor = torch.ops.dcpc.attention(q, k, v, scale=scale, after=0)
    return out


class _Blocks(torch.autograd.Function):
    """dcpc's blocks of matmuls, whatever kernel its op would take."""

    @staticmethod
    def forward(ctx, q, k, v):  # type: ignore[no-untyped-def]
        ctx.sight = Sight(1 / math.sqrt(q.shape[-1]), after=0)
        out, lse = blocks.forward(q, k, v, None, None, ctx.sight)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        given = Attended(grad, *ctx.saved_tensors)
        return blocks.backward(given, None, None, ctx.sight)[:3]


def ways(device: torch.device) -> dict[str, Attend]:
    """Returns the ways that a device may have."""
    found: dict[str, Attend] = {"dcpc": _ours, "dcpc blocks": _Blocks.apply}
    named = {"torch flash": SDPBackend.FLASH_ATTENTION, "torch math": SDPBackend.MATH}
    if device.type == "cuda":
        named = {
            "torch flash": SDPBackend.FLASH_ATTENTION,
            "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
            "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
        }
    found |= {name: partial(_torchs, backend) for name, backend in named.items()}
    if flash_attn_func is not None and device.type == "cuda":
        found["flash-attn"] = _flash_attn
    return found


def speeds(
    machine: Machine, shapes: tuple[Shape, ...], dtype: torch.dtype, rounds: int
) -> list[Speed]:
    """Returns the FLOP/s of each way at each shape, medians of rounds in which all take turns."""
    found = []
    for shape in shapes:
        given = [_drawn(shape, dtype, machine.device) for _ in range(4)]
        runs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
        for name, attend in ways(machine.device).items():
            run = _runs(attend, given)
            if run is not None:
                runs[name] = run
        each = [call for pair in runs.values() for call in pair]
        seconds = iter(machine.medians_s(each, rounds))
        for name in ways(machine.device):
            if name not in runs:
                found.append(Speed(name, shape, None, None))
                continue
            forward_s, backward_s = next(seconds), next(seconds)
            rates = shape.flops / forward_s, BACKWARD * shape.flops / backward_s
            found.append(Speed(name, shape, *rates))
    return found


def _drawn(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns `[b, h, n, d]`, laid out (b, n, h, d) as models have it."""
    size = (shape.batch, shape.length, shape.heads, shape.width)
    return torch.randn(size, dtype=dtype, device=device).transpose(1, 2).requires_grad_()


def _runs(
    attend: Attend, given: list[Tensor]
) -> tuple[Callable[[], object], Callable[[], object]] | None:
    """Returns forward and backward alone, None where the device has no such kernel."""
    q, k, v, grad = given
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says at length why a kernel does not fit
            out = attend(q, k, v)
            torch.autograd.grad(out, (q, k, v), grad.detach(), retain_graph=True)
    except RuntimeError:
        return None

    def forward() -> object:
        with torch.no_grad():
            return attend(q, k, v)

    def backward() -> object:
        return torch.autograd.grad(out, (q, k, v), grad.detach(), retain_graph=True)

    return forward, backward
