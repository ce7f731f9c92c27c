"""Language models with a state that the zoo runs beside the named ones: scans, chunks, loops."""

from __future__ import annotations

from tests.zoo.models import ZooModel, common
from tests.zoo.text import language_model

FEW = {"num_key_value_heads": 2}
SCAN = {"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 2}
CHUNKS = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

RECURRENT: dict[str, ZooModel] = {
    "Mamba": language_model(
        "Mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4
    ),
    "Mamba2": language_model(
        "Mamba2", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4, num_heads=4,
        head_dim=16, n_groups=1, chunk_size=8, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
    "FalconMamba": language_model(
        "FalconMamba", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    ),
    "Jamba": language_model(
        "Jamba", **common(pad_token_id=0, num_experts=1, attn_layer_period=2, attn_layer_offset=1,
                          use_mamba_kernels=False, mamba_dt_rank=4, **SCAN, **FEW),
    ),
    "Bamba": language_model(
        "Bamba", **common(pad_token_id=0, attn_layer_indices=[1], **SCAN, **CHUNKS, **FEW)
    ),
    "Zamba2": language_model(
        "Zamba2", **common(pad_token_id=0, mamba_d_state=4, mamba_d_conv=2, mamba_expand=2,
                           n_mamba_heads=4, mamba_headdim=16, mamba_ngroups=1, chunk_size=8,
                           layers_block_type=["mamba", "hybrid"], num_mem_blocks=1,
                           adapter_rank=4, **FEW),
    ),
    "Qwen3-Next": language_model(
        "Qwen3Next", **common(pad_token_id=0, head_dim=8, num_experts=0, mlp_only_layers=[0, 1],
                              layer_types=["linear_attention", "full_attention"], **DELTA, **FEW),
    ),
    "RecurrentGemma": language_model(
        "RecurrentGemma", **common(pad_token_id=0, lru_width=32, attention_window_size=8,
                                   block_types=["recurrent", "attention"], **FEW),
    ),
}  # fmt: skip
