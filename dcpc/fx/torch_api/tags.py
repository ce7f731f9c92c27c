"""Reads torch's tags of ops, and adds those that some releases lack."""

from __future__ import annotations

import torch

# Tagged as pointwise in some releases only; each computes every element by itself.
_UNTAGGED = frozenset(
    ("_conj_physical", "celu_", "elu_", "hardsigmoid_", "hardtanh_", "leaky_relu", "leaky_relu_",
     "selu_")
)  # fmt: skip


def is_pointwise(op: torch._ops.OpOverload) -> bool:
    """Whether an op computes each element by itself."""
    return torch.Tag.pointwise in op.tags or (
        op.namespace == "aten" and op._opname in _UNTAGGED and op._overloadname == "default"
    )
