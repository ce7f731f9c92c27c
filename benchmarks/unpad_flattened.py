"""Padding removed beside transformers' own: a Llama whose samples are flattened into one row.

transformers leaves padding out in two ways. Its flash attention packs queries, keys and values of
each attention: for a GPU's or an NPU's kernels alone (`is_flash_attn_available`, 5.23), and all
other ops compute on padding. `DataCollatorWithFlattening` makes one row of a batch's samples, whose
positions restart. Causal models make a mask of these positions for any attention, so they run on a
CPU; BERT's and ModernBERT's masks know no positions, and samples would see each other. So they do
in a Llama with `use_cache=True`, its default: with a cache no mask is made of positions (5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import transformers
from torch import Tensor, nn

from dcpc.verify.exactness import gradient_errors, loss_error
from dcpc.verify.reference import plain


def llama(width: int, layers: int, heads: int, vocabulary: int) -> nn.Module:
    """A Llama of these sizes, its hidden layers as wide as BERT's."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, intermediate_size=4 * width, vocab_size=vocabulary,
        max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def flattened(inputs: Mapping[str, Tensor], lengths: Sequence[int]) -> dict[str, Tensor]:
    """One row of a batch's samples, as transformers' collator makes it.

    Args:
        inputs: `input_ids` and `labels`, `[batch, seq]`, padded at their ends.
        lengths: of the samples.
    """
    names = ("input_ids", "labels")
    features = [{n: inputs[n][i, :size].tolist() for n in names} for i, size in enumerate(lengths)]
    collate = transformers.DataCollatorWithFlattening(return_tensors="pt")
    found: dict[str, Tensor] = collate(features)
    return found


def flattened_call(
    model: nn.Module, inputs: Mapping[str, Tensor], lengths: Sequence[int]
) -> Callable[[], object]:
    """A forward and backward of the plain model on the flattened row."""
    row = flattened(inputs, lengths)

    def call() -> None:
        model(**row).loss.backward()

    return call


def flattened_error(
    model: nn.Module, inputs: Mapping[str, Tensor], lengths: Sequence[int]
) -> float:
    """Largest relative error of loss and gradients of the row beside the padded batch.

    Args:
        model: a float64 one.
        inputs: the padded batch.
        lengths: of its samples.
    """
    expected = plain(model, inputs)
    got = model(**flattened(inputs, lengths)).loss
    got.backward()
    errors = gradient_errors(model, expected.gradients).values()
    worst = max(loss_error(got, expected.loss), *errors)
    model.zero_grad()
    return worst
