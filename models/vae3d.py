"""Open-Sora v1.2's video autoencoder: causal 3-D convolutions over 2-D latents. Plain PyTorch.

    video `[B, 3, T, Y, X]` -- frames by themselves: 8 x 8 fewer pixels --> `[B, 4, T, Y/8, X/8]`
    -- causal in time: 4 times fewer frames --> `[B, 4, T/4, Y/8, X/8]`, and all the way back

Shapes as suffix: B batch, C channels, T frames, Y rows, X columns. `x_BCTYX` is `[B, C, T, Y, X]`.

Source: hpcaitech/Open-Sora, tag v1.2.0, `opensora/models/vae/`: widths, blocks, norms, strides and
padding of `VAE_Temporal_SD`. Its encoder has 144,421,128 parameters, its decoder 165,265,924; with
the two 1 x 1 convolutions around the latents they are 309,687,144. The 2-D autoencoder is the one
of Stable Diffusion XL in its public configuration, which the authors take from elsewhere.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHORTER = 4  # times fewer frames


@dataclass(frozen=True, slots=True)
class TemporalConfig:
    """Sizes of the temporal autoencoder; the defaults are Open-Sora v1.2's."""

    latents: int = 4  # channels of its input, and of its own latents
    width: int = 128
    widths: tuple[int, ...] = (1, 2, 2, 4)  # of each level, in `width`
    halves: tuple[bool, ...] = (False, True, True)  # whether frames are halved after a level
    blocks: int = 4  # of each level
    groups: int = 32  # of the norms


@dataclass(frozen=True, slots=True)
class SpatialConfig:
    """Sizes of the spatial autoencoder; the defaults are those of Stable Diffusion (XL)."""

    latents: int = 4
    width: int = 128
    widths: tuple[int, ...] = (1, 2, 4, 4)
    blocks: int = 2
    groups: int = 32


class CausalConv(nn.Module):
    """A 3-D convolution that sees no later frame: time is padded in front alone."""

    def __init__(
        self, inner: int, outer: int, kernel: int, halve: bool = False, bias: bool = True
    ) -> None:
        super().__init__()
        step = 2 if halve else 1
        side = kernel // 2
        self.padding = (side, side, side, side, kernel - step, 0)
        self.conv = nn.Conv3d(inner, outer, kernel, stride=(step, 1, 1), bias=bias)

    def forward(self, x_BCTYX: Tensor) -> Tensor:
        """Returns `[B, outer, T or T / 2, Y, X]`."""
        return self.conv(F.pad(x_BCTYX, self.padding))


class CausalBlock(nn.Module):
    """Norm, SiLU, convolution, twice, and a way around them."""

    def __init__(self, inner: int, outer: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inner)
        self.conv1 = CausalConv(inner, outer, 3, bias=False)
        self.norm2 = nn.GroupNorm(groups, outer)
        self.conv2 = CausalConv(outer, outer, 3, bias=False)
        around = CausalConv(inner, outer, 1, bias=False)
        self.around = nn.Identity() if inner == outer else around

    def forward(self, x_BCTYX: Tensor) -> Tensor:
        """Returns `[B, outer, T, Y, X]`."""
        h = self.conv1(F.silu(self.norm1(x_BCTYX)))
        return self.around(x_BCTYX) + self.conv2(F.silu(self.norm2(h)))


