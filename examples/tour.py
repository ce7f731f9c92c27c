"""The tour: `python -m examples.tour [--world 2] [--seconds 120]`, in three minutes.

The lengths of a corpus, the report of a model, a planned step as a picture, a race of the same
samples against DistributedDataParallel whose batches are grouped by length, and a step in float64
beside the plain model.
"""

from __future__ import annotations

import argparse
import copy
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

import dcpc
from dcpc.commands.report.what_if import what_if, what_if_text
from dcpc.commands.simulate.timeline import of_step
from dcpc.runtime.data.steps import Step
from examples.baselines import Dcpc, GroupedDdp, PlainDdp
from examples.job import MB, Compared, Job
from examples.launch import launch
from examples.race import replica
from examples.stdlib_source import IGNORE, StdlibSource
from examples.workload import DEMO, INPUTS, Workload

# On one rank the longest sample fits without recompute, for dcpc and for the others.
TOUR = replace(DEMO, longest=4096, memory_bytes=180_000_000, count=6)
WIDTH = 72  # characters of a step
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class Seen:
    """What the tour found: the text of its parts, the race, and the largest relative difference."""

    lengths: str
    report: str
    picture: str
    compared: Sequence[Compared]
    difference: float


def lengths_picture(lengths: Sequence[int]) -> str:
    """Returns a line for each octave of lengths: its share of the samples, and of the tokens."""
    lines, total = [], sum(lengths)
    for power in range(max(lengths).bit_length()):
        own = [n for n in lengths if n.bit_length() == power + 1]
        if own:
            share, tokens = len(own) / len(lengths), sum(own) / total
            bars = "".join(f"  {s:6.1%} {'#' * round(40 * s):<24}" for s in (share, tokens))
            lines.append(f"{2**power:>5} to {2 ** (power + 1) - 1:>5}{bars}".rstrip())
    return "\n".join([f"{'bytes':>14}  {'samples':<33}tokens", *lines])


def step_picture(step: Step) -> str:
    """Returns a step as a line for each rank along the predicted time, and what its letters are."""
    line = of_step(step.plan)
    rows = [["."] * WIDTH for _ in range(line.world)]
    names = []
    for letter, span in zip(LETTERS, line.spans, strict=False):
        at = slice(*(round(WIDTH * t / line.end_s) for t in (span.begin_s, span.end_s)))
        for rank in range(span.first_rank, span.first_rank + span.ranks):
            rows[rank][at] = letter * (at.stop - at.start)
        names.append(f"{letter}: {span.name.partition(' recompute')[0]}")
    lines = [f"rank {rank} |{''.join(row)}|" for rank, row in enumerate(rows)]
    pairs = zip(names[::2], [*names[1::2], ""], strict=False)
    return "\n".join([*lines, *(f"  {a:<38}{b}".rstrip() for a, b in pairs)])


def difference(workload: Workload, dataset: StdlibSource) -> float:
    """Returns how far a float64 step over the ranks is from the plain model on one, relative."""
    small = replace(workload, model=replace(workload.model, n_layers=1), count=2, longest=1024)
    model = small.make_model().double()
    plain = copy.deepcopy(model)
    buckets = dcpc.Buckets(INPUTS, [{"seq": 512}, {"seq": 1024}])
    compiled = dcpc.compile(model, buckets, backend="eager", sp=dist.get_world_size())
    loader = replace(small, tokens_per_step=2048).loader(dataset, compiled, on_too_long="skip")
    step = next(iter(loader))
    loss = compiled.train_step(step).loss
    ids = sorted(i for mb in step.plan.micro_batches for i in mb.sample_ids)
    batches = [{k: x[None] for k, x in dataset[i].items()} for i in ids]
    counts = [int((b["labels"] != IGNORE).sum()) for b in batches]
    alone = sum(plain(**b) * (n / sum(counts)) for b, n in zip(batches, counts, strict=True))
    alone.backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    gradients = [float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs]
    return max(float((loss - alone).abs() / alone.abs()), *gradients)


def run(workload: Workload, limit_s: float) -> Seen:
    """One rank's part."""
    warnings.simplefilter("ignore")
    job = Job(limit_s, Path("out"), workload.memory_bytes, trained=0.35, compared=0.8)
    dataset = StdlibSource(workload.longest)
    lengths = lengths_picture([dataset.dims(i)["seq"] for i in range(len(dataset))])
    job.say(f"[bold]1. The corpus[/]: {len(dataset):,} functions and classes of Python's library")
    job.say(lengths, markup=False, highlight=False)
    model = workload.make_model()
    compiled = workload.compile(model, dataset)
    report = compiled.report()
    job.say(
        f"\n[bold]2. The report[/]: a GPT of {sum(p.numel() for p in model.parameters()):,} "
        f"parameters on {dist.get_world_size()} ranks of {workload.memory_bytes / MB:,.0f} MB"
    )
    job.say(report, markup=False, highlight=False, soft_wrap=True)
    tighter = what_if(compiled.planned, workload.memory_bytes // 2)
    job.say(what_if_text([tighter]), markup=False, highlight=False)
    ours = Dcpc(compiled, workload.loader(dataset, compiled))
    ours.load(1)
    picture = step_picture(ours.steps[0])
    job.say("[bold]3. A planned step[/]: time to the right, a letter a micro-batch")
    job.say(picture, markup=False, highlight=False)
    job.say("\n[bold]4. The race[/]: the same samples in each step, from the same weights")
    optimizer = workload.make_optimizer(model)
    ours.loader.set_epoch(0)
    history = job.train(compiled, ours.loader, optimizer)
    others = [
        GroupedDdp(replica(model), dataset, ours, workload.longest),
        PlainDdp(replica(model), dataset, ours, 4),
    ]
    make, trained = workload.make_optimizer, len(history.losses)
    compared = job.compare(ours, others, optimizer, make, trained)
    found = difference(workload, dataset)
    job.say(
        f"[bold]5. The numbers[/]: a step in float64, each sequence over {dist.get_world_size()} "
        f"ranks: loss and gradients are within {found:.0e} of the plain model's"
    )
    return Seen(lengths, report, picture, compared, found)


def main(arguments: Sequence[str] | None = None) -> Seen:
    """Launches the ranks; returns what rank 0 saw."""
    parser = argparse.ArgumentParser(prog="python -m examples.tour", description=__doc__)
    parser.add_argument("--world", type=int, default=2, help="gloo ranks (default 2)")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit, about")
    args = parser.parse_args(arguments)
    found: Seen = launch(run, args.world, TOUR, args.seconds)[0]
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
