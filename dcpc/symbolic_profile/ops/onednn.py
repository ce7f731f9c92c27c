"""Transient memory of oneDNN's convolutions: an upper bound for any x86 processor.

oneDNN picks a kernel by processor, dtype and sizes. Each copies its operands into a layout of its
own and takes a scratchpad, whose size its source tells: `init_scratchpad` and
`gemm_convolution_utils.cpp` of src/cpu in oneDNN 3.12, which torch 2.13 is built with. The bound is
the largest of them. It is compared with the allocator under several of oneDNN's instruction sets
in `tests/symbolic_profile/ops/test_convolutions.py`.

A transposed convolution is the gradient of a convolution whose input is its output.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from dcpc.symbolic_profile.polynomials import FUNCTIONS, OfIntegers, each_point

BLOCK = 16  # channels of a block
WIDE_BLOCK = 32  # channels of a block of weights in half precision
TILE = 32  # elements of a row that an AMX tile loads
PAGE_BYTES = 4096
FEW_CHANNELS = 16  # fewer are laid out with all elements of a window
WIDEST_BLOCK = 64  # channels of the widest block of outputs
FLOAT_BYTES = 4


@functools.cache
def multiplies(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN multiplies in a dtype of half precision here, as torch asks it."""
    asked = {
        torch.bfloat16: "_is_mkldnn_bf16_supported",
        torch.float16: "_is_mkldnn_fp16_supported",
    }
    return dtype in asked and bool(getattr(torch.ops.mkldnn, asked[dtype])())


@functools.cache
def multiplies_tiles() -> bool:
    """Returns whether it multiplies tiles of bfloat16 here: the processor has AMX."""
    return multiplies(torch.bfloat16) and bool(torch.cpu._is_amx_tile_supported())


def halves() -> str:
    """Returns in words which half-precision dtypes oneDNN computes on this processor."""
    tiles = " by tiles of AMX" if multiplies_tiles() else ""
    known = {"bfloat16" + tiles: torch.bfloat16, "float16": torch.float16}
    found = [name for name, dtype in known.items() if multiplies(dtype)]
    return f"computes {' and '.join(found)}" if found else "computes none"


class ConvolutionBytes(OfIntegers):
    """Bytes that oneDNN takes for a convolution, see `onednn_bytes`."""


@dataclass(frozen=True, slots=True)
class Window:
    """Sizes of a convolution from `src` to `dst`.

    Attributes:
        item_bytes: bytes of an element.
        threads: threads that it runs on.
        samples: size of the batch.
        groups: number of groups of channels.
        src: channels of a group of the input, then spatial sizes.
        dst: channels of a group of the output, then spatial sizes.
        kernel: spatial sizes.
        strides: steps of the kernel.
        pads: rows on each side.
        dilations: dilations of the kernel.
    """

    item_bytes: int
    threads: int
    samples: int
    groups: int
    src: tuple[int, ...]
    dst: tuple[int, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]

    @property
    def half(self) -> bool:
        """Whether elements are numbers in half precision."""
        return self.item_bytes < FLOAT_BYTES

    @property
    def spans(self) -> tuple[int, ...]:
        """Rows that a window reaches over in each dim."""
        return tuple((k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True))

    @property
    def weights(self) -> int:
        """Elements of the weight in whole blocks."""
        (i, o), each = (self.src[0], self.dst[0]), self.groups * math.prod(self.kernel)
        if self.half:
            return each * _wide(i) * _wide(o)
        return each * max(_up(i, BLOCK) * _up(o, BLOCK), _wide(i) * o, i * _wide(o))

    def bytes_of(self, sizes: tuple[int, ...]) -> int:
        """Returns the bytes of `src` or `dst` in whole blocks."""
        channels = _up(self.groups * sizes[0], BLOCK)
        return self.samples * channels * math.prod(sizes[1:]) * self.item_bytes

    def dense(self, sizes: tuple[int, ...]) -> int:
        """Returns the bytes of `src` or `dst` as they are."""
        return self.samples * self.groups * math.prod(sizes) * self.item_bytes

    @property
    def regular(self) -> bool:
        """Whether every processor with AVX2 has a kernel that takes it as it is.

        Others are computed as products of matrices of windows.
        """
        if self.groups > 1 or len(self.kernel) > 2 or any(d > 1 for d in self.dilations):
            return False
        sizes = zip(self.kernel, self.strides, self.pads, strict=True)
        inside = all(2 * p <= k and (s < k or s == k == 1) for k, s, p in sizes)
        return inside and self.src[0] % BLOCK == self.dst[0] % BLOCK == 0

    def flipped(self) -> Window:
        """Returns the convolution from `dst` to `src` that the input's gradient is at stride 1."""
        pads = tuple(max(0, span - 1 - p) for span, p in zip(self.spans, self.pads, strict=True))
        return replace(self, src=self.dst, dst=self.src, pads=pads)


