"""Captures ops for which a GPU has one kernel, and the CPU several, as one op on any device.

torch takes a composite op apart unless its tensors' device has a kernel of its own for it: on a GPU
`rms_norm` is `_fused_rms_norm` and its backward, which keep one number a row; on the CPU ten calls,
of which backward keeps float32 values as large as the input. A GPU is planned for on CPU tensors,
as a CPU build of torch cannot differentiate others. Within `as_on_gpu` torch's own derivative of
the one kernel is recorded; run on the CPU it computes what torch says the kernel computes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload

aten = torch.ops.aten
_Key = torch._C.DispatchKey

# `tests/fx/test_gpu_ops.py` finds them in the installed torch, by what is registered for each op.
ONE_KERNEL: tuple[OpOverload, ...] = (aten._fused_rms_norm.default,)
# Their backward is an op that no other device has: the CPU runs torch's decomposition of it.
_BACKWARD: tuple[OpOverload, ...] = (aten._fused_rms_norm_backward.default,)

_asked = threading.local()


@contextmanager
def as_on_gpu(gpu: bool) -> Iterator[None]:
    """Traces the calls of its block, in this thread, as on a GPU if `gpu` is true.

    The block must run under torch's python dispatcher.
    """
    before = is_asked()
    _asked.value = gpu
    try:
        yield
    finally:
        _asked.value = before


def is_asked() -> bool:
    """Returns whether this thread traces calls as on a GPU."""
    return getattr(_asked, "value", False)


def stays_whole(op: OpOverload) -> bool:
    """Returns whether an op stays one call here, though the tensors' device would decompose it."""
    return is_asked() and op in ONE_KERNEL


def _register(op: OpOverload) -> None:
    """Lets torch's python dispatcher differentiate an op on CPU tensors as on a GPU."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if is_asked():
            return op._op_dk(_Key.Autograd, *args, **kwargs)
        return op.decompose(*args, **kwargs)

    op.py_impl(_Key.AutogradCPU)(kernel)


def _run_on_cpu(op: OpOverload) -> None:
    """Registers torch's decomposition as the CPU kernel of an op that lacks one."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU"):
        name = op.name().removeprefix("aten::")
        _CPU_KERNELS.impl(name, decomposition_table[op], "CPU")


_CPU_KERNELS = torch.library.Library("aten", "IMPL")
for _op in ONE_KERNEL:
    _register(_op)
for _op in _BACKWARD:
    _run_on_cpu(_op)
