"""Mixtures of experts that the zoo runs beside the named ones, against the loop over experts."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

from tests.cases.experts import Dense, Text, Titan
from tests.zoo.models import DEPTH, ZooModel, common, text_model


class Grouped(nn.Module):
    """Experts on grouped products where it is captured; the plain model loops over experts.

    torch's grouped product takes no float64, so the plain model cannot run it there.
    """

    def __init__(self, model: nn.Module) -> None:
        """Keeps the model."""
        super().__init__()
        self.model: Any = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss, one number."""
        captured = torch.compiler.is_compiling()
        self.model.set_experts_implementation("grouped_mm" if captured else "eager")
        found: Tensor = self.model(input_ids=input_ids, labels=labels).loss
        return found


def mixture(name: str, **fields: Any) -> ZooModel:
    """A decoder of transformers with experts, by the prefix of its classes' names."""

    def make() -> nn.Module:
        config = getattr(transformers, f"{name}Config")(**common(pad_token_id=0, **fields))
        return Grouped(getattr(transformers, f"{name}ForCausalLM")(config))

    return text_model(make)


FEW = {"num_key_value_heads": 2}
CHOSEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **CHOSEN}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}

EXPERTS: dict[str, ZooModel] = {
    "Mixtral": mixture("Mixtral", num_local_experts=4, output_router_logits=True, **FEW),
    "Qwen3Moe": mixture("Qwen3Moe", head_dim=8, num_experts=4, **CHOSEN, **FEW),
    "OLMoE": mixture("Olmoe", num_experts=4, num_experts_per_tok=2, **FEW),
    "DeepSeek-V3": mixture(
        "DeepseekV3", n_routed_experts=4, v_head_dim=8, num_key_value_heads=4, **ROUTED, **LATENT
    ),
    "gpt-oss": mixture(
        "GptOss", head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=8, **FEW
    ),
    "GLM-4.5": mixture("Glm4Moe", head_dim=8, n_routed_experts=4, **ROUTED, **FEW),
    "experts of torchtitan": text_model(lambda: Text(Titan, DEPTH["layers"])),
    "experts that all compute": text_model(lambda: Text(Dense, DEPTH["layers"])),
}
