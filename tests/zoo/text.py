"""Language models of transformers that the zoo runs beside the named ones."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.zoo.models import (
    NO_DROPOUT,
    VOCABULARY,
    ZooModel,
    common,
    float64,
    text_model,
    two_texts,
)


def language_model(name: str, masked: bool = False, **fields: Any) -> ZooModel:
    """A transformers model of ids by the prefix of its classes' names."""
    config_name, _, model_name = name.partition(":")

    def make() -> nn.Module:
        config = getattr(transformers, f"{config_name}Config")(**fields)
        return getattr(transformers, model_name or f"{config_name}ForCausalLM")(config)

    return text_model(make, masked)


def grouped(**more: Any) -> dict[str, Any]:
    """Sizes of a decoder with two key/value heads."""
    return common(num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, **more)


def seq2seq(name: str, **fields: Any) -> ZooModel:
    """A transformers encoder-decoder of ids."""
    return ZooModel(
        float64(lambda: _seq2seq(name, fields)),
        {"input_ids": "int64[batch, source]", "labels": "int64[batch, seq]"},
        ({"batch": 1, "source": 17, "seq": 11}, {"batch": 1, "source": 13, "seq": 19}),
        {"batch": 1, "source": 64, "seq": 32},
        two_texts,
    )


def _seq2seq(name: str, fields: dict[str, Any]) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**fields)
    return getattr(transformers, f"{name}ForConditionalGeneration")(config)


BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
}


XLM = {"vocab_size": VOCABULARY, "emb_dim": 32, "n_layers": 2, "n_heads": 4}
XLM |= {"dropout": 0.0, "attention_dropout": 0.0, "max_position_embeddings": 128}


