"""A loss that hangs on how samples are divided into micro-batches, or on padding, is warned of."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import dcpc
from models.gpt import GPT, GPTConfig

VECTORS = {"x": "float32[batch, seq, 4]"}
TOKENS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
PAD = {"input_ids": 0, "labels": -100}
DIVIDED, PADDED = "of its halves by weight=", "which changes the loss"


class Regression(nn.Module):
    """A loss of each kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.kind == "sum":
            return y.square().sum()
        y = y.mean(1)
        if self.kind == "batch norm":
            y = F.batch_norm(y, None, None, training=True).pow(3) + y
        if self.kind == "contrast":
            y = (y @ y.transpose(0, 1)).softmax(-1)
        return F.dropout(y, 0.2, self.training).square().mean()


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocab_size=11, dim=16, n_layers=1, n_heads=2))


def llama() -> nn.Module:
    config = LlamaConfig(
        vocab_size=11, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def said(model: nn.Module, inputs: dict[str, str], verify: str = "auto", **options) -> list[str]:
    buckets = dcpc.Buckets(inputs=inputs, sizes=[{"seq": 8}, {"seq": 16}])
    compiled = dcpc.compile(model, buckets, backend="eager", memory=1e9, verify=verify)
    integers = {n: torch.ones(8, dtype=torch.int64) for n in inputs}
    sample = {"x": torch.ones(8, 4)} if "x" in inputs else integers
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        dcpc.DataLoader([sample], compiled, tokens_per_step=64, **options)
    return [str(each.message) for each in found]


@pytest.mark.parametrize("kind", ["sum", "batch norm", "contrast"])
def test_a_loss_that_is_no_mean_over_samples_is_told(kind):
    (text,) = said(Regression(kind), VECTORS)
    assert DIVIDED in text
    assert "samples" in text


def test_a_mean_over_samples_is_not():
    assert said(Regression("mean"), VECTORS) == []


def test_nothing_is_looked_at_without_verification():
    assert said(Regression("sum"), VECTORS, verify="off") == []


@pytest.mark.parametrize(
    ("make", "weight", "right"),
    [
        (gpt, "samples", False),
        (gpt, "labels", True),
        (llama, "labels", False),
        (llama, dcpc.CountLabels("labels", shift=1), True),
    ],
)
def test_a_weight_is_what_the_loss_is_a_mean_over(make, weight, right):
    found = said(make(), TOKENS, pad=PAD, weight=weight)
    assert [DIVIDED in text for text in found] == ([] if right else [True])


def test_samples_without_padding_may_count_alike():
    assert said(gpt(), TOKENS) == []


def test_padding_that_changes_a_loss_is_told():
    (text,) = said(Regression("mean"), VECTORS, pad={"x": 0})
    assert PADDED in text
