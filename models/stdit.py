"""STDiT-3, the video diffusion transformer of Open-Sora v1.2, and its rectified-flow loss.

Spatial and temporal blocks take turns over `T * S` tokens. Text padding is a mask over the keys of
cross-attention; it gives the numbers of packing the real tokens, at any length. Plain PyTorch.

Shapes as suffix: B batch, T latent frames, S tokens of a frame, N = T * S, D model width, H heads,
C width of a head, L text tokens, E text width; latents are `[B, channels, T, rows, columns]`.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pair = tuple[Tensor, Tensor]  # cosines and sines

STEPS = 1000  # a timestep is 1000 * tau
REFERENCE_PIXELS = 512  # of a side: positions and timesteps are scaled by the size relative to it


@dataclass(frozen=True, slots=True)
class STDiTConfig:
    """Sizes of an STDiT-3; the default is XL/2 with 1.2e9 parameters.

    Attributes:
        depth: number of spatial blocks, and of temporal blocks.
        dim: width of a token.
        heads: attention heads.
        text_dim: width of the text encoder's states.
        text_len: text tokens of a sample, padding included.
        channels: channels of a latent; the output has twice as many, of which half are used.
        patch: rows and columns of a patch; a patch has one frame.
    """

    depth: int = 28
    dim: int = 1152
    heads: int = 16
    text_dim: int = 4096
    text_len: int = 300
    channels: int = 4
    patch: int = 2

    def __post_init__(self) -> None:
        """Refuses sizes that do not divide."""
        if self.dim % (2 * self.heads) or self.dim % 4:
            raise ValueError(f"dim {self.dim} must be a multiple of 4 and 2 * heads {self.heads}")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.dim // self.heads

    def flops(self, frames: int, tokens: int, text: int) -> int:
        """Returns the FLOPs of all blocks for one sample of so many latent frames, forward.

        `tokens` are those of a frame, `text` those computed, masked padding included.
        """
        d, n = self.dim, frames * tokens
        both = 28 * n * d * d + 4 * text * d * d + 4 * n * text * d
        return self.depth * (2 * both + 4 * d * n * (tokens + frames))


XL = STDiTConfig()
STDIT_3B = STDiTConfig(dim=1872, heads=26)


def xl() -> nn.Module:
    """Returns the training step of an XL/2 in bfloat16, for `dcpc report models.stdit:xl`."""
    return RectifiedFlow(STDiT(XL)).to(torch.bfloat16)


def sinusoid(x: Tensor, width: int) -> Tensor:
    """Returns `[*x.shape, width]`: cosines, then sines, at periods up to 10000, in float32."""
    powers = torch.arange(width // 2, device=x.device, dtype=torch.float32) / (width // 2)
    angles = x.float()[..., None] * torch.exp(-math.log(10000.0) * powers)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def axis_code(x: Tensor, width: int) -> Tensor:
    """Returns `[*x.shape, width]`: sines, then cosines, of coordinates."""
    powers = torch.arange(0, width, 2, device=x.device, dtype=x.dtype) / width
    angles = x[..., None] * 10000.0**-powers
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


def positions(rows: int, columns: int, pixels_B: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Returns the code of each place in a frame, `[B, S, D]`.

    The first half of a code is of its column. Coordinates run from 0 to about sqrt(S) / scale
    whatever the resolution; `pixels_B` is height times width in pixels. All of it is made of
    tensors, so that the numbers of rows and columns of patches may be symbols.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    place = {"device": pixels_B.device, "dtype": exact}
    base = torch.full((), rows * columns, **place).sqrt().round()
    step_B1 = (base * REFERENCE_PIXELS / pixels_B.to(exact).sqrt())[:, None]
    row = axis_code(torch.arange(rows, **place) * step_B1 / rows, dim // 2)
    column = axis_code(torch.arange(columns, **place) * step_B1 / columns, dim // 2)
    shape = (-1, rows, columns, -1)
    code = torch.cat((column[:, None].expand(shape), row[:, :, None].expand(shape)), dim=-1)
    return code.flatten(1, 2).to(dtype)


class Rotary(nn.Module):
    """Rotary positions of frames: neighbouring pairs of a head are rotated."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        powers = torch.arange(0, head_dim, 2) / head_dim
        self.freqs = nn.Parameter(10000.0**-powers, requires_grad=False)

    def forward(self, frames: int) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of the angles of frames 0 .. T-1, both `[T, C / 2]`."""
        frame_T = torch.arange(frames, device=self.freqs.device, dtype=self.freqs.dtype)
        angles = frame_T[:, None] * self.freqs
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns `[..., T, C]` with each pair (2i, 2i+1) rotated by the angle of its frame."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    return torch.stack(pair, dim=-1).flatten(-2)


class MLP(nn.Module):
    """Linear, activation, linear."""

    def __init__(self, inner: int, hidden: int, outer: int, activation: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Linear(inner, hidden)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, outer)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `[..., outer]`."""
        return self.fc2(self.activation(self.fc1(x)))


