"""The result of a train step: its loss, and the measured seconds and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dcpc.errors import DispatchError
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.planner.plans import imbalance


@dataclass(frozen=True)
class MicroBatchOutputs:
    """The outputs of forward for a micro-batch of this rank.

    Attributes:
        micro_batch: micro-batch with its samples (indices in the dataset), inputs and ranks, all of
            which have these outputs.
        loss: loss of the micro-batch, detached; None where it was not run, as its weight is 0.
        outputs: outputs of forward in its own structure, detached; None likewise.
    """

    micro_batch: MicroBatch
    loss: torch.Tensor | None
    outputs: Any


@dataclass(frozen=True)
class StepResult:
    """The loss of a train step, and its measured seconds and bytes.

    Attributes:
        loss: weighted mean loss of the global batch, float64 scalar, the same on every rank.
        busy_s: measured seconds each rank took for its micro-batches, waits for its peers inside
            collectives included, compiling excluded.
        seconds_s: measured seconds of the whole step on this rank, reduction included.
        total_weight: sum of the weights of all micro-batches.
        reduced_bytes: bytes of gradients that this rank put into the sum over ranks; 0 alone.
        early_bytes: part of `reduced_bytes` that was sent before the last backward had ended.
        micro_batch_s: measured seconds of each micro-batch of this rank; 0 of one that does not
            count.
        reduction_s: measured seconds from the end of this rank's micro-batches to the sum of
            gradients: waiting for slower ranks, and the wire.
        grad_norm: norm of the summed gradient before clipping; None: not asked for, or skipped.
        skipped: whether its loss was NaN or infinite: gradients are as they were before it.
        every_s: measured seconds of each micro-batch of the plan, on its slowest rank, the same on
            every rank; 0 of one that does not count; empty: not asked for.
        outputs: outputs of each micro-batch of this rank, in order; empty: not asked for.
    """

    loss: torch.Tensor
    busy_s: tuple[float, ...]
    seconds_s: float
    total_weight: float
    reduced_bytes: int = 0
    early_bytes: int = 0
    micro_batch_s: tuple[float, ...] = ()
    reduction_s: float = 0.0
    grad_norm: float | None = None
    skipped: bool = False
    every_s: tuple[float, ...] = ()
    outputs: tuple[MicroBatchOutputs, ...] = ()

    def __post_init__(self) -> None:
        """Has `loss.backward()` say that the gradients are there."""
        self.loss.backward = _refuse_backward  # type: ignore[method-assign]

    def __str__(self) -> str:
        """Returns a line on the step."""
        norm = "" if self.grad_norm is None else f", gradient norm {self.grad_norm:.4g}"
        return (
            f"loss {float(self.loss):.6g}{' (skipped)' * self.skipped}{norm}, {self.seconds_s:.3f} "
            f"s, imbalance {self.imbalance:.1%}"
        )

    @property
    def imbalance(self) -> float:
        """Measured mean idle share of the ranks, 0 to 1."""
        return imbalance(self.busy_s)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Measured seconds of each rank from its last micro-batch to that of the last rank."""
        return tuple(max(self.busy_s) - t for t in self.busy_s)

    def figures(self, step: Step) -> dict[str, float]:
        """Returns the numbers of a step by name, measured and predicted, for loggers.

        Example:
            compiled.log_to(lambda step, result: wandb.log(result.figures(step)))

        Args:
            step: step of the loader that this is the result of.
        """
        values = {
            "loss": float(self.loss),
            "seconds/step": self.seconds_s,
            "seconds/predicted": step.plan.makespan_s,
            "imbalance/measured": self.imbalance,
            "imbalance/predicted": step.plan.imbalance,
            "reduction/early_share": self.early_bytes / max(self.reduced_bytes, 1),
            "tokens_per_s": step.tokens / self.seconds_s,
        }
        if self.grad_norm is not None:
            values["grad_norm"] = self.grad_norm
        ranks = zip(self.busy_s, self.idle_s, step.plan.busy_s, strict=True)
        for rank, (busy_s, idle_s, predicted_s) in enumerate(ranks):
            values[f"busy_s/rank_{rank}"] = busy_s
            values[f"idle_s/rank_{rank}"] = idle_s
            values[f"busy_predicted_s/rank_{rank}"] = predicted_s
        return values


def _refuse_backward(*args: object, **kwargs: object) -> None:
    raise DispatchError(
        "train_step(step).loss.backward(): got a backward of a step's loss; expected none, as "
        "train_step has run it and has summed the gradients over the ranks; leave it out: "
        "optimizer.step() comes next"
    )
