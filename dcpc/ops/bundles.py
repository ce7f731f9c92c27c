"""Groups small tensors into common messages, as the wait for a message costs more than a copy.

norm 1 KB, qkv 3 MB, bias 3 KB, out 4 MB     messages: [qkv], [out], [norm, bias]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Bytes of a whole parameter from which on it travels alone. A message costs gloo some 0.5 ms on
# loopback, as much as a copy of this size (docs/results/parameters.md).
ALONE_BYTES = 1 << 20


def messages(tensors: Mapping[int, tuple[torch.dtype, int]]) -> list[list[int]]:
    """Returns groups of tensors that travel in one message each, in the order of their first.

    Args:
        tensors: index of a tensor -> its dtype, and its bytes over all ranks.
    """
    found: list[list[int]] = []
    open_: dict[torch.dtype, list[int]] = {}
    for number, (dtype, size) in tensors.items():
        if size < ALONE_BYTES and dtype in open_:
            open_[dtype].append(number)
            continue
        found.append([number])
        if size < ALONE_BYTES:
            open_[dtype] = found[-1]
    return found
