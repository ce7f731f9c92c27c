"""Padding removed from both sides of a T5, whose attention has a bias that learns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers
from torch import Tensor, nn

INPUTS = {
    "input_ids": "int64[batch, seq]",
    "attention_mask": "int64[batch, seq]",
    "decoder_attention_mask": "int64[batch, target]",
    "labels": "int64[batch, target]",
}


def t5(width: int, layers: int, heads: int, vocabulary: int) -> nn.Module:
    """A T5 with so many layers on each side, without dropout."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // heads,
        d_ff=4 * width,
        num_layers=layers,
        num_heads=heads,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


def batch_of(vocabulary: int, seq: int, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Samples of these lengths, whose targets are half as long; so are the dims.

    Args:
        vocabulary: of both sides.
        seq: to which the encoder's samples are padded.
        lengths: of these.
    """
    g = torch.Generator().manual_seed(0)
    targets = torch.tensor([(n + 1) // 2 for n in lengths])
    ids = torch.randint(5, vocabulary, (len(lengths), seq), generator=g)
    labels = torch.randint(5, vocabulary, (len(lengths), seq // 2), generator=g)
    mask = torch.arange(seq) < torch.tensor(lengths)[:, None]
    of_targets = torch.arange(seq // 2) < targets[:, None]
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "decoder_attention_mask": of_targets.long(),
        "labels": torch.where(of_targets, labels, -100),
    }
