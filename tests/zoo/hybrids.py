"""Convolutions and attention in one model: a Conformer, and models of timm where it is installed.

XCiT attends over channels of pixels that a batch norm in eval() made, the others of timm over
blocks, over patches, or over channels again. None of the tests' packages needs timm:

    pip install --no-deps timm torchvision
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from dcpc.buckets import Sizes
from tests.zoo.media import SumOfSquares
from tests.zoo.models import ZooModel, float64

NMS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


def timm() -> Any:
    """Returns timm, beside a CPU build of torch, too: there torchvision's kernels do not load.

    It stops at the shapes of two ops that are then unknown. They are declared; no model calls them.
    """
    try:
        return importlib.import_module("timm")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", NMS)
    return importlib.import_module("timm")


class Classified(nn.Module):
    """A classifier's cross-entropy; its batch norms keep to the statistics that they have."""

    def __init__(self, model: nn.Module) -> None:
        """Keeps the model, which stays in eval()."""
        super().__init__()
        self.model = model.eval()

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        """Returns the loss, one number."""
        return F.cross_entropy(self.model(image), label)


def classifier(name: str, pixels: int, **fields: Any) -> ZooModel:
    """A classifier of square images of one size, of which the batch alone is symbolic."""

    def make() -> nn.Module:
        return Classified(timm().create_model(name, num_classes=10, **fields))

    return ZooModel(
        float64(make),
        {"image": f"float64[batch, 3, {pixels}, {pixels}]", "label": "int64[batch]"},
        ({"batch": 1},),
        {"batch": 1},
    )


class Norming(nn.Module):
    """A model whose batch norms stay in train(), whatever the rest of it does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def train(self, mode: bool = True) -> Norming:
        """Changes the mode of all but batch norms."""
        super().train(mode)
        for module in self.modules():
            module.training |= isinstance(module, nn.BatchNorm1d)
        return self

    def forward(self, **inputs: Tensor) -> Any:
        """Returns what the model does."""
        return self.model(**inputs)


def _conformer(groups: bool) -> nn.Module:
    """A Conformer whose convolutions are normed by micro-batch, or in groups instead."""
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, hidden_dropout=0.0,
        attention_dropout=0.0, feat_proj_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0,
        apply_spec_augment=False, conformer_conv_dropout=0.0, conv_depthwise_kernel_size=5,
        activation_dropout=0.0, position_embeddings_type="relative",
    )  # fmt: skip
    model = transformers.Wav2Vec2ConformerModel(config)
    if not groups:
        return Norming(SumOfSquares(model))
    for module in model.modules():
        if isinstance(getattr(module, "batch_norm", None), nn.BatchNorm1d):
            module.batch_norm = nn.GroupNorm(4, 32)
    return SumOfSquares(model)


def _audio(groups: bool) -> ZooModel:
    return ZooModel(
        float64(partial(_conformer, groups)),
        {"input_values": "float64[batch, samples]"},
        ({"batch": 1, "samples": 333}, {"batch": 1, "samples": 401}),
        {"batch": 1, "samples": 640},
    )


class CTCEncoder(nn.Module):
    """Convolutions and attention on frames of sound, and `nn.CTCLoss` of padded targets."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 32, 3, stride=2, padding=1)
        layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(32, 11)
        self.loss = nn.CTCLoss(blank=10)

    def forward(self, frames: Tensor, lengths: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        """Returns the loss, one number; lengths [batch] of frames and of targets."""
        x = F.gelu(self.conv(frames.mT)).mT
        lengths = (lengths + 1) // 2
        hidden = torch.arange(x.shape[1], device=x.device) >= lengths.unsqueeze(1)
        x = self.head(self.layers(x, src_key_padding_mask=hidden)).log_softmax(-1)
        loss: Tensor = self.loss(x.transpose(0, 1), targets, lengths, counts)
        return loss


def _transcribed(sizes: Sizes) -> dict[str, Tensor]:
    batch, frames, text = (sizes[d] for d in ("batch", "frames", "text"))
    generator = torch.Generator().manual_seed(frames)
    return {
        "frames": torch.randn(batch, frames, 8, dtype=torch.float64, generator=generator),
        "lengths": torch.full((batch,), frames - 6),
        "targets": torch.randint(0, 10, (batch, text), generator=generator),
        "counts": torch.full((batch,), text - 2),
    }


CTC_ENCODER = ZooModel(
    float64(CTCEncoder),
    {
        "frames": "float64[batch, frames, 8]", "lengths": "int64[batch]",
        "targets": "int64[batch, text]", "counts": "int64[batch]",
    },
    ({"batch": 1, "frames": 33, "text": 5}, {"batch": 1, "frames": 47, "text": 7}),
    {"batch": 1, "frames": 64, "text": 8},
    _transcribed,
)  # fmt: skip
CONFORMER = _audio(groups=True)
TIMM: dict[str, ZooModel] = {
    "XCiT": classifier("xcit_nano_12_p16_224", 48, depth=2, img_size=48, embed_dim=32, num_heads=4),
    "CoAtNet": classifier("coatnet_pico_rw_224", 64, img_size=64),
    "MobileViT": classifier("mobilevitv2_050", 64),
    "EdgeNeXt": classifier("edgenext_xx_small", 64),
}
if importlib.util.find_spec("timm"):
    timm()  # before transformers imports torchvision, which stops it, too
LEFT_OUT = {} if importlib.util.find_spec("timm") else dict.fromkeys(TIMM, "timm")
HYBRIDS = {
    "Conformer": _audio(groups=False),
    "Conformer with group norms": CONFORMER,
    "CTC encoder": CTC_ENCODER,
    **{name: model for name, model in TIMM.items() if name not in LEFT_OUT},
}
