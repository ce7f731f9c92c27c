"""Protocols: a stage as the executor of a pipeline sees it, forward, backward and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

# Shape and dtype of a value that one stage sends to the next.
Shaped = tuple[tuple[int, ...], torch.dtype]


class StageSetting(Protocol):
    """A stage with one setting of recompute, for micro-batches of any shape."""

    def at(self, sizes: Mapping[str, int]) -> Stage:
        """Returns the stage for a micro-batch: the part of the model that is for its shape."""


class Stage(Protocol):
    """A part of a model that runs on a rank of its own, for micro-batches of any shape.

    Stage 0 receives nothing. A stage receives the tensors that the one before sends, in their
    order; a value that a later stage needs is relayed by those between. The last stage sends its
    loss.
    """

    @property
    def index(self) -> int:
        """Place of the stage in the pipeline, from 0."""

    @property
    def count(self) -> int:
        """Stages of the pipeline."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the model's parameters that the stage reads.

        Stages that read the same one each add their part of its gradient; it is the sum of them.
        """

    def forward(
        self, inputs: Mapping[str, Tensor], received: tuple[Tensor, ...], seed: int = 0
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Returns the tensors to send, (loss,) on the last stage, and those that backward reads.

        Args:
            inputs: the model's inputs by name: at least those that the stage reads.
            received: tensors from the stage before, in the order of `received(...)`.
            seed: seed of the micro-batch's random numbers, the same in all stages.
        """

    def backward(self, saved: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Adds to `.grad` of the stage's parameters; returns the gradients of its received tensors.

        Args:
            saved: result of `forward`, used once.
            grads: gradient of each value that the stage sent, None where it has none; on the last
                stage the weight of the micro-batch, a scalar.
        """

    def received(self, sizes: Mapping[str, int]) -> tuple[Shaped, ...]:
        """Returns shape and dtype of each tensor that the stage receives for a micro-batch."""

    def sent(self, sizes: Mapping[str, int]) -> tuple[Shaped, ...]:
        """Returns shape and dtype of each tensor to send; on the last stage, of the loss."""
