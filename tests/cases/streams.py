"""Streams of samples that say which they are: the tokens of sample i are all i."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from dcpc.runtime.data.steps import Step

LENGTHS = [4, 2, 16, 7, 5, 1, 16, 12, 4, 4, 3, 7, 9, 6, 6, 7, 1, 2, 15, 8, 4, 3, 2]
PAD = {"input_ids": 0, "labels": -100}


def sample(i: int) -> dict[str, Tensor]:
    """Returns sample i, of a length that recurs."""
    ids = torch.full((LENGTHS[i % len(LENGTHS)],), i)
    return {"input_ids": ids, "labels": ids % 11}


def small(i: int) -> dict[str, Tensor]:
    """Returns sample i with ids below 11."""
    return {name: x % 11 for name, x in sample(i).items()}


Make = Callable[[int], dict[str, Tensor]]


def trained(steps: list[Step]) -> list[int]:
    """Returns the samples that a rank ran, in order."""
    every = [mb for step in steps for mb in step.micro_batches]
    rows = [row for mb in every for row in mb.inputs["input_ids"]]
    return [int(row[0]) for row in rows]


class ByNumber:
    """The same samples by number."""

    def __init__(self, count: int, make: Make = sample) -> None:
        self.count, self.make = count, make

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.make(i)


class Plain:
    """An iterable that knows nothing of workers."""

    def __init__(self, count: int, make: Make = sample) -> None:
        self.count, self.make = count, make

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from map(self.make, range(self.count))


class Divided(IterableDataset[dict[str, Tensor]]):
    """torch's: each worker yields every n-th sample; in epoch e they are `e * 1000` further."""

    def __init__(self, count: int, step: int = 0, make: Make = sample) -> None:
        self.count, self.step, self.make = count, step, make
        self.epoch, self.yielded = 0, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def numbers(self, start: int) -> Iterator[int]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for i in itertools.islice(range(worker, self.count, workers), start, None):
            self.yielded.append(i)
            yield i + self.epoch * self.step

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from map(self.make, self.numbers(0))


class Stateful(Divided):
    """With the state of torchdata's protocol, kept in the dataset itself."""

    at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for i in self.numbers(self.at):
            self.at += 1
            yield self.make(i)


class Vague(Stateful):
    """Its state goes on after some samples too many, as one with a shuffle buffer does."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at + 3 * (self.at > 0)}
