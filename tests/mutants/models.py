"""Small models on which planted faults matter: each is traced, planned and run in half a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dcpc
from dcpc.buckets import Buckets
from dcpc.buckets.specs import InputSpec
from dcpc.commands.check.split import SPLITTING
from dcpc.symbolic_profile.seconds.hardware import Link

DIM = 8
VOCABULARY = 20
TOKENS = {"ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
MARKED = {**TOKENS, "mask": "bool[batch, seq]", "segment": "int64[batch, seq]"}
GRID = {"x": "float64[batch, h, w, 8]"}
SIDES = {"x": "float64[batch, h, 8]", "y": "float64[batch, w, 8]"}
VIDEO = {"x": "float64[batch, t, s, 8]"}
SOUND = {"x": "float64[1, 8, seq]"}
ROWS = {"x": "float64[seq, 8]"}
VECTORS = {"x": "float64[seq, 8]", "y": "float64[seq, 8]"}


@dataclass(frozen=True)
class Setting:
    """A model, the buckets it is compiled for, and how.

    Attributes:
        make: the model; its parameters are float64 afterwards.
        inputs: specs by name.
        sizes: of the buckets; what runs is compared with the plain model at each of them.
        options: for `dcpc.api.plan`, besides the backend, which is eager.
        train: whether the model's dropout is on.
        called: whether a variant is called as `dcpc.compile`'s model does, not its graphs alone.
        degrees: that each bucket is run at; default: its plan's.
        samples: of a run.
    """

    make: Callable[[], nn.Module]
    inputs: Mapping[str, str]
    sizes: tuple[Mapping[str, int], ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    train: bool = False
    called: bool = False
    degrees: tuple[int, ...] = ()
    samples: int = 2

    def model(self) -> nn.Module:
        """Returns the model, of the same numbers each time."""
        torch.manual_seed(0)
        return self.make().double().train(self.train)

    def buckets(self) -> Buckets:
        """Returns what it is compiled for."""
        return dcpc.Buckets(inputs=dict(self.inputs), sizes=[dict(s) for s in self.sizes])

    def data(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Returns inputs such as a user has: some labels ignored, keys hidden, rows packed."""
        generator = torch.Generator().manual_seed(7)
        found: dict[str, Tensor] = {}
        for name, text in self.inputs.items():
            spec = InputSpec.parse(text)
            shape = spec.shape(sizes)
            if name == "mask":
                value = torch.rand(shape, generator=generator) < 0.7
                value[:, 0], value[:, 4] = True, False
            elif name == "segment":  # one of them has one position alone, which is hidden
                value = (torch.rand(shape, generator=generator) < 0.1).cumsum(1)
                value[:, 4:] += 1
                value[:, 5:] += 1
            elif spec.dtype.is_floating_point:
                value = torch.randn(shape, generator=generator, dtype=torch.float64)
            else:
                value = torch.randint(0, VOCABULARY, shape, generator=generator)
                if name == "labels":
                    value[torch.rand(shape, generator=generator) < 0.3] = -100
                    value[0, -1] = 1
            found[name] = value.to(spec.dtype)
        return found


class Attention(nn.Module):
    """Heads over a sequence, masked as `hide` says."""

    def __init__(self, heads: int, causal: bool = False) -> None:
        """Makes the projections."""
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Returns x `[b, s, d]` and what was attended to."""
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Tokens(nn.Module):
    """Token and position embeddings, one block, a head, cross-entropy with ignored labels."""

    def __init__(self, heads: int = 2, dropout: float = 0.0) -> None:
        """Makes the block."""
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, DIM), nn.Embedding(64, DIM)
        self.mixer, self.norm = Attention(heads, causal=True), nn.LayerNorm(DIM)
        self.wide, self.narrow = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.drop, self.head = nn.Dropout(dropout), nn.Linear(DIM, VOCABULARY)

    def mixed(self, x: Tensor) -> Tensor:
        """Returns x after its positions have seen each other."""
        found: Tensor = self.mixer(x)
        return found

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss."""
        x = self.embed(ids) + self.place(torch.arange(ids.shape[1]))
        x = self.mixed(x)
        x = x + self.drop(self.narrow(F.gelu(self.wide(self.norm(x)))))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Shifted(Tokens):
    """Some of the logits and labels are cut off: a slice of what is split."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss."""
        x = self.mixed(self.embed(ids) + self.place(torch.arange(ids.shape[1])))
        logits = self.head(x)[:, 1:].flatten(0, 1)
        return F.cross_entropy(logits, labels[:, :-1].flatten(), label_smoothing=0.1)