class SelfAttention(nn.Module):
    """Attention of a sequence to itself, queries and keys normalised a head."""

    def __init__(self, config: STDiTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=1e-6)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, rotary: Pair | None) -> Tensor:
        """Returns what each of `[sequences, length, D]` attends to, in the same shape."""
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Attention of every token to the real text tokens of its sample."""

    def __init__(self, config: STDiTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q = nn.Linear(config.dim, config.dim)
        self.kv = nn.Linear(config.dim, 2 * config.dim)
        self.proj = nn.Linear(config.dim, config.dim)

    def forward(self, x_BND: Tensor, text_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        """Returns `[B, N, D]`."""
        q = self.q(x_BND).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        kv = self.kv(text_BLD).unflatten(-1, (2, self.heads, -1))
        k, v = kv.permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_BL[:, None, None, :])
        return self.proj(out.transpose(1, 2).flatten(2))


def modulation(table_RD: Tensor, time_BKRD: Tensor, mask_BT: Tensor | None) -> list[Tensor]:
    """Returns each row of a table plus the condition, `[B, T or 1, 1, D]`.

    Args:
        table_RD: the block's own part.
        time_BKRD: with K = 1 the condition of all frames; with K = 2 that of noisy frames, and that
            of frames given clean.
        mask_BT: True for a noisy frame; given if K = 2.
    """
    rows = (table_RD + time_BKRD).unbind(2)
    if mask_BT is None:
        return [row[:, :, None] for row in rows]
    noisy = mask_BT[:, :, None, None]
    return [torch.where(noisy, row[:, :1, None], row[:, 1:, None]) for row in rows]


class Block(nn.Module):
    """Self-attention over space or over time, cross-attention to text, MLP."""

    def __init__(self, config: STDiTConfig, temporal: bool) -> None:
        super().__init__()
        self.temporal = temporal
        self.table = nn.Parameter(torch.randn(6, config.dim) / config.dim**0.5)
        self.norm1 = nn.LayerNorm(config.dim, eps=1e-6, elementwise_affine=False)
        self.attention = SelfAttention(config)
        self.cross = CrossAttention(config)
        self.norm2 = nn.LayerNorm(config.dim, eps=1e-6, elementwise_affine=False)
        self.mlp = MLP(config.dim, 4 * config.dim, config.dim, nn.GELU("tanh"))

    def forward(
        self, x_BTSD: Tensor, text: tuple[Tensor, Tensor], rows: list[Tensor], rotary: Pair
    ) -> Tensor:
        """Returns `[B, T, S, D]`; text is states `[B, L, D]` and mask `[B, L]`."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = rows
        h_BTSD = self.norm1(x_BTSD) * (1 + scale_a) + shift_a
        x_BTSD = x_BTSD + gate_a * self._attend(h_BTSD, rotary)
        crossed_BND = self.cross(x_BTSD.flatten(1, 2), *text)
        x_BTSD = x_BTSD + crossed_BND.unflatten(1, x_BTSD.shape[1:3])
        h_BTSD = self.norm2(x_BTSD) * (1 + scale_m) + shift_m
        return x_BTSD + gate_m * self.mlp(h_BTSD)

    def _attend(self, x_BTSD: Tensor, rotary: Pair) -> Tensor:
        if not self.temporal:
            out = self.attention(x_BTSD.flatten(0, 1), None)
            return out.unflatten(0, x_BTSD.shape[:2])
        x_BSTD = x_BTSD.transpose(1, 2)
        out = self.attention(x_BSTD.flatten(0, 1), rotary)
        return out.unflatten(0, x_BSTD.shape[:2]).transpose(1, 2)


