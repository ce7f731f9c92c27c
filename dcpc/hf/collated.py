"""The Trainer's data set as the loader reads it: a tensor for each input, without `batch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils.data import IterableDataset

from dcpc.buckets import BATCH, InputSpec, Sizes, completed
from dcpc.errors import DataError

MASK = "attention_mask"


class Records(Protocol):
    """Map-style: anything that the collator takes."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Any:
        """Sample `index`."""


class CollatedSamples:
    """Samples as the Trainer's own collator makes them, one at a time."""

    def __init__(
        self,
        records: Records,
        collate: Callable[[Sequence[Any]], Mapping[str, Any]],
        inputs: Mapping[str, InputSpec],
        accepted: frozenset[str],
        maskless: bool,
        smallest: Sizes,
    ) -> None:
        """Loads nothing yet.

        Args:
            records: data set of the Trainer.
            collate: function from a list of samples to input name -> tensor with a batch dim.
            inputs: spec of each input to keep; others are dropped.
            accepted: further names that the model's forward accepts: dropping one is an error.
            maskless: whether padding at the end is harmless without a mask, as in causal models
                whose loss ignores it.
            smallest: shortest length of each dim: where it is 0, an input may be lacking.
        """
        self.records = records
        self._collate = collate
        self._inputs = inputs
        self._accepted = accepted
        self._maskless, self._smallest = maskless, smallest

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Returns the inputs of a sample; an error as for `collated`."""
        return self.collated(index, self.records[index])

    def collated(self, index: int, record: Any) -> dict[str, torch.Tensor]:
        """Returns the inputs of a record of the data set.

        Raises:
            DataError: the collator makes too little, or an input that the model takes and the
                buckets do not declare.
        """
        made = completed(self._inputs, self._collate([record]), self._smallest)
        missing = [name for name in self._inputs if made.get(name) is None]
        if missing:
            raise DataError(
                f"sample {index}: got {', '.join(map(str, made))} from the data collator; expected "
                f"{', '.join(self._inputs)}, the buckets' inputs; have the data set and the "
                f"collator give {', '.join(missing)}, or declare other inputs in the buckets"
            )
        for name in sorted(made.keys() & self._accepted - self._inputs.keys()):
            self._check_left_out(index, name, made[name])
        return {name: self._alone(index, name, made[name]) for name in self._inputs}

    def _check_left_out(self, index: int, name: str, value: Any) -> None:
        if value is None:
            return
        full = isinstance(value, torch.Tensor) and bool((value == 1).all())
        if name == MASK and self._maskless and full:
            return
        raise DataError(
            f"sample {index}, input '{name}': got one from the data collator that the model's "
            f"forward takes and the buckets lack; expected it among their inputs, as training "
            f"without it may differ; add e.g. '{name}: int64[batch, seq]' to the buckets, or have "
            "the collator leave it out"
        )

    def _alone(self, index: int, name: str, value: torch.Tensor) -> torch.Tensor:
        """Returns an input without its batch dim."""
        dims = [dim.name for dim in self._inputs[name].dims]
        if BATCH not in dims:
            return value
        at = dims.index(BATCH)
        if value.dim() <= at or value.shape[at] != 1:
            raise DataError(
                f"sample {index}, input '{name}': got {tuple(value.shape)} for one sample; "
                f"expected 1 as dim {at}, its batch; correct the data collator or the spec"
            )
        return value.select(at, 0)


class CollatedStream(IterableDataset[dict[str, torch.Tensor]]):
    """A stream's samples as the Trainer's own collator makes them.

    It has the stream's `set_epoch`, `state_dict` and `load_state_dict`, where that has them.
    """

    def __init__(self, samples: CollatedSamples) -> None:
        """Takes the samples; reads nothing yet."""
        self.records: Any = samples.records
        self._collated = samples.collated

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yields the inputs of each sample."""
        for number, record in enumerate(self.records):
            yield self._collated(number, record)

    def __getattr__(self, name: str) -> Any:
        if name in ("set_epoch", "state_dict", "load_state_dict"):
            return getattr(self.records, name)
        raise AttributeError(name)


def accelerates_order(samples: int, seed: int, epoch: int) -> list[int]:
    """Returns the samples in the order of the Trainer's own shuffling sampler.

    Source: accelerate's `SeedableRandomSampler`, which the Trainer uses by default.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    order: list[int] = torch.randperm(samples, generator=generator).tolist()
    return order
