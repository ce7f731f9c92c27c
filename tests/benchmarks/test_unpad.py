"""The benchmark of calls without padding: what runs beside dcpc computes the same."""

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from benchmarks.unpad import TINY, batch_of, compiled, lengths_of
from benchmarks.unpad_flattened import flattened, flattened_error, llama
from tests.cases.exactness import plain
from tests.cases.language_models import in_float64
from tests.cases.unpad_t5 import INPUTS, t5
from tests.cases.unpad_t5 import batch_of as t5_batch


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch):
    """transformers casts norms and losses of a Llama to float32, where layouts round apart."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.float)  # to be put back
    monkeypatch.setattr(LlamaRMSNorm, "forward", LlamaRMSNorm.forward)
    in_float64()


def small() -> torch.nn.Module:
    return llama(TINY.width, TINY.layers, TINY.heads, TINY.vocabulary).double()


def test_transformers_row_of_samples_is_the_padded_batch():
    lengths = lengths_of(TINY, 0.4)
    inputs = batch_of(TINY, lengths)
    assert flattened(inputs, lengths)["input_ids"].shape == (1, sum(lengths))
    assert flattened_error(small(), inputs, lengths) < 1e-12


def test_samples_of_a_row_see_each_other_in_a_model_with_a_cache():
    """Why the benchmark turns it off: if this fails, it need not."""
    lengths = lengths_of(TINY, 0.4)
    model = small()
    model.config.use_cache = True
    assert flattened_error(model, batch_of(TINY, lengths), lengths) > 1e-3


def test_llama_runs_without_padding():
    model = small()
    inputs = batch_of(TINY, lengths_of(TINY, 0.4))
    made = compiled(model, TINY, True)
    expected, _ = plain(model, inputs)
    torch.testing.assert_close(made(**inputs), expected, rtol=1e-12, atol=0)
    assert made.stats().unpadded == 1


@pytest.mark.slow  # tests/test_unpad.py has smaller ones
def test_t5_runs_without_padding_on_both_sides():
    model = t5(TINY.width, TINY.layers, TINY.heads, TINY.vocabulary).double()
    inputs = t5_batch(TINY.vocabulary, TINY.seq, lengths_of(TINY, 0.4))
    made = compiled(model, TINY, True, INPUTS)
    expected, _ = plain(model, inputs)
    torch.testing.assert_close(made(**inputs), expected, rtol=1e-12, atol=0)
    assert made.stats().unpadded == 1


@pytest.mark.parametrize("version", [2, 3, 4])
def test_transformers_unpads_attention_for_other_devices_alone(version):
    """What the benchmark does not run: if this fails, it can."""
    with pytest.raises(ImportError, match="cannot be used"):
        transformers.ModernBertForMaskedLM._from_config(
            transformers.ModernBertConfig(
                hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
            ),
            attn_implementation=f"flash_attention_{version}",
        )