class FinalLayer(nn.Module):
    """Modulated norm and projection to patches."""

    def __init__(self, config: STDiTConfig) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2, config.dim) / config.dim**0.5)
        self.norm = nn.LayerNorm(config.dim, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(config.dim, config.patch**2 * 2 * config.channels)

    def forward(self, x_BTSD: Tensor, time_BKD: Tensor, mask_BT: Tensor | None) -> Tensor:
        """Returns patches, `[B, T, S, patch * patch * 2 * channels]`."""
        noisy = self._modulate(x_BTSD, time_BKD[:, :1])
        if mask_BT is None:
            return self.linear(noisy)
        still = self._modulate(noisy, time_BKD[:, 1:])  # of the modulated x, as in the original
        return self.linear(torch.where(mask_BT[:, :, None, None], noisy, still))

    def _modulate(self, x_BTSD: Tensor, time_B1D: Tensor) -> Tensor:
        shift, scale = modulation(self.table, time_B1D[:, :, None], None)
        return self.norm(x_BTSD) * (1 + scale) + shift


class STDiT(nn.Module):
    """The transformer: noisy latents, timestep and text to velocity."""

    def __init__(self, config: STDiTConfig) -> None:
        super().__init__()
        self.config = config
        dim, side = config.dim, config.patch
        self.patch = nn.Conv3d(config.channels, dim, (1, side, side), stride=(1, side, side))
        self.time = MLP(256, dim, dim, nn.SiLU())
        self.fps = MLP(256, dim, dim, nn.SiLU())
        self.time_table = nn.Sequential(nn.SiLU(), nn.Linear(dim, 6 * dim))
        self.text = MLP(config.text_dim, dim, dim, nn.GELU("tanh"))
        no_text = torch.randn(config.text_len, config.text_dim) / config.text_dim**0.5
        self.register_buffer("no_text", no_text)
        self.rotary = Rotary(config.head_dim)
        self.spatial = nn.ModuleList(Block(config, temporal=False) for _ in range(config.depth))
        self.temporal = nn.ModuleList(Block(config, temporal=True) for _ in range(config.depth))
        self.final = FinalLayer(config)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv3d):
                nn.init.xavier_uniform_(module.weight.flatten(1))
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.fps.fc1.weight, std=0.02)
        zero = [self.fps.fc2]
        for block in self.temporal:
            zero += [block.attention.proj, block.cross.proj, block.mlp.fc2]
        for linear in zero:
            nn.init.zeros_(linear.weight)

    def forward(
        self,
        latents: Tensor,
        timestep: Tensor,
        text: Tensor,
        text_mask: Tensor,
        fps: Tensor,
        pixel_height: Tensor,
        pixel_width: Tensor,
        frame_mask: Tensor | None = None,
        drop_text: Tensor | None = None,
    ) -> Tensor:
        """Returns `[B, 2 * channels, T, rows, columns]`, float32 or wider; half of it is velocity.

        Args:
            latents: `[B, channels, T, rows, columns]`, any number of rows and columns.
            timestep: `[B]`, 0 (clean) .. 1000 (noise).
            text: states of the text encoder, `[B, L, E]`.
            text_mask: bool `[B, L]`, True for a real token; at least one a sample.
            fps: frames a second, `[B]`; images use 120.
            pixel_height: of the decoded video, `[B]`.
            pixel_width: of the decoded video, `[B]`.
            frame_mask: bool `[B, T]`, False for a frame that is given clean; None: all are noisy.
            drop_text: bool `[B]`, True for a sample whose text is replaced by `no_text`.
        """
        side = self.config.patch
        frames, rows, columns = latents.shape[2:]
        down, across = (rows + side - 1) // side, (columns + side - 1) // side
        padded = F.pad(latents, (0, across * side - columns, 0, down * side - rows))
        x_BTSD = self.patch(padded).flatten(3).permute(0, 2, 3, 1)
        code_BSD = positions(
            down, across, pixel_height * pixel_width, self.config.dim, x_BTSD.dtype
        )
        x_BTSD = x_BTSD + code_BSD[:, None]
        times_BK = timestep[:, None]
        if frame_mask is not None:
            times_BK = torch.cat((times_BK, torch.zeros_like(times_BK)), dim=1)
        time_BKD = self.time(sinusoid(times_BK, 256).to(x_BTSD.dtype))
        time_BKD = time_BKD + self.fps(sinusoid(fps, 256).to(x_BTSD.dtype))[:, None]
        time_BKRD = self.time_table(time_BKD).unflatten(-1, (6, -1))
        if drop_text is not None:
            text = torch.where(drop_text[:, None, None], self.no_text.to(text.dtype), text)
        states, rotary = (self.text(text), text_mask), self.rotary(frames)
        for pair in zip(self.spatial, self.temporal, strict=True):
            for block in pair:
                modulated = modulation(block.table, time_BKRD, frame_mask)
                x_BTSD = block(x_BTSD, states, modulated, rotary)
        patches = self.final(x_BTSD, time_BKD, frame_mask)
        out = self._unpatchify(patches, down, across)[..., :rows, :columns]
        return out if out.dtype == torch.float64 else out.float()

    def _unpatchify(self, patches: Tensor, down: int, across: int) -> Tensor:
        side = self.config.patch
        x = patches.unflatten(-1, (side, side, -1)).unflatten(2, (down, across))
        return x.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)


