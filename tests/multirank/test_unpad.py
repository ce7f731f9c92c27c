"""Calls without padding on several ranks: loss and every gradient are those of the plain model."""

import warnings

import pytest
import torch
import transformers
from torch import nn

import dcpc
from dcpc.trace.loss import find_loss
from tests.cases.exactness import SPLITTING, compiled_error, loss_error, wrong
from tests.cases.launch import run_ranks
from tests.cases.padded_models import TOKENS, VOCABULARY, PaddedEncoder, batch

pytestmark = pytest.mark.multirank

SIZES = [{"seq": 12}, {"seq": 16}]
BATCHES = [([1, 12, 5], 0), ([1, 1], 0), ([9, 3, 2, 11], 0), ([4, 16, 7], 1), ([16, 16, 0, 3], 1)]


def bert() -> nn.Module:
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        vocab_size=VOCABULARY, max_position_embeddings=32, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


MODELS = {"encoder": (PaddedEncoder, PaddedEncoder.INPUTS), "bert": (bert, TOKENS)}


def errors(rank: int, name: str, sp: int, backend: str, options: dict) -> dict[str, float]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().double()
    made = dcpc.compile(
        model, dcpc.Buckets(inputs, SIZES), unpad=True, sp=sp, backend=backend, device=SPLITTING,
        **options,
    )  # fmt: skip
    found = {}
    for lengths, at in BATCHES:
        given = batch(inputs, lengths, SIZES[at])
        found[f"{name} {lengths}"] = compiled_error(made, model, given)
        model.zero_grad()
        with torch.no_grad():
            expected = find_loss(model(**given))
            found[f"{name} {lengths}, evaluated"] = loss_error(made.evaluate(given), expected)
    stats = made.stats()
    print(name, stats.unpadded, made.report()[-900:]) if rank == 0 else None
    assert stats.unpadded >= 8, stats.unpadded
    assert f"without padding at sp {sp}: loss and every gradient" in made.report()
    return found


def test_two_ranks_run_a_call_without_its_padding():
    for name in MODELS:
        found = run_ranks(errors, 2, name, 2, "eager", {"recompute": "none"}, timeout_s=280)
        assert not wrong(found, 1e-10)
