"""torch's own `context_parallel` and a plain Ulysses on the cases at which libraries differ."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

from benchmarks.attention_layer import KINDS, Kind, example
from dcpc.runtime.groups.local_ranks import run_ranks

TOLERANCE = 1e-10  # in float64
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Row:
    """One case.

    Attributes:
        name: of the row.
        kind: a key of `KINDS`.
        length: of the sequence.
        p: ranks.
    """

    name: str
    kind: str
    length: int
    p: int


ROWS = (
    Row("4 heads, 2 ranks", "4 heads, causal", 64, 2),
    Row("4 heads, 4 ranks", "4 heads, causal", 64, 4),
    Row("1 head, 2 ranks", "1 head, causal", 64, 2),
    Row("1 head, 4 ranks", "1 head, causal", 64, 4),
    Row("6 heads, 4 ranks", "6 heads, causal", 64, 4),
    Row("GQA 8:1, 4 ranks", "GQA 8:1, causal", 64, 4),
    Row("MQA 8:1, packed, 4 ranks", "MQA 8:1, packed", 64, 4),
    Row("61 positions, 4 ranks", "4 heads, causal", 61, 4),
    Row("3 positions, 4 ranks", "4 heads, causal", 3, 4),
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Way = Callable[[list[Tensor], Attend], list[Tensor]]


def dense(kind: Kind, length: int) -> tuple[list[Tensor], Attend]:
    """Returns q, k and v of a case `[1, heads, length, width]`, and its attention of them."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(1, h, length, kind.width) for h in (kind.heads, kind.key_heads, kind.key_heads)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    options: dict[str, Any] = {"is_causal": kind.causal}
    if kind.packed:
        ids = example(kind, length, batch=1)["segments"]
        mask = ids[:, :, None] == ids[:, None]
        mask = mask & torch.ones(length, length, dtype=torch.bool).tril() if kind.causal else mask
        options = {"attn_mask": mask[:, None]}
    if kind.heads != kind.key_heads:
        options["enable_gqa"] = True
    # Looked up at the call: `context_parallel` puts another function there.
    return tensors, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def plainly(tensors: list[Tensor], attend: Attend) -> list[Tensor]:
    """Returns the output and the gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = attend(*leaves)
    out.backward(_direction(out))
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def _direction(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)


def by_context_parallel(tensors: list[Tensor], attend: Attend) -> list[Tensor]:
    """The same by torch.distributed.tensor.experimental.context_parallel, as its tutorial does."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = plainly(tensors, attend)[0]
    q, k, v, direction = (x.clone() for x in (*tensors, _direction(whole)))
    buffers = [q, k, v, direction]
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        out.backward(direction)
        found = [out.detach(), *(x.grad for x in leaves if x.grad is not None)]
        return context_parallel_unshard(mesh, found, [2] * 4)


class _AllToAll(torch.autograd.Function):
    """Equal parts of the first dim to every rank; its transpose is itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sends the parts."""
        return _exchanged(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Sends the gradients back."""
        return _exchanged(grad)


def _exchanged(x: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    dist.all_to_all_single(out, x)
    return out


def _swapped(x: Tensor, cut: int, join: int) -> Tensor:
    """Returns x with one dim cut over the ranks, and the other joined from them."""
    p = dist.get_world_size()
    parts = x.unflatten(cut, (p, x.shape[cut] // p)).movedim(cut, 0)
    return torch.cat(list(_AllToAll.apply(parts)), dim=join)


def by_ulysses(tensors: list[Tensor], attend: Attend) -> list[Tensor]:
    """The same by a plain Ulysses: an all-to-all of heads against rows before and after."""
    p, rank = dist.get_world_size(), dist.get_rank()
    rows, heads = tensors[0].shape[2], [x.shape[1] for x in tensors]
    refused = [f"{n} {what}" for what, n in (("heads", heads[0]), ("key heads", heads[1])) if n % p]
    if rows % p:
        refused.append(f"{rows} positions")
    if refused:
        raise ValueError(f"{' and '.join(refused)} over {p} ranks")
    leaves = [x.chunk(p, 2)[rank].clone().requires_grad_() for x in tensors]
    out = _swapped(attend(*(_swapped(x, 1, 2) for x in leaves)), 2, 1)
    whole = tensors[0].new_empty((1, heads[0], rows, tensors[2].shape[3]))
    out.backward(_direction(whole).chunk(p, 2)[rank])
    found = [out.detach(), *(x.grad for x in leaves if x.grad is not None)]
    return [_gathered(x) for x in found]


def _gathered(x: Tensor) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 2)


WAYS: dict[str, Way] = {"Ulysses": by_ulysses, "context_parallel": by_context_parallel}


def on_rank(rank: int, rows: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Returns what becomes of each (row, way) on one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)  # torch logs a traceback for what it refuses
    return {(row.name, way): _verdict(row, way) for way in WAYS for row in rows}


def _verdict(row: Row, way: str) -> str:
    """Returns "ok", how wrong a way is, or its error's first line."""
    tensors, attend = dense(KINDS[row.kind], row.length)
    wanted = plainly(tensors, attend)
    try:
        found = WAYS[way](tensors, attend)
    except Exception as e:
        lines = str(e).strip().splitlines() or [""]
        return f"{type(e).__name__}: {lines[0]}"
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return f"wrong shapes: {[tuple(x.shape) for x in found]}"
    pairs = zip(found, wanted, strict=True)
    worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return "ok" if worst < TOLERANCE else f"wrong by {worst:.1e}"


def verdicts(rows: Sequence[Row] = ROWS) -> dict[tuple[str, str], str]:
    """Returns what becomes of each (row, way), the worst of its ranks."""
    found: dict[tuple[str, str], str] = {}
    for p in sorted({row.p for row in rows}):
        mine = [row for row in rows if row.p == p]
        each = run_ranks(on_rank, p, mine, timeout_s=TIMEOUT_S, fork=True)
        for key in each[0]:
            found[key] = max((texts[key] for texts in each), key=lambda text: text != "ok")
    return found
