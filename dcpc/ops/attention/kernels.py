"""Chooses the kernel of an attention, by each kernel's requirements on its tensors.

Fused kernels are called below torch's dispatch, where torch would check their arguments: with wrong
arguments a kernel reads foreign memory, or returns NaN. So every caller follows the tables here.
Requirements that no copy can meet decide `kernel_name` and, for a GPU's kernels, `gpu_kernel`,
which the profile also uses to count bytes; strides decide `laid`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from dcpc.ops.attention.spec import Sight

HALVES = (torch.bfloat16, torch.float16)
GPU_DEVICE = "cuda"  # type of the devices that `GPU_KERNELS` are for
# Of so many queries and keys at most the CPU's kernel, with a mask of the window, takes less time
# than blocks: a third less for 34, as long for 160, of heads of 64 (both ways, one thread).
SHORT = 128


@dataclass(frozen=True, slots=True)
class Demands:
    """The requirements of a kernel.

    Beside this all ask for the sizes that `check_sizes` checks, for elements of the last dim that
    lie together, and for rows that do not overlap.

    Attributes:
        dtypes: dtypes of queries, keys and values, which must be equal.
        widest: largest width of a head in elements, None: any.
        multiple: number of which the width of a head must be a multiple.
        aligned_bytes: alignment of rows in memory.
        whole_scales: whether scores are scaled by a number above 0 even where none is hidden.
            Hidden scores are -inf before scaling, so with them the number must be above 0 in any
            case.
    """

    dtypes: tuple[torch.dtype, ...]
    widest: int | None
    multiple: int
    aligned_bytes: int
    whole_scales: bool


DEMANDS = {
    # Source: aten/src/ATen/native/cpu/FlashAttentionKernel.cpp and measured, torch 2.13. Causal
    # attention fills scores with -inf, and scales them then. Gradients, logsumexp and masks may lie
    # in any way; rows that overlap are refused in half precision by oneDNN.
    "flash": Demands((torch.float64, torch.float32, *HALVES), None, 1, 1, False),
    # Requirements common to all `GPU_KERNELS`: loads are of 16 bytes.
    "cuda": Demands((torch.float32, *HALVES), None, 1, 16, True),
}

Capability = tuple[int, int]  # of a GPU, as NVIDIA counts its generations


class OnGpu(NamedTuple):
    """The facts by which a GPU's kernel for an attention without a mask is chosen.

    Attributes:
        dtype: dtype of queries, keys and values.
        width: width of a head in elements, equal for queries, keys and values.
        sight: limits by position.
        capability: compute capability of the GPU.
    """

    dtype: torch.dtype
    width: int
    sight: Sight
    capability: Capability


@dataclass(frozen=True, slots=True)
class GpuKernel:
    """A fused attention kernel of GPUs.

    Attributes:
        name: "flash" or "efficient".
        demands: requirements on its tensors.
        windows: whether it supports limits of the keys before or after a query.
        since: lowest compute capability.
        untrained: first and last width for which some GPUs lack its backward.
        lacking: ranges of compute capabilities of these GPUs.
    """

    name: str
    demands: Demands
    windows: bool
    since: Capability
    untrained: tuple[int, int] = (0, 0)
    lacking: tuple[tuple[Capability, Capability], ...] = ()

    def takes(self, asked: OnGpu) -> bool:
        """Returns whether it computes an attention and its gradients."""
        sight, asks, width = asked.sight, self.demands, asked.width
        bytes_of_head = width * asked.dtype.itemsize
        fits = asks.widest is None or width <= asks.widest
        fits = fits and width % asks.multiple == 0 and bytes_of_head % asks.aligned_bytes == 0
        seen = self.windows or (sight.before is None and sight.after in (None, 0))
        first, last = self.untrained
        lacks = any(low <= asked.capability <= high for low, high in self.lacking)
        trains = not (first <= width <= last and lacks)
        new = asked.capability >= self.since
        return asked.dtype in asks.dtypes and fits and seen and new and trains


# THE table: the first row that takes an attention computes it, else blocks do. "flash" may be
# cuDNN's kernel (`cuda.by_cudnn`), which holds no more bytes.
GPU_KERNELS = (
    # Source: flash-attention, csrc/flash_attn (flash_api.cpp; softmax.h: the largest score is
    # looked for before scaling), of which torch has a copy; widths without a backward: torch's
    # sdp_utils.cpp (`head_dim_gt192_constraints_on_sm86_89_or_120`).
    GpuKernel(
        "flash", Demands(HALVES, 256, 8, 16, True), windows=True, since=(8, 0),
        untrained=(193, 224), lacking=(((8, 6), (8, 9)), ((12, 0), (99, 0))),
    ),
    # Source: aten/src/ATen/native/transformers/cuda/mem_eff_attention (kernel_forward.h,
    # kernel_backward.h): products of float32 by three of TF32; causal counted from the last query.
    GpuKernel(
        "efficient", Demands((torch.float32, *HALVES), None, 4, 16, True),
        windows=False, since=(8, 0),
    ),
)  # fmt: skip


@lru_cache(4096)
def gpu_kernel(asked: OnGpu) -> str:
    """Returns the kernel of an attention on a GPU: "flash", "efficient" or "blocks".

    `cuda.py` also leaves an attention to the blocks where queries see no key at all, and where
    causal ones lie beyond the last key; no piece of a split does.
    """
    return next((row.name for row in GPU_KERNELS if row.takes(asked)), "blocks")


def has_no_wide_kernel(q: Tensor) -> bool:
    """Returns whether attention of these queries may run another kernel than in float64."""
    return q.device.type == GPU_DEVICE and any(q.dtype in r.demands.dtypes for r in GPU_KERNELS)


def kernel_name(
    device: str,
    same_widths: bool,
    mask: torch.dtype | None,
    has_keep: bool,
    sight: Sight,
    has_segment: bool = False,
) -> str:
    """Returns the kernel of an attention, "flash", "cuda" or "blocks", without reading sizes.

    "flash" is the CPU's; "cuda" means the choice of `gpu_kernel`, which may be blocks. Packed
    sequences are computed one at a time by "flash" and "cuda", but by blocks if they are very
    short.

    Args:
        device: device type of the tensors.
        same_widths: whether keys and values have equal widths.
        mask: dtype of the mask, None without one.
        has_keep: whether some keys are hidden from all queries.
        sight: limits of the op; the positions of its queries do not matter.
        has_segment: whether rows hold several sequences.
    """
    scale, before, after = sight.scale, sight.before, sight.after
    if device == GPU_DEVICE and mask is None and not has_keep and same_widths:
        return "cuda" if _scales("cuda", scale, sight.banded) else "blocks"
    if device != "cpu" or not same_widths or before is not None or after not in (None, 0):
        return "blocks"
    if mask is not None and (has_keep or has_segment):
        return "blocks"
    native = sight.empty == "zero" or (mask is None and not has_keep)
    return "flash" if native and _scales("flash", scale, sight.banded) else "blocks"


def masks_window(device: str, same_widths: bool, hidden: bool, sight: Sight) -> bool:
    """Returns whether "flash" may compute a window by a mask, if there are few queries and keys."""
    alone = device == "cpu" and same_widths and not hidden and sight.banded
    return alone and _scales("flash", sight.scale, True)


def _scales(kernel: str, scale: float, hides: bool) -> bool:
    """Returns whether a kernel supports this scale; NaN counts as not above 0."""
    return scale > 0 or not (hides or DEMANDS[kernel].whole_scales)


def takes(kernel: str, q: Tensor) -> bool:
    """Returns whether a kernel supports the dtype and head width of these queries."""
    asks, width = DEMANDS[kernel], q.shape[-1]
    narrow = asks.widest is None or width <= asks.widest
    return q.dtype in asks.dtypes and narrow and width % asks.multiple == 0


def laid(kernel: str, x: Tensor) -> Tensor:
    """Returns a tensor `[b, h, s, d]`, or a copy with strides that the kernel supports."""
    if _lies_well(DEMANDS[kernel], x):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _lies_well(asks: Demands, x: Tensor) -> bool:
    *outer, rows, width = x.shape
    together = width == 1 or x.stride(-1) == 1
    apart = rows == 1 or x.stride(-2) >= width
    if asks.aligned_bytes == 1:
        return together and apart
    starts = [x.data_ptr()]
    for size, stride in zip((*outer, rows), x.stride()[:-1], strict=True):
        starts += [stride * x.itemsize] if size > 1 else []
    return together and apart and not any(start % asks.aligned_bytes for start in starts)


def added_dtype(mask: torch.dtype, query: torch.dtype) -> torch.dtype:
    """Returns the dtype in which "flash" adds a mask to scores.

    It is float32 for queries in half precision with a float32 mask, else the queries' dtype: for
    float64 queries the kernel would read a float32 mask as float64.
    """
    return mask if mask == torch.float32 and query in HALVES else query


def check_sizes(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> None:
    """Checks that the sizes and dtypes of queries, keys, values and a mask match."""
    queries, keys, values = q.shape, k.shape, v.shape
    four = len(queries) == len(keys) == len(values) == 4
    assert four, f"attention of {_sizes(q, k, v)}: not of four dims each"
    same = queries[0] == keys[0] and keys[:3] == values[:3] and queries[3] == keys[3]
    expected = "[b, h, s, d], [b, g, t, d] and [b, g, t, e] expected"
    assert same, f"attention of {_sizes(q, k, v)}: {expected}"
    groups = keys[1] and queries[1] % keys[1] == 0
    assert groups or not queries[1], f"attention of {_sizes(q, k, v)}: query heads are no multiple"
    rows = queries[0] if mask is None else mask.shape[0]
    shared = rows and queries[0] % rows == 0
    assert shared or not queries[0], (
        f"a mask of {rows} samples for {queries[0]}: they share no rows"
    )
    alike = q.dtype == k.dtype == v.dtype
    assert alike, f"attention of queries, keys and values of {q.dtype}, {k.dtype} and {v.dtype}"


def _sizes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"queries {list(q.shape)}, keys {list(k.shape)}, values {list(v.shape)}"
