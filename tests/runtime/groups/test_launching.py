"""A rank's GPU: which one it takes, and what it refuses; `torch.cuda` is a recorder here."""

import pytest
import torch
import torch.distributed as dist

from dcpc.errors import GroupError
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.launch import launched, refuse_one_queue

CUDA = torch.device("cuda", 1)


@pytest.fixture
def gpus(monkeypatch):
    """Two GPUs; holds those that were made the current one."""
    taken: list[torch.device] = []

    def set_device(device: torch.device) -> None:
        if device.index >= 2:
            raise RuntimeError("CUDA error: invalid device ordinal")
        taken.append(device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return taken


def test_a_ranks_own_gpu_becomes_the_current_one(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert Groups.default().device == CUDA
    assert gpus == [CUDA]


def test_a_gpu_that_is_not_there_is_refused(gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(GroupError, match=r"cuda:2 of this rank \(LOCAL_RANK=2\).*one of 2 CUDA"):
        Groups.default()


def test_the_default_group_is_bound_to_the_ranks_gpu(gpus, monkeypatch):
    told = {}
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "x"),
                        ("MASTER_PORT", "1"), ("LOCAL_RANK", "1")):  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **o: told.update({backend: o}))
    monkeypatch.setattr("atexit.register", lambda call: call)
    assert launched(CUDA, 5.0)
    assert launched(torch.device("cpu"), 5.0)
    assert {b: o["device_id"] for b, o in told.items()} == {
        "cpu:gloo,cuda:nccl": CUDA, "gloo": None,
    }  # fmt: skip


def test_one_queue_of_work_is_refused_on_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    refuse_one_queue(torch.device("cpu"))
    with pytest.raises(GroupError, match="CUDA_DEVICE_MAX_CONNECTIONS: got 1; expected it to be"):
        refuse_one_queue(CUDA)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    refuse_one_queue(CUDA)
