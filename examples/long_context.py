"""A sequence that one rank's memory cannot hold: `python -m examples.long_context [--quick]`.

A small GPT of 6 heads is trained on bytes of the interpreter's standard library, one long sequence
a step, on 4 gloo ranks of a fixed memory. One rank cannot hold it, nor can two, whatever backward
makes again: the plan says how many bytes are missing. Four can; 6 heads do not go round among
them, so attention is split in another way, and the table shows what each would take.

Ranks are forks of this process, one thread each, on this machine's cores.
"""

from __future__ import annotations

import argparse
import os
import sysconfig
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import dcpc
from dcpc.api import plan
from dcpc.commands.check import SplitModel
from dcpc.errors import PlanError
from dcpc.passes.sharding.attention_ways import LOWERINGS, attentions, lowering_of
from dcpc.plan.notes.attention_note import attention_lines
from dcpc.plan.planning import Planned
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.symbolic_profile import evaluator
from examples.allocator import measured_peak_bytes
from examples.stdlib_source import segments
from models.gpt import GPT, GPTConfig

RANKS = 4
MB = 1e6
INPUTS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
TIMEOUT_S = 900.0
PLANNING = {"backend": "eager", "device": "cpu"}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained, within how much memory.

    Attributes:
        model: sizes of the GPT.
        length: of a sequence, bytes of text.
        memory_bytes: of a rank; too little for one and for two.
        steps: of the optimizer, a sequence each.
        checked: length at which loss and gradients are compared with the plain model's.
    """

    model: GPTConfig
    length: int
    memory_bytes: int
    steps: int
    checked: int

    @property
    def buckets(self) -> dcpc.Buckets:
        """The one shape."""
        return dcpc.Buckets(INPUTS, [{"seq": self.length, "batch": 1}])

    def make_model(self) -> GPT:
        """Returns the model, the same weights on every rank."""
        torch.manual_seed(0)
        return GPT(self.model)


FULL = Setting(GPTConfig(dim=192, n_layers=2, n_heads=6), 16_384, 150_000_000, 5, 509)
QUICK = Setting(GPTConfig(dim=192, n_layers=1, n_heads=6), 4_096, 40_000_000, 3, 251)


@dataclass(frozen=True, slots=True)
class Trained:
    """What one rank saw.

    Attributes:
        losses: of each step.
        seconds_s: of each step.
        predicted_bytes: peak of activations and gradients.
        measured_bytes: the same, by the allocator's events.
    """

    losses: tuple[float, ...]
    seconds_s: tuple[float, ...]
    predicted_bytes: int
    measured_bytes: int

    @property
    def error(self) -> float:
        """Of the predicted peak, relative to the measured."""
        return self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True, slots=True)
class Shown:
    """What the example found.

    Attributes:
        refused: number of ranks that cannot hold the sequence -> the planner's message.
        attention: how the ranks that can hold it split attention.
        error: the largest of loss and gradients against the plain model's, in float64.
        first_loss: the plain model's.
        ranks: what each of them saw.
    """

    refused: Mapping[int, str]
    attention: str
    error: float
    first_loss: float
    ranks: Sequence[Trained]


def text(length: int, count: int) -> list[dict[str, Tensor]]:
    """Returns sequences of the standard library's source, end to end, and the byte that follows."""
    root = Path(sysconfig.get_path("stdlib"))
    found = b"\n".join(segments(root / "asyncio") + segments(root / "email"))
    need = count * length + 1
    found = (found * (need // len(found) + 1))[:need]
    ids = torch.frombuffer(bytearray(found), dtype=torch.uint8).long()
    starts = range(0, count * length, length)
    return [
        {"input_ids": ids[None, i : i + length], "labels": ids[None, i + 1 : i + length + 1]}
        for i in starts
    ]


def planned(
    setting: Setting, world: int, attention: str = "auto", sp: int | str = "auto"
) -> Planned:
    """Returns the plan for so many ranks."""
    return plan(
        setting.make_model(),
        setting.buckets,
        world=world,
        memory=setting.memory_bytes,
        attention=attention,
        sp=sp,
        **PLANNING,
    )


def ways(found: Planned) -> str:
    """Returns how the attentions of a plan are split, in words."""
    (bucket,) = found.plans
    nodes = found.placement(bucket).nodes
    chosen = [nodes[n.name] for n in attentions(found.program)]
    names = [
        f"hybrid {c.across} x {RANKS // c.across}" if c.across > 1 else lowering_of(c)
        for c in chosen
    ]
    return ", ".join(dict.fromkeys(names))


def side_by_side(setting: Setting, auto: Planned) -> Table:
    """Returns what each way to split attention would take on all ranks, within the memory."""
    table = _table(
        f"attention on {RANKS} ranks of {setting.memory_bytes / MB:,.0f} MB, as predicted",
        ("asked for", "split by", "seconds", "peak MB", "recompute", "in all MB"),
        words=2,
    )
    for asked in ("auto", *LOWERINGS):
        try:
            found = auto if asked == "auto" else planned(setting, RANKS, asked, sp=RANKS)
        except PlanError as e:
            short = str(e).partition("; a rank has ")[2].partition(", ")[2].partition(";")[0]
            table.add_row(asked, "does not fit", "-", "-", "-", short)
            continue
        (p,) = found.plans.values()
        needed = next(
            r.needed_bytes
            for rows in found.tables.values()
            for r in rows
            if (r.sp, r.micro_batch, r.menu_step) == (p.sp, p.micro_batch, p.menu_step)
        )
        table.add_row(
            asked,
            ways(found),
            f"{p.seconds_s:.2f}",
            f"{p.peak_bytes / MB:.1f}",
            f"{p.menu_step} of {p.steps}",
            f"{needed / MB:.1f}",
        )
    return table


# ------------------------------------------------------------------------------- on the ranks


def train(rank: int, setting: Setting, data: Sequence[Mapping[str, Tensor]]) -> Trained:
    """Compiles, trains a step a sequence, and measures the peak of one more."""
    warnings.simplefilter("ignore")
    model = setting.make_model()
    compiled = dcpc.compile(model, setting.buckets, memory=setting.memory_bytes, **PLANNING)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, betas=(0.9, 0.95))
    losses, seconds = [], []
    for batch in data:
        begin_s = time.perf_counter()
        loss = compiled(**batch)
        loss.backward()
        compiled.reduce_gradients()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # the gradients stay, as the plan counts them
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - begin_s)
    del loss
    (bucket,) = compiled.planned.plans
    p, study = compiled.planned.plans[bucket], compiled.planned.study(bucket)
    sizes = study.local_sizes({"seq": setting.length, "batch": 1}, rank)
    at = evaluator(study.profile(p.menu_step))
    measured = measured_peak_bytes(lambda: compiled(**data[0]).backward())
    return Trained(tuple(losses), tuple(seconds), int(at.peak_bytes(sizes)), measured)


