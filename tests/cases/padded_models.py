"""Models of padded batches, and batches whose samples have other lengths."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import dcpc
from dcpc.buckets.specs import InputSpec
from dcpc.compiled.unpadding.unpadding import Unpadding

VOCABULARY = 40
SIZES = [{"seq": 12}, {"seq": 16}]
TOKENS = {
    "input_ids": "int64[batch, seq]",
    "attention_mask": "int64[batch, seq]",
    "labels": "int64[batch, seq]",
}


class PaddedEncoder(nn.Module):
    """Everything that meets padding: token loss, masked mean, masked square, a condition a sample.

    Layers differ: the first makes its mask again and has dropout, the second sees a window.
    """

    INPUTS: ClassVar = TOKENS | {
        "target": "float64[batch, seq]",
        "condition": "float64[batch, 4]",
    }

    def __init__(self, width: int = 24, heads: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.randn(64, width) * 0.1)
        self.condition = nn.Linear(4, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head, self.number = nn.Linear(width, VOCABULARY), nn.Linear(width, 1)

    def attention(self, x: Tensor, layer: int, seen: Tensor) -> Tensor:
        b, t, d = x.shape
        qkv = self.qkv[layer](self.norms[layer](x)).view(b, t, 3, self.heads, d // self.heads)
        found = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), attn_mask=seen)
        return self.dropout(self.out[layer](found.transpose(1, 2).reshape(b, t, d)))

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        target: Tensor,
        condition: Tensor,
    ) -> Tensor:
        x = self.tokens(input_ids) + self.positions[: input_ids.shape[1]]
        x = x + self.condition(condition)[:, None]
        x = x + self.attention(x, 0, (attention_mask > 0)[:, None, None])
        x = x + self.attention(x, 1, (attention_mask > 0)[:, None, None])
        x = F.gelu(x)
        tokens = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        kept = attention_mask.to(x.dtype)
        mean = (x * kept[:, :, None]).sum(1) / kept.sum(1).clamp(min=1)[:, None]
        squares = (self.number(x)[..., 0] - target) ** 2 * kept
        return tokens + squares.sum() / kept.sum() + (self.number(mean) ** 2).mean()


def batch(
    inputs: Mapping[str, str],
    lengths: Sequence[int],
    sizes: Mapping[str, int],
    *,
    left: bool = False,
    holes: bool = False,
) -> dict[str, Tensor]:
    """Samples of these lengths: with padding on the left, or with holes.

    Args:
        inputs: name -> spec.
        lengths: of the samples.
        sizes: of the dims but the batch.
        left: whether padding comes first.
        holes: whether keys in between are hidden as well.
    """
    g = torch.Generator().manual_seed(sum(lengths))
    found = {}
    for name, text in inputs.items():
        spec = InputSpec.parse(text)
        shape = spec.shape({**sizes, "batch": len(lengths)})
        if name.endswith("mask"):
            mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
            mask = mask.flip(1) if left else mask
            if holes:
                mask[:, 1:] &= torch.rand(mask[:, 1:].shape, generator=g) < 0.7
            found[name] = mask.to(spec.dtype)
        elif spec.dtype.is_floating_point:
            found[name] = torch.randn(shape, generator=g, dtype=spec.dtype)
        else:
            found[name] = torch.randint(3, VOCABULARY, shape, generator=g)
            if len(shape) == 1:
                found[name] %= 2
    if found["labels"].ndim == 2:
        of = found.get("decoder_attention_mask", found["attention_mask"])
        found["labels"] = torch.where(of > 0, found["labels"], -100)
    found["input_ids"] = torch.where(found["attention_mask"] > 0, found["input_ids"], 1)
    return found


def unpadding_of(model: dcpc.CompiledModel) -> Unpadding:
    return model._core.dispatch.unpadding(next(iter(model.buckets)))


def t5(encoder_layers: int, decoder_layers: int) -> nn.Module:
    torch.manual_seed(0)
    made = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, num_heads=2, d_ff=24, dropout_rate=0.0,
        num_layers=encoder_layers, num_decoder_layers=decoder_layers, decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(made).double()


T5_SIZES = {"seq": 16, "tgt": 12}
T5_INPUTS = {
    "input_ids": "int64[batch, seq]", "attention_mask": "int64[batch, seq]",
    "decoder_attention_mask": "int64[batch, tgt]", "labels": "int64[batch, tgt]",
}  # fmt: skip


def t5_batch(lengths: list[int], targets: list[int], left: bool = False) -> dict[str, Tensor]:
    """Samples of these lengths for the encoder and for the decoder."""
    given = batch(T5_INPUTS, lengths, T5_SIZES, left=left)
    kept = torch.arange(T5_SIZES["tgt"]) < torch.tensor(targets)[:, None]
    given["decoder_attention_mask"] = kept = (kept.flip(1) if left else kept).long()
    given["labels"] = torch.where(kept > 0, given["labels"].clamp(min=0), -100)
    return given


def small(**more) -> dict[str, object]:
    """Options of a configuration of transformers for a model without dropout."""
    shared = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48, "vocab_size": VOCABULARY, "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    return shared | more


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**small()))


def misplaced(init: Callable[..., None]) -> Callable[..., None]:
    """Returns an `__init__` of `ValidRows` whose rows have the positions of others."""

    def shifted(self: object, indices: Mapping[str, Tensor], *rest: object) -> None:
        indices = {n: i.flip(0) if n == "unpad.position" else i for n, i in indices.items()}
        init(self, indices, *rest)

    return shifted
