"""Tiny language models of four families, their inputs, and plain data for them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from models.gpt import GPT, GPTConfig

VOCABULARY = 64
NAMES = ("gpt", "gpt_grouped", "llama", "gpt2", "bert")


def model(name: str, layers: int = 1) -> nn.Module:
    """A float64 model with 4 heads and no dropout."""
    torch.manual_seed(0)
    return make(name, layers).double()


def in_float64() -> None:
    """Lets Llama's norms and every loss compute in float64 for the rest of this process.

    transformers casts them to float32, whose rounding depends on how rows lie in memory: a rank
    that has a whole sample, and a shape of its own, is off by 1e-7, which is no fault of a split.
    """
    Tensor.float = Tensor.double

    def forward(self: LlamaRMSNorm, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon))

    LlamaRMSNorm.forward = forward


def make(name: str, layers: int = 1) -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": 4}
    if name == "gpt":
        return GPT(GPTConfig(vocab_size=VOCABULARY, dim=32, n_layers=layers, n_heads=4))
    if name == "gpt_grouped":
        grouped = {"n_kv_heads": 2, "tie_embeddings": True}
        return GPT(GPTConfig(vocab_size=VOCABULARY, dim=32, n_layers=layers, n_heads=4, **grouped))
    if name == "llama":  # on 4 ranks its 2 key/value heads do not go round
        return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2))
    if name == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=layers, n_head=4, **off)
        )
    assert name == "bert", name
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **off))


def inputs(name: str) -> dict[str, str]:
    names = ("input_ids", "labels", "attention_mask") if name == "bert" else ("input_ids", "labels")
    return dict.fromkeys(names, "int64[batch, seq]")


def data(name: str, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Tensor]:
    """Random tokens, a third of the labels ignored; BERT's samples end in padding."""
    generator = torch.Generator().manual_seed(seed)
    batch, seq = sizes["batch"], sizes["seq"]
    ids, labels = torch.randint(VOCABULARY, (2, batch, seq), generator=generator)
    labels[torch.rand(batch, seq, generator=generator) < 0.3] = -100
    labels[:, -1] = 1
    found = {"input_ids": ids, "labels": labels}
    if name == "bert":
        mask = torch.ones(batch, seq, dtype=torch.int64)
        mask[0, seq - seq // 3 :] = 0
        found["attention_mask"] = mask
    return found
