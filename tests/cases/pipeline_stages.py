"""A language model cut by hand into stages of plain modules, differentiated by autograd."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH = 13, 8


class TiedModel(nn.Module):
    """An embedding, tied to the head, and blocks; every block also reads the first's input."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64),
                nn.Tanh(),
                nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64),
            )
            for _ in range(blocks)
        )

    def begin(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values, the skipping value and an integer one that go from stage to stage."""
        x = self.embedding(ids)
        return x, x * 0.5, ids.sum(1)

    def block(self, n: int, x: Tensor, skip: Tensor, whole: Tensor) -> Tensor:
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.blocks[n](mixed) + skip * (whole % 3)[:, None, None]

    def end(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = x @ self.embedding.weight.T
        return nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100
        )

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, skip, whole = self.begin(input_ids)
        for n in range(len(self.blocks)):
            x = self.block(n, x, skip, whole)
        return self.end(x, labels)


class HandStage:
    """Stage `index` of `count` of a `TiedModel` whose blocks are shared out evenly."""

    def __init__(self, model: TiedModel, index: int, count: int) -> None:
        self.model, self.index, self.count = model, index, count
        each = len(model.blocks) // count
        self.own = range(index * each, (index + 1) * each)

    @property
    def parameters(self) -> tuple[str, ...]:
        ends = self.index in (0, self.count - 1)
        names = [
            name
            for name, _ in self.model.named_parameters()
            if (int(name.split(".")[1]) in self.own if name.startswith("blocks") else ends)
        ]
        return tuple(names)

    def forward(
        self, inputs: Mapping[str, Tensor], received: tuple[Tensor, ...], seed: int = 0
    ) -> tuple[tuple[Tensor, ...], Any]:
        taken = tuple(x.clone().requires_grad_() if x.is_floating_point() else x for x in received)
        values = taken if self.index else self.model.begin(inputs["input_ids"])
        x, skip, whole = values
        for n in self.own:
            x = self.model.block(n, x, skip, whole)
        if self.index == self.count - 1:
            outs: tuple[Tensor, ...] = (self.model.end(x, inputs["labels"]),)
        else:
            outs = (x, skip, whole)
        return tuple(o.detach() for o in outs), (taken, outs)

    def backward(self, saved: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        taken, outs = saved
        pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if g is not None]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        return tuple(x.grad for x in taken)

    def backward_input(
        self, saved: Any, grads: tuple[Tensor | None, ...]
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        taken, outs = saved
        pairs = [(o, g) for o, g in zip(outs, grads, strict=True) if g is not None]
        floats = [x for x in taken if x.is_floating_point()]
        found = iter(
            torch.autograd.grad(
                [o for o, _ in pairs], floats, [g for _, g in pairs], retain_graph=True
            )
            if floats
            else ()
        )
        back = tuple(next(found) if x.is_floating_point() else None for x in taken)
        return back, pairs

    def backward_weight(self, rest: Any) -> None:
        named = dict(self.model.named_parameters())
        params = [named[name] for name in self.parameters]
        grads = torch.autograd.grad([o for o, _ in rest], params, [g for _, g in rest])
        for p, g in zip(params, grads, strict=True):
            p.grad = g if p.grad is None else p.grad + g

    def sent(self, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        if self.index == self.count - 1:
            return (((), torch.float64),)
        return self._carried(sizes)

    def received(self, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        return self._carried(sizes) if self.index else ()

    def _carried(self, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        values = (sizes["batch"], sizes["seq"], WIDTH)
        return (
            (values, torch.float64),
            (values, torch.float64),
            ((sizes["batch"],), torch.int64),
        )


class WholeStage(HandStage):
    """A stage whose backward is not split."""

    backward_input = None  # type: ignore[assignment]


def tied_model(blocks: int = 4) -> TiedModel:
    """A model with the same numbers everywhere."""
    torch.manual_seed(0)
    return TiedModel(blocks)


def batch_of(step: int, number: int) -> tuple[dict[str, Tensor], float]:
    """Returns inputs and weight (labels that count) of a micro-batch; shapes differ."""
    drawn = torch.Generator().manual_seed(100 * step + number)
    batch, seq = 1 + (number + step) % 3, 2 + (3 * number + step) % 5
    ids = torch.randint(VOCABULARY, (batch, seq), generator=drawn)
    labels = (ids * 5 + 1) % VOCABULARY
    labels[0, : 1 + number % 2] = -100
    return {"input_ids": ids, "labels": labels}, float((labels != -100).sum())


def plain_step(model: TiedModel, step: int, counts: int) -> tuple[float, dict[str, Tensor]]:
    """Returns loss and gradients of the model on all micro-batches of a step at once."""
    twin = copy.deepcopy(model)
    found = [batch_of(step, n) for n in range(counts)]
    total = sum(weight for _, weight in found)
    loss = sum(twin(**inputs) * (weight / total) for inputs, weight in found)
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in twin.named_parameters()}
