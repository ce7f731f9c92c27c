"""The parts of a stream that worker processes read, as one sequence of samples."""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from typing import Any, NoReturn

import torch
from torch.utils import data as torch_data

from dcpc.errors import DataError

LOG = logging.getLogger("dcpc")
# Samples from one state of the source to the next: so many are read again after a resume, at most.
EVERY = 64
END = object()
Item = tuple[str, Any, Any]  # kind, sample or what is wrong, mark
_ENDED: Item = ("end", None, None)


@dataclass(slots=True)
class StreamPart:
    """Position in the part of a stream that one worker reads.

    Attributes:
        state: state of the source after `at` samples; None: the source begins, and `at` is 0.
        at: number of samples of this part before the state.
        digest: lengths and checksum of the sample after the state.
        since: number of samples taken after the state.
        ended: whether all samples of the part are taken.
    """

    state: Any = None
    at: int = 0
    digest: str = ""
    since: int = 0
    ended: bool = False


class PartReader(torch_data.IterableDataset[tuple[Any, ...]]):
    """Yields the rest of a worker's part: its number, and items.

    The mark of an item is a state, the number of samples before it, and the digest of the sample.
    """

    def __init__(self, source: Any, parts: list[StreamPart]) -> None:
        """Stores the source, and the position of each worker's part."""
        self.source, self.parts = source, parts

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yields the items; the last one says that the part has ended."""
        info = torch_data.get_worker_info()
        worker = 0 if info is None else info.id
        if not self.parts[worker].ended:
            yield from ((worker, *item) for item in self._items(self.parts[worker]))
        yield worker, *_ENDED

    def _items(self, part: StreamPart) -> Iterator[Item]:
        source, keeps, wanted = self.source, keeps_state(self.source), part.at + part.since
        if part.state is not None:
            source.load_state_dict(part.state)
        samples = iter(source)
        for number in itertools.count(part.at):
            first = number == part.at
            marked = number == 0 or (keeps and number % EVERY == 0)
            # The state of a source that was just loaded is told only after its next sample.
            state = part.state if first or not marked else copy.deepcopy(source.state_dict())
            sample = next(samples, END)
            if sample is END:
                if number < wanted:
                    yield "short", number, None
                return
            digest = digest_of(sample) if marked or first else ""
            if first and part.digest not in ("", digest):
                yield "other", digest, None
            if number >= wanted:
                yield "sample", sample, (state, number, digest) if marked else None


class PartsInTurn:
    """The samples of all parts: one of each worker after the other, whichever comes first.

    So their order follows from the number of workers alone; torch's own also follows from which
    worker ends first. torch's DataLoader runs the workers.

    Attributes:
        read: number of samples that were returned.
        first: digest of the stream's first sample, once that is read.
        marked: whether a position is worth keeping after the sample returned last.
    """

    def __init__(
        self, source: Any, num_workers: int, seed: int, saved: Mapping[str, Any] | None
    ) -> None:
        """Starts the workers, at the beginning or at a position that `plain` returned."""
        self._source, self._workers, self._seed = source, num_workers, seed
        at = saved or {"read": 0, "turn": 0, "workers": [()] * max(1, num_workers)}
        self.read, self._turn = int(at["read"]), int(at["turn"])
        self._parts = [StreamPart(*each) for each in at["workers"]]
        self.first, self.marked = "", False
        self._open()

    def _open(self) -> None:
        source = self._source
        if keeps_state(source) and not self._workers:
            # Workers have copies. An iteration that is left must not be where the next one begins.
            source = _copied(source)
        self._queues: list[deque[Item]] = [deque() for _ in self._parts]
        reader = PartReader(source, copy.deepcopy(self._parts))
        draw = torch.Generator().manual_seed(self._seed)  # torch's own is left alone
        options: dict[str, Any] = {"num_workers": self._workers, "collate_fn": _as_it_is}
        self._items = iter(
            torch_data.DataLoader(reader, batch_size=None, generator=draw, **options)
        )

    def plain(self) -> dict[str, Any]:
        """Returns the position as plain values."""
        workers = [list(astuple(part)) for part in self._parts]
        return {"read": self.read, "turn": self._turn, "workers": workers}

    def next(self) -> Any:
        """Returns the next sample; END after the last.

        Raises:
            DataError: the stream is shorter, or begins otherwise, than when a state was saved, or
                workers read the same samples.
        """
        while not all(part.ended for part in self._parts):
            part, queue = self._parts[self._turn], self._queues[self._turn]
            while not queue and not part.ended:
                worker, *item = next(self._items)
                self._queues[worker].append((item[0], item[1], item[2]))
            kind, found, mark = _ENDED if part.ended else queue.popleft()
            if kind == "other":
                self._meet_other(part, found)
                continue
            if kind == "short":
                refuse_short(found, part.at + part.since)
            part.ended = kind == "end"
            self._turn = (self._turn + 1) % len(self._parts)
            if kind == "sample":
                if mark is not None:
                    self._mark(part, *mark)
                self.marked = mark is not None or self.read % EVERY == 0
                part.since += 1
                self.read += 1
                return found
        return END

    def _mark(self, part: StreamPart, state: Any, at: int, digest: str) -> None:
        part.state, part.at, part.digest, part.since = state, at, digest, 0
        if at == 0 and self.read == 0:
            self.first = digest
        firsts = [part.digest for part in self._parts if part.at == 0 and part.digest]
        if at == 0 and len(firsts) == self._workers > 1 and len({*firsts}) == 1:
            raise DataError(
                f"num_workers={self._workers}: got the same first sample from every worker; "
                "expected each to read a part of the stream, as all samples come "
                f"{self._workers} times else; divide the dataset by "
                "torch.utils.data.get_worker_info(), or pass num_workers=1"
            )

    def _meet_other(self, part: StreamPart, digest: str) -> None:
        """Goes on though another sample follows a saved state than did, where it may."""
        if part.state is None:
            check_same(digest, part.digest, "when its state was saved")
            return
        LOG.warning(
            "loader: got another sample after load_state_dict of the dataset than came after its "
            "state_dict (a shuffle buffer of datasets is not in it); the stream is read from its "
            "beginning up to sample %d instead, so that none is lost or repeated", self.read,
        )  # fmt: skip
        for each in self._parts:
            each.state, each.at, each.digest, each.since = None, 0, "", each.at + each.since
        self._open()


def keeps_state(source: object) -> bool:
    """Returns whether a source can tell its position and go on from one."""
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")


def digest_of(sample: object) -> str:
    """Returns the lengths of a sample and a checksum of its values, as text."""
    given = sample if isinstance(sample, Mapping) else {type(sample).__name__: sample}
    checksum, lengths = hashlib.blake2b(digest_size=8), []
    for name, x in given.items():
        if isinstance(x, torch.Tensor):
            size: Any = tuple(x.shape)
            checksum.update(x.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            size = len(x) if hasattr(x, "__len__") else ""
            checksum.update(repr(x).encode())
        lengths.append(f"{name} {size}")
    return f"{', '.join(lengths)}|{checksum.hexdigest()}"


def check_same(got: str, expected: str, where: str) -> None:
    """Refuses a first sample of other lengths, and warns of one of other values.

    Raises:
        DataError: their lengths differ.
    """
    told = (
        f"dataset: got a stream whose first sample is {got}; expected {expected}, as {where}; "
        "give every rank, and each start, the whole stream in one order: no part by rank (rank 0 "
        "reads for all), and random numbers of a generator seeded by the epoch"
    )
    if got.partition("|")[0] != expected.partition("|")[0]:
        raise DataError(told)
    if got != expected:
        LOG.warning("%s", told)


def refuse_short(got: int, expected: int) -> NoReturn:
    """Refuses a stream that ends before the samples that were trained.

    Raises:
        DataError: always.
    """
    raise DataError(
        f"dataset: got a stream, or a worker's part of one, that ends after {got} samples; "
        f"expected at least {expected}, which were trained before; resume with the same data"
    )


def _copied(source: Any) -> Any:
    """Returns a source with attributes of its own, and the same data: that may be large."""
    if not hasattr(source, "__dict__"):
        return copy.copy(source)
    found = object.__new__(type(source))  # copy.copy of a datasets' one has the same __dict__
    for name, value in vars(source).items():  # what it wraps may keep the state
        value = dict(value) if type(value) is dict else value
        found.__dict__[name] = _copied(value) if keeps_state(value) else value
    return found


def _as_it_is(item: Any) -> Any:
    return item
