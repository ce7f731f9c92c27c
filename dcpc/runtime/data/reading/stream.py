"""The samples of a stream by number: a dataset that is read forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from torch.utils.data import IterableDataset

from dcpc.errors import DataError, DcpcError
from dcpc.runtime.data.reading.stream_parts import END, PartsInTurn, refuse_short
from dcpc.runtime.data.window import Position


def is_stream(dataset: object) -> bool:
    """Returns whether a dataset is one to iterate, anew in each epoch, and has none by number."""
    kind = type(dataset)
    by_number = hasattr(kind, "__len__") and hasattr(kind, "__getitem__")
    again = hasattr(kind, "__iter__") and not hasattr(kind, "__next__")
    ordered = again and not isinstance(dataset, AbstractSet)
    return isinstance(dataset, IterableDataset) or (ordered and not by_number)


class SampleStream:
    """A dataset whose samples are there once, from when they are read until they are taken."""

    def __init__(self, source: Any, num_workers: int, seed: int) -> None:
        """Stores the source; reads nothing yet.

        Args:
            source: iterable of samples that begins anew each time. Where it has `set_epoch`, this
                is called before; where it has `state_dict` and `load_state_dict`, a resume goes on
                from these, else it reads the samples before again.
            num_workers: number of processes that read; 0: this one reads.
            seed: seed of the workers' random numbers, with the epoch.
        """
        self.source, self.num_workers, self.seed = source, num_workers, seed
        self.compared = False  # whether the first sample was, with rank 0's
        self._turns: PartsInTurn | None = None
        self._held: dict[int, Any] = {}
        self._marks = deque[tuple[int, dict[str, Any]]]()

    def begin(self, epoch: int, position: Position, saved: Mapping[str, Any] | None) -> None:
        """Begins an epoch, or goes on with it where `saved` was saved; done samples are dropped.

        Raises:
            DataError: the source raises.
        """
        self.close()
        self._epoch, self._position, self._ended = epoch, position, False
        set_epoch = getattr(self.source, "set_epoch", None)
        if callable(set_epoch):
            self._asked(lambda: set_epoch(epoch))
        seed = self.seed + epoch
        turns = self._asked(lambda: PartsInTurn(self.source, self.num_workers, seed, saved))
        self._turns, self._marks = turns, deque([(turns.read, turns.plain())])

    def close(self) -> None:
        """Ends the workers, and drops what was read."""
        self._turns, self._held = None, {}

    @property
    def first(self) -> str:
        """Digest of the epoch's first sample; "": it was not read."""
        return "" if self._turns is None else self._turns.first

    def _asked(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except DcpcError:
            raise
        except Exception as error:
            read = 0 if self._turns is None else self._turns.read
            raise DataError(
                f"dataset, sample {read} of the stream: got {type(error).__name__}: {error}; "
                "expected its next sample; look at the dataset's own lines above"
            ) from error

    def reaches(self, place: int, /) -> bool:
        """Returns whether there is a sample of this number; reads up to it.

        Raises:
            DataError: the source raises, or ends at its beginning.
        """
        turns, done = self._turns, self._position
        assert turns is not None, "it has begun"
        while turns.read <= place and not self._ended:
            number, sample = turns.read, self._asked(turns.next)
            if sample is END:
                self._ended = True
                if number == 0:
                    raise DataError(
                        f"dataset: got a stream without a sample in epoch {self._epoch}; expected "
                        "at least 1; check the path or filter it is made from, and that its "
                        "__iter__ begins anew in each epoch: a generator or a file can be read once"
                    )
                if number < done.start:
                    refuse_short(number, done.start)
            elif number >= done.start and number not in done.ahead:
                self._held[number] = sample
            if turns.marked:
                self._marks.append((turns.read, turns.plain()))
        return place < turns.read

    def __getitem__(self, number: int) -> Any:
        """Returns a sample that was read, once.

        Raises:
            DataError: it is not here any more, or another rank has it.
        """
        if number not in self._held:
            raise DataError(
                f"sample {number} of the stream: got no such sample here, as a stream is read once "
                "by rank 0, and goes to the ranks that run it; expected one of a step at hand; "
                "save plans on rank 0, of steps of the epoch that runs"
            )
        return self._held.pop(number)

    def hold(self, samples: Mapping[int, Any]) -> None:
        """Makes samples of these numbers be here."""
        self._held.update(samples)

    def saved(self, start: int) -> dict[str, Any]:
        """Returns the last position of the source from which the samples from `start` can be read.

        Earlier ones are forgotten.
        """
        while len(self._marks) > 1 and self._marks[1][0] <= start:
            self._marks.popleft()
        return self._marks[0][1]

    def check_saved(self, saved: object) -> None:
        """Refuses a position that cannot be gone on from.

        Raises:
            DataError: it is none, or is of another number of workers.
        """
        workers = saved.get("workers") if isinstance(saved, Mapping) else None
        expected = max(1, self.num_workers)
        if saved is not None and not isinstance(workers, list):
            raise DataError(
                f"loader state 'source': got {type(saved).__name__}; expected the position of a "
                "stream; pass what state_dict() returned"
            )
        if workers is not None and len(workers) != expected:
            raise DataError(
                f"loader state: got a stream read by {len(workers)} workers; expected {expected}, "
                "by which its order follows; resume with the same num_workers="
            )


class StreamOrder:
    """The order of a stream: its own."""

    def __init__(self, stream: SampleStream) -> None:
        """Stores the stream."""
        self._stream = stream

    def __getitem__(self, place: int) -> int:
        """Returns the number of the sample at a place, the same; IndexError after the last."""
        if not self._stream.reaches(place):
            raise IndexError(place)
        return place
