"""A decoder compiled for batches of one shape, which `away` and `tiles` run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import dcpc
from dcpc.buckets import BATCH

INPUTS = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}


@dataclass(frozen=True, slots=True)
class Subject:
    """A compiled decoder and its batch."""

    model: nn.Module
    compiled: Any
    given: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, ids: Tensor, labels: Tensor, **options: Any) -> Subject:
        """Returns a decoder compiled, on the eager backend, for batches of this one's shape."""
        samples, seq = ids.shape
        buckets = dcpc.Buckets(INPUTS, [{"seq": seq, BATCH: samples}])
        options = {"memory": 1e12, "backend": "eager", "verify": "off", **options}
        compiled = dcpc.compile(model, buckets, **options)
        return cls(model, compiled, {"input_ids": ids, "labels": labels})

    @property
    def row(self) -> Any:
        """Its plan."""
        return next(iter(self.compiled.planned.plans.values()))

    def run(self) -> list[Tensor]:
        """Returns loss and gradients."""
        self.model.zero_grad()
        loss = self.compiled(**self.given)
        torch.autograd.backward(loss)
        return [loss.detach(), *(p.grad for p in self.model.parameters() if p.grad is not None)]
