"""Small models of `benchmarks.models`, their data, and how many parameters the large ones have."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dcpc.buckets import Buckets
from models.evoformer import MASKED, Evoformer, EvoformerConfig
from models.evoformer import input_specs as evoformer_specs
from models.gpt import GPT, GPTConfig
from models.stdit import XL, RectifiedFlow, STDiT, STDiTConfig
from models.stdit import input_specs as stdit_specs
from models.vae3d import TemporalConfig, TemporalLoss, TemporalVAE
from models.vae3d import input_specs as latents_specs

Sizes = Mapping[str, int]

SMALL_FOLD = EvoformerConfig(
    blocks=1, msa_dim=16, pair_dim=8, msa_heads=4, pair_heads=2, head_dim=4, outer_dim=3,
    triangle_dim=8, distances=6, reach=3,
)  # fmt: skip
SMALL_VAE = TemporalConfig(width=8, blocks=1, groups=4)
SMALL_STDIT = STDiTConfig(depth=1, dim=32, heads=4, text_dim=20, text_len=6)
SMALL_GPT = GPTConfig(vocab_size=32, dim=32, n_layers=1, n_heads=4)


def buckets_of(specs: Mapping[str, str], points: Sequence[Sizes]) -> Buckets:
    """Returns buckets of these inputs, one a point."""
    sizes = [{n: s for n, s in p.items() if n != "batch"} for p in points]
    return Buckets(inputs=dict(specs), sizes=sizes)


def evoformer_buckets(points: Sequence[Sizes]) -> Buckets:
    """Returns buckets of crops."""
    return buckets_of(evoformer_specs(), points)


def latents_buckets(config: TemporalConfig, points: Sequence[Sizes]) -> Buckets:
    """Returns buckets of clips of latents, float32."""
    return buckets_of(latents_specs(config), points)


@dataclass(frozen=True, slots=True)
class Case:
    """A small model, and the number of parameters of the published one.

    Attributes:
        make: the small model.
        specs: of its inputs, in float64.
        points: lengths, which no degree divides.
        draw: inputs at some lengths.
        degrees: ranks that it is compared on.
        published: parts of the large model, on the meta device, and their published sizes.
    """

    make: Callable[[], nn.Module]
    specs: Mapping[str, str]
    points: tuple[Sizes, ...]
    draw: Callable[[Sizes, torch.Generator], dict[str, Tensor]]
    degrees: tuple[int, ...] = (2, 4)
    published: Sequence[tuple[Callable[[], nn.Module], int]] = field(default=())

    @property
    def buckets(self) -> Buckets:
        """One bucket a point."""
        return buckets_of(self.specs, self.points)

    def model(self) -> nn.Module:
        """The small model in float64, every parameter random."""
        torch.manual_seed(0)
        model = self.make().double()
        for p in model.parameters():
            if p.requires_grad:
                nn.init.normal_(p, std=0.2)
        return model

    def data(self, sizes: Sizes) -> dict[str, Tensor]:
        """The same inputs at every call."""
        return self.draw(sizes, torch.Generator().manual_seed(0))

    def parameters_off(self) -> int:
        """How many parameters the large model has beside the published number, of all parts."""
        found = 0
        for make, expected in self.published:
            with torch.device("meta"):
                found += abs(sum(p.numel() for p in make().parameters()) - expected)
        return found


def _fold(sizes: Sizes, g: torch.Generator) -> dict[str, Tensor]:
    batch, sequences, residues = (sizes[n] for n in ("batch", "sequences", "residues"))
    tokens = torch.randint(0, MASKED, (batch, sequences, residues), generator=g)
    hidden = torch.rand(tokens.shape, generator=g) < 0.3
    distance = torch.randint(0, SMALL_FOLD.distances, (batch, residues, residues), generator=g)
    masked = torch.where(hidden, MASKED, tokens)
    return {"msa": masked, "true_msa": tokens, "hidden": hidden, "target": tokens[:, 0],
            "distance": distance}  # fmt: skip


def _latents(sizes: Sizes, g: torch.Generator) -> dict[str, Tensor]:
    shape = (sizes["batch"], SMALL_VAE.latents, *(sizes[n] for n in ("frames", "height", "width")))
    return {n: torch.randn(shape, generator=g, dtype=torch.float64) for n in ("x", "noise")}


def _video(sizes: Sizes, g: torch.Generator) -> dict[str, Tensor]:
    batch, frames, height, width = (sizes[n] for n in ("batch", "frames", "height", "width"))
    config = SMALL_STDIT

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    return {
        "latents": normal(batch, 4, frames, height, width),
        "noise": normal(batch, 4, frames, height, width),
        "timestep": 1000 * torch.rand(batch, generator=g),
        "text": normal(batch, config.text_len, config.text_dim),
        "text_mask": torch.ones(batch, config.text_len, dtype=torch.bool),
        "fps": torch.full((batch,), 24.0),
        "pixel_height": torch.full((batch,), 8.0 * height),
        "pixel_width": torch.full((batch,), 8.0 * width),
        "frame_mask": torch.ones(batch, frames, dtype=torch.bool),
        "drop_text": torch.zeros(batch, dtype=torch.bool),
    }


def _text(sizes: Sizes, g: torch.Generator) -> dict[str, Tensor]:
    shape = (sizes["batch"], sizes["seq"])
    ids = torch.randint(0, SMALL_GPT.vocab_size, shape, generator=g)
    return {"input_ids": ids, "labels": ids}


def _vae() -> TemporalVAE:
    return TemporalVAE(TemporalConfig())


CASES: Mapping[str, Case] = {
    "evoformer": Case(
        lambda: Evoformer(SMALL_FOLD),
        evoformer_specs(),
        ({"batch": 1, "sequences": 5, "residues": 7}, {"batch": 2, "sequences": 3, "residues": 9}),
        _fold,
        # No exact number was found published: the sum of algorithms 7 to 15 at its widths.
        published=((lambda: Evoformer(EvoformerConfig()).blocks, 48 * 1_829_952),),
    ),
    "vae3d": Case(
        lambda: TemporalLoss(TemporalVAE(SMALL_VAE), 0.1),
        latents_specs(SMALL_VAE, "float64"),
        (
            {"batch": 1, "frames": 5, "height": 7, "width": 6},
            {"batch": 2, "frames": 9, "height": 5, "width": 4},
        ),
        _latents,
        (2, 3, 4),
        # Source: the issue; the layers are those of hpcaitech/Open-Sora, tag v1.2.0
        (
            (lambda: _vae().encoder, 144_421_128),
            (lambda: _vae().decoder, 165_265_924),
            (_vae, 309_687_144),
        ),
    ),
    "stdit": Case(
        lambda: RectifiedFlow(STDiT(SMALL_STDIT)),
        stdit_specs(SMALL_STDIT, "float64"),
        (
            {"batch": 1, "frames": 5, "height": 5, "width": 6},
            {"batch": 1, "frames": 3, "height": 9, "width": 4},
        ),
        _video,
        # Source: shared/specs/stdit.md 1.4
        published=((lambda: STDiT(XL), 1_207_643_972),),
    ),
    "gpt": Case(
        lambda: GPT(SMALL_GPT),
        {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"},
        ({"batch": 1, "seq": 13}, {"batch": 2, "seq": 7}),
        _text,
    ),
}
