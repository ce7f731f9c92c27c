"""Report line on oneDNN's half-precision kernels, on which bytes in a CPU's plan depend."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dcpc.ir import Program
from dcpc.symbolic_profile import Device, halves

HALVES = {torch.bfloat16, torch.float16}


def kernel_lines(device: Device, programs: Iterable[Program]) -> list[str]:
    """Returns a line on how oneDNN computes in half precision on this processor, or none.

    Args:
        device: device of the plan; a plan for a GPU depends on no processor.
        programs: captured models; without half precision there is no line.
    """
    dtypes = {info.dtype for program in programs for info in program.info.values()}
    if device.gpu or HALVES.isdisjoint(dtypes):
        return []
    return [
        f"bytes of kernels in half precision are this processor's, where oneDNN {halves()}: plan "
        "on the processor that trains"
    ]
