"""Hand-written modules such as a user might bring, each with the inputs it takes.

Each entry of `CASES` is one idea that a wrong compiler gets wrong: a shifted loss, positions, a
contraction over the sequence, a masked mean. All are float64 and deterministic.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dcpc.buckets.specs import InputSpec

DIM = 12
VOCABULARY = 20
# Long enough for every length in the tests.
TABLE = 64


@dataclass(frozen=True)
class Case:
    """A module and its inputs; integer inputs are below `high`, `fill` makes those that are not."""

    make: Callable[[], nn.Module]
    inputs: Mapping[str, str]
    high: int = VOCABULARY
    fill: Mapping[str, Callable[[tuple[int, ...], torch.Generator], Tensor]] = field(
        default_factory=dict
    )

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().double()

    def data(self, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {n: self._tensor(n, s, sizes, generator) for n, s in self.inputs.items()}

    def _tensor(
        self, name: str, text: str, sizes: Mapping[str, int], generator: torch.Generator
    ) -> Tensor:
        spec = InputSpec.parse(text)
        shape = spec.shape(sizes)
        if name in self.fill:
            return self.fill[name](shape, generator)
        if spec.dtype == torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        if spec.dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(spec.dtype)
        x = torch.randint(0, self.high, shape, generator=generator)
        if name == "labels" and x.ndim == 2:
            x[torch.rand(shape, generator=generator) < 0.3] = -100
            x[0, -1] = 1  # at least one counts
        return x.to(spec.dtype)


CASES: dict[str, Case] = {}
TOKENS = {"ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
VECTORS = {"x": "float64[batch, seq, 12]", "y": "float64[batch, seq, 12]"}
POOLED = {"x": "float64[batch, seq, 12]", "labels": "int64[batch]"}


def case(inputs: Mapping[str, str], **options: object) -> Callable[[type], type]:
    def add(cls: type) -> type:
        CASES[cls.__name__] = Case(cls, inputs, **options)  # type: ignore[arg-type]
        return cls

    return add


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


class Tokens(nn.Module):
    """Embedding and head around `mix`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.head = nn.Linear(DIM, VOCABULARY)
        self.setup()

    def setup(self) -> None:
        self.inner = nn.Linear(DIM, DIM)

    def mix(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return token_loss(self.head(self.mix(self.embed(ids))), labels)


class Heads(nn.Module):
    def __init__(self, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.out(y.transpose(1, 2).reshape(b, s, d))


# ------------------------------------------------------------------------------------- attention


@case(TOKENS)
class OneHead(Tokens):
    def setup(self) -> None:
        self.blocks = nn.Sequential(Heads(1), Heads(1))

    def mix(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@case(TOKENS)
class SixHeads(Tokens):
    def setup(self) -> None:
        self.blocks = nn.Sequential(Heads(6), Heads(6))

    def mix(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@case(TOKENS)
class TorchLayer(Tokens):
    """torch's own encoder layer: needs its slow path, dropout off."""

    def setup(self) -> None:
        self.layer = nn.TransformerEncoderLayer(
            DIM, 3, 24, dropout=0.0, batch_first=True, norm_first=True
        )

    def mix(self, x: Tensor) -> Tensor:
        s = x.shape[1]
        mask = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
        return self.layer(x, src_mask=mask)


@case(TOKENS)
class EinsumWindow(Tokens):
    """Attention by einsum; a sliding window by comparing positions."""

    def setup(self) -> None:
        self.q, self.k = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def mix(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        far = at[:, None] - at[None, :]
        scores = torch.einsum("bqd,bkd->bqk", self.q(x), self.k(x)) / DIM**0.5
        scores = scores.masked_fill((far < 0) | (far > 3), float("-inf"))
        return torch.einsum("bqk,bkd->bqd", scores.softmax(-1), x)


@case(TOKENS)
class Alibi(Tokens):
    """A float mask of distances, one slope a head, into attention."""

    def setup(self) -> None:
        self.slope = nn.Parameter(torch.tensor([0.5, 0.25, 0.125]))
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1], device=x.device)
        distance = (at[None, :] - at[:, None]).abs().to(x.dtype)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=-distance * self.slope[:, None, None])
        return y.transpose(1, 2).flatten(2)


@case(TOKENS)
class RelativeBias(Tokens):
    """A learned bias by clamped distance, as T5's."""

    def setup(self) -> None:
        self.bias = nn.Embedding(9, 3)
        self.qkv = nn.Linear(DIM, 3 * DIM)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (3, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1], device=x.device)
        bias = self.bias((at[None, :] - at[:, None]).clamp(-4, 4) + 4).permute(2, 0, 1)
        scores = q @ k.transpose(-1, -2) + bias[None]
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


def all_but_last(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.arange(shape[1]).expand(shape) < shape[1] - 1


TEXT = {"text": "float64[batch, words, 12]", "keep": "bool[batch, words]"}


@case({"x": "float64[batch, seq, 12]", **TEXT}, fill={"keep": all_but_last})
class CrossAttention(nn.Module):
    """Two named lengths; padding of the second is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor, text: Tensor, keep: Tensor) -> dict[str, Tensor]:
        q = self.q(x).unflatten(-1, (4, 3)).transpose(1, 2)
        k, v = (t.unflatten(-1, (4, 3)).transpose(1, 2) for t in self.kv(text).chunk(2, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        return {"loss": (y.transpose(1, 2).flatten(2) - x).square().mean()}


@case({"x": "float64[batch, seq, 12]"})
class LyingAttention(nn.Module):
    """Queries, keys and values whose last dim is not innermost; a scale below 0 where keys hide."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.near = nn.Linear(DIM, 3 * DIM), nn.Conv1d(DIM, DIM, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        apart = [t.unflatten(-1, (3, 4)).permute(0, 3, 1, 2) for t in self.qkv(x).chunk(3, -1)]
        at = torch.arange(x.shape[1])
        y = F.scaled_dot_product_attention(*apart, attn_mask=at <= at[:, None], scale=-0.7)
        channels = self.near(x.mT).mT.unsqueeze(1)
        one = F.scaled_dot_product_attention(channels, channels, channels, is_causal=True)
        return {"loss": (y.transpose(1, 2).flatten(2) + one.squeeze(1) - x).square().mean()}


@case(TOKENS)
class LinearAttention(Tokens):
    """Contracts over the sequence: keys^T values is a sum over all ranks' positions."""

    def setup(self) -> None:
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.after = nn.Linear(DIM, DIM, bias=False)

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = self.after(k.transpose(1, 2) @ v)
        total = q @ k.sum(1).unsqueeze(-1)
        return (q @ state) / total


# ------------------------------------------------------------------- positions along the sequence


@case(TOKENS)
class CausalMean(Tokens):
    def mix(self, x: Tensor) -> Tensor:
        count = torch.arange(1, x.shape[1] + 1, device=x.device)
        return self.inner(x.cumsum(1) / count[:, None])


@case(TOKENS)
class TokenShift(Tokens):
    """Each token sees the one before it, made in two ways."""

    def mix(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        again = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        return self.inner(x + 0.5 * before + 0.25 * again)


@case(TOKENS)
class PositionTable(Tokens):
    def setup(self) -> None:
        self.at = nn.Embedding(TABLE, DIM)
        self.more = nn.Parameter(torch.randn(1, TABLE, DIM))
        self.register_buffer("mask", torch.ones(TABLE, TABLE).tril())

    def mix(self, x: Tensor) -> Tensor:
        s = x.shape[1]
        x = x + self.at(torch.arange(s, device=x.device)) + self.more[:, :s]
        weights = self.mask[:s, :s] / self.mask[:s, :s].sum(-1, keepdim=True)
        return weights @ x


@case(TOKENS)
class Backwards(Tokens):
    """flip and roll along the sequence."""

    def mix(self, x: Tensor) -> Tensor:
        return torch.tanh(self.inner(x.flip(1).cumsum(1).flip(1))) + x.roll(1, dims=1)


@case(TOKENS)
class InPlace(Tokens):
    """Writes into its own values, as library code does."""

    def mix(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h += x
        h[:, 0] = 0.0
        h[:, 1:] *= 2.0
        return h.mul_(0.5).tanh_()


@case({"ids": "int64[batch, seq]", "at": "int64[batch, picks]", "labels": "int64[batch, picks]"},
      fill={"at": lambda shape, g: torch.randint(0, 2, shape, generator=g)})  # fmt: skip
class Gathered(Tokens):
    """A masked language model that predicts at given positions only."""

    def forward(self, ids: Tensor, at: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        x = self.mix(self.embed(ids)).cumsum(1)
        picked = x.gather(1, at[..., None].expand(-1, -1, DIM))
        rows = torch.arange(ids.shape[0], device=ids.device)[:, None]
        return token_loss(self.head(picked + x[rows, at]), labels)


# ------------------------------------------------------------------------------------------ losses


@case(VECTORS)
class MeanSquares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(DIM, 24), nn.GELU(), nn.Linear(24, DIM))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.net(x)
        return out, F.mse_loss(out, y)


@case(VECTORS)
class ManyLosses(nn.Module):
    """Several reductions of one value, with parameters that only some of them use."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.net(x)
        loss = F.l1_loss(z, y) + F.smooth_l1_loss(z, y, reduction="sum") * 0.01
        loss = loss + F.binary_cross_entropy_with_logits(z, (y > 0).to(z.dtype))
        loss = loss + z.std() + z.var(1).mean() + z.norm() * 0.1 + z.logsumexp(-1).square().mean()
        loss = loss + (z.amax(1) - z.mean(1)).abs().mean() * self.scale
        return loss + F.kl_div(z.log_softmax(-1), y.softmax(-1), reduction="batchmean")


@case(TOKENS)
class Shifted(Tokens):
    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = self.head(self.mix(self.embed(ids).cumsum(1)))
        shifted = logits[:, :-1].contiguous().view(-1, VOCABULARY)
        return {"logits": logits, "loss": F.cross_entropy(shifted, labels[:, 1:].reshape(-1))}


@case(TOKENS)
class MaskedMean(Tokens):
    """The loss of each token, masked and averaged by hand; classes in dim 1."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.mix(self.embed(ids))).transpose(1, 2)
        kept = labels != -100
        each = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        return (each * kept).sum() / kept.sum()


@case(TOKENS)
class KDimensional(Tokens):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.mix(self.embed(ids))).transpose(1, 2)
        return F.cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(1).square().mean()


@case(TOKENS)
class Smoothed(Tokens):
    def setup(self) -> None:
        super().setup()
        self.register_buffer("weights", torch.rand(VOCABULARY) + 0.5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.mix(self.embed(ids))).flatten(0, 1)
        labels = labels.flatten()
        smooth = F.cross_entropy(logits, labels, label_smoothing=0.1)
        return smooth + F.cross_entropy(logits, labels, weight=self.weights, label_smoothing=0.2)


@case(TOKENS)
class SummedLoss(Tokens):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.mix(self.embed(ids))).flatten(0, 1)
        total = F.cross_entropy(logits, labels.flatten(), reduction="sum")
        return total / (labels != -100).sum() + 0.1 * F.nll_loss(
            logits.log_softmax(-1), labels.flatten()
        )


@case({"ids": "int64[batch*2, seq]", "labels": "int64[batch*2, seq]"})
class Preferences(Tokens):
    """DPO: sums of log-probabilities of chosen and rejected, stacked along the batch."""

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logp = self.head(self.mix(self.embed(ids).cumsum(1))).log_softmax(-1)
        kept = labels != -100
        each = logp.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        chosen, rejected = (each * kept).sum(1).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()


# ------------------------------------------------------------------------- pooling: partial sums


@case(POOLED)
class Pooled(nn.Module):
    """Mean, masked mean and last of a sequence, then a head on each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(DIM, DIM), nn.Linear(3 * DIM, VOCABULARY)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        kept = (x[..., :1] > 0).to(x.dtype)
        masked = (h * kept).sum(1) / kept.sum(1).clamp(min=1)
        return F.cross_entropy(self.head(torch.cat([h.mean(1), masked, h[:, -1]], -1)), labels)


@case(POOLED)
class PartialSums(nn.Module):
    """A sum over the sequence, put through everything that is and is not linear."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        a, b = h.sum(1), h.square().sum(1)
        z = (a + 1) * 0.5 + (2 - b) / 3 + a * b + (a - b).sum(-1, keepdim=True) * a.new_ones(())
        z = z + (a + labels[:, None]) / 10 - a / (b + 1) + 1 / (1 + b) + a * self.body.bias
        return F.cross_entropy(self.head(z), labels) + self.head(a).mean() + a.view(-1).mean()


@case(POOLED)
class WholeNumbers(nn.Module):
    """Counts over the sequence, divided, cast and compared: none of that is linear."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Embedding(TABLE, DIM)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        positive = (x[..., 0] > -5).sum(1)
        half = (positive // 2).clamp(max=TABLE - 1)
        third = torch.div(x[..., 1].abs().sum(1), 3, rounding_mode="floor").long() % TABLE
        whole = (x[..., 2].abs().sum(1) * 1.7).long() % TABLE
        some = (x[..., 3] > 9).sum(1).bool().long() + positive.bool().long()
        remainder = positive % 3 + positive.float().half().long() % 5
        chosen = self.scale(half) + self.scale(third) + 2 * self.scale(whole) + 3 * self.scale(some)
        chosen = chosen + 4 * self.scale(remainder)
        return (chosen * labels[:, None] * x.sum(1)).mean()


@case({"x": "float64[batch, seq, 12]", "y": "float64[batch, seq, 12]"})
class Contrastive(nn.Module):
    """Every sample against every other one: the batch is a dim of the logits twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        u, v = F.normalize(self.a(x).mean(1), dim=-1), F.normalize(self.b(y).mean(1), dim=-1)
        logits = u @ v.T * self.temperature.exp()
        target = torch.arange(x.shape[0], device=x.device)
        return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@case(POOLED)
class Squeezed(nn.Module):
    """`squeeze()` without a dim must not drop a dim that happens to be 1 on some rank."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(DIM, 1)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weights = self.body(x).squeeze().softmax(-1)
        weights = weights.view(x.shape[0], x.shape[1])
        return ((weights[..., None] * x).sum(1).mean(-1) - labels).square().mean()


# ------------------------------------------------------------------------------------- other shapes


@case({"x": "float64[batch, frames, patches, 12]", "time": "float64[batch]"})
class SpaceTime(nn.Module):
    """Attention over patches, then over frames; a scalar a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.space, self.time = Heads(3, causal=False), Heads(3, causal=False)
        self.norm = nn.LayerNorm(DIM, elementwise_affine=False)
        self.scale = nn.Linear(1, DIM)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        b, f, p, d = x.shape
        h = self.norm(x) * self.scale(time[:, None])[:, None, None]
        h = self.space(h.reshape(b * f, p, d)).view(b, f, p, d)
        h = self.time(h.transpose(1, 2).reshape(b * p, f, d)).view(b, p, f, d).transpose(1, 2)
        return (h.reshape(b, f * p, d) - x.flatten(1, 2)).square().mean()


@case({"x": "float64[batch, frames, patches, 12]"})
class GridPositions(nn.Module):
    """Positions counted over a whole grid, of which a rank has some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        _, f, p, _ = x.shape
        at = torch.arange(f * p, device=x.device).to(x.dtype).reshape(f, p, 1) / 7
        return (torch.tanh(self.body(x + at.cos())) * at.sin()).square().mean()


@case({"x": "float64[batch, seq*2, 12]", "y": "float64[batch, seq, 12]"})
class Merging(nn.Module):
    """Two neighbours become one token."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.merge = nn.Linear(DIM, DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, s, d = x.shape
        h = self.merge(torch.relu(self.body(x)).reshape(b, s // 2, 2 * d))
        return (h - y).abs().mean()


@case({"ids": "int64[batch, seq+1]"})
class OneMore(Tokens):
    """Inputs and labels are slices of one input."""

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        x = self.embed(ids[:, :-1])
        return token_loss(self.head(self.mix(x.cumsum(1))), ids[:, 1:])


@case({"ids": "int64[seq]", "labels": "int64[seq]"})
class NoBatch(Tokens):
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        return F.cross_entropy(self.head(self.mix(x.cumsum(0))), labels)


@case({"ids": "int32[batch, seq]", "keep": "bool[batch, seq]", "factor": "float64[]", "unused": "float32[batch]"})  # fmt: skip  # noqa: E501
class Scalars(Tokens):
    """A scalar input, a bool one, an input that nothing reads."""

    def forward(self, ids: Tensor, keep: Tensor, factor: Tensor, unused: Tensor) -> Tensor:  # type: ignore[override]
        h = self.mix(self.embed(ids)) * keep[..., None]
        return (h * factor).square().sum() / keep.sum().clamp(min=1) + (
            h.sum() * 0.1 + factor
        ).sin()


@case(TOKENS)
class Norms(Tokens):
    """LayerNorm without bias, RMSNorm, GroupNorm over features, eval BatchNorm over rows."""

    def setup(self) -> None:
        self.a = nn.LayerNorm(DIM, bias=False)
        self.b, self.c = nn.RMSNorm(DIM), nn.GroupNorm(3, DIM)
        self.d = nn.BatchNorm1d(DIM).eval()
        self.d.running_mean.normal_()
        self.d.train = lambda mode=True: self.d  # type: ignore[method-assign]

    def mix(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).cumsum(1))
        x = self.c(x.flatten(0, 1)).view_as(x)
        return self.d(x.transpose(1, 2)).transpose(1, 2)


@case(TOKENS)
class GroupsOfChannels(Tokens):
    """A norm over positions, split by its groups: of three two ranks have 2 and 1."""

    def setup(self) -> None:
        self.one, self.two = nn.GroupNorm(3, DIM), nn.GroupNorm(3, DIM, affine=False)
        self.inner = nn.Linear(DIM, DIM)

    def mix(self, x: Tensor) -> Tensor:
        x = self.two(torch.tanh(self.inner(x)).transpose(1, 2))
        return self.one(x.square()).transpose(1, 2)


@case(TOKENS)
class Convolution(Tokens):
    """An op without a sharding rule: replicated, with a warning."""

    def setup(self) -> None:
        self.inner = nn.Conv1d(DIM, DIM, 3, padding=1)

    def mix(self, x: Tensor) -> Tensor:
        return torch.relu(self.inner(x.transpose(1, 2)).transpose(1, 2))


@case(TOKENS)
class Experts(Tokens):
    """A dense mixture: every expert runs, top-2 weights by topk and scatter."""

    def setup(self) -> None:
        self.gate = nn.Linear(DIM, 4)
        self.up = nn.Parameter(torch.randn(4, DIM, DIM) / 4)

    def mix(self, x: Tensor) -> Tensor:
        value, index = self.gate(x).topk(2, -1)
        weights = torch.zeros(*x.shape[:2], 4, dtype=x.dtype, device=x.device)
        weights = weights.scatter(-1, index, value.softmax(-1))
        each = torch.einsum("bsd,edf->bsef", x, self.up)
        return (torch.relu(each) * weights[..., None]).sum(2)


@case(TOKENS)
class Frozen(Tokens):
    """Frozen parts before and after trained ones, an unread parameter, tied weights."""

    def setup(self) -> None:
        self.embed.weight.requires_grad_(False)
        self.inner, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.last.requires_grad_(False)
        self.lost = nn.Parameter(torch.ones(3))
        self.again = self.inner

    def mix(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.again(torch.tanh(self.inner(x.cumsum(1))))))


@case(TOKENS)
class Mixed(Tokens):
    """Repeats, stacks, casts and outer products along the sequence."""

    def mix(self, x: Tensor) -> Tensor:
        s = x.shape[1]
        twice = torch.stack([x, x * 2], 2).flatten(1, 2)[:, ::2]
        wide = x.repeat_interleave(2, 1)[:, 1::2] + x.repeat(1, 2, 1)[:, s:]
        # Whole numbers: exact in float32, whatever the order of the sum.
        single = self.inner.weight.sign().float() @ (x * 8).round().float().transpose(1, 2)
        wide = wide * self.inner.bias
        return twice + wide + single.transpose(1, 2).to(x.dtype) + x.unbind(-1)[0][..., None]


@case(TOKENS)
class Detached(Tokens):
    """Part of the value is a constant for backward; another part is computed without gradients."""

    def mix(self, x: Tensor) -> Tensor:
        h = self.inner(x.cumsum(1))
        with torch.no_grad():
            scale = h.abs().amax(1, keepdim=True)
        return h / scale + h.sum(1, keepdim=True).detach() * x


# (batch, length): p divides it, it does not, it is shorter than 4 ranks.
POINTS = ((2, 8), (3, 17), (1, 3))
# Lengths of a second named dim beside a first one of 8, 17 and 3.
SECOND = {"words": (5, 4, 7), "picks": (3, 6, 2), "frames": (4, 3, 5)}

# What the tests run by default: one case for each way to be wrong. The slow ones run all.
TELLING = (*("CrossAttention", "GroupsOfChannels", "InPlace", "NoBatch", "SpaceTime"),)


def sizes(name: str) -> list[dict[str, int]]:
    """The buckets of a case, batch given."""
    declared = " ".join(CASES[name].inputs.values())
    points = []
    for i, (batch, length) in enumerate(POINTS):
        point = {d: length for d in ("seq", "patches") if d in declared}
        point |= {d: lengths[i] for d, lengths in SECOND.items() if d in declared}
        points.append(point | ({"batch": batch} if "batch" in declared else {}))
    return points
