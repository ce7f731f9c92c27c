"""A model 8 times larger than the memory it trains in: `python -m examples.one_small_card`.

A byte-level GPT on one rank: its parameters, gradients and Adam's state take 8 times what the rank
may use, so they lie in the host's memory, and graphs fetch them one block after the other. Of a
step's micro-batches the short ones leave room: blocks stay there from one to the next.

There is no card in this: the device is what malloc gets, which RLIMIT_DATA caps once graphs are
compiled; the host's memory is a shared mapping, which it does not. Real text trains the model, and
the plain model, uncapped, goes through the same steps.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import resource
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import dcpc
from dcpc.codegen import fetched
from examples.allocator import measured_peak_bytes
from examples.large_model import ADAM, MB, LargeModel, init, needed_bytes, plain
from examples.stdlib_source import PAD, StdlibSource
from models.gpt import GPTConfig

HOST_BYTES = 1_200_000_000
# What a process gets besides tensors while it trains: stacks of threads, graphs, Python's objects.
BESIDE_BYTES = 40_000_000
FREE = 2  # first steps without the cap: graphs are compiled, which takes more than a rank has
FULL = LargeModel(
    GPTConfig(dim=512, n_layers=16, n_heads=8), torch.float32, 100_000_000, (64, 256, 512),
    tokens_per_step=768, steps=4, tolerance=1e-4,
)  # fmt: skip
CHECK = replace(
    FULL, model=GPTConfig(dim=128, n_layers=12, n_heads=4), memory_bytes=9_600_000,
    dtype=torch.float64, lengths=(32, 128), tokens_per_step=256, steps=4, tolerance=1e-9,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SmallCard:
    """What training within a cap found.

    Attributes:
        losses: of each step.
        samples: of each step, indices in the data.
        predicted_bytes: the most that plans count for a micro-batch that ran.
        measured_bytes: the most that steps took.
        copied_bytes: parameters copied to the device.
        read_bytes: parameters that graphs read.
    """

    losses: tuple[float, ...]
    samples: tuple[tuple[int, ...], ...]
    predicted_bytes: int
    measured_bytes: int
    copied_bytes: int
    read_bytes: int


@contextmanager
def at_most(more_bytes: int) -> Iterator[None]:
    """Lets this process get so many bytes more by malloc; shared mappings do not count."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    own = int(status.partition("VmData:")[2].split()[0]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (own + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def train(
    setting: LargeModel, data: StdlibSource, host_bytes: int = HOST_BYTES, free: int = FREE
) -> SmallCard:
    """Trains with parameters in the host's memory, after some free steps under the cap."""
    compiled = dcpc.compile(
        setting.on_meta(), setting.buckets, host=host_bytes, away="parameters", verify="off",
        **setting.options("rounds"),
    )  # fmt: skip
    torch.manual_seed(0)
    dcpc.materialize(compiled, init)
    optimizer = ADAM(compiled.parameters())
    loader = dcpc.DataLoader(
        data, compiled, tokens_per_step=setting.tokens_per_step, pad=PAD, weight="labels",
        lookahead=0,
    )  # fmt: skip
    losses: list[float] = []
    samples = []
    measured = predicted = 0

    def one(step: dcpc.Step) -> None:
        losses.append(float(compiled.train_step(step).loss))
        optimizer.step()
        optimizer.zero_grad()

    copied, read = fetched.copied_bytes, fetched.read_bytes
    for number, step in enumerate(islice(loader, setting.steps)):
        capped = at_most(setting.memory_bytes + BESIDE_BYTES) if number >= free else nullcontext()
        with capped:
            measured = max(measured, measured_peak_bytes(functools.partial(one, step)))
        samples.append(tuple(i for mb in step.plan.micro_batches for i in mb.sample_ids))
        needed = [needed_bytes(compiled, mb) for mb in step.micro_batches]
        predicted = max([predicted, *needed])
    return SmallCard(
        tuple(losses), tuple(samples), predicted, measured, fetched.copied_bytes - copied,
        fetched.read_bytes - read,
    )  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> SmallCard:
    """Trains within the cap, then the plain model without one, and compares."""
    parser = argparse.ArgumentParser(prog="python -m examples.one_small_card", description=__doc__)
    parser.add_argument("--check", action="store_true", help="a smaller model in float64")
    setting = CHECK if parser.parse_args(arguments).check else FULL
    console = Console(width=None if Console().is_terminal else 120)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data = StdlibSource(setting.lengths[-1], limit=400)
    whole_bytes = 4 * sum(p.nbytes for p in setting.on_meta().parameters())
    found = train(setting, data)
    expected = plain(setting, data, found.samples)
    columns = ("step", "samples", "longest", "loss", "uncapped", "relative difference")
    table = Table(*columns, title="the same steps", title_justify="left")
    for number, (ids, loss, own) in enumerate(
        zip(found.samples, found.losses, expected, strict=True)
    ):
        longest = max(data.dims(i)["seq"] for i in ids)
        numbers = (f"{loss:.6f}", f"{own:.6f}", f"{abs(loss / own - 1):.1e}")
        table.add_row(str(number), str(len(ids)), str(longest), *numbers)
    console.print(
        f"{whole_bytes / MB:,.0f} MB of parameters, gradients and Adam's state, "
        f"{whole_bytes / setting.memory_bytes:.1f} times the {setting.memory_bytes / MB:,.0f} MB "
        f"of the rank; micro-batches need up to {found.predicted_bytes / MB:.1f} MB by the plan, "
        f"steps took {found.measured_bytes / MB:.1f} MB with the blocks that stayed\n"
        f"{found.copied_bytes / MB:,.0f} MB of parameters were copied, of "
        f"{found.read_bytes / MB:,.0f} MB that graphs read",
        highlight=False,
    )
    console.print(table)
    off = max(abs(a / b - 1) for a, b in zip(found.losses, expected, strict=True))
    if off > setting.tolerance:
        raise SystemExit(f"losses are {off:.1e} off the plain model's")
    if found.measured_bytes > setting.memory_bytes:
        raise SystemExit(f"steps took {found.measured_bytes / MB:.1f} MB")
    return found


if __name__ == "__main__":
    main()
