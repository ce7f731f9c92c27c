"""Attention as one op with saved tensors of its own: q, k, v, out, logsumexp, on any device."""

from dcpc.attention.blocks import ROWS
from dcpc.attention.op import EMPTY, kernel_name

__all__ = ["EMPTY", "ROWS", "kernel_name"]