class Spelled(Tokens):
    """Attention as a product, a softmax and a product, its keys and values repeated."""

    def __init__(self) -> None:
        """Makes the projections."""
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.register_buffer("weights", torch.rand(VOCABULARY) + 0.5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the loss: of each class as much as it weighs."""
        logits = self.head(self.mixed(self.embed(ids))).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten(), self.weights)

    def mixed(self, x: Tensor) -> Tensor:
        """Returns x after its positions have seen each other."""
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = self.kv(x).split([4, 4], -1)
        k, v = (t[:, None].repeat_interleave(2, 1) for t in (k, v))
        at = torch.arange(x.shape[1])
        scores = (q @ k.transpose(-1, -2) / 2.0).masked_fill(at > at[:, None], float("-inf"))
        return x + (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Marked(Tokens):
    """A window both ways, padding and packed sequences in one mask."""

    def forward(  # type: ignore[override]
        self, ids: Tensor, labels: Tensor, mask: Tensor, segment: Tensor
    ) -> Tensor:
        """Returns the loss."""
        x = self.embed(ids)
        at = torch.arange(ids.shape[1])
        far = at[:, None] - at
        seen = ((far < 4) & (far >= -2))[None] & mask[:, None]
        seen = seen & (segment[:, :, None] == segment[:, None])
        self.mixer.causal = False
        x = self.mixer(x, seen[:, None])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Frames(nn.Module):
    """Causal attention over patches of frames in one row."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.mixer = Attention(1, causal=True)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        t, s = x.shape[1], x.shape[2]
        y = (x * x.cumsum(1)).flatten(1, 2)
        return self.mixer(y).unflatten(1, (t, s)).square().mean()


class Padded(Tokens):
    """Numbers added to the scores: a causal mask and padding, as libraries make them."""

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
        """Returns the loss."""
        at = torch.arange(ids.shape[1])
        seen = (at <= at[:, None])[None] & mask[:, None]
        low = torch.zeros_like(seen, dtype=torch.float64).masked_fill(~seen, float("-inf"))
        self.mixer.causal = False
        x = self.mixer(self.embed(ids), low[:, None])
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), reduction="sum")


