"""What others send, by formula: DAP of FastFold, and the rows that a convolution's windows need.

Bytes of one rank, forward and backward: the transpose of each collective sends as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch
from torch import Tensor, nn

from models.evoformer import EvoformerConfig
from models.vae3d import TemporalConfig, TemporalVAE

ITEM_BYTES = 4


def dap_bytes(config: EvoformerConfig, sequences: int, residues: int, p: int) -> float:
    """Returns the bytes that a rank sends for one block under Dynamic Axial Parallelism.

    One axis is split, and a layer that mixes it is preceded by an all-to-all: two of the alignment,
    four of the pairs. Gathered are the bias of row attention and of both triangle attentions, one
    side of the outer product and one of each triangle product.
    Source: hpcaitech/FastFold, `fastfold/model/fastnn/` (`gather_async`, `row_to_col`,
    `col_to_row`, `All_to_All_Async`); arXiv 2203.00854, section 4.2.

    Args:
        config: the trunk's sizes.
        sequences: of the alignment.
        residues: of the crop.
        p: ranks.
    """
    pairs, cells = residues**2, sequences * residues
    gathered = pairs * (config.msa_heads + 2 * config.pair_heads + 2 * config.triangle_dim)
    gathered += cells * config.outer_dim
    switched = 2 * cells * config.msa_dim + 4 * pairs * config.pair_dim
    return 2 * ITEM_BYTES * (gathered + switched / p) * (p - 1) / p


def halo_bytes(model: TemporalVAE, config: TemporalConfig, point: Mapping[str, int]) -> float:
    """Returns the bytes of the rows that convolutions need of both neighbours, of the best dim.

    The latents are split along rows, or columns: a window of k steps of s needs k - s rows of
    neighbours. Sums of the norms are not counted.

    Args:
        model: on the meta device.
        config: its sizes.
        point: the lengths.
    """
    needed = {"height": 0, "width": 0}

    def count(conv: nn.Module, given: tuple[Tensor, ...], _: Tensor) -> None:
        assert isinstance(conv, nn.Conv3d)
        batch, channels, frames, *_ = given[0].shape
        sizes = {"height": (3, "width"), "width": (4, "height")}
        for name, (dim, other) in sizes.items():
            rows = conv.kernel_size[dim - 2] - conv.stride[dim - 2]
            row = prod((batch, channels, frames, point[other]))
            needed[name] += max(0, rows) * row * ITEM_BYTES

    hooks = [m.register_forward_hook(count) for m in model.modules() if isinstance(m, nn.Conv3d)]
    shape = (point["batch"], config.latents, point["frames"], point["height"], point["width"])
    mean, _ = model.encode(torch.empty(shape, device="meta"))
    model.decode(mean, point["frames"])
    for hook in hooks:
        hook.remove()
    return 2 * min(needed.values())
