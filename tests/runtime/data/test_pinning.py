"""Inputs of a step for a GPU: pinned in the loader's thread; `torch.cuda` is a recorder here."""

import threading
from contextlib import nullcontext

import pytest
import torch

from dcpc.errors import DataError
from dcpc.runtime.data.loader import DataLoader
from dcpc.runtime.data.steps import MicroBatch, pinned
from dcpc.runtime.groups.groups import Groups
from tests.cases.fakes import Ragged, compiled_for

GPU = torch.device("cuda", 1)
PAD = {"input_ids": 0, "labels": -100}


class Pins:
    """What was pinned: by which thread, with which GPU as its current one."""

    def __init__(self) -> None:
        self.made: dict[int, torch.Tensor] = {}
        self.threads: set[str] = set()
        self.devices: list[torch.device] = []

    def pin(self, x: torch.Tensor) -> torch.Tensor:
        self.threads.add(threading.current_thread().name)
        made = x.clone()
        self.made[id(made)] = made
        return made

    def device(self, device: torch.device) -> nullcontext[None]:
        self.devices.append(device)
        return nullcontext()


@pytest.fixture
def pins(monkeypatch):
    found = Pins()
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: found.pin(x))
    monkeypatch.setattr(torch.cuda, "device", found.device)
    return found


def micro_batches(device: torch.device) -> list[MicroBatch]:
    compiled = compiled_for(Groups(device=device), {4: (1, 2), 7: (1, 1)})
    loader = DataLoader(Ragged([4, 3, 7, 2]), compiled, tokens_per_step=11, pad=PAD)
    return [mb for step in loader for mb in step.micro_batches]


def test_inputs_for_a_gpu_are_pinned_in_the_loaders_thread(pins):
    found = micro_batches(GPU)
    assert {id(x) for mb in found for x in mb.inputs.values()} == {*pins.made}
    assert pins.threads == {"dcpc-loader"}
    # A thread's own GPU is number 0 at first, whose memory is another rank's.
    assert pins.devices == [GPU] * len(found)


def test_inputs_for_the_cpu_are_not_pinned(pins):
    assert micro_batches(torch.device("cpu"))
    assert not pins.made


def test_they_have_the_same_values(pins):
    for a, b in zip(micro_batches(GPU), micro_batches(torch.device("cpu")), strict=True):
        assert all(torch.equal(a.inputs[name], x) for name, x in b.inputs.items())


def test_memory_that_cannot_be_pinned_is_an_error(pins, monkeypatch):
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", fails)
    with pytest.raises(DataError, match="CUDA error: out of memory for 24 bytes of pinned memory"):
        pinned({"x": torch.zeros(3, dtype=torch.int64)}, GPU)


def test_copies_wait_for_nobody(monkeypatch):
    told = []

    def to(x: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        told.append((device, non_blocking))
        return x

    (mb, *_) = micro_batches(torch.device("cpu"))
    monkeypatch.setattr(torch.Tensor, "to", to)
    assert mb.inputs_on(GPU).keys() == mb.inputs.keys()
    assert told == [(GPU, True)] * 2
