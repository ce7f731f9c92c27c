"""A model that returns more than its loss, its data, and its outputs beside the plain ones."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

import dcpc
from dcpc.runtime.data.steps import Step
from dcpc.runtime.step.result import StepResult
from tests.cases.ready import Ready

TEXT = dict.fromkeys(("ids", "labels"), "int64[batch, seq]")
BUCKETS = [{"seq": 7}, {"seq": 12}]


@dataclass
class Found:
    """What forward returns."""

    loss: Tensor | None
    logits: Tensor
    more: dict[str, Any]


pytree.register_dataclass(Found)


class Tagger(nn.Module):
    """Two layers of attention over tokens; a loss where it is asked for; metrics of all kinds.

    Args:
        own_loss: whether forward makes the loss.
        drop: share that its dropout leaves out.
    """

    def __init__(self, own_loss: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.own_loss = own_loss
        self.embed, self.out = nn.Embedding(13, 16), nn.Linear(16, 13)
        self.mix, self.drop = nn.Linear(16, 16), nn.Dropout(drop)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Found:
        x = self.embed(ids)
        for _ in range(2):
            q = self.drop(self.mix(x)).unflatten(-1, (4, 4)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).flatten(
                2
            )
        logits = self.out(x)
        loss = cross_entropy(logits, labels) if self.own_loss else None
        best = logits.argmax(-1)
        right = None if labels is None else (best == labels).double().mean()
        more = {"best": best, "right": right, "length": x.mean((1, 2)), "name": "tags", "ids": ids}
        more["flat"] = logits.flatten(0, 1)[:, :3]
        return Found(loss, logits, more)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean over labels that are not -100."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def outside(found: Found, labels: Tensor) -> Tensor:
    """The loss of a model that returns none."""
    return cross_entropy(found.logits, labels)


class Texts(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Texts of 4 to 12 tokens."""

    def __len__(self) -> int:
        """Returns how many there are."""
        return 12

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """Returns a text by its number."""
        drawn = torch.Generator().manual_seed(i)
        ids, labels = torch.randint(0, 13, (2, 4 + 5 * i % 9), generator=drawn)
        return {"ids": ids, "labels": labels}


def ready(own_loss: bool = True, world: int = 1, **options: Any) -> Ready:
    """Returns a tagger in float64, to be compiled by some ranks."""
    torch.manual_seed(0)
    model = Tagger(own_loss, options.pop("drop", 0.0)).double()
    one = {"batch": 1} if options.pop("alone", False) else {}
    options = {"verify": "off"} | options
    buckets = dcpc.Buckets(TEXT, [b | one for b in BUCKETS])
    return Ready(model, buckets, world, loss=None if own_loss else outside, **options)


def training(made: Ready) -> tuple[dcpc.CompiledModel, dcpc.DataLoader]:
    """Returns a tagger that this rank compiles, and a loader of all texts in two steps."""
    compiled = made.compile()
    pad = {"ids": 0, "labels": -100}
    loader = dcpc.DataLoader(
        Texts(), compiled, samples_per_step=6, pad=pad, weight="labels", shuffle=True
    )
    return compiled, loader


def plain_of(compiled: dcpc.CompiledModel) -> Tagger:
    """Returns the plain model of a compiled tagger, with its values."""
    plain = Tagger(bool(compiled.module.own_loss)).double()
    state = compiled.state_dict()
    plain.load_state_dict({n: getattr(x, "full_tensor", lambda x=x: x)() for n, x in state.items()})
    return plain


def output_errors(got: Found, loss: Tensor, plain: Tagger, batch: dict[str, Tensor]) -> list[float]:
    """Returns how far outputs, or pieces of them, are from the plain model's.

    Args:
        got: what came back.
        loss: that came back beside it.
        plain: the model.
        batch: its inputs.
    """
    assert type(got) is Found
    assert got.more["name"] == "tags"
    with torch.no_grad():
        want = plain(**batch)
    pairs = [(loss, cross_entropy(want.logits, batch["labels"])), (got.logits, want.logits)]
    pairs += [(got.more[n], want.more[n]) for n in ("best", "right", "length", "ids", "flat")]
    if plain.own_loss:
        pairs.append((got.loss, want.loss))
    errors = []
    for a, b in pairs:
        piece = a if isinstance(a, Tensor) else a.tensor
        whole = b if isinstance(a, Tensor) else a.of(b)
        assert not piece.requires_grad
        assert (piece.shape, piece.dtype) == (whole.shape, whole.dtype)
        errors.append(float((piece - whole).abs().max()) if piece.numel() else 0.0)
    return errors


def step_errors(
    compiled: dcpc.CompiledModel, step: Step, outputs: str
) -> tuple[list[float], StepResult]:
    """Returns how far a step's loss, gradients and outputs are from the plain model's; its result.

    Args:
        compiled: from `training`, without dropout.
        step: of its loader.
        outputs: as they are asked for.
    """
    plain = plain_of(compiled)
    compiled.zero_grad()
    result = compiled.train_step(step, outputs=outputs)
    assert [o.micro_batch for o in result.outputs] == [*step.micro_batches]
    errors = []
    for one in result.outputs:
        assert one.loss is not None
        errors += output_errors(one.outputs, one.loss, plain, one.micro_batch.inputs)
    total, count = torch.zeros((), dtype=torch.float64), 0
    for i in sorted(i for mb in step.plan.micro_batches for i in mb.sample_ids):
        x = Texts()[i]
        logits = plain(x["ids"][None], x["labels"][None]).logits
        total = total + F.cross_entropy(logits[0], x["labels"], reduction="sum")
        count += len(x["labels"])
    (total / count).backward()
    errors.append(abs(float(result.loss) - float(total.detach()) / count))
    for p, own in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert p.grad is not None
        grad: Any = own.grad
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        errors.append(float((whole - p.grad).abs().max()))
    return errors, result
