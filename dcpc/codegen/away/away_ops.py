"""Torch ops by which a saved value leaves the device after forward's last use, and comes back.

    handle = dcpc::leave(v, store)        starts to copy v to the store
    handle = dcpc::gone(handle, v)        v may be freed after this: it waits for the copy
    ...
    x = dcpc::ask(handle, order, device)  new memory, which starts to be filled
    x = dcpc::arrive(x)                   waits until it is filled

A handle has no elements, and v's dims behind one of size 0. What it stands for is given back to the
store when the handle is gone, so a forward without a backward leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from dcpc.codegen.away.host_store import HeldSlot, store_of
from dcpc.errors import CodegenError

_LIBRARY = torch.library.Library("dcpc", "FRAGMENT")
_LIBRARY.define("leave(Tensor value, str store) -> Tensor")
_LIBRARY.define("gone(Tensor handle, Tensor value) -> Tensor")
_LIBRARY.define("ask(Tensor handle, int[] order, Device device) -> Tensor")
_LIBRARY.define("arrive(Tensor value) -> Tensor")

_forward_alone: ContextVar[bool] = ContextVar("dcpc_forward_alone", default=False)


@contextmanager
def forward_alone() -> Iterator[None]:
    """Lets nothing leave: no backward follows."""
    token = _forward_alone.set(True)
    try:
        yield
    finally:
        _forward_alone.reset(token)


@dataclass(slots=True)
class _Left:
    """The memory in the store of the value that a handle stands for, and its layout."""

    taken: HeldSlot
    strides: tuple[int, ...]


def leave(value: Tensor, store: str) -> Tensor:
    """Starts to copy a value, and returns its handle."""
    handle = _handle(value, store)
    if not _forward_alone.get() and value.numel():
        value = value.detach()
        if not _dense(value):
            value = value.contiguous()
        away = _Left(store_of(store).take(value.nbytes), value.stride())
        away.taken.last = away.taken.slot.write(_flat(value))
        handle.dcpc_away = away  # type: ignore[attr-defined]
    return handle


def gone(handle: Tensor, value: Tensor) -> Tensor:
    """Waits until the copy is made, and returns the handle."""
    del value
    away: _Left | None = getattr(handle, "dcpc_away", None)
    if away is not None:
        away.taken.last.wait()
    return handle


def ask(handle: Tensor, order: Sequence[int], device: torch.device) -> Tensor:
    """Returns memory for the value, which is being filled."""
    shape = handle.shape[1:]
    if not shape.numel():
        return _memory(handle, order, device)
    away: _Left | None = getattr(handle, "dcpc_away", None)
    if away is None:
        raise CodegenError(
            f"backward of a compiled loss: got a value of {tuple(shape)} that never left the "
            "device; expected one that forward sent away; run forward with gradients on"
        )
    found = torch.empty_strided(shape, away.strides, dtype=handle.dtype, device=device)
    # The slot is kept until the value is here.
    away.taken.last = away.taken.slot.read(_flat(found))
    found.dcpc_coming = away.taken.last, away.taken  # type: ignore[attr-defined]
    return found


def arrive(value: Tensor) -> Tensor:
    """Waits until a value is here, and returns it."""
    coming = getattr(value, "dcpc_coming", None)
    if coming is not None:
        coming[0].wait()
        del value.dcpc_coming  # type: ignore[attr-defined]
    return value


def _dense(value: Tensor) -> bool:
    """Whether a tensor's elements fill its memory, in some order of its dims."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _flat(value: Tensor) -> Tensor:
    """Returns the bytes of a dense tensor as they lie."""
    return value.as_strided((value.numel(),), (1,), value.storage_offset()).view(torch.uint8)


def _handle(value: Tensor, store: str) -> Tensor:
    del store
    return torch.empty((0, *value.shape), dtype=value.dtype, device="cpu")


def _memory(handle: Tensor, order: Sequence[int], device: torch.device) -> Tensor:
    shape = handle.shape[1:]
    made = torch.empty([shape[d] for d in order], dtype=handle.dtype, device=device)
    return made.permute([order.index(d) for d in range(len(order))])


for _name, _run, _fake in (
    ("leave", leave, _handle),
    ("gone", gone, lambda handle, value: torch.empty_like(handle)),
    ("ask", ask, _memory),
    ("arrive", arrive, lambda value: torch.empty_like(value)),
):
    _LIBRARY.impl(_name, _run, "CPU")
    _LIBRARY.impl(_name, _run, "CUDA")
    torch.library.register_fake(f"dcpc::{_name}", _fake, lib=_LIBRARY)

LEAVE, GONE = torch.ops.dcpc.leave.default, torch.ops.dcpc.gone.default
ASK, ARRIVE = torch.ops.dcpc.ask.default, torch.ops.dcpc.arrive.default
