"""The walk of a user's model through `dcpc.compile`: the modules that it enters, and its climbs.

A room is a module of dcpc with a function that takes the model. A climb is a call that hands it
from a folder to one above, against the order of the phases.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import dcpc

ROOT = Path(dcpc.__file__).parent
# Folders from the ground up, as in dcpc/README.md.
LAYERS = {
    "errors.py": 0, "buckets": 1, "ir": 2, "ops": 2, "fx": 2, "trace": 3, "symbolic_profile": 3,
    "passes": 4, "codegen": 4, "runtime": 4, "plan": 5, "verify": 6, "compiled": 7, "api": 8,
}  # fmt: skip


class Regression(nn.Module):
    """A model of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the loss of `x: float32[batch, seq, 4]`."""
        return self.layer(x).square().mean()


@cache
def _room(file: str) -> tuple[str, ...]:
    """Returns the path of a module below dcpc/; (): it is elsewhere."""
    path = Path(file)
    return path.relative_to(ROOT).parts if path.is_relative_to(ROOT) else ()


def _caller(frame: FrameType | None) -> tuple[str, ...]:
    """Returns the room of the nearest frame of dcpc's."""
    while frame is not None:
        if found := _room(frame.f_code.co_filename):
            return found
        frame = frame.f_back
    return ()


def walk() -> tuple[set[str], set[tuple[str, str]]]:
    """Returns the rooms of a model in `dcpc.compile`, and the climbs: from a room, to a room."""
    model = Regression()
    buckets = dcpc.Buckets({"x": "float32[batch, seq, 4]"}, [{"seq": 4}, {"seq": 8}])
    rooms: set[str] = set()
    climbs: set[tuple[str, str]] = set()

    def seen(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not (room := _room(code.co_filename)):
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if not any(frame.f_locals.get(name) is model for name in names):
            return
        rooms.add("/".join(room))
        caller = _caller(frame.f_back)
        if caller and LAYERS.get(caller[0], 0) < LAYERS.get(room[0], 0):
            climbs.add(("/".join(caller), "/".join(room)))

    sys.setprofile(seen)
    try:
        dcpc.compile(model, buckets, memory=1e9, backend="eager")
    finally:
        sys.setprofile(None)
    return rooms, climbs


if __name__ == "__main__":
    every, upwards = walk()
    print(len(every), *sorted(every), sep="\n")
    print(len(upwards), *sorted(upwards), sep="\n")
