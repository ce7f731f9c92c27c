"""Attention on one device: dcpc's op beside those of torch and flash-attn, both directions.

On an H100 plain `scaled_dot_product_attention` takes cuDNN's kernel first; it has a row of its own.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu_checks.machine import Machine
from benchmarks.gpu_checks.rows import Row, Setting, not_run, tried
from dcpc.ops.attention import blocks
from dcpc.ops.attention.spec import Attended, Sight

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
LONGEST_OF_BLOCKS = 4096
BACKWARD = 2.5  # FLOPs of backward for one of forward: five products for two


@dataclass(frozen=True, slots=True)
class Shape:
    """Of q, k and v, `[batch, heads, length, width]`, causal."""

    batch: int
    heads: int
    length: int
    width: int

    @property
    def text(self) -> str:
        """The shape as a row has it."""
        return f"attention {self.batch} x {self.heads} x {self.length} x {self.width}"

    @property
    def flops(self) -> float:
        """Of forward: half of all pairs."""
        return 2.0 * self.batch * self.heads * self.length**2 * self.width


SHAPES = tuple(Shape(16_384 // n, 16, n, 128) for n in (1024, 4096, 16_384))
TINY = (Shape(1, 2, 128, 16),)


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
            "torch flash": SDPBackend.FLASH_ATTENTION, "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
            "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
        }  # fmt: skip
    found |= {name: partial(_torchs, backend) for name, backend in named.items()}
    if flash_attn_func is not None and device.type == "cuda":
        found["flash-attn"] = _flash_attn
    return found


def speeds(setting: Setting) -> Iterator[Row]:
    """Yields the FLOP/s of each way at each shape, medians of rounds in which all take turns."""
    shapes, dtype = (SHAPES if setting.card else TINY), setting.dtypes[-1]
    for shape in shapes:
        yield from tried(shape.text, partial(_speeds_of, setting, shape, dtype))


def _speeds_of(setting: Setting, shape: Shape, dtype: torch.dtype) -> Iterator[Row]:
    machine = Machine(setting.device)
    given = [_drawn(shape, dtype, machine.device) for _ in range(4)]
    runs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for name, attend in ways(machine.device).items():
        slow = name == "dcpc blocks" and shape.length > LONGEST_OF_BLOCKS
        run = None if slow else _runs(attend, given)
        if run is None:
            why = "takes seconds" if slow else "torch has no such kernel here"
            yield not_run(f"{shape.text}, {name}", why)
        else:
            runs[name] = run
    each = [call for pair in runs.values() for call in pair]
    seconds = iter(machine.medians_s(each, 9 if setting.card else 1))
    for name in runs:
        forward, backward = shape.flops / next(seconds), BACKWARD * shape.flops / next(seconds)
        rates = {"forward_flops_per_s": forward, "backward_flops_per_s": backward}
        yield setting.measured(f"{shape.text}, {name}", **rates)


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
