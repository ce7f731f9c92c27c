"""The loader's steps as the Trainer's batches: one batch is one whole optimizer step."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from dcpc.errors import DataError
from dcpc.runtime.data import loader as steps_loader
from dcpc.runtime.data.steps import Step

STEP = "dcpc_step"
Batch = dict[str, Any]


class StepStream(IterableDataset[Batch]):
    """One epoch of steps, each as the Trainer's `inputs`.

    Beside the step a batch has what the Trainer counts tokens and FLOPs by, and no labels: it
    would gather their number over the ranks and divide by it.
    """

    def __init__(self, loader: steps_loader.DataLoader, main_input: str) -> None:
        """Stores the loader; loads nothing yet."""
        self.loader = loader
        self.main_input = main_input
        self.skipped = 0  # steps that the Trainer skips and that are not made again
        self._running: Generator[Step, None, None] | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Yields an epoch's steps; after a resume first an empty batch for each step already done.

        accelerate's `skip_first_batches` drops these empty batches.
        """
        self.close()
        skipped, self.skipped = self.skipped, 0
        for _ in range(skipped):
            yield {}
        steps = self._running = iter(self.loader)  # type: ignore[assignment]
        with closing(steps):  # type: ignore[type-var]
            for step in steps:
                yield self._batch(step)

    def close(self) -> None:
        """Ends the running epoch and its thread."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _batch(self, step: Step) -> Batch:
        """Returns a step as a batch; all ranks' counts add up to those of the whole step."""
        rank = self.loader.compiled.groups.rank
        own = [mb for mb in step.micro_batches if mb.ranks[0] == rank]
        counted = [mb.inputs[self.main_input] for mb in own if self.main_input in mb.inputs]
        real = step.tokens if rank == 0 else 0
        return {
            STEP: step,
            self.main_input: torch.empty(sum(x.numel() for x in counted), device="meta"),
            "attention_mask": torch.ones(real, dtype=torch.int64),
        }


class StepLoader(DataLoader[Batch]):
    """The Trainer's training dataloader: a batch is a whole optimizer step."""

    def __init__(self, stream: StepStream, counted: bool = True) -> None:
        """Takes batches as they are; where the data set is a stream, nobody has counted them."""
        super().__init__(stream, batch_size=None, collate_fn=_as_it_is)
        self.stream, self.counted = stream, counted
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        """Steps of epoch 0; others may have another number: see `count`."""
        return self.count(0) if self.counted else len(self.stream.loader)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of `epoch`."""
        self.stream.loader.set_epoch(epoch)

    def count(self, epoch: int) -> int:
        """Returns how many steps an epoch has."""
        if epoch not in self._counts:
            self._counts[epoch] = self.stream.loader.count_steps(epoch)
        return self._counts[epoch]

    def size(self) -> str:
        """Returns the size of a step, as text."""
        loader = self.stream.loader
        if loader.samples_per_step is not None:
            return f"{loader.samples_per_step} samples"
        return f"{loader.tokens_per_step} tokens"

    def resume(self, saved: dict[str, Any], skip: bool) -> tuple[int, int]:
        """Moves to the position of a checkpoint; returns its epoch and the steps done in it.

        Args:
            saved: dict that `LoaderState` saved.
            skip: whether to continue within the epoch; else at its beginning.

        Raises:
            DataError: the checkpoint's steps have another size, or its data set differs.
        """
        if saved["size"] != self.size():
            raise DataError(
                f"resume_from_checkpoint: got a checkpoint of steps of {saved['size']}; expected "
                f"{self.size()} as in these arguments: the schedule and the number of steps follow "
                "from it; keep per_device_train_batch_size * gradient_accumulation_steps * ranks, "
                "or tokens_per_step, as they were"
            )
        position = saved["position"]
        loader = self.stream.loader
        if not skip:
            loader.set_epoch(position["epoch"])
            return position["epoch"], 0
        loader.load_state_dict(position)
        self.stream.skipped = position["step"]
        return position["epoch"], position["step"]


class LoaderState(TrainerCallback, ExportableState):  # type: ignore[misc]
    """Saves the loader's position in each checkpoint's `trainer_state.json`.

    Attributes:
        loader: loader of the running training; None before.
    """

    def __init__(self) -> None:
        self.loader: StepLoader | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Notes which loader trains."""
        loader = kwargs.get("train_dataloader")
        self.loader = loader if isinstance(loader, StepLoader) else None

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Ends the loader's thread."""
        if self.loader is not None:
            self.loader.stream.close()

    def state(self) -> dict[str, Any]:
        """Returns the loader's place, the step trained last counted as done."""
        if self.loader is None:
            return {"args": {}, "attributes": {}}
        saved = {"size": self.loader.size(), "position": self.loader.stream.loader.state_dict()}
        return {"args": {}, "attributes": {"saved": saved}}


def saved_in(state: Any) -> dict[str, Any] | None:
    """Returns the dict that `LoaderState` saved; None: the checkpoint has none."""
    entry = state.stateful_callbacks.setdefault(LoaderState.__name__, {})
    entry = entry[-1] if isinstance(entry, list) else entry
    found: dict[str, Any] | None = entry.get("attributes", {}).get("saved")
    return found


def _as_it_is(batch: Any) -> Any:
    return batch
