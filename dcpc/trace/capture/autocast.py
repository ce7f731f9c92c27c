"""Mixed precision: the casts that `torch.autocast` makes, written into the captured graph.

torch.export captures above autocast and sees none of them. Made functional under autocast the graph
has each one as a `_to_copy`: torch itself decides which op computes in what, nothing here repeats
its lists. A weight that several ops read is cast once, as autocast's own cache does.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import fx

from dcpc.errors import check_choice

aten = torch.ops.aten

DTYPES = (torch.bfloat16, torch.float16)
SHORT = {"bf16": "bfloat16", "fp16": "float16"}


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Returns the dtype of the active autocast for a device type, or None if none is active."""
    active = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if active else None


def checked_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Returns the dtype, which may be a name, if autocast can compute in it; None for None.

    Raises:
        PlanError: autocast cannot compute in this dtype.
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, SHORT.get(dtype, dtype), dtype)
    if dtype is not None:
        check_choice("got autocast=", dtype, (*DTYPES, *SHORT), also=" or None")
    return dtype if isinstance(dtype, torch.dtype) else None


def casting(device_type: str, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Returns a context under autocast in `dtype`; None: a context without autocast."""
    if dtype is None and not torch.is_autocast_enabled(device_type):
        return nullcontext()
    return torch.autocast(device_type, dtype, enabled=dtype is not None)


def share_casts(graph: fx.Graph, parameters: Collection[str]) -> None:
    """Keeps one cast of each parameter, the first one, in place.

    The gradients of its users are then added in the low precision, as under autocast.
    """
    first: dict[tuple[str, str], fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is not aten._to_copy.default:
            continue
        source = node.args[0]
        if not isinstance(source, fx.Node) or source.name not in parameters:
            continue
        known = first.setdefault((source.name, repr(node.kwargs)), node)
        if known is not node:
            node.replace_all_uses_with(known)
            graph.erase_node(node)
