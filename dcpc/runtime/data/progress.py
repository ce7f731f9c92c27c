"""The position of training: the epoch, the samples of it that are done, and their order."""

from __future__ import annotations

import hashlib
import operator
import reprlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dcpc.errors import DataError
from dcpc.runtime.data.arguments import check_count
from dcpc.runtime.data.window import Position

State = dict[str, Any]
Order = Callable[[int], Sequence[int]]


class Progress:
    """Position of a loader.

    Attributes:
        epoch: epoch that runs, or that comes next.
        index: number of the next step in it.
        position: samples that are done.
        seed: seed of the order.
        shuffle: whether each epoch has a new order; else it has the dataset's.
        ended: whether the epoch has no samples after the position.
        source: for a stream: position of its source before these samples; None: its beginning.
    """

    def __init__(
        self, samples: int | None, seed: int, shuffle: bool, order: Order | None = None
    ) -> None:
        """Begins with epoch 0 of a dataset of `samples`, in the order of an epoch that is given.

        A stream has an unknown number of samples: None.

        Raises:
            DataError: `order` cannot be called.
        """
        if order is not None and not callable(order):
            raise DataError(
                f"order: got {reprlib.repr(order)}; expected a function: number of an epoch -> the "
                "samples in its order; for one order pass e.g. order=lambda epoch: indices"
            )
        self.epoch = self.index = 0
        self.position = Position()
        self.seed = seed
        self.shuffle = shuffle
        self._samples, self._order = samples, order
        self._resumed = self.ended = False
        self.source: Mapping[str, Any] | None = None

    def begin(self) -> None:
        """Begins an iteration: where a state was loaded from there, else with its epoch."""
        if not self._resumed:
            self._restart()
        self._resumed = False

    def _restart(self) -> None:
        self.position, self.index, self.ended, self.source = Position(), 0, False, None

    def advance(self, position: Position, ended: bool, source: Mapping[str, Any] | None) -> None:
        """Moves on to a position, where the epoch may have ended."""
        self.position, self.ended, self.source = position, ended, source

    def go_to(self, epoch: int) -> None:
        """Makes the next iteration that of `epoch`, from its start, if it is another."""
        if self._resumed and epoch < self.epoch:
            warnings.warn(
                f"set_epoch: got {epoch} for a loader that resumes in epoch {self.epoch}: all "
                "since is trained again; to go on, loop over range(loader.epoch, epochs)",
                stacklevel=3,
            )
        if epoch != self.epoch:
            self.epoch = epoch
            self._restart()
            self._resumed = False

    def order(self, epoch: int | None = None) -> list[int]:
        """Returns the samples in the order of an epoch; default: the one that runs.

        Raises:
            DataError: the order that the user gave has not every sample once.
        """
        assert self._samples is not None, "a stream has its own order"
        n = self._samples
        epoch = self.epoch if epoch is None else epoch
        if self._order is not None:
            return self._given(self._order, epoch, n)
        if not self.shuffle:
            return list(range(n))
        digest = hashlib.blake2b(f"{self.seed} {epoch}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        order: list[int] = torch.randperm(n, generator=generator).tolist()
        return order

    def _given(self, order: Order, epoch: int, n: int) -> list[int]:
        given = order(epoch)
        try:
            found = [operator.index(i) for i in given]
        except TypeError:
            raise DataError(
                f"order: got {reprlib.repr(given)} for epoch {epoch}; expected {n} integers, each "
                f"of 0 to {n - 1} once; return a permutation of the samples"
            ) from None
        if len(found) != n or set(found) != set(range(n)):
            raise DataError(
                f"order: got {len(found)} numbers, {len(set(found))} of them different, for epoch "
                f"{epoch}; expected each of 0 to {n - 1} once; return a permutation of the samples"
            )
        return found

    def text(self) -> str:
        """Returns the position that must be equal on all ranks before an iteration, as text."""
        return (
            f"epoch {self.epoch} from place {self.position.start}, step {self.index}, seed "
            f"{self.seed}, {'a stream' if self._samples is None else f'{self._samples} samples'}"
        )

    def state(self) -> State:
        """Returns it as plain values."""
        done = self.ended
        streams = self._samples is None
        return {
            "epoch": self.epoch + done,
            "consumed": 0 if done else self.position.start,
            "ahead": [] if done else sorted(self.position.ahead),
            "step": 0 if done else self.index,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "samples": self._samples,
            **({"source": None if done else self.source} if streams else {}),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue from a state.

        Raises:
            DataError: the state lacks a field or is of another dataset or order.
        """
        fields = self.state()
        if not isinstance(state, Mapping):
            raise DataError(
                f"loader state: got {type(state).__name__}; expected a mapping with the fields "
                f"{', '.join(fields)}; pass what state_dict() returned"
            )
        if state.keys() != fields.keys():
            raise DataError(
                f"loader state: got fields {', '.join(map(str, state))}; expected "
                f"{', '.join(fields)}; pass what state_dict() returned"
            )
        counts = {n: check_count(f"loader state '{n}'", state[n], 0)
                  for n in ("epoch", "consumed", "step", "seed")}  # fmt: skip
        places = state["ahead"]
        if not isinstance(places, list):
            raise DataError(
                f"loader state 'ahead': got {places!r}; expected a list of places; pass what "
                "state_dict() returned"
            )
        done = frozenset(check_count("loader state 'ahead'", p, 0) for p in places)
        for name in ("samples", "shuffle"):
            if state[name] != fields[name]:
                raise DataError(
                    f"loader state: got {name}={state[name]}; expected {fields[name]}, as this "
                    "loader has; resume with the same dataset and shuffle="
                )
        furthest = max((counts["consumed"], *(n + 1 for n in done)))
        if self._samples is not None and furthest > self._samples:
            raise DataError(
                f"loader state: got places up to {furthest}; expected at most {self._samples}, the "
                "samples of an epoch; pass what state_dict() returned"
            )
        self.epoch, self.position = counts["epoch"], Position(counts["consumed"], done)
        self.index, self.seed = counts["step"], counts["seed"]
        self.ended, self.source = False, state.get("source")
        self._resumed = True
