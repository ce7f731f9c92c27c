"""Models that keep the sequences of a row apart, and sequences for them."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from dcpc.verify.float64 import InFloat64

VOCABULARY, TOKENS = 96, 64  # wide enough for tiles; of which samples have
POSITIONS = {n: "int64[batch, seq]" for n in ("input_ids", "position_ids", "labels")}
NUMBERS = {n: "int64[batch, seq]" for n in ("input_ids", "segment_ids", "position_ids", "labels")}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}


def transformers_model(name: str, **options: object) -> nn.Module:
    """An unmodified library model, its casts to float32 left out on both sides of a comparison.

    `use_cache=False` is how the library is told to look for sequences that are packed.
    """
    torch.manual_seed(0)
    config, kind = FAMILIES[name]
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"sliding_window": 7} if name == "mistral" else {}
    given = {**sizes, "use_cache": False, "attention_dropout": 0.0, **options}
    return InFloat64(kind(config(**given)).double())


class Documents(nn.Module):
    """A user's own model, masked by documents; bidirectional unless causal, labels not shifted."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.causal = causal
        self.tokens, self.places = nn.Embedding(VOCABULARY, 16), nn.Embedding(64, 16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, VOCABULARY)
        self.double()

    def logits(self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Returns [batch, seq, vocabulary]."""
        x = self.tokens(input_ids) + self.places(position_ids)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mask = segment_ids[:, :, None] == segment_ids[:, None, :]
        mask = mask & (segment_ids != 0)[:, None, :]
        if self.causal:
            n = input_ids.shape[1]
            mask = mask & torch.ones(n, n, dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])
        return self.out(y.transpose(1, 2).flatten(2))

    def forward(
        self, input_ids: Tensor, segment_ids: Tensor, position_ids: Tensor, labels: Tensor
    ) -> Tensor:
        logits = self.logits(input_ids, segment_ids, position_ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Frames(nn.Module):
    """Attention over patches of frames in one row, within the sequences that patches are of."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.causal = causal
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        own = ids.flatten(1)
        q, k, v = (t[:, None] for t in self.qkv(x.flatten(1, 2)).chunk(3, -1))
        mask = (own[:, :, None] == own[:, None]) & (own != 0)[:, None]
        if self.causal:
            mask = mask & torch.ones(own.shape[1], own.shape[1], dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])[:, 0]
        return self.out(y).unflatten(1, x.shape[1:3]).square().mean()


class Sequences:
    """Sequences of the given lengths, some labels ignored; sample i is made from i alone."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(i)
        ids, labels = torch.randint(TOKENS, (2, self.lengths[i]), generator=generator)
        labels[torch.rand(self.lengths[i], generator=generator) < 0.2] = -100
        return {"input_ids": ids, "labels": labels}

    def dims(self, i: int) -> dict[str, int]:
        return {"seq": self.lengths[i]}


def alone(model: nn.Module, data: Sequences, ids: Sequence[int], names: Sequence[str]) -> Tensor:
    """Mean loss over all labels of some samples, each run by itself and without padding."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    shift = not isinstance(model, Documents)
    for i in ids:
        sample = {n: x[None] for n, x in data[i].items()}
        n = data.lengths[i]
        made = {"position_ids": torch.arange(n)[None], "segment_ids": torch.ones(1, n).long()}
        labels = int((sample["labels"][:, shift:] != -100).sum())
        if not labels:
            continue
        given = {**sample, **{k: v for k, v in made.items() if k in names}}
        out = model(**given)
        total = total + (out if isinstance(out, Tensor) else out["loss"]) * labels
        count += labels
    return total / count
