"""Small models whose loss is a mean of each kind that docs/train.md has a weight for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc

VOCABULARY, WIDTH = 9, 6
# Loss -> what marks a label that does not count.
IGNORED = {"labels": -100, "shifted": -100, "minus": -1, "bytes": 255, "samples": -100,
           "sums": -100, "weights": -100, "target": -100}  # fmt: skip
# A mean over samples, whatever their lengths.
OF_SAMPLES = {"samples", "sums", "target"}


@dataclass(frozen=True)
class Setup:
    """A model, its buckets and the options of `dcpc.compile`.

    Attributes:
        seed: of the parameters.
        body: what joins tokens: "linear" nothing, "causal" attention, attention by a "masked"
            key or within "documents" (both ways), or causal between "restarts" of positions;
            "looped": causal attention, three times with one block's parameters.
        loss: one of `IGNORED`.
        sizes: length of each named dim, and the most samples a micro-batch (0: free), a bucket.
        fields: inputs beside ids and labels: "types" (int32), "x" (two rows a token), "scale" (one
            for all samples), "position_ids".
        head: "own", "tied" to the embedding, or "frozen" (before compiling) or "late" (after).
        unused: there is a parameter that no loss uses.
        output: what forward returns: the loss as a "tensor", in a "mapping" or a "tuple", or with
            "logits".
        sp, recompute, attention, splitting, comm: options; `splitting`: the device that is best
            used by splitting all; `comm`: bytes of gradients sent at once.
        parameters: who holds them, as of `dcpc.compile`.
        pipeline, unpad, tile, backend: of `dcpc.compile`; pipeline 0: none.
        classes: tokens that the model knows.
        autocast: the model is float32, under bfloat16.
    """

    seed: int = 0
    body: str = "linear"
    loss: str = "labels"
    sizes: tuple[tuple[tuple[int, ...], int], ...] = (((8,), 0),)
    fields: tuple[str, ...] = ()
    head: str = "own"
    unused: bool = False
    output: str = "tensor"
    sp: int | str = "auto"
    recompute: str = "auto"
    attention: str = "auto"
    splitting: bool = False
    comm: int = 25_000_000
    parameters: str = "whole"
    pipeline: int = 0
    unpad: bool | str = False
    tile: int | str = "auto"
    classes: int = VOCABULARY
    backend: str = "eager"
    autocast: bool = False

    @property
    def grid(self) -> bool:
        return len(self.sizes[0][0]) == 2

    @property
    def names(self) -> tuple[str, ...]:
        return ("seq", "wide") if self.grid else ("seq",)

    @property
    def inputs(self) -> dict[str, str]:
        """Returns the specs of the model's inputs."""
        dims = ", ".join(("batch", *self.names))
        kind = "uint8" if self.loss == "bytes" else "int64"
        more = {
            "types": f"int32[{dims}]", "x": "float64[batch, seq*2, 2]", "scale": "float64[6]",
            "position_ids": f"int64[{dims}]", "segment_ids": f"int64[{dims}]",
            "mask": f"bool[{dims}]", "weights": f"float64[{dims}]", "target": "float64[batch]",
        }  # fmt: skip
        given = {"input_ids": f"int64[{dims}]", "labels": f"{kind}[{dims}]"}
        return given | {n: spec for n, spec in more.items() if n in self.extra}

    @property
    def extra(self) -> set[str]:
        """Returns the inputs beside ids and labels."""
        needs = {"documents": {"segment_ids", "position_ids"}, "masked": {"mask"},
                 "restarts": {"position_ids"}}  # fmt: skip
        of_loss = {"weights": {"weights"}, "target": {"target", "mask"}}
        return {*self.fields, *needs.get(self.body, ()), *of_loss.get(self.loss, ())}

    @property
    def pad(self) -> dict[str, float]:
        """Returns what fills up each input; nothing that does not count is zero by chance."""
        ids = {"input_ids": self.classes - 1, "types": 2, "x": 0.5, "position_ids": 3}
        fills = {**ids, "segment_ids": 0, "mask": 0, "weights": 0, "labels": IGNORED[self.loss]}
        return {n: value for n, value in fills.items() if n in self.inputs}

    @property
    def packing(self) -> bool | str:
        """Returns `packing=` for a loader that packs."""
        return {"documents": "segment_ids", "restarts": True}.get(self.body, False)

    @property
    def made(self) -> set[str]:
        """Returns the inputs that a loader which packs makes by itself."""
        return {"segment_ids", "position_ids"} & self.extra

    @property
    def weight(self) -> Any:
        """Returns `weight=` of the loader, by docs/train.md."""
        if self.loss in OF_SAMPLES:
            return "samples"
        if self.loss == "weights":
            return weigh
        if self.loss == "labels":
            return "labels"
        return dcpc.CountLabels("labels", IGNORED[self.loss], int(self.loss == "shifted"))


