"""Calls whose kernels depend on the processor: what they take, and what the tables predict.

`python -m tests.cases.kernel_bytes` prints them as JSON, so that a test can have another processor
played: ONEDNN_MAX_CPU_ISA and ATEN_CPU_CAPABILITY are read when torch is loaded.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Iterator
from typing import NamedTuple

import torch

from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.onednn import multiplies_tiles
from dcpc.symbolic_profile.ops.transients import transient_bytes
from tests.cases.joint_graphs import measure_call

aten = torch.ops.aten
SCALARS_BYTES = 24
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
H200 = (9, 0)  # as NVIDIA counts generations
MASKS = ((True, True), (True, False), (False, True))  # which gradients are asked for
MOST_PRODUCTS = 3e7  # of numbers, of a convolution


def tiles_may_be_hidden() -> bool:
    """Returns whether a setting may keep oneDNN from what the processor has, which nothing tells.

    What attention takes in bfloat16 is a bound then, and exact else.
    """
    return multiplies_tiles() and "ONEDNN_MAX_CPU_ISA" in os.environ


class Bytes(NamedTuple):
    """One call, what it took, and what the tables say it takes here and on a GPU."""

    name: str
    measured: int
    predicted: int
    on_gpu: int


class Convolution(NamedTuple):
    """A convolution's sizes; lists have a number for each spatial dim."""

    dtype: torch.dtype
    samples: int
    channels: tuple[int, int]
    groups: int
    spatial: list[int]
    kernel: list[int]
    stride: int
    pads: list[int]
    dilation: int
    transposed: bool
    last: bool  # whether channels are the last dim in memory


def measured(function, *tensors: torch.Tensor) -> list[Bytes]:
    """Returns the bytes of each call of a function that a table has a formula for."""
    facts, threads, found = Facts({}), torch.get_num_threads(), []
    for m in measure_call(function, *tensors):
        if "convolution" in str(m.node.target) or "flash" in str(m.node.target):
            table = (transient_bytes(m.node, facts, threads, gpu) for gpu in (None, H200))
            name = f"{m.node.target} {tensors[0].dtype} {[tuple(x.shape) for x in tensors]}"
            found.append(Bytes(name, m.transient_bytes, *(int(t.doit()) for t in table)))
    return found


def convolution(c: Convolution, masks: tuple[bool, bool] = (True, True)) -> list[Bytes]:
    """Returns the bytes of a convolution and of its backward."""
    dims, (own, made) = len(c.spatial), c.channels
    args = ([c.stride] * dims, c.pads, [c.dilation] * dims, c.transposed, [0] * dims, c.groups)

    def both(x, w):
        out = aten.convolution(x, w, None, *args)
        grad = out.contiguous(memory_format=torch.channels_last) if c.last else out
        return aten.convolution_backward(grad, x, w, None, *args, [*masks, False])

    shape = (own, made // c.groups) if c.transposed else (made, own // c.groups)
    x = torch.rand(c.samples, own, *c.spatial, dtype=c.dtype)
    x = x.contiguous(memory_format=torch.channels_last) if c.last else x
    return measured(both, x, torch.rand(*shape, *c.kernel, dtype=c.dtype))


def drawn(random_state: random.Random) -> Convolution:
    """Returns a small convolution of any kind but transposed ones of volumes.

    Torch's own kernel for these returns a result that keeps as much memory as its input has.
    """
    pick = random_state.choice
    dims, groups = pick((1, 2, 2, 3)), pick((1, 1, 1, 1, 2, 3))
    kernel = [pick((1, 2, 3, 3, 4, 7)) for _ in range(dims)]
    dilation = pick((1, 1, 1, 2))
    sizes = {1: (9, 64, 501), 2: (8, 21, 33, 56), 3: (7, 8, 13)}[dims]
    return Convolution(
        dtype=pick(DTYPES),
        samples=pick((1, 2, 5)),
        channels=(groups * pick((1, 3, 8, 16, 24, 64)), groups * pick((1, 4, 16, 48, 64))),
        groups=groups,
        spatial=[pick(sizes) for _ in range(dims)],
        kernel=kernel,
        stride=pick((1, 1, 2, 3)),
        pads=[pick((0, k // 2)) * dilation for k in kernel],
        dilation=dilation,
        transposed=dims < 3 and random_state.random() < 0.25,
        last=dims == 2 and random_state.random() < 0.2,
    )


def convolutions(seed: int, count: int) -> Iterator[list[Bytes]]:
    """Yields the bytes of so many convolutions that are quick to compute."""
    random_state = random.Random(seed)
    while count:
        c, masks = drawn(random_state), random_state.choice(MASKS)
        spans = (c.dilation * (k - 1) for k in c.kernel)
        fits = all(n > span for n, span in zip(c.spatial, spans, strict=True))
        work = math.prod((c.samples, *c.channels, *c.spatial, *c.kernel)) / c.groups
        if fits and work < MOST_PRODUCTS:
            count -= 1
            yield convolution(c, masks)


def attention(dtype: torch.dtype, heads: int, rows: int, keys: int, width: int) -> list[Bytes]:
    """Returns the bytes of the CPU's flash attention and of its backward."""

    def both(q, k, v, grad):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False)
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, q, k, v, out, lse, 0.0, False)[0]

    given = (torch.randn(1, n, heads, width, dtype=dtype) for n in (rows, keys, keys, rows))
    return measured(both, *(x.transpose(1, 2) for x in given))


def risky() -> list[Bytes]:
    """Returns the bytes of calls whose kernels differ most between processors."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for channels, kernel, stride, transposed in (
            ((32, 64), 3, 1, False), ((32, 64), 4, 2, False), ((32, 24), 2, 2, True),
        ):  # fmt: skip
            sizes = ([102, 20], [kernel] * 2, stride, [1, 1], 1, transposed, False)
            found += convolution(Convolution(dtype, 2, channels, 1, *sizes))
        found += attention(dtype, 3, 200, 613, 33)
    return found


if __name__ == "__main__":
    print(json.dumps(risky()))
