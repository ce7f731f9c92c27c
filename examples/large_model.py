"""A model that one rank's memory cannot hold: `python -m examples.large_model [--check]`.

A byte-level GPT is made on the meta device, compiled for 4 gloo ranks of a fixed memory, and only
then gets values, module by module: no rank ever has all of it. Parameters, gradients and Adam's
state take three times the memory of a rank, so every way to keep them whole is refused by the
planner. Real text of mixed lengths trains it; then the plain model, which may use all memory, goes
through the same steps.

`--check` does all this with a smaller model in float64, where both give the same losses but for the
last digits.

Ranks are forks of this process, one thread each, on this machine's cores.
"""

from __future__ import annotations

import argparse
import functools
import os
import sysconfig
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import dcpc
from dcpc.api import plan
from dcpc.errors import PlanError
from dcpc.runtime.data.steps import MicroBatch, Step
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.runtime.parameters.modes import shares
from examples.allocator import measured_peak_bytes
from examples.stdlib_source import IGNORE, PAD, StdlibSource
from models.gpt import GPT, GPTConfig

RANKS = 4
MB = 1e6
INPUTS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
TIMEOUT_S = 300.0
PLANNING = {"backend": "eager", "device": "cpu"}
ADAM = functools.partial(torch.optim.Adam, lr=1e-3, betas=(0.9, 0.95))
# Scalars, and numbers on which ranks agree: what a plan does not count.
SLACK_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class LargeModel:
    """What is trained, within how much memory.

    Attributes:
        model: sizes of the GPT.
        dtype: of parameters and activations.
        memory_bytes: of a rank.
        lengths: of the shape buckets.
        tokens_per_step: of a global batch.
        steps: of the optimizer.
        tolerance: largest relative difference of a loss from the plain model's.
    """

    model: GPTConfig
    dtype: torch.dtype
    memory_bytes: int
    lengths: tuple[int, ...]
    tokens_per_step: int
    steps: int
    tolerance: float

    @property
    def buckets(self) -> dcpc.Buckets:
        """The shapes; their batch is left to the planner."""
        return dcpc.Buckets(INPUTS, [{"seq": n} for n in self.lengths])

    def on_meta(self) -> GPT:
        """Returns the model without memory."""
        with torch.device("meta"):
            return GPT(self.model).to(self.dtype)

    def options(self, mode: str) -> dict[str, Any]:
        """Returns what `dcpc.compile` and `dcpc.api.plan` are called with."""
        return {**PLANNING, "memory": self.memory_bytes, "optimizer": ADAM, "parameters": mode}


