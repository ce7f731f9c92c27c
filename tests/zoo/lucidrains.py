"""Architectures of x-transformers and vit-pytorch, where these are installed.

None of the tests' packages needs them:

    pip install --no-deps x-transformers vit-pytorch einops einx loguru frozendict \
        torch-einops-utils hyper-connections discrete-continuous-embed-readout
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.hybrids import Classified
from tests.zoo.models import VOCABULARY, ZooModel, float64, text_model, two_texts

SMALL = {"dim": 32, "depth": 2, "heads": 4, "attn_dim_head": 8}


class Predicted(nn.Module):
    """The cross-entropy of a model of ids that returns logits."""

    def __init__(self, model: nn.Module) -> None:
        """Keeps the model."""
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss, one number."""
        return F.cross_entropy(self.model(input_ids).flatten(0, 1), labels.flatten())


class Written(nn.Module):
    """The loss of an encoder and a decoder, which take a mask of the source."""

    def __init__(self, model: nn.Module) -> None:
        """Keeps the model."""
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss, one number."""
        found: Tensor = self.model(input_ids, labels.clamp(min=0), mask=input_ids != 0)
        return found


def _text(causal: bool, fields: dict[str, Any]) -> nn.Module:
    library: Any = importlib.import_module("x_transformers")
    layers = (library.Decoder if causal else library.Encoder)(**SMALL, **fields)
    made = library.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=128, attn_layers=layers)
    return Predicted(made)


def text(causal: bool = True, **fields: Any) -> ZooModel:
    """A decoder, or an encoder, of x-transformers."""
    return text_model(partial(_text, causal, fields))


def _pair() -> nn.Module:
    library: Any = importlib.import_module("x_transformers")
    return Written(library.XTransformer(
        dim=32, enc_num_tokens=VOCABULARY, enc_depth=2, enc_heads=4, enc_max_seq_len=128,
        dec_num_tokens=VOCABULARY, dec_depth=2, dec_heads=4, dec_max_seq_len=128,
    ))  # fmt: skip


def image(module: str, name: str, pixels: int = 32, **fields: Any) -> ZooModel:
    """A classifier of vit-pytorch, of images of one size, of which the batch alone is symbolic."""

    def make() -> nn.Module:
        library: Any = importlib.import_module(f"vit_pytorch.{module}")
        return Classified(getattr(library, name)(num_classes=10, **fields))

    return ZooModel(
        float64(make),
        {"image": f"float64[batch, 3, {pixels}, {pixels}]", "label": "int64[batch]"},
        ({"batch": 1},),
        {"batch": 1},
    )


X_TRANSFORMERS: dict[str, ZooModel] = {
    "x-transformers decoder, rotary, SwiGLU": text(
        rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, ff_swish=True, ff_no_bias=True
    ),
    "x-transformers decoder, flash, grouped heads": text(attn_flash=True, attn_kv_heads=2),
    "x-transformers decoder, ALiBi": text(alibi_pos_bias=True, alibi_num_heads=2),
    "x-transformers decoder, T5's bias": text(rel_pos_bias=True),
    "x-transformers decoder, talking heads": text(attn_pre_talking_heads=True),
    "x-transformers decoder, top k of attention": text(attn_sparse_topk=4),
    "x-transformers decoder, residual attention": text(residual_attn=True),
    "x-transformers decoder, gated residuals": text(gate_residual=True),
    "x-transformers decoder, shifted tokens": text(shift_tokens=1),
    "x-transformers decoder, memories": text(attn_num_mem_kv=3),
    "x-transformers decoder, norms of queries and keys": text(attn_qk_norm=True),
    "x-transformers decoder, macaron, sandwich": text(macaron=True, sandwich_norm=True),
    "x-transformers decoder, scale norm": text(use_scalenorm=True, ff_relu_squared=True),
    "x-transformers decoder, value residuals": text(add_value_residual=True),
    "x-transformers encoder": text(causal=False),
    "x-transformers encoder, rotary": text(causal=False, rotary_xpos=False, rotary_pos_emb=True),
    "x-transformers encoder and decoder": ZooModel(
        float64(_pair),
        {"input_ids": "int64[batch, source]", "labels": "int64[batch, seq]"},
        ({"batch": 1, "source": 17, "seq": 11}, {"batch": 1, "source": 13, "seq": 19}),
        {"batch": 1, "source": 64, "seq": 32},
        two_texts,
    ),
}
VIT = {"dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48, "image_size": 32, "patch_size": 8}
VIT_PYTORCH: dict[str, ZooModel] = {
    "vit-pytorch ViT": image("vit", "ViT", **VIT),
    "vit-pytorch SimpleViT": image("simple_vit", "SimpleViT", **VIT),
    "vit-pytorch DeepViT": image("deepvit", "DeepViT", **VIT),
    "vit-pytorch CaiT": image("cait", "CaiT", cls_depth=1, **VIT),
    "vit-pytorch ViT of register tokens": image(
        "simple_vit_with_register_tokens", "SimpleViT", num_register_tokens=2, **VIT
    ),
    "vit-pytorch parallel ViT": image("parallel_vit", "ViT", **VIT),
    "vit-pytorch ViT with FFT": image(
        "simple_vit_with_fft", "SimpleViT", freq_patch_size=8, **VIT
    ),
    "vit-pytorch patch merger": image(
        "vit_with_patch_merger", "ViT", patch_merge_layer=1, patch_merge_num_tokens=4, **VIT
    ),
    "vit-pytorch normalized ViT": image("normalized_vit", "nViT", **VIT),
    "vit-pytorch small data sets": image("vit_for_small_dataset", "ViT", **VIT),
    "vit-pytorch CvT": image(
        "cvt", "CvT", 64,
        s1_emb_dim=16, s1_heads=1, s1_depth=1, s2_emb_dim=32, s2_heads=2, s2_depth=1,
        s3_emb_dim=48, s3_heads=2, s3_depth=1,
    ),
    "vit-pytorch Twins": image(
        "twins_svt", "TwinsSVT", 64,
        s1_emb_dim=16, s1_patch_size=4, s1_local_patch_size=4, s1_global_k=4, s1_depth=1,
        s2_emb_dim=32, s2_patch_size=2, s2_local_patch_size=4, s2_global_k=4, s2_depth=1,
        s3_emb_dim=48, s3_patch_size=2, s3_local_patch_size=2, s3_global_k=2, s3_depth=1,
        s4_emb_dim=64, s4_patch_size=2, s4_local_patch_size=2, s4_global_k=2, s4_depth=1,
    ),
}  # fmt: skip
LIBRARIES = {"x_transformers": X_TRANSFORMERS, "vit_pytorch": VIT_PYTORCH}
LEFT_OUT = {
    name: library
    for library, models in LIBRARIES.items()
    if importlib.util.find_spec(library) is None
    for name in models
}
LUCIDRAINS = {
    name: model
    for models in LIBRARIES.values()
    for name, model in models.items()
    if name not in LEFT_OUT
}