class MaskedPositions(nn.Module):
    """An encoder without its padding, and the loss of masked positions alone, as BERT's is."""

    def __init__(self) -> None:
        """Draws the parameters."""
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.token = nn.Parameter(torch.zeros(32))
        self.layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss, one number."""
        kept = attention_mask != 0
        x, guessed = self.embed(input_ids), kept & (input_ids % 3 == 0)
        x[guessed] = self.token
        x = self.layer(x, src_key_padding_mask=~kept)
        return F.cross_entropy(self.head(x[guessed]), labels[guessed])


TEXT_MODELS: dict[str, ZooModel] = {
    "Gemma": language_model("Gemma", **common(num_key_value_heads=1, head_dim=8)),
    "Gemma2": language_model(
        "Gemma2", **common(num_key_value_heads=2, head_dim=8, sliding_window=8)
    ),
    "Gemma3": language_model(
        "Gemma3Text:Gemma3ForCausalLM",
        **common(num_key_value_heads=2, head_dim=8, sliding_window=8),
    ),
    "Phi": language_model("Phi", **common()),
    "Phi3": language_model("Phi3", **grouped()),
    "Qwen3": language_model("Qwen3", **common(num_key_value_heads=2, head_dim=8)),
    "OPT": language_model(
        "OPT",
        vocab_size=64,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        word_embed_proj_dim=32,
        dropout=0.0,
    ),
    "GPTNeoX": language_model("GPTNeoX", **common()),
    "GPTNeo": language_model(
        "GPTNeo",
        vocab_size=64,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
        max_position_embeddings=128,
        intermediate_size=48,
        resid_dropout=0.0,
        embed_dropout=0.0,
        attention_dropout=0.0,
    ),
    "GPTJ": language_model(
        "GPTJ",
        vocab_size=64,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "GPTBigCode": language_model(
        "GPTBigCode",
        vocab_size=64,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "CodeGen": language_model(
        "CodeGen",
        vocab_size=64,
        n_positions=128,
        n_embd=32,
        n_layer=2,
        n_head=4,
        rotary_dim=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
    "Falcon": language_model(
        "Falcon",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    ),
    "Falcon alibi": language_model(
        "Falcon",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    ),
    "Bloom": language_model(
        "Bloom",
        vocab_size=64,
        hidden_size=32,
        n_layer=2,
        n_head=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    ),
    "MPT": language_model("Mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=128, vocab_size=64),
    "OLMo": language_model("Olmo", **grouped()),
    "OLMo2": language_model("Olmo2", **grouped()),
    "Cohere": language_model("Cohere", **grouped()),
    "StableLM": language_model("StableLm", **common(num_key_value_heads=2)),
    "Starcoder2": language_model(
        "Starcoder2",
        **common(
            num_key_value_heads=2, residual_dropout=0.0, embedding_dropout=0.0, sliding_window=8
        ),
    ),
    "Granite": language_model("Granite", **common(num_key_value_heads=2)),
    "Persimmon": language_model("Persimmon", **common()),
    "GLM": language_model("Glm", **grouped(head_dim=8)),
    "Nemotron": language_model("Nemotron", **common(num_key_value_heads=2)),
    "XGLM": language_model(
        "XGLM",
        vocab_size=64,
        max_position_embeddings=128,
        d_model=32,
        ffn_dim=48,
        num_layers=2,
        attention_heads=4,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    "RoBERTa": language_model(
        "Roberta:RobertaForMaskedLM", True, **common(pad_token_id=1, **NO_DROPOUT)
    ),
    "DeBERTa-v2": language_model(
        "DebertaV2:DebertaV2ForMaskedLM",
        True,
        **common(
            relative_attention=True, position_buckets=16, pos_att_type=["p2c", "c2p"], **NO_DROPOUT
        ),
    ),
    "ELECTRA": language_model(
        "Electra:ElectraForMaskedLM", True, **common(embedding_size=16, **NO_DROPOUT)
    ),
    "ALBERT": language_model(
        "Albert:AlbertForMaskedLM", True, **common(embedding_size=16, **NO_DROPOUT)
    ),
    "ALBERT of 12": language_model(
        "Albert:AlbertForMaskedLM",
        True,
        **common(embedding_size=16, **NO_DROPOUT, num_hidden_layers=12),
    ),
    "DistilBERT": language_model(
        "DistilBert:DistilBertForMaskedLM",
        True,
        vocab_size=64,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    "XLNet": language_model(
        "XLNet:XLNetLMHeadModel",
        True,
        vocab_size=64,
        d_model=32,
        n_layer=2,
        n_head=4,
        d_inner=48,
        dropout=0.0,
    ),
    "ModernBERT": language_model(
        "ModernBert:ModernBertForMaskedLM",
        True,
        **common(
            pad_token_id=0,
            local_attention=8,
            global_attn_every_n_layers=2,
            embedding_dropout=0.0,
            mlp_dropout=0.0,
            attention_dropout=0.0,
            cls_token_id=1,
            sep_token_id=2,
            bos_token_id=1,
            eos_token_id=2,
        ),
    ),
    "MPNet": language_model("MPNet:MPNetForMaskedLM", True, **common(pad_token_id=1, **NO_DROPOUT)),
    "Nystromformer": language_model(
        "Nystromformer:NystromformerForMaskedLM",
        True,
        **common(num_landmarks=8, segment_means_seq_len=8, **NO_DROPOUT),
    ),
    "FNet": language_model(
        "FNet:FNetForMaskedLM",
        **{k: v for k, v in common(hidden_dropout_prob=0.0).items() if k != "num_attention_heads"},
    ),
    "XLM": language_model("XLM:XLMWithLMHeadModel", **XLM),
    "Flaubert": language_model("Flaubert:FlaubertWithLMHeadModel", **XLM),
    "ESM": language_model(
        "Esm:EsmForMaskedLM",
        True,
        **common(pad_token_id=1, mask_token_id=3, token_dropout=True, **NO_DROPOUT),
    ),
    "masked positions alone": text_model(MaskedPositions, True),
    "BART": seq2seq("Bart", **BART),
    "Pegasus": seq2seq("Pegasus", **BART),
    "mBART": seq2seq("MBart", **BART),
    "Marian": ZooModel(
        float64(lambda: transformers.MarianMTModel(transformers.MarianConfig(**BART))),
        {"input_ids": "int64[batch, source]", "labels": "int64[batch, seq]"},
        ({"batch": 1, "source": 17, "seq": 11}, {"batch": 1, "source": 13, "seq": 19}),
        {"batch": 1, "source": 64, "seq": 32},
        two_texts,
    ),
    "mT5": seq2seq(
        "MT5",
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    "UMT5": seq2seq(
        "UMT5",
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    ),
    "ProphetNet": seq2seq(
        "ProphetNet",
        vocab_size=64,
        hidden_size=32,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_encoder_layers=2,
        num_decoder_layers=2,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        max_position_embeddings=128,
        decoder_start_token_id=0,
    ),
}