class TemporalEncoder(nn.Module):
    """2-D latents of frames to means and log variances of fewer frames."""

    def __init__(self, config: TemporalConfig) -> None:
        super().__init__()
        now = config.width
        self.first = CausalConv(config.latents, now, 3, bias=False)
        layers: list[nn.Module] = []
        for level, times in enumerate(config.widths):
            wide = config.width * times
            for _ in range(config.blocks):
                layers.append(CausalBlock(now, wide, config.groups))
                now = wide
            if level < len(config.halves) and config.halves[level]:
                layers.append(CausalConv(now, now, 3, halve=True))
        layers += [CausalBlock(now, now, config.groups) for _ in range(config.blocks)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.GroupNorm(config.groups, now)
        self.last = CausalConv(now, 2 * config.latents, 1)

    def forward(self, x_BCTYX: Tensor) -> Tensor:
        """Returns `[B, 2 * latents, T / 4, Y, X]`."""
        x_BCTYX = self.first(x_BCTYX)
        for layer in self.layers:
            x_BCTYX = layer(x_BCTYX)
        return self.last(F.silu(self.norm(x_BCTYX)))


class Doubling(nn.Module):
    """A causal convolution to twice the channels, each half of which is every second frame."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = CausalConv(width, 2 * width, 3)

    def forward(self, x_BCTYX: Tensor) -> Tensor:
        """Returns `[B, C, 2 * T, Y, X]`."""
        x = self.conv(x_BCTYX).unflatten(1, (-1, 2))
        return x.transpose(2, 3).flatten(2, 3)


class TemporalDecoder(nn.Module):
    """Latents back to 2-D latents of every frame."""

    def __init__(self, config: TemporalConfig) -> None:
        super().__init__()
        now = config.width * config.widths[-1]
        self.first = CausalConv(config.latents, now, 3)
        layers: list[nn.Module] = []
        layers += [CausalBlock(now, now, config.groups) for _ in range(config.blocks)]
        for level, times in reversed(list(enumerate(config.widths))):
            wide = config.width * times
            for _ in range(config.blocks):
                layers.append(CausalBlock(now, wide, config.groups))
                now = wide
            if level and config.halves[level - 1]:
                layers.append(Doubling(now))
        self.layers = nn.ModuleList(layers)
        self.norm = nn.GroupNorm(config.groups, now)
        self.last = CausalConv(now, config.latents, 3)

    def forward(self, z_BCTYX: Tensor) -> Tensor:
        """Returns `[B, latents, 4 * T, Y, X]`."""
        x_BCTYX = self.first(z_BCTYX)
        for layer in self.layers:
            x_BCTYX = layer(x_BCTYX)
        return self.last(F.silu(self.norm(x_BCTYX)))


class TemporalVAE(nn.Module):
    """The autoencoder of 2-D latents over time; frames are padded in front to a multiple of 4."""

    def __init__(self, config: TemporalConfig) -> None:
        super().__init__()
        self.encoder = TemporalEncoder(config)
        self.moments = CausalConv(2 * config.latents, 2 * config.latents, 1)
        self.unpack = CausalConv(config.latents, config.latents, 1)
        self.decoder = TemporalDecoder(config)

    def encode(self, x_BCTYX: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and log variance of the latents, `[B, latents, ceil(T / 4), Y, X]`."""
        frames = x_BCTYX.shape[2]
        padding = (frames + SHORTER - 1) // SHORTER * SHORTER - frames
        moments = self.moments(self.encoder(F.pad(x_BCTYX, (0, 0, 0, 0, padding, 0))))
        mean, log_variance = moments.chunk(2, dim=1)
        return mean, log_variance.clamp(-30.0, 20.0)

    def decode(self, z_BCTYX: Tensor, frames: int) -> Tensor:
        """Returns the last `frames` frames, `[B, latents, frames, Y, X]`."""
        x = self.decoder(self.unpack(z_BCTYX))
        return x[:, :, x.shape[2] - frames :]


class TemporalLoss(nn.Module):
    """The loss of training the temporal autoencoder; the draw is an input, so a step repeats."""

    def __init__(self, model: TemporalVAE, divergence: float = 1e-6) -> None:
        super().__init__()
        self.model = model
        self.divergence = divergence

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        """Returns the mean absolute error and, weighted, the divergence from a normal, a scalar.

        Args:
            x: 2-D latents, `[B, latents, T, Y, X]`.
            noise: normal, of the same shape; its first frames, as many as latents have, are used.
        """
        mean, log_variance = self.model.encode(x)
        z = mean + torch.exp(0.5 * log_variance) * noise[:, :, : mean.shape[2]]
        error = (self.model.decode(z, x.shape[2]) - x).abs().mean()
        each = 0.5 * (mean.square() + log_variance.exp() - 1.0 - log_variance)
        return error + self.divergence * each.mean()


# ------------------------------------------------------------------------------- frames: 2-D


class FrameBlock(nn.Module):
    """Norm, SiLU, convolution, twice, and a way around them."""

    def __init__(self, inner: int, outer: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, inner, eps=1e-6)
        self.conv1 = nn.Conv2d(inner, outer, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, outer, eps=1e-6)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1)
        self.around = nn.Identity() if inner == outer else nn.Conv2d(inner, outer, 1)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        """Returns `[B, outer, Y, X]`."""
        h = self.conv1(F.silu(self.norm1(x_BCYX)))
        return self.around(x_BCYX) + self.conv2(F.silu(self.norm2(h)))