class Convolutions(nn.Module):
    """Windows along a sequence: convolution, pooling, batch norm, and a mean of squares."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.near, self.far = nn.Conv1d(DIM, DIM, 3, padding=1), nn.Conv1d(DIM, DIM, 1)
        self.groups, self.norm = nn.GroupNorm(2, DIM), nn.BatchNorm1d(DIM).eval()
        self.patches = nn.Conv1d(DIM, DIM, 2, stride=2)
        assert self.norm.running_mean is not None
        assert self.norm.running_var is not None
        self.norm.running_mean += torch.rand(DIM)
        self.norm.running_var += torch.rand(DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        y = self.norm(F.silu(self.near(x))) + self.groups(self.far(x))
        y = F.max_pool1d(y, 2) + F.avg_pool1d(y, 2) + self.patched(x)
        return F.mse_loss(y, y.detach().flip(-1)) + y.mean() + (y * y.sum(-1, keepdim=True)).mean()

    def patched(self, x: Tensor) -> Tensor:
        """Returns a convolution of patches."""
        found: Tensor = self.patches(x)
        return found

    def train(self, mode: bool = True) -> Convolutions:
        """Leaves the batch norm as it is: its statistics are buffers."""
        super().train(mode)
        self.norm.eval()
        return self


class Near(nn.Module):
    """One number a position, and its neighbours'."""

    def __init__(self) -> None:
        """Makes the layer."""
        super().__init__()
        self.first = nn.Linear(DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        y = self.first(x).flatten()
        y = y.exp() + y.sin().flip(0) * y
        return (y * y.cumsum(0)).tanh().sum()


class Grid(nn.Module):
    """Height and width are used alike: what one dim's calls are traced as serves the other's."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.rows, self.columns = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.mixer = Attention(2)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        h, w = x.shape[1], x.shape[2]
        down, right = torch.arange(h).double() + 1, torch.arange(w).double() + 1
        y = self.rows(x * down[:, None, None]).cumsum(1) / h
        y = y + self.columns(x * right[:, None]).cumsum(2) / w
        across, along = torch.meshgrid(down, right, indexing="xy")
        y = y + (across - 2 * along).T[..., None]
        y = y + torch.outer(right, down).T[..., None]
        y = y + y.mean(1, keepdim=True) * y.sum(2).tanh()[:, :, None]
        y = y + y.roll(1, 1) * y.roll(1, 2).flip(2)
        z = self.mixer(y.flatten(1, 2) / 100).unflatten(1, (h, w))
        return z.square().mean() + z.tanh().amax(1).mean() + z.tanh().amax(2).sum().tanh()


class Scaled(nn.Module):
    """What is made of rows and of columns is divided by how many there are, and scaled."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.rows, self.columns = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the loss."""
        a, b = self.rows(x), self.columns(y)
        a, b = a * 0.25 + (a / x.shape[1]).sin(), b * 4.0 + (b / y.shape[1]).sin()
        return (a.sum(1) * b.sum(1)).mean()


class Video(nn.Module):
    """Attention over frames, of which an image has one, then over places."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.over_time, self.over_places = Attention(2), Attention(2)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        t, s = x.shape[1], x.shape[2]
        y = self.over_time(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (-1, s)).transpose(1, 2)
        y = self.over_places(y.flatten(0, 1)).unflatten(0, (-1, t))
        return y.square().mean()


class Sums(nn.Module):
    """Contractions over the sequence, whose pieces add up, and a loss of several terms."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.keys, self.values = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM, bias=False)
        self.after, self.scale = nn.Linear(DIM, DIM), nn.Parameter(torch.tensor(0.3))
        self.twice, self.again = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the loss."""
        k, v = self.keys(x), self.values(x)
        state = (k.T @ v) / x.shape[0]
        z = self.after(x @ state + v @ state.T) + torch.cat([x[1:], x[:1]]) * self.scale
        z = z * self.twice.repeat_interleave(2, 0) + v * self.again.repeat(2)
        z[:, 0] = k[:, 1]
        z[1:4] *= 2
        z = z + k.softmax(0) * v.softmax(1) + z.cumsum(0) * 0.25 + z.cumsum(1) * 4.0
        loss = F.mse_loss(z, y) + F.smooth_l1_loss(z, y, reduction="sum") * 0.01
        loss = loss + (z.mean(0) * k.amax(0)).sum() + z.sum(0).tanh().mean() * self.scale
        return loss + (v * k * z * z).mean() + (z * z).mean()


class Reduced(nn.Module):
    """One number a position: sums and largest of them, and what is made of these."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.first, self.after = nn.Linear(DIM, 1), nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        y = self.first(x.sin()).flatten()
        total = y.sin().sum().tanh() + y.cos().sum().tanh() + (y * y).sum().tanh()
        more = [self.after(z.sum(0, keepdim=True)) for z in (y.sigmoid(), y.exp(), y * 3)]
        return total + more[0].sum() + more[1].sum() + more[2].sum() + y.amax(0) * 2


# Sending costs as much as computing, so that a partial sum is passed on where it may be.
SENDING = replace(SPLITTING, name="sending", inside=Link(0.0, 1e6), across=Link(0.0, 1e6))
SHORT = ({"seq": 9},)
SPLIT: dict[str, Any] = {"world": 2, "sp": 2}
RING: dict[str, Any] = {**SPLIT, "attention": "ring"}

SETTINGS: dict[str, Setting] = {
    "gpt": Setting(Tokens, TOKENS, SHORT),
    "degrees": Setting(Tokens, TOKENS, SHORT, {"world": 2}, degrees=(2, 1)),
    "again": Setting(Tokens, TOKENS, SHORT, {"recompute": "all"}),
    "called": Setting(Tokens, TOKENS, SHORT, called=True),
    "shifted": Setting(Shifted, TOKENS, SHORT, {**SPLIT, "attention": "gathered"}),
    "shifted ring 2": Setting(Shifted, TOKENS, SHORT, RING),
    "spelled": Setting(Spelled, TOKENS, SHORT),
    "marked": Setting(Marked, MARKED, ({"seq": 14},)),
    "padded": Setting(Padded, {k: v for k, v in MARKED.items() if k != "segment"}, SHORT),
    "sound": Setting(Convolutions, SOUND, SHORT),
    "grid": Setting(Grid, GRID, ({"h": 4, "w": 7},)),
    "scaled": Setting(Scaled, SIDES, ({"h": 4, "w": 7},)),
    "video": Setting(Video, VIDEO, ({"t": 1, "s": 6},)),
    "video and image": Setting(Video, VIDEO, ({"t": 3, "s": 5}, {"t": 1, "s": 6})),
    "sums": Setting(Sums, VECTORS, SHORT),
    "dropout": Setting(lambda: Tokens(dropout=0.3), TOKENS, SHORT, train=True),
    "heads 2": Setting(Tokens, TOKENS, SHORT, {**SPLIT, "attention": "heads"}),
    "gathered 2": Setting(Tokens, TOKENS, SHORT, {**SPLIT, "attention": "gathered"}),
    "ring 2": Setting(Tokens, TOKENS, SHORT, RING),
    "marked 2": Setting(Marked, MARKED, SHORT, {**SPLIT, "attention": "gathered"}),
    "marked ring 2": Setting(Marked, MARKED, ({"seq": 13},), RING),
    "hybrid 4": Setting(
        lambda: Tokens(heads=2),
        TOKENS,
        ({"seq": 13},),
        {"world": 4, "sp": 4, "attention": "hybrid"},
    ),
    "zigzag 2": Setting(lambda: Tokens(heads=1), TOKENS, SHORT, {**SPLIT, "attention": "gathered"}),
    "frames 2": Setting(Frames, {"x": "float64[1, t, s, 8]"}, ({"t": 3, "s": 6},), SPLIT),
    "sums 2": Setting(Sums, VECTORS, SHORT, SPLIT),
    "sent 2": Setting(Sums, VECTORS, SHORT, {**SPLIT, "device": SENDING}),
    "reduced 2": Setting(
        Reduced, {"x": "float64[seq, 8]"}, ({"seq": 33},), {**SPLIT, "device": SENDING}
    ),
    "even 2": Setting(Tokens, TOKENS, ({"seq": 12},), RING),
    "near 2": Setting(Near, ROWS, ({"seq": 33},), SPLIT),
    "grid 2": Setting(Grid, {"x": "float64[1, h, w, 8]"}, ({"h": 4, "w": 7},), SPLIT),
    "dropout 2": Setting(
        lambda: Tokens(dropout=0.3), TOKENS, SHORT, {**SPLIT, "attention": "gathered"}, train=True
    ),
}
