"""Rows of results: what each check found, and what judged it.

A row is a dict with `check`, its name, and `status`:

    passed, failed   compared with what must hold; `failed` also where an error came
    measured         figures that nothing judges
    ran              with `--no-numbers`: it ran, and shapes, strides, dtypes and devices are right
    not run          `why` says what it needs
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Row = dict[str, Any]
NEEDS_A_CARD = "needs a card"


@dataclass(frozen=True, slots=True)
class Setting:
    """What the checks run on.

    Attributes:
        device: the CPU, or the first GPU.
        quick: whether fewer sizes are run.
        numbers: whether numbers are compared and measured; a stub of a GPU computes none, but its
            bytes are those of a GPU.
    """

    device: torch.device
    quick: bool
    numbers: bool

    @property
    def small(self) -> bool:
        """Whether models are tiny: where no GPU computes."""
        return self.device.type == "cpu" or not self.numbers

    @property
    def card(self) -> bool:
        """Whether a GPU computes."""
        return not self.small

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of models; on the CPU float32 alone, for the time it takes."""
        if self.device.type == "cpu":
            return (torch.float32,)
        return (torch.float32, torch.bfloat16)

    def choose_kernels(self) -> None:
        """Has this process run the kernels that are checked; ranks and steps each call it."""
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        if self.device.type == "cpu":
            torch.set_num_threads(1)
        else:
            torch.cuda.set_device(self.device)
        if not self.numbers:
            # No stub has cuDNN: convolutions and the plain model's attention take torch's own.
            torch.backends.cudnn.enabled = False
            torch.backends.cuda.enable_cudnn_sdp(False)
            if self.device.type == "cuda":
                # A stub's kernels write nothing: a tensor is what lies in its block, zeros in a
                # new one. One that is used again has other weights on each rank, which dcpc
                # refuses, and sequences of a row without an end.
                torch.cuda.caching_allocator_enable(False)

    def judged(self, check: str, ok: bool, *, of_bytes: bool = False, **figures: Any) -> Row:
        """Returns the row of a comparison; one of bytes is made without numbers, too."""
        if not self.numbers and not of_bytes:
            return {"check": check, "status": "ran"}
        return {"check": check, "status": "passed" if ok else "failed", **figures}

    def measured(self, check: str, **figures: Any) -> Row:
        """Returns the row of a measurement."""
        if not self.numbers:
            return {"check": check, "status": "ran"}
        return {"check": check, "status": "measured", **figures}


def not_run(check: str, why: str = NEEDS_A_CARD) -> Row:
    """Returns the row of what could not be run here."""
    return {"check": check, "status": "not run", "why": why}


def tried(check: str, call: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Yields a case's rows; an error becomes a row that failed, so that it hides no other case."""
    try:
        yield from call()
    except Exception as e:
        where = "".join(traceback.format_tb(e.__traceback__)[-3:])
        told = f"{type(e).__name__}: {str(e)[:600]}"
        yield {"check": check, "status": "failed", "error": told, "where": where[-1200:]}


def same_kind(got: Tensor, wanted: Tensor, what: str) -> None:
    """Asserts that two tensors are of one shape, stride, dtype and device.

    Strides of dims of one element do not matter.
    """
    kinds = [
        (
            tuple(x.shape), tuple(s for n, s in zip(x.shape, x.stride(), strict=True) if n > 1),
            x.dtype, x.device,
        )
        for x in (got, wanted)
    ]  # fmt: skip
    assert kinds[0] == kinds[1], f"{what}: got {kinds[0]}, expected {kinds[1]}"


def error(got: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """Returns the norm of a difference over that of what is wanted, or over a floor above it."""
    got, wanted = got.detach().double(), wanted.detach().double()
    scale = max(float(wanted.norm()), floor, 1e-30)
    return float((got - wanted).norm()) / scale
