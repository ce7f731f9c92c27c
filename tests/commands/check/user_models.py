"""Models as a user of `dcpc check` has them: a good one, one that cannot be split, a wrong one."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

import dcpc

BUCKETS = """
inputs:
  input_ids: int64[batch, seq]
  labels: int64[batch, seq]
sizes:
  - {seq: 8}
  - {seq: 32}
"""


@torch.library.custom_op("accepted::centre", mutates_args=())
def centre(x: Tensor) -> Tensor:
    """x less the mean over all of it: no dim of it can be split."""
    return x - x.mean()


@torch.library.custom_op("accepted::mistaken", mutates_args=())
def mistaken(x: Tensor) -> Tensor:
    """The same under a name whose rule says that every dim can."""
    return x - x.mean()


for op in (centre, mistaken):
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, g: g - g.mean())


class Tiny(nn.Module):
    """Embedding, something in between, classes."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.embed, self.between, self.classes = nn.Embedding(16, 32), between, nn.Linear(32, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.classes(self.between(self.embed(input_ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Logits(nn.Module):
    """A model that returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.classes = nn.Embedding(16, 32), nn.Linear(32, 16)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.classes(self.embed(input_ids))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy over all positions."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Call(nn.Module):
    """One op as a module."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return getattr(torch.ops.accepted, self.op)(x)


class Dropped(nn.Module):
    """Draws random numbers in eval() too."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


class Loop(nn.Module):
    """A loop over the length, and a list as long as the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.step, self.classes = (
            nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 16)
        )  # fmt: skip

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden, states = self.embed(input_ids), []
        state = torch.stack([hidden[0, 0] * 0 for _ in [0] * input_ids.shape[0]])
        for t in range(input_ids.shape[1]):
            state = torch.tanh(self.step(hidden[:, t] + state))
            states.append(self.classes(state))
        return nn.functional.cross_entropy(torch.cat(states), labels.T.flatten())


def loop() -> nn.Module:
    return Loop()


def good() -> nn.Module:
    return Tiny(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)))


def replicated() -> nn.Module:
    return Tiny(Call("centre"))


def wrong() -> nn.Module:
    dcpc.register_sharding_rule("accepted::mistaken", "b l d -> b l d")
    return Tiny(Call("mistaken"))


def drawing() -> nn.Module:
    return Tiny(Dropped())


def unlabelled() -> nn.Module:
    return Logits()


def ids(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Ids up to 16 and some ignored labels."""
    labels = torch.randint(16, (sizes["batch"], sizes["seq"]))
    labels[:, 1] = -100
    return {"input_ids": torch.randint(16, labels.shape), "labels": labels}
