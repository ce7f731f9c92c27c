"""What the executor of a pipeline knows of a stage: forward, backward, and shapes in advance."""

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
        """Returns what runs a micro-batch: the part of the model that is for its shape.

        Args:
            sizes: length of every dim of the micro-batch, batch included.
        """


class Stage(Protocol):
    """A part of a model that runs on a rank of its own, for micro-batches of any shape.

    Stage 0 receives nothing. What a stage sends is what the next one receives, in the same order;
    a value that a later stage needs is relayed by those between. The last stage sends its loss.
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
        """Returns what the stage sends, of the last one (loss,), and what its backward needs.

        Args:
            inputs: the model's inputs by name: at least those that the stage reads.
            received: what the stage before it sent, in the order of `received(...)`.
            seed: of the micro-batch's random numbers, the same in all stages.
        """

    def backward(self, saved: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Adds to `.grad` of the stage's parameters; returns the gradients of what it received.

        Args:
            saved: from `forward`, used once.
            grads: of each value that the stage sent, None where the value has no gradient; of the
                last stage the weight of the micro-batch, a scalar.
        """

    def received(self, sizes: Mapping[str, int]) -> tuple[Shaped, ...]:
        """Returns shape and dtype of what the stage receives of a micro-batch.

        Args:
            sizes: length of every dim of the micro-batch, batch included.
        """

    def sent(self, sizes: Mapping[str, int]) -> tuple[Shaped, ...]:
        """Returns shape and dtype of what the stage sends, of the last one its loss's."""
