"""A compiled model against the plain one: loss and every gradient, on several ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor, nn

from dcpc.commands.check import SPLITTING, SplitModel
from dcpc.trace.loss import Loss
from dcpc.verify import reference
from dcpc.verify.exactness import Gradients, gradient_errors, loss_error, nan_as_infinite

__all__ = [
    "SPLITTING",
    "SplitJob",
    "SplitModel",
    "compiled_error",
    "gradient_error",
    "loss_error",
    "plain",
    "split_errors",
    "wrong",
]


def plain(
    model: nn.Module, inputs: Mapping[str, Tensor], loss: Loss | None = None
) -> tuple[Tensor, Gradients]:
    """Loss and gradients of the model itself, whose own gradients are gone then."""
    model.zero_grad()
    found = reference.plain(model, inputs, loss=loss)
    return found.loss, found.gradients


def gradient_error(model: nn.Module, expected: Gradients) -> float:
    """Largest of `gradient_errors`."""
    return max(map(nan_as_infinite, gradient_errors(model, expected).values()), default=0.0)


def compiled_error(
    compiled: Any,
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    share: float = 1.0,
    function: Any = None,
) -> float:
    """Largest relative error of one call's loss and of its gradients summed over all ranks.

    `share` of the loss counts on this rank: 1 / number of SP groups that run these inputs.
    `function` is what the model was compiled with as `loss=`.
    """
    loss, gradients = plain(model, inputs, function)
    got = compiled(**inputs)
    (got * share).backward()
    compiled.reduce_gradients()
    return max(loss_error(got, loss), gradient_error(model, gradients))


@dataclass(frozen=True)
class SplitJob:
    """A model split over ranks, and what it is called with: for `run_prepared`.

    Attributes:
        name: name of the model and of the way in which it is split.
        split: the model.
        points: sizes and inputs.
        recomputes: settings of recompute.
    """

    name: str
    split: SplitModel
    points: list[tuple[Mapping[str, int], Mapping[str, Tensor]]]
    recomputes: Sequence[str] = ("none", "all")

    @classmethod
    def ready(cls, *given: Any) -> "SplitJob":
        """Returns the job with the variants of all ranks made."""
        job = cls(*given)
        for (sizes, _), recompute in product(job.points, job.recomputes):
            job.split.ready(sizes, recompute)
        return job


def split_errors(rank: int, jobs: Sequence[SplitJob]) -> dict[str, float]:
    """Largest error of each job at each of its points, by a text that says which."""
    found = {}
    for job in jobs:
        found |= job.split.errors(job.name, job.points, job.recomputes)
    return found


def wrong(found: Sequence[Mapping[str, float]], limit: float) -> dict[str, float]:
    """What is not below a limit on some rank (NaN is not)."""
    return {k: e for errors in found for k, e in errors.items() if not e < limit}
