"""What a process holds after many compiles: threads, and open files, on two ranks over gloo."""

from __future__ import annotations

import gc
import os
import warnings

import torch
from torch import Tensor, nn

import dcpc
from dcpc.commands.check.split import SPLITTING
from dcpc.runtime.groups.local_ranks import run_ranks

FIRST, LAST = 2, 20  # compiles after which a rank counts


class Bent(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        """Makes the layer."""
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the loss."""
        return self.linear(x).tanh().square().mean()


def held(rank: int, compiles: int) -> list[tuple[int, int]]:
    """Returns threads and open files of a rank after each of so many compiles."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    buckets = dcpc.Buckets({"x": "float32[batch, seq, 4]"}, [{"seq": 6}])
    found = []
    for _ in range(compiles):
        compiled = dcpc.compile(Bent(), buckets, backend="eager", sp=2, device=SPLITTING)
        compiled(x=torch.ones(1, 6, 4)).backward()
        compiled.reduce_gradients()
        del compiled
        gc.collect()
        found.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return found


def leak_figures() -> dict[str, int]:
    """Returns the figures: of the rank that holds most."""
    ranks = run_ranks(held, 2, LAST, timeout_s=600.0)
    figures: dict[str, int] = {}
    for which, name in enumerate(("threads", "descriptors")):
        for count in (FIRST, LAST):
            most = max(found[count - 1][which] for found in ranks)
            figures[f"{name}_after_{count}_compiles"] = most
    return figures
