"""Attention as one op with explicit saved tensors (q, k, v, out, logsumexp), on any device."""

from dcpc.ops.attention.blocks import ROWS
from dcpc.ops.attention.kernels import (
    DEMANDS,
    SHORT,
    Capability,
    OnGpu,
    added_dtype,
    gpu_kernel,
    has_no_wide_kernel,
    kernel_name,
    laid,
    masks_window,
    takes,
)
from dcpc.ops.attention.of_rows import ROWS_OP
from dcpc.ops.attention.op import DIRECT, EMPTY
from dcpc.ops.attention.partial import Backward, Forward, Operands
from dcpc.ops.attention.rectangles import sees
from dcpc.ops.attention.spec import (
    RunOfRows,
    Sight,
    accumulated,
    empty_gradient,
    empty_outputs,
    hides,
    hiding,
)
from dcpc.ops.attention.whole import WIDEST
