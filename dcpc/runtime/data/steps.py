"""One optimizer step as a rank gets it from the loader: its plan and the tensors to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from dcpc.buckets import Bucket
from dcpc.errors import DataError, DcpcError
from dcpc.runtime.planner.plans import StepPlan


def pinned(inputs: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
    """Returns inputs in memory that a GPU copies from while the host goes on; else as they are.

    The loader's thread asks for it: a copy into such memory takes it time, and the step none.

    Raises:
        DataError: the host does not give such memory.
    """
    if device.type != "cuda":
        return dict(inputs)
    try:
        # A thread begins with GPU 0 as its own: there a second process would take memory.
        with torch.cuda.device(device):
            return {name: x.pin_memory() for name, x in inputs.items()}
    except RuntimeError as e:
        size = sum(x.nbytes for x in inputs.values())
        raise DataError(
            f"loader: got {(str(e).splitlines() or ['no reason'])[0]} for {size} bytes of pinned "
            "memory; expected the host to give them; raise its limit (ulimit -l), leave it more "
            "memory, or pass lookahead=1 to keep fewer steps ready"
        ) from e


@dataclass(frozen=True)
class MicroBatch:
    """Samples that this rank runs at once.

    Attributes:
        bucket: shape of the samples.
        sp: number of ranks that get this same micro-batch.
        inputs: arguments of the model, on the CPU; pinned where the model is on a GPU.
        weight: weight in the step's loss.
        samples: indices in the dataset; packed: those of all rows, one row after the other.
        ranks: ranks that get it, consecutive.
        micro_batch: samples of the row of the plan table that it runs.
        menu_step: steps of recompute that the row takes.
        number: position in the step's global order.
        rows: for packed ones: the samples of each row of `inputs`, in the order of the row.
    """

    bucket: Bucket
    sp: int
    inputs: dict[str, torch.Tensor]
    weight: float
    samples: tuple[int, ...]
    ranks: tuple[int, ...]
    micro_batch: int
    menu_step: int
    number: int
    rows: tuple[tuple[int, ...], ...] = ()

    def inputs_on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Returns the inputs on a device; on a GPU later work waits for their copies.

        The host does not wait for the copy. Pinned memory is not used again before it has ended,
        though this step may be gone by then: torch's allocator of such memory has an event of each
        copy's stream.
        """
        return {name: x.to(device, non_blocking=True) for name, x in self.inputs.items()}


@dataclass(frozen=True, repr=False)
class Step:
    """One optimizer step, as one rank sees it.

    Attributes:
        epoch: number of the epoch, from 0.
        index: number of the step in its epoch, from 0.
        plan: plan of all ranks.
        micro_batches: micro-batches of this rank, in order.
        total_weight: sum of all ranks' weights; None: `train_step` sums them up.
        tokens: tokens of all ranks' samples, padding left out.
        samples: number of all ranks' samples.
        plan_s: seconds of forming and planning the batch, on the rank that plans.
        rows: for packed steps: the samples of each row; a micro-batch has `rows` of its own.
        problem: reason why this rank has no micro-batches, such as a wrong sample: `train_step`
            raises it on every rank.
        again: function that plans the same samples with the table of the moment, and loads this
            rank's; all ranks get the same plan. None: the step is not a loader's.
    """

    epoch: int
    index: int
    plan: StepPlan
    micro_batches: tuple[MicroBatch, ...]
    total_weight: float | None
    tokens: int
    samples: int
    plan_s: float
    rows: tuple[tuple[int, ...], ...] = ()
    problem: DcpcError | None = None
    again: Callable[[], Step] | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        """Returns a line: `print(step)` shows no tensors."""
        return (
            f"Step {self.index} of epoch {self.epoch}: {self.samples:,} samples, {self.tokens:,} "
            f"tokens, {len(self.micro_batches)} of {len(self.plan.micro_batches)} micro-batches "
            "on this rank"
        )
