"""The main job: `python -m examples.demo [--world 2] [--seconds 240] [--out out]`.

Compiles a small GPT once for buckets of up to 8,192 bytes, trains it over gloo ranks on every
function and class of the interpreter's standard library, then runs the same steps as one would have
to without dcpc, and compares: in as much memory as DistributedDataParallel needs for the longest
sample, so that nobody wins by a limit.

A run is bounded by time, but for the least steps of the comparison: training ends at about a third
of it. What each step computes does not depend on the clock.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from examples.baselines import Dcpc, FixedSp, GroupedDdp, PlainDdp
from examples.job import MB, Compared, History, Job
from examples.launch import launch
from examples.plots import plot_loss, plot_memory
from examples.race import replica
from examples.stdlib_source import StdlibSource
from examples.workload import DEMO, Workload

# What DistributedDataParallel needs for the longest sample alone, so that all have equal memory.
MEMORY_MB = 250.0
TOKENS, STEPS = 8_192, 20  # of a step; of the comparison at least
# Most tokens of a batch of like lengths; a longer sample is one alone. Larger ones leave a step two
# batches, and a rank of the two waits.
GROUPED = 2_048


@dataclass(frozen=True, slots=True)
class Demonstrated:
    """What came of the demo.

    Attributes:
        variants: that the model has, one a bucket.
        history: of training.
        compared: dcpc and the systems without it, over the same steps.
        padding_share: padding's share of the tokens that dcpc ran in training, 0 to 1.
        pictures: files that were drawn.
    """

    variants: int
    history: History
    compared: Sequence[Compared]
    padding_share: float
    pictures: Sequence[Path]


def run(workload: Workload, limit_s: float, out: Path) -> Demonstrated:
    """One rank's part: compiles, trains, compares, draws."""
    job = Job(limit_s, out, workload.memory_bytes, trained=0.3)
    dataset = StdlibSource(workload.longest)
    job.say(f"[bold]data[/]: {dataset.counts}; {len(dataset):,} samples")
    model = workload.make_model()
    job.say(
        f"[bold]model[/]: GPT, {workload.model.n_layers} layers, "
        f"{sum(p.numel() for p in model.parameters()):,} parameters; {dist.get_world_size()} "
        f"ranks of {workload.memory_bytes / MB:,.0f} MB each"
    )
    begin_s = time.monotonic()
    compiled = workload.compile(model, dataset)
    job.say(f"[bold]compiled[/] in {time.monotonic() - begin_s:.1f} s\n")
    job.say(compiled.report(), markup=False, highlight=False, soft_wrap=True)
    ours = Dcpc(compiled, workload.loader(dataset, compiled))
    optimizer = workload.make_optimizer(model)
    history = job.train(compiled, ours.loader, optimizer)
    padding_share = ours.loader.stats().padding_share
    job.say(
        f"padding: {padding_share:.2%} of the tokens that ran, in {len(compiled.buckets)} buckets"
    )
    job.say("[bold]the same samples without dcpc[/]")
    others = [
        FixedSp(compiled, replica(model), workload, dataset, dist.get_world_size()),
        GroupedDdp(replica(model), dataset, ours, GROUPED),
        PlainDdp(replica(model), dataset, ours, 1),
    ]
    make, trained = workload.make_optimizer, len(history.losses)
    compared = job.compare(ours, others, optimizer, make, trained, least=STEPS)
    every = [mb for step in ours.steps for mb in step.plan.micro_batches]
    job.say(
        f"{sum(mb.sp > 1 for mb in every)} of the {len(every)} micro-batches of the "
        f"{len(ours.steps)} steps that were planned run on several ranks together: the longest of "
        "a step, where a rank would wait for the other\n",
        highlight=False,
    )
    pictures = (out / "demo_loss.png", out / "demo_memory.png")
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        plot_loss(history.losses, history.tokens, pictures[0])
        plot_memory(compiled, pictures[1])
    job.say(f"wrote {pictures[0]} and {pictures[1]}")
    return Demonstrated(len(compiled.plans), history, compared, padding_share, pictures)


def figures_of(found: Demonstrated) -> dict[str, float]:
    """Returns what the demo found as numbers, by name."""
    ours = found.compared[0]
    return {
        "buckets": found.variants,
        "padding_share": found.padding_share,
        "seconds": ours.seconds_s,
        **{f"speed_over_{number}": each.speed for number, each in enumerate(found.compared)},
    }


def on_rank(workload: Workload, limit_s: float, out: Path) -> Demonstrated:
    """Runs the demo on one rank of the group."""
    warnings.simplefilter("ignore")
    return run(workload, limit_s, out)


def main(arguments: Sequence[str] | None = None) -> Demonstrated:
    """Launches the ranks; returns what rank 0 saw."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--world", type=int, default=2, help="gloo ranks (default 2)")
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit, about")
    parser.add_argument("--memory", type=float, default=MEMORY_MB, help="a rank's MB (default 250)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the plots")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args(arguments)
    workload = replace(DEMO, memory_bytes=int(args.memory * MB), tokens_per_step=TOKENS)
    found: Demonstrated = launch(on_rank, args.world, workload, args.seconds, args.out)[0]
    if args.json is not None:
        args.json.write_text(json.dumps({"name": "demo", "figures": figures_of(found)}) + "\n")
    return found


if __name__ == "__main__":
    main()