FULL = LargeModel(
    GPTConfig(dim=512, n_layers=12, n_heads=8), torch.float32, 203_800_000, (32, 64, 128, 256),
    tokens_per_step=768, steps=6, tolerance=1e-4,
)  # fmt: skip
CHECK = LargeModel(
    GPTConfig(dim=256, n_layers=10, n_heads=4), torch.float64, 86_700_000, (16, 32, 64),
    tokens_per_step=256, steps=4, tolerance=1e-9,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LargeRank:
    """What one rank saw.

    Attributes:
        losses: of each step.
        samples: of each step, indices in the data.
        predicted_bytes: the most that the plan counts for a micro-batch that it ran.
        start_bytes: the most that it held while the model got its values.
        measured_bytes: the most that it held in a step.
        step_s: seconds of all steps.
        plans: a line for each bucket.
    """

    losses: tuple[float, ...]
    samples: tuple[tuple[int, ...], ...]
    predicted_bytes: int
    start_bytes: int
    measured_bytes: int
    step_s: float
    plans: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Trained:
    """What the example found.

    Attributes:
        whole_bytes: of parameters, gradients and Adam's state.
        memory_bytes: of a rank.
        refused: mode -> the planner's message, of those that do not fit.
        ranks: what each of them saw.
        losses: of the plain model.
        difference: the largest relative one of a loss.
    """

    whole_bytes: int
    memory_bytes: int
    refused: Mapping[str, str]
    ranks: Sequence[LargeRank]
    losses: Sequence[float]
    difference: float


def init(module: nn.Module) -> None:
    """Gives a module's own parameters values, whether the model is made so or shard by shard."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    elif isinstance(module, nn.RMSNorm):
        nn.init.ones_(module.weight)


# ------------------------------------------------------------------------------- on the ranks


def train(rank: int, setting: LargeModel, mode: str, data: StdlibSource) -> LargeRank:
    """Compiles, materialises and trains; measures all of it but compiling."""
    warnings.simplefilter("ignore")
    # The losses are compared below. Gradients to compare the graphs with would take more memory.
    compiled = dcpc.compile(
        setting.on_meta(), setting.buckets, verify="off", **setting.options(mode)
    )
    torch.manual_seed(0)
    start_bytes = measured_peak_bytes(lambda: dcpc.materialize(compiled, init))
    start_bytes += _mapped_bytes(compiled)
    optimizer = ADAM(compiled.parameters())
    loader = dcpc.DataLoader(  # "inter": few settings, each of which takes seconds to make
        data,
        compiled,
        tokens_per_step=setting.tokens_per_step,
        mode="inter",
        pad=PAD,
        weight="labels",
    )
    losses: list[float] = []
    samples: list[tuple[int, ...]] = []
    predicted, measured = 0, 0
    begin_s = time.perf_counter()
    for _, step in zip(range(setting.steps), loader, strict=False):
        before = _held_bytes(compiled, optimizer)
        peak = measured_peak_bytes(functools.partial(_step, compiled, optimizer, step, losses))
        measured = max(measured, before + peak)
        counted = [needed_bytes(compiled, mb) for mb in step.micro_batches]
        predicted = max([predicted, *counted])
        samples.append(tuple(i for mb in step.plan.micro_batches for i in mb.sample_ids))
    seconds = time.perf_counter() - begin_s
    plans = tuple(
        f"{bucket}: sp {p.sp}, micro-batch {p.micro_batch}, recompute {p.recompute}"
        for bucket, p in compiled.plans.items()
    )
    return LargeRank(
        tuple(losses), tuple(samples), predicted, start_bytes, measured, seconds, plans
    )


def _step(
    compiled: dcpc.CompiledModel, optimizer: torch.optim.Optimizer, step: Step, losses: list[float]
) -> None:
    losses.append(float(compiled.train_step(step).loss))
    optimizer.step()
    optimizer.zero_grad()


def needed_bytes(compiled: dcpc.CompiledModel, mb: MicroBatch) -> int:
    """Returns what the plan counts for a micro-batch, with all that stays."""
    setting = (mb.sp, mb.micro_batch, mb.menu_step)
    rows = compiled.planned.tables[mb.bucket]
    return next(r.needed_bytes for r in rows if (r.sp, r.micro_batch, r.menu_step) == setting)


def _mapped_bytes(compiled: dcpc.CompiledModel) -> int:
    """Returns a rank's share of what all ranks map: parameters and the sum of gradients."""
    if compiled.planned.request.parameters != "pull":
        return 0
    parameters = [*compiled.model.parameters()]
    return 2 * sum(p.nbytes for p in shares(parameters, dist.get_world_size()))


def _held_bytes(compiled: dcpc.CompiledModel, optimizer: torch.optim.Optimizer) -> int:
    """Returns what a rank holds between two steps: its share of parameters, the optimizer's."""
    held = [x for state in optimizer.state.values() for x in state.values()]
    mapped = _mapped_bytes(compiled)
    if not mapped:
        held += [*compiled.model.parameters(), *compiled.parameters()]
    own = (getattr(x, "to_local", lambda x=x: x)() for x in held if isinstance(x, Tensor))
    storages = {s.data_ptr(): s.nbytes() for s in (x.untyped_storage() for x in own)}
    return mapped + sum(storages.values())


# ---------------------------------------------------------------------------------- the story


def plain(setting: LargeModel, data: StdlibSource, samples: Sequence[Sequence[int]]) -> list[float]:
    """Returns the losses of the plain model with the same samples in each step, one by one."""
    torch.manual_seed(0)
    model = GPT(setting.model).to(setting.dtype)
    torch.manual_seed(0)
    model.apply(init)
    optimizer, losses = ADAM(model.parameters()), []
    for numbers in samples:
        every = [data[i] for i in numbers]
        counts = [int((x["labels"] != IGNORE).sum()) for x in every]
        loss = 0.0
        for x, count in zip(every, counts, strict=True):
            part = model(**{n: t[None] for n, t in x.items()}) * (count / sum(counts))
            part.backward()
            loss += float(part.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    return losses


def refused(console: Console, setting: LargeModel) -> dict[str, str]:
    """Shows that the model fits no rank that keeps parameters or gradients whole."""
    said = {}
    for mode in ("whole", "step"):
        try:
            plan(setting.on_meta(), setting.buckets, world=RANKS, **setting.options(mode))
        except PlanError as e:
            said[mode] = str(e)
            console.print(f"[bold red]parameters='{mode}'[/]: {e}", highlight=False)
        else:
            raise SystemExit(f"parameters='{mode}' fits; take less memory")
    return said


def report(
    console: Console,
    setting: LargeModel,
    data: StdlibSource,
    ranks: Sequence[LargeRank],
    expected: Sequence[float],
) -> None:
    """Shows the plan, losses and peaks."""
    for line in ranks[0].plans:
        console.print(line, highlight=False, markup=False)
    columns = ("step", "tokens of its samples", "loss", "plain model", "relative difference")
    table = Table(*columns, title="the same steps", title_justify="left")
    steps = zip(ranks[0].samples, ranks[0].losses, expected, strict=True)
    for number, (samples, loss, own) in enumerate(steps):
        table.add_row(
            str(number),
            " ".join(str(n) for n in sorted(data.dims(i)["seq"] for i in samples)),
            f"{loss:.6f}",
            f"{own:.6f}",
            f"{abs(loss / own - 1):.1e}",
        )
    console.print(table)
    columns = ("rank", "start MB", "predicted MB", "measured MB", "memory MB")
    title = "the most that a rank holds"
    table = Table(*columns, title=title, title_justify="left")
    for number, each in enumerate(ranks):
        sizes = (each.start_bytes, each.predicted_bytes, each.measured_bytes, setting.memory_bytes)
        table.add_row(str(number), *(f"{x / MB:.1f}" for x in sizes))
    console.print(table)
    console.print(
        "start: while the model gets its values; predicted and measured: in a step; the rank's\n"
        "share of what all ranks map included\n"
        f"{ranks[0].step_s / setting.steps:.1f} s a step, measuring included"
    )


def main(arguments: Sequence[str] | None = None) -> Trained:
    """Plans, trains on ranks, trains the plain model, compares."""
    parser = argparse.ArgumentParser(prog="python -m examples.large_model", description=__doc__)
    parser.add_argument("--check", action="store_true", help="a smaller model in float64")
    parser.add_argument("--parameters", default="pull", help="who holds them (pull)")
    options = parser.parse_args(arguments)
    setting = CHECK if options.check else FULL
    console = Console(width=None if Console().is_terminal else 120)
    warnings.simplefilter("ignore")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process whose autograd has GPUs cannot be forked
    torch.set_num_threads(1)
    data = StdlibSource(setting.lengths[-1], Path(sysconfig.get_path("stdlib")) / "asyncio")
    whole_bytes = 4 * sum(p.nbytes for p in setting.on_meta().parameters())
    console.print(
        f"[bold]GPT[/] of {whole_bytes / 4 / setting.dtype.itemsize:,.0f} parameters in "
        f"{str(setting.dtype).removeprefix('torch.')}: {whole_bytes / MB:,.0f} MB with gradients "
        f"and Adam's state; {RANKS} ranks of {setting.memory_bytes / MB:,.0f} MB, "
        f"{whole_bytes / setting.memory_bytes:.2f} times less",
        highlight=False,
    )
    too_large = refused(console, setting)
    ranks = run_ranks(
        train, RANKS, setting, options.parameters, data, timeout_s=TIMEOUT_S, fork=True
    )
    expected = plain(setting, data, ranks[0].samples)
    report(console, setting, data, ranks, expected)
    pairs = zip(ranks[0].losses, expected, strict=True)
    difference = max(abs(loss / own - 1) for loss, own in pairs)
    if difference > setting.tolerance:
        raise SystemExit(f"losses are {difference:.1e} off the plain model's")
    most = max(max(r.start_bytes, r.measured_bytes) for r in ranks)
    if most > setting.memory_bytes + SLACK_BYTES:
        raise SystemExit(f"a rank held {most / MB:.1f} MB of {setting.memory_bytes / MB:.1f}")
    return Trained(whole_bytes, setting.memory_bytes, too_large, ranks, expected, difference)


if __name__ == "__main__":
    main()