def _up(size: int, block: int) -> int:
    return -(-size // block) * block


def _wide(channels: int) -> int:
    """Channels in whole blocks of the weight; blocks of 48 are taken where they fill to 95%."""
    return _up(channels + channels // 20, WIDE_BLOCK)


def _each_thread(w: Window) -> int:
    """A thread's pages: tiles, masks, ends of buffers, and addresses of a window's elements."""
    blocks = 1 + max(w.src[0], w.dst[0]) // BLOCK
    pages = 4 + 3 * w.item_bytes
    return pages * PAGE_BYTES + _up(64 * math.prod(w.kernel) * blocks, PAGE_BYTES)


def _columns(w: Window) -> int:
    """Elements of the windows of a group of one sample, side by side; none where they are one."""
    one = math.prod(w.kernel) == 1 and all(s == 1 for s in w.strides) and not any(w.pads)
    return 0 if one else w.src[0] * math.prod(w.kernel) * math.prod(w.dst[1:])


def _forward(w: Window) -> int:
    """Scratch of forward: a padded sample for each thread, and a block of sums in float32."""
    rows = [s + 4 * p for s, p in zip(w.src[1:], w.pads, strict=True)]
    spans, reach = w.spans, w.strides[-1] * (w.spans[-1] if w.dst[-1] == 1 else 1)
    rows[-1] = w.src[-1] + 2 * w.pads[-1]
    if len(rows) > 1:
        rows[-2] += w.dst[-2] * w.strides[-2] + spans[-2] + 1
    else:
        rows = [3, *rows]
    channels = w.groups * _up(w.src[0], WIDE_BLOCK if w.half else BLOCK)
    padded = math.prod(rows) * channels * reach
    if w.src[0] < FEW_CHANNELS:
        high = w.kernel[-2] if len(w.kernel) > 1 else 1
        line = high * w.strides[-1] * w.groups * _up(w.src[0], 2)
        few = high * (3 * spans[-2] + 4 * w.pads[-2] + 2 if len(rows) > 1 and high > 1 else 3)
        few = few * rows[-1] * line + math.prod(w.dst[1:-1]) * line * max(w.strides)
        padded = max(padded, few if len(w.kernel) < 3 else 0)
    sums = FLOAT_BYTES * math.prod(w.dst[1:]) * min(WIDEST_BLOCK, _up(w.dst[0], BLOCK))
    lowered = w.weights * w.item_bytes if w.src[0] % WIDE_BLOCK else 0
    brgemm = w.threads * (padded * w.item_bytes + sums + _each_thread(w)) + lowered
    if not w.half and w.src[0] > 1 and w.dst[-1] * w.kernel[-1] > 1:
        brgemm = 0
    if w.regular:
        return brgemm
    held = w.item_bytes * _columns(w)
    if w.half:
        held += FLOAT_BYTES * w.dst[0] * math.prod(w.dst[1:])
    return max(brgemm, w.threads * held)


def _source(w: Window) -> int:
    """Scratch of the input's gradient: a padded sample of the output's gradient a thread."""
    rows = [s + 2 * span for s, span in zip(w.dst[1:], w.spans, strict=True)]
    channels = w.groups * _up(w.dst[0], WIDE_BLOCK if w.half else BLOCK)
    sums = FLOAT_BYTES * math.prod(w.src[1:]) * min(WIDEST_BLOCK, _up(w.src[0], BLOCK))
    out = w.src[-1] * w.strides[-1] * w.groups * w.src[0]
    each = (math.prod(rows) * channels + out) * w.item_bytes + sums + _each_thread(w)
    held = w.threads * each
    if all(s == 1 for s in w.strides):
        held = max(_forward(w.flipped()), held if w.half else 0)
    if w.regular:
        return held
    gemm = FLOAT_BYTES * (_columns(w) + w.groups * math.prod(w.src))
    return max(held, w.threads * gemm)


def _weight(w: Window) -> int:
    """Scratch of the weight's gradient: operands with rows side by side, and sums in float32."""
    padded = w.groups * _up(w.src[0], BLOCK) * _up(w.dst[0], BLOCK) * math.prod(w.kernel)
    sums = FLOAT_BYTES * padded * (w.threads if w.half or w.threads > 1 else 0)
    held = sums + 3 * w.threads * PAGE_BYTES
    if w.half:
        stride = w.strides[-1]
        row = _up(-(-(w.src[-1] + 2 * w.pads[-1]) // stride), TILE) * stride
        made = _up(w.dst[-1], 2 if w.dst[-1] <= TILE else TILE)
        src = w.groups * _up(w.src[0], BLOCK) * math.prod(w.src[1:-1]) * row
        dst = w.groups * _up(w.dst[0], BLOCK) * math.prod(w.dst[1:-1]) * made
        batch = _up(64 * math.prod(w.dst[1:-1]), PAGE_BYTES)
        held += w.threads * ((src + dst) * w.item_bytes + batch + 4 * PAGE_BYTES)
        held += 2 * (BLOCK + 2) * row * w.item_bytes
    if w.regular:
        return held
    # Its bytes are taken for their number of elements.
    plain = FLOAT_BYTES * w.dense((w.src[0] * w.dst[0], *w.kernel)) // w.samples
    gemm = w.threads * (w.item_bytes * _columns(w) + plain) + (plain if w.half else 0)
    return max(held, gemm + PAGE_BYTES)


def onednn_bytes(
    item_bytes: int, threads: int, transposed: int, bias: int, grads: int, *sizes: int
) -> int:
    """Returns oneDNN's bytes beyond a convolution's operands and results.

    Args:
        item_bytes: bytes of an element.
        threads: threads that it runs on.
        transposed: 1 for a transposed convolution.
        bias: 1 where a bias is added.
        grads: 0 for forward; for backward 1 for the input's gradient, plus 2 for the weight's.
        sizes: samples, groups, then for the input and the output channels of a group and spatial
            sizes, then kernel, strides, pads and dilations.
    """
    samples, groups, *rest = sizes
    dims = (len(rest) - 2) // 6
    ends = (1 + dims, 2 + 2 * dims, *(2 + n * dims for n in (3, 4, 5, 6)))
    x, out, *others = (tuple(rest[a:b]) for a, b in zip((0, *ends), ends, strict=False))
    ways = (out, x) if transposed else (x, out)
    w = Window(item_bytes, threads, samples, groups, *ways, *others)
    weight = w.weights * item_bytes
    if not grads:
        scratch = _source(w) if transposed else _forward(w)
        if transposed and bias:
            scratch += w.bytes_of(out) * FLOAT_BYTES // item_bytes
        compute = w.bytes_of(x) + weight + w.bytes_of(out) - w.dense(out) + scratch
        return max(compute, w.bytes_of(out) + w.dense(out))
    blocks = w.bytes_of(x) + w.bytes_of(out) + weight
    own = w.dense(x) if grads % 2 else 0
    kept = w.dense((w.src[0] * w.dst[0], *w.kernel)) // samples if grads > 1 else 0
    held = [0]
    if grads % 2:
        held += [blocks + (_forward(w) if transposed else _source(w)), w.bytes_of(x) + 2 * own]
    if grads > 1:
        held += [own + blocks + _weight(w), own + 2 * weight + kept]
    return max(held) - own - kept if max(held) > own + kept else 0


FUNCTIONS[ConvolutionBytes.__name__] = each_point(onednn_bytes)
