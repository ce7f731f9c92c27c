"""Attention as one op with saved tensors of its own: q, k, v, out, logsumexp, on any device."""

from dcpc.attention.blocks import ROWS
from dcpc.attention.kernels import kernel_name
from dcpc.attention.op import EMPTY

__all__ = ["EMPTY", "ROWS", "kernel_name"]
