"""Attention as one op with saved tensors of its own: q, k, v, out, logsumexp, on any device."""

from dcpc.attention.blocks import ROWS
from dcpc.attention.kernels import DEMANDS, added_dtype, kernel_name, laid
from dcpc.attention.op import EMPTY
from dcpc.attention.partial import Backward, Forward, Operands
from dcpc.attention.rectangles import sees
from dcpc.attention.spec import (
    Run,
    Sight,
    accumulated,
    empty_gradient,
    empty_outputs,
    hides,
    hiding,
)
from dcpc.attention.whole import WIDEST

__all__ = [
    "DEMANDS",
    "EMPTY",
    "ROWS",
    "WIDEST",
    "Backward",
    "Forward",
    "Operands",
    "Run",
    "Sight",
    "accumulated",
    "added_dtype",
    "empty_gradient",
    "empty_outputs",
    "hides",
    "hiding",
    "kernel_name",
    "laid",
    "sees",
]
