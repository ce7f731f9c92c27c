"""Attention as dcpc computes it on a device, forward and backward, against float64 math.

Cases are whole sequences, pieces of a split (a later piece, a zigzag piece), windows, grouped
heads, hidden keys, a bias and packed sequences. Each row names the kernels of torch that ran, read
off its profiler and not off dcpc's table: blocks of matmuls have none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import dcpc  # noqa: F401 - registers its ops
from benchmarks.gpu_checks.rows import Row, Setting, error, same_kind, tried

# Largest norm of an error over the norm of the result, of out and of each gradient. A unit in the
# last place is 3.9e-3 of bfloat16 and 4.9e-4 of float16; weights are rounded to it once more.
LIMITS = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5}


@dataclass(frozen=True, slots=True)
class Case:
    """One attention.

    Attributes:
        name: what it is.
        heads: of queries, then of keys.
        queries: how many.
        keys: how many.
        sight: fields of `dcpc.ops.attention.spec.Sight` but the scale.
        hides: "" or "keep", "bias", "segment", "segments": the tensor that hides keys or adds to
            scores; segments are short, and each sample has its own.
    """

    name: str
    heads: tuple[int, int]
    queries: int
    keys: int
    sight: dict[str, Any] = field(default_factory=dict)
    hides: str = ""

    def tensor(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the argument that hides keys, by name."""
        if self.hides == "keep":
            return {"keep": torch.arange(self.keys, device=device)[None] < self.keys - 9}
        if self.hides == "bias":
            size = (2, self.heads[0], self.queries, self.keys)
            return {"mask": torch.randn(size, device=device, dtype=dtype)}
        if self.hides == "segment":
            return {"segment": torch.arange(self.keys, device=device)[None] // 70}
        if self.hides == "segments":
            lengths = torch.tensor([[30], [7]], device=device)
            return {"segment": torch.arange(self.keys, device=device) // lengths}
        return {}


CAUSAL = {"after": 0}
CASES = (
    Case("causal", (4, 4), 256, 256, CAUSAL), Case("all keys", (4, 4), 200, 333),
    Case("causal, grouped heads", (8, 2), 129, 129, CAUSAL),
    Case("causal, last piece", (4, 4), 64, 320, {**CAUSAL, "start": 256}),
    Case("causal, middle piece", (4, 2), 100, 320, {**CAUSAL, "start": 100}),
    Case("causal, zigzag piece", (4, 4), 80, 320, {**CAUSAL, "turn": 40, "second": 280}),
    Case("causal, keys that nobody sees", (4, 4), 100, 130, CAUSAL),
    Case("window", (4, 4), 256, 256, {**CAUSAL, "before": 31}),
    Case("window, middle piece", (4, 4), 100, 320, {**CAUSAL, "before": 50, "start": 100}),
    Case("window both ways", (4, 4), 200, 200, {"before": 20, "after": 20}),
    Case("one query", (4, 4), 1, 300), Case("few positions", (2, 2), 15, 15),
    Case("hidden keys", (4, 4), 128, 128, hides="keep"),
    Case("bias", (4, 4), 96, 128, hides="bias"),
    Case("packed", (4, 4), 210, 210, CAUSAL, hides="segment"),
    Case("packed, window", (4, 4), 210, 210, {"before": 9, "after": 5}, hides="segment"),
    Case("packed, grouped heads", (8, 2), 211, 211, CAUSAL, hides="segments"),
)  # fmt: skip


def attention(setting: Setting) -> Iterator[Row]:
    """Yields a row for each case, width and dtype."""
    on_cpu = setting.device.type == "cpu"
    dtypes = (torch.float32,) if on_cpu else tuple(LIMITS)
    # 72: STDiT-XL's. No GPU kernel takes 20.
    widths = (64,) if setting.quick or on_cpu else (64, 72, 128, 256)
    for dtype in dtypes:
        for width in widths:
            for case in CASES:
                name = f"{case.name}, {str(dtype).removeprefix('torch.')}, width {width}"
                yield from tried(name, partial(_compared, setting, case, dtype, width, name))


def _compared(
    setting: Setting, case: Case, dtype: torch.dtype, width: int, name: str
) -> Iterator[Row]:
    torch.manual_seed(0)
    q, k, v = (
        _drawn(heads, length, width, dtype, setting.device)
        for heads, length in zip(
            (case.heads[0], case.heads[1], case.heads[1]), (case.queries, case.keys, case.keys),
            strict=True,
        )
    )  # fmt: skip
    hides = case.tensor(setting.device, dtype)
    scale = 1 / math.sqrt(width)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        out = torch.ops.dcpc.attention(q, k, v, **hides, scale=scale, **case.sight)
        grad = torch.randn(out.shape, dtype=dtype, device=setting.device)
        got = torch.autograd.grad(out, (q, k, v), grad)
    for what, x, like in zip(("out", "dq", "dk", "dv"), (out, *got), (q, q, k, v), strict=True):
        same_kind(x, like, what)
    if not setting.numbers:
        yield {**setting.judged(name, True), "kernels": _kernels(seen)}
        return
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = math_attention(*exact, scale, case.sight, hides)
    wanted = (want, *torch.autograd.grad(want, exact, grad.double()))
    errors = [error(x, y) for x, y in zip((out, *got), wanted, strict=True)]
    told = {f"error_{n}": e for n, e in zip(("out", "dq", "dk", "dv"), errors, strict=True)}
    ok = max(errors) < LIMITS[dtype]
    yield setting.judged(name, ok, **told, limit=LIMITS[dtype], kernels=_kernels(seen))


def _drawn(heads: int, length: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns `[2, heads, length, width]`, laid out as models have it: heads after positions."""
    x = torch.randn(2, length, heads, width, device=device, dtype=dtype)
    return x.transpose(1, 2).requires_grad_()


def math_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    sight: dict[str, Any],
    hides: dict[str, Tensor],
) -> Tensor:
    """Returns attention by products of whole matrices; 0 for a query that sees no key."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    rows, columns = (torch.arange(x.shape[2], device=q.device) for x in (q, k))
    positions = rows + sight.get("start", 0)
    if "turn" in sight:
        turn = sight["turn"]
        positions = torch.where(rows < turn, positions, rows - turn + sight["second"])
    distance = columns - positions[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if "after" in sight:
        seen = seen & (distance <= sight["after"])
    if "before" in sight:
        seen = seen & (distance >= -sight["before"])
    if "keep" in hides:
        seen = seen & hides["keep"]
    if "segment" in hides:
        of_keys = hides["segment"][:, None, None]
        seen = seen & (of_keys == of_keys[..., positions].mT)
    scores = scale * (q @ k.transpose(2, 3))
    if "mask" in hides:
        scores = scores + hides["mask"].double()
    scores = scores.masked_fill(~seen, -torch.inf)
    anything = seen.any(-1, keepdim=True)
    weights = torch.where(anything, scores, 0.0).softmax(-1)
    return torch.where(anything, weights, 0.0) @ v


def _kernels(seen: profile) -> list[str]:
    """Returns torch's attention kernels that ran."""
    names = {event.key for event in seen.key_averages()}
    return sorted(n.removeprefix("aten::") for n in names if n.startswith("aten::_") and "att" in n)