class RectifiedFlow(nn.Module):
    """The loss of training an STDiT: noise and timestep are inputs, so a step can be repeated."""

    def __init__(self, model: STDiT) -> None:
        super().__init__()
        self.model = model

    def forward(self, latents: Tensor, noise: Tensor, timestep: Tensor, **given: Tensor) -> Tensor:
        """Returns the mean over samples of each sample's mean squared error of velocity, a scalar.

        A frame that `frame_mask` leaves out is given clean and does not count.

        Args:
            latents: clean, `[B, channels, T, rows, columns]`.
            noise: normal, of the same shape.
            timestep: `[B]`, 0 (clean) .. 1000 (noise).
            given: text, text_mask, fps, pixel_height, pixel_width, and if wanted frame_mask and
                drop_text, as for `STDiT`.
        """
        tau = (timestep / STEPS).to(latents.dtype)[:, None, None, None, None]
        noisy = (1 - tau) * latents + tau * noise
        frame_mask = given.get("frame_mask")
        if frame_mask is not None:
            noisy = torch.where(frame_mask[:, None, :, None, None], noisy, latents)
        velocity = self.model(noisy, timestep, **given)[:, : latents.shape[1]]
        squared = (velocity - (latents - noise).to(velocity.dtype)).square()
        if frame_mask is None:
            return squared.mean()
        each_B = (squared * frame_mask[:, None, :, None, None]).sum(dim=(1, 2, 3, 4))
        frame_elements = latents.shape[1] * latents.shape[3] * latents.shape[4]
        frames_B = frame_mask.sum(dim=1).clamp(min=1).to(each_B.dtype)
        return (each_B / (frames_B * frame_elements)).mean()


def shift_timesteps(tau: Tensor, pixels: Tensor, pixel_frames: int) -> Tensor:
    """Returns tau in 0..1 moved towards noise for videos of many pixels and frames, as decoded."""
    frames = 1 if pixel_frames == 1 else max(5 * (pixel_frames // 17), 1)
    ratio = pixels.sqrt() / REFERENCE_PIXELS * frames**0.5
    return ratio * tau / (1 + (ratio - 1) * tau)


def draw(
    latents: Tensor, pixels_B: Tensor, pixel_frames: int, generator: torch.Generator,
    drop_text: float = 0.1,
) -> dict[str, Tensor]:  # fmt: skip
    """Returns a step's random inputs of `RectifiedFlow`: noise, timestep and drop_text.

    Args:
        latents: `[B, channels, T, rows, columns]`.
        pixels_B: height times width of each sample in pixels.
        pixel_frames: frames of the decoded video.
        generator: where the numbers come from.
        drop_text: probability of training a sample without its caption.
    """
    batch = latents.shape[0]
    tau_B = torch.sigmoid(torch.randn(batch, generator=generator))
    return {
        "noise": torch.randn(latents.shape, generator=generator, dtype=latents.dtype),
        "timestep": shift_timesteps(tau_B, pixels_B.float(), pixel_frames) * STEPS,
        "drop_text": torch.rand(batch, generator=generator) < drop_text,
    }


def input_specs(config: STDiTConfig, dtype: str = "float32") -> dict[str, str]:
    """Returns the specs of the training step's inputs; height and width are those of the latent."""
    latents = f"{dtype}[batch, {config.channels}, frames, height, width]"
    return {
        "latents": latents,
        "noise": latents,
        "timestep": "float32[batch]",
        "text": f"{dtype}[batch, {config.text_len}, {config.text_dim}]",
        "text_mask": f"bool[batch, {config.text_len}]",
        "fps": "float32[batch]",
        "pixel_height": "float32[batch]",
        "pixel_width": "float32[batch]",
        "frame_mask": "bool[batch, frames]",
        "drop_text": "bool[batch]",
    }
