"""Run with the stub: a step of the checks reads zeros, and ends while torch's autograd works.

Zeros are what a kernel writes there: no bytes of what was in a block before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import torch

from benchmarks.gpu_checks import __main__ as command
from benchmarks.gpu_checks.rows import Row, Setting
from benchmarks.gpu_checks.runner import CheckStep

BEGUN = threading.Event()


class Slow(torch.autograd.Function):
    """A backward that takes longer than Python does to end."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        BEGUN.set()
        time.sleep(3)
        return grad


def rows(setting: Setting) -> Iterator[Row]:
    """Yields a row once the backward has begun."""
    torch.ones(1000).to(setting.device)
    assert not torch.empty(1000, device=setting.device).cpu().any(), "a block is used again"
    x = torch.zeros(1, device=setting.device, requires_grad=True)
    threading.Thread(target=Slow.apply(x).backward, daemon=True).start()
    BEGUN.wait()
    yield setting.measured("ending")


if __name__ == "__main__":
    command.STEPS = (CheckStep("ending", "ends early", rows, 60),)
    command.main()