def weigh(inputs: dict[str, Tensor]) -> float:
    return float(inputs["weights"].sum())


def alone(setup: Setup, sample: dict[str, Tensor]) -> float:
    """Returns what one sample weighs in a step, counted here without the loader's functions."""
    if setup.loss in OF_SAMPLES:
        return 1.0
    if setup.loss == "weights":
        return float(sample["weights"].sum())
    labels = sample["labels"].flatten().tolist()[int(setup.loss == "shifted") :]
    return float(sum(label != IGNORED[setup.loss] for label in labels))


class Model(nn.Module):
    """Embeddings, at most one attention, and a loss."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        torch.manual_seed(setup.seed)
        self.setup = setup
        self.tokens, self.types = nn.Embedding(setup.classes, WIDTH), nn.Embedding(3, WIDTH)
        self.places, self.x = nn.Embedding(64, WIDTH), nn.Linear(4, WIDTH)
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, setup.classes, bias=setup.head != "tied")
        kept = {"types": "types", "x": "x", "position_ids": "places"}
        for name, module in kept.items():
            if name not in setup.extra and not setup.unused:
                delattr(self, module)
        if setup.body == "linear" and not setup.unused:
            del self.qkv
        self.register_buffer("gain", torch.ones(WIDTH))
        if setup.head == "tied":
            self.head.weight = self.tokens.weight
        self.to(torch.float32 if setup.autocast else torch.float64)
        if setup.head == "frozen":
            self.freeze()

    def freeze(self) -> None:
        self.tokens.requires_grad_(False)
        self.norm.requires_grad_(False)

    def forward(self, **inputs: Tensor) -> Any:
        logits = self.head(self.hidden(inputs))
        loss = self.loss(logits, inputs)
        both = {"loss": loss, "logits": logits}
        every = {"tensor": loss, "mapping": {"loss": loss}, "tuple": (loss,), "logits": both}
        return every[self.setup.output]

    def hidden(self, inputs: dict[str, Tensor]) -> Tensor:
        """Returns [batch, tokens, WIDTH]."""
        h = self.tokens(inputs["input_ids"])
        if "types" in inputs:
            h = h + self.types(inputs["types"].long())
        if "position_ids" in inputs:
            h = h + self.places(inputs["position_ids"])
        if "x" in inputs:
            h = h + self.x(inputs["x"].unflatten(1, (-1, 2)).flatten(2))
        if "scale" in inputs:
            h = h * inputs["scale"]
        h = self.norm(h.flatten(1, -2)).tanh() * self.gain
        for _ in range({"linear": 0, "looped": 3}.get(self.setup.body, 1)):
            h = h + self.attended(h, inputs)
        return h

    def attended(self, h: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        mask = None
        if self.setup.body == "masked":
            mask = inputs["mask"].flatten(1)[:, None, None]
        elif self.setup.body == "documents":
            ids = inputs["segment_ids"]
            mask = (ids[:, :, None] == ids[:, None, :])[:, None]
        elif self.setup.body == "restarts":
            places = inputs["position_ids"]
            jumps = torch.diff(places, prepend=places[:, :1] - 1, dim=-1) != 1
            ids, n = jumps.cumsum(-1), places.shape[1]
            causal = torch.ones(n, n, dtype=torch.bool).tril()
            mask = ((ids[:, :, None] == ids[:, None, :]) & causal)[:, None]
        causal = self.setup.body in ("causal", "looped")
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return y.transpose(1, 2).flatten(2)

    def loss(self, logits: Tensor, inputs: dict[str, Tensor]) -> Tensor:
        kind = self.setup.loss
        labels = inputs["labels"].flatten(1).long()
        if kind == "shifted":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if kind in ("labels", "shifted", "minus", "bytes"):
            flat = logits.flatten(0, 1), labels.flatten()
            return F.cross_entropy(*flat, ignore_index=IGNORED[kind])
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        counts = (labels != -100).double()
        if kind == "weights":
            weights = inputs["weights"].flatten(1)
            return (each * weights).sum() / weights.sum()
        if kind == "sums":
            return each.sum(1).mean()
        if kind == "samples":
            return (each.sum(1) / counts.sum(1).clamp(min=1)).mean()
        keep = inputs["mask"].flatten(1).double()
        pooled = (logits.logsumexp(-1) * keep).sum(1) / keep.sum(1)
        return (pooled - inputs["target"]).square().mean()