class FrameAttention(nn.Module):
    """Attention of one head between all pixels of a frame."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, width, eps=1e-6)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        """Returns `[B, C, Y, X]`."""
        rows_BND = self.norm(x_BCYX).flatten(2).transpose(1, 2)
        q, k, v = (linear(rows_BND)[:, None] for linear in (self.q, self.k, self.v))
        found_BND = F.scaled_dot_product_attention(q, k, v)[:, 0]
        return x_BCYX + self.out(found_BND).transpose(1, 2).unflatten(2, x_BCYX.shape[2:])


def middle(width: int, groups: int) -> list[nn.Module]:
    """Returns the layers of the lowest resolution."""
    ends = [FrameBlock(width, width, groups) for _ in range(2)]
    return [ends[0], FrameAttention(width, groups), ends[1]]


class Halving(nn.Module):
    """A convolution of step 2, padded behind alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x_BCYX: Tensor) -> Tensor:
        """Returns `[B, C, Y / 2, X / 2]`."""
        return self.conv(F.pad(x_BCYX, (0, 1, 0, 1)))


class SpatialVAE(nn.Module):
    """The autoencoder of frames by themselves, 8 x 8 fewer pixels."""

    def __init__(self, config: SpatialConfig) -> None:
        super().__init__()
        widths = [config.width * times for times in config.widths]
        self.encoder = nn.Sequential(*self._down(config, widths))
        self.moments = nn.Conv2d(2 * config.latents, 2 * config.latents, 1)
        self.unpack = nn.Conv2d(config.latents, config.latents, 1)
        self.decoder = nn.Sequential(*self._up(config, widths))

    def _down(self, config: SpatialConfig, widths: list[int]) -> list[nn.Module]:
        now = widths[0]
        layers: list[nn.Module] = [nn.Conv2d(3, now, 3, padding=1)]
        for level, wide in enumerate(widths):
            for _ in range(config.blocks):
                layers.append(FrameBlock(now, wide, config.groups))
                now = wide
            layers += [Halving(now)] if level < len(widths) - 1 else []
        layers += [*middle(now, config.groups), nn.GroupNorm(config.groups, now, eps=1e-6)]
        return [*layers, nn.SiLU(), nn.Conv2d(now, 2 * config.latents, 3, padding=1)]

    def _up(self, config: SpatialConfig, widths: list[int]) -> list[nn.Module]:
        now = widths[-1]
        layers: list[nn.Module] = [nn.Conv2d(config.latents, now, 3, padding=1)]
        layers += middle(now, config.groups)
        for level, wide in reversed(list(enumerate(widths))):
            for _ in range(config.blocks + 1):
                layers.append(FrameBlock(now, wide, config.groups))
                now = wide
            if level:
                layers += [nn.Upsample(scale_factor=2.0), nn.Conv2d(now, now, 3, padding=1)]
        layers += [nn.GroupNorm(config.groups, now, eps=1e-6), nn.SiLU()]
        return [*layers, nn.Conv2d(now, 3, 3, padding=1)]

    def encode(self, x_BCTYX: Tensor) -> Tensor:
        """Returns the means of the latents, `[B, latents, T, Y / 8, X / 8]`."""
        frames = x_BCTYX.transpose(1, 2).flatten(0, 1)
        mean = self.moments(self.encoder(frames)).chunk(2, dim=1)[0]
        return mean.unflatten(0, (x_BCTYX.shape[0], -1)).transpose(1, 2)

    def decode(self, z_BCTYX: Tensor) -> Tensor:
        """Returns frames, `[B, 3, T, 8 * Y, 8 * X]`."""
        frames = self.decoder(self.unpack(z_BCTYX.transpose(1, 2).flatten(0, 1)))
        return frames.unflatten(0, (z_BCTYX.shape[0], -1)).transpose(1, 2)


def input_specs(config: TemporalConfig, dtype: str = "float32") -> dict[str, str]:
    """Returns the specs of the inputs of `TemporalLoss`."""
    latents = f"{dtype}[batch, {config.latents}, frames, height, width]"
    return {"x": latents, "noise": latents}