def differences(rank: int, split: SplitModel, batch: Mapping[str, Tensor]) -> float:
    """Returns the largest relative error of loss and gradients against the plain model's."""
    warnings.simplefilter("ignore")
    sizes = {"batch": 1, "seq": batch["input_ids"].shape[1]}
    return max(split.difference(sizes, batch, recompute).worst for recompute in ("none", "all"))


def checked(setting: Setting, attention: str) -> float:
    """Returns the worst error in float64 over all ranks, at a length they do not divide."""
    sizes = {"batch": 1, "seq": setting.checked}
    buckets = dcpc.Buckets(INPUTS, [sizes])
    split = SplitModel(setting.make_model().double(), buckets, sizes, "eager", RANKS, attention)
    for recompute in ("none", "all"):
        split.ready(sizes, recompute)
    (batch,) = text(setting.checked, 1)
    return max(run_ranks(differences, RANKS, split, batch, timeout_s=TIMEOUT_S, fork=True))


# ---------------------------------------------------------------------------------- the story


def _table(title: str, columns: Sequence[str], words: int = 1) -> Table:
    """Returns an empty table, the first columns for words and the others for numbers."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < words else "right")
    return table


def refused(console: Console, setting: Setting) -> dict[int, str]:
    """Shows that one rank cannot hold the sequence, nor can two; returns what the planner says."""
    said = {}
    for world in (1, RANKS // 2):
        try:
            found = planned(setting, world)
        except PlanError as e:
            said[world] = str(e)
            console.print(f"[bold red]{world} rank{'s' * (world > 1)}[/]: {e}", highlight=False)
        else:
            raise SystemExit(f"{world} ranks can hold it: {found.plans}; take less memory")
    return said


def report(console: Console, setting: Setting, found: Sequence[Trained], first: float) -> None:
    """Shows losses and peaks."""
    losses = found[0].losses
    console.print(
        f"[bold]trained[/] {len(losses)} steps: loss "
        + " ".join(f"{loss:.4f}" for loss in losses)
        + f"; {min(found[0].seconds_s):.2f} s a step; plain model's first loss {first:.4f}, "
        f"{abs(losses[0] / first - 1):.1e} off",
        highlight=False,
    )
    columns = ("rank", "predicted MB", "measured MB", "error %")
    table = _table("peak of activations and gradients", columns)
    for rank, each in enumerate(found):
        sizes = (each.predicted_bytes / MB, each.measured_bytes / MB, 100 * each.error)
        table.add_row(str(rank), *(f"{x:.3f}" for x in sizes))
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> Shown:
    """Plans, checks, trains."""
    parser = argparse.ArgumentParser(prog="python -m examples.long_context", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a shorter sequence, in under a minute"
    )
    setting = QUICK if parser.parse_args(arguments).quick else FULL
    console = Console(width=None if Console().is_terminal else 120)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a process whose autograd has GPUs cannot be forked
    data = text(setting.length, setting.steps)
    console.print(
        f"[bold]a sequence[/] of {setting.length:,} bytes; GPT of {setting.model.n_heads} heads, "
        f"{setting.model.n_layers} deep; ranks of {setting.memory_bytes / MB:,.0f} MB"
    )
    too_few = refused(console, setting)
    auto = planned(setting, RANKS)
    (chosen,) = auto.plans.values()
    console.print(
        f"[bold green]{RANKS} ranks[/]: sp {chosen.sp}, recompute {chosen.menu_step} of "
        f"{chosen.steps}, attention by {ways(auto)}: {chosen.reason}",
        highlight=False,
    )
    for line in attention_lines(auto.by_bucket, auto.plans):
        console.print(line, highlight=False, markup=False)
    console.print(side_by_side(setting, auto))
    attention = ways(auto).split()[0]
    error = checked(setting, attention)
    console.print(
        f"[bold]float64[/], {setting.checked} bytes on {RANKS} ranks by {attention}: loss and "
        f"gradients {error:.1e} from the plain model's",
        highlight=False,
    )
    found = run_ranks(train, RANKS, setting, data, timeout_s=TIMEOUT_S, fork=True)
    with torch.no_grad():  # one rank could not differentiate it, but it can run it
        first = float(setting.make_model()(**data[0]))
    report(console, setting, found, first)
    if not (error < 1e-10 and abs(found[0].losses[0] / first - 1) < 1e-5):
        raise SystemExit("the numbers are not the plain model's")
    return Shown(too_few, attention, error, first, found)


if __name__ == "__main__":
    main()
