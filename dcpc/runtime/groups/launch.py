"""The default process group, from the environment that a launcher such as torchrun leaves."""

from __future__ import annotations

import atexit
import contextlib
import os
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from dcpc.errors import GroupError
from dcpc.runtime.groups.attempt import kept_by_torchrun, store_of_launcher

_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def local_device(device: torch.device | str | None) -> torch.device:
    """Returns where this rank computes: as asked, else its own CUDA device, else the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        local = os.environ.get("LOCAL_RANK")
        device = torch.device("cuda", int(local) if local else torch.cuda.current_device())
    return device


def take_device(device: torch.device) -> None:
    """Makes a rank's CUDA device the current one of its process: NCCL and kernels take that.

    Raises:
        GroupError: there is no such device.
    """
    if device.type != "cuda":
        return
    try:
        torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as e:
        raise GroupError(
            f"device {device} of this rank (LOCAL_RANK={os.environ.get('LOCAL_RANK', 'not set')}): "
            f"got {(str(e).splitlines() or ['no reason'])[0]}; expected one of "
            f"{torch.cuda.device_count()} CUDA devices; start as many ranks on a host as it has "
            "GPUs (torchrun --nproc-per-node), or pass device='cpu'"
        ) from e


def refuse_one_queue(device: torch.device) -> None:
    """Refuses a GPU with one queue of work: messages that wait for each other would stand in it.

    A rank's receive may wait for a send of another one that stands behind that one's own receive.

    Raises:
        GroupError: `CUDA_DEVICE_MAX_CONNECTIONS` says so.
    """
    if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise GroupError(
            "CUDA_DEVICE_MAX_CONNECTIONS: got 1; expected it to be unset, or 8 or more: ranks run "
            "messages of several process groups beside each other, and would wait for ever in one "
            "queue; unset it before Python starts (Megatron's scripts set it)"
        )


def launched(device: torch.device, timeout_s: float) -> bool:
    """Initialises the default group from a launcher's environment; False: there is none."""
    if int(os.environ.get("WORLD_SIZE") or 1) < 2:
        return False
    missing = [name for name in _LAUNCHER if name not in os.environ]
    if missing:
        warnings.warn(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, but not {', '.join(missing)}: "
            "this process runs alone; start it by torchrun, or call "
            "torch.distributed.init_process_group() first",
            stacklevel=5,
        )
        return False
    backend, bound = "gloo", None
    if device.type == "cuda":
        # Bound to it, new groups' communicators are split from that of all ranks.
        backend, bound = "cpu:gloo,cuda:nccl", device
    try:
        timeout = timedelta(seconds=timeout_s)
        if kept_by_torchrun():
            store, rank, world = store_of_launcher(timeout_s)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world, timeout=timeout,
                device_id=bound,
            )  # fmt: skip
        else:
            dist.init_process_group(backend, timeout=timeout, device_id=bound)
    except (RuntimeError, ValueError) as e:
        where = ", ".join(f"{name}={os.environ[name]}" for name in _LAUNCHER)
        raise GroupError(
            f"process group of the launcher's environment ({where}): got {e}; expected every rank "
            f"to call dcpc within {timeout_s:g} s; start all ranks by torchrun, or unset "
            "WORLD_SIZE to run alone"
        ) from e
    atexit.register(_leave)
    return True


def _leave() -> None:
    # A peer that died makes this fail, and the process is at its end anyway.
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
