"""What the report says of the kernels whose bytes a plan for a CPU counts."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from dcpc.ir import Program
from dcpc.symbolic_profile import Device, halves

HALVES = {torch.bfloat16, torch.float16}


def kernel_lines(device: Device, programs: Iterable[Program]) -> list[str]:
    """Returns a line on what oneDNN computes in half precision here, which bytes depend on.

    Args:
        device: what was planned for; a plan for a GPU depends on no processor.
        programs: the models as they were captured; without half precision there is no line.
    """
    dtypes = {info.dtype for program in programs for info in program.info.values()}
    if device.gpu or HALVES.isdisjoint(dtypes):
        return []
    return [
        f"bytes of kernels in half precision are this processor's, where oneDNN {halves()}: plan "
        "on the processor that trains"
    ]
