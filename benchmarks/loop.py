"""A training loop over dcpc beside the same loop without it: `python -m benchmarks.loop`.

**What dcpc takes for itself**: processor seconds of `train_step` less those of the plain model's
forward and backward of the same micro-batches, on one rank, eager, medians of interleaved turns. A
GPT of 305 modules takes micro-batches so small that kernels hardly count, 1 and 7 of them a step:
`overhead_s_per_microbatch` is the slope, `overhead_s_per_step` the rest. `equal_lengths` is the
ratio of both where kernels count, at lengths that are all equal; `equal_lengths_inductor` that of
`torch.compile`, which runs the same micro-batches (not in `--quick`, whose races are two).

**Races** at two gloo ranks, a GPT of 2 layers on the standard library's functions and classes, of
which each fourth byte is a token: about as long as in the tokens of a vocabulary of words. Texts
are cut where they are 3, 10, 30 and 100 times as long as the median text. The same samples in each
step, in the memory that DistributedDataParallel needs for the longest one:

    dcpc          8 buckets, that memory
    grouped DDP   samples of like length share a batch of as many tokens as the longest has, dealt
                  out by tokens
    padded DDP    batches of 4 padded to their longest, no memory limit

A speedup is the median, over repeats, of the ratios of processor seconds: in each step those of the
busiest rank, so that other work on the machine is not in them, nor a wait within the step, which is
in `wall_speedup_...`.
"""

from __future__ import annotations

import asyncio
import copy
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import dcpc
from benchmarks.harness import Cell, finish, interleaved, parser, print_table
from benchmarks.throughput import Total, totals_of
from dcpc.runtime.groups.local_ranks import run_ranks
from examples.allocator import measured_peak_bytes
from examples.baselines import Dcpc, GroupedDdp, PlainDdp, System
from examples.code_lines import of_both_loops
from examples.race import Entrant, repeats, replica
from examples.stdlib_source import PAD, StdlibSource
from examples.workload import DEMO, INPUTS, Workload
from models.gpt import GPT, GPTConfig

WORLD = 2
BYTES_OF_TOKEN, DDP_BATCH = 4, 4
DEEP = GPTConfig(dim=32, n_layers=25, n_heads=4)  # 305 modules
EQUAL = GPTConfig(dim=128, n_layers=6, n_heads=4)
SMALL, FEW, MANY = 8, 1, 7  # tokens of a micro-batch, micro-batches of a step


@dataclass(frozen=True, slots=True)
class Run:
    """How much is run.

    Attributes:
        steps: of a race.
        tokens: of a step; where the longest sample is longer, twice as many as it has.
        repeats: of a race, at most.
        limit_s: seconds of a race, after which no further repeat begins.
        turns: of measuring what dcpc takes for itself.
        root: folder of the texts; None: all of the standard library.
    """

    steps: int
    tokens: int
    repeats: int
    limit_s: float
    turns: int
    buckets: int = 8
    ratios: tuple[int, ...] = (3, 10, 30, 100)
    root: Path | None = None


def own_seconds(
    config: GPTConfig, shape: tuple[int, int], counts: tuple[int, ...], turns: int, backend: str
) -> dict[int, list[tuple[float, float]]]:
    """Returns number of micro-batches -> processor seconds with dcpc and without, of each turn.

    `shape` is samples of a micro-batch and tokens of a sample; Inductor runs on both sides.
    """
    batch, seq = shape
    torch.manual_seed(0)
    model = GPT(config)
    other = copy.deepcopy(model)
    plain: Callable[..., torch.Tensor] = other if backend == "eager" else torch.compile(other)
    buckets = dcpc.Buckets(INPUTS, [{"batch": batch, "seq": seq}])
    compiled = dcpc.compile(model, buckets, memory=8e9, backend=backend, verify="off")
    calls: dict[str, Callable[[], object]] = {}
    for count in counts:
        ids = torch.randint(256, (count * batch, seq))
        data = [{"input_ids": x, "labels": x} for x in ids]
        step = next(iter(dcpc.DataLoader(data, compiled, samples_per_step=len(data), pad=PAD)))
        assert len(step.micro_batches) == count, "equal lengths make full micro-batches"
        calls[f"dcpc {count}"] = partial(compiled.train_step, step)
        calls[f"plain {count}"] = partial(_accumulate, plain, ids, batch)
    spent = interleaved(calls, turns, lambda: (model.zero_grad(), other.zero_grad()))
    return {n: [*zip(spent[f"dcpc {n}"], spent[f"plain {n}"], strict=True)] for n in counts}


def _accumulate(model: Callable[..., torch.Tensor], ids: torch.Tensor, batch: int) -> None:
    for part in ids.split(batch):
        (model(input_ids=part, labels=part) * (batch / len(ids))).backward()


def overheads(run: Run, quick: bool) -> dict[str, Cell]:
    """Returns the figures of dcpc's own seconds."""
    spent = own_seconds(DEEP, (1, SMALL), (FEW, MANY), run.turns, "eager")
    over = {n: median(ours - theirs for ours, theirs in each) for n, each in spent.items()}
    slope = (over[MANY] - over[FEW]) / (MANY - FEW)
    found: dict[str, Cell] = {
        "overhead_s_per_microbatch": slope, "overhead_s_per_step": over[FEW] - FEW * slope,
        "microbatch_s": median(ours for ours, _ in spent[MANY]) / MANY,
    }  # fmt: skip
    jobs = {"": ("eager", 2, 4)} | ({} if quick else {"_inductor": ("inductor", 8, 1)})
    for name, (backend, batch, count) in jobs.items():
        pairs = own_seconds(EQUAL, (batch, 256), (count,), run.turns, backend)[count]
        found[f"equal_lengths{name}"] = median(ours / theirs for ours, theirs in pairs)
    return found


def memory_of(workload: Workload) -> int:
    """Returns the bytes of DDP with the longest sample, parameters and Adam's state among them."""
    model = workload.make_model()
    ids = torch.randint(256, (1, workload.longest))

    def run() -> None:
        DistributedDataParallel(model)(input_ids=ids, labels=ids).backward()

    peak = torch.tensor(measured_peak_bytes(run))
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return int(peak) + 3 * sum(p.nbytes for p in model.parameters())


Raced = tuple[dict[str, list[Total]], int]  # totals of each system, tokens of all steps


def on_rank(rank: int, run: Run, sources: Mapping[int, StdlibSource]) -> dict[int, Raced]:
    """Returns ratio -> its race, on one rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return {ratio: _race(run, source) for ratio, source in sources.items()}


def _race(run: Run, source: StdlibSource) -> Raced:
    longest = max(source.dims(i)["seq"] for i in range(len(source)))
    tokens = max(run.tokens, 2 * longest)
    workload = replace(DEMO, longest=longest, tokens_per_step=tokens, count=run.buckets)
    workload = replace(workload, memory_bytes=memory_of(workload))
    model = workload.make_model()
    compiled = workload.compile(model, source, verify="off")
    ours = Dcpc(compiled, workload.loader(source, compiled))
    systems: dict[str, System] = {
        "dcpc": ours, "grouped_ddp": GroupedDdp(replica(model), source, ours, longest),
        "padded": PlainDdp(replica(model), source, ours, DDP_BATCH),
    }  # fmt: skip
    for system in systems.values():
        system.load(run.steps)
    entrants = [Entrant(s, workload.make_optimizer(s.model)) for s in systems.values()]
    end_s = time.monotonic() + run.limit_s
    laps = repeats(entrants, run.steps, run.repeats + 1, end_s, least=2)
    keys = {s.name: key for key, s in systems.items()}
    totals = totals_of(laps[len(entrants) * run.steps :], keys, run.steps)  # the first compiles
    return totals, sum(step.tokens for step in ours.steps)


def races(run: Run) -> dict[str, Cell]:
    """Returns the figures of the races, and prints them."""
    every = StdlibSource(10**6, run.root, every=BYTES_OF_TOKEN)
    middle = int(median(every.dims(i)["seq"] for i in range(len(every))))
    sources = {
        r: every.cut_at(64 * round(r * middle / 64)) for r in run.ratios
    }  # a bucket's length
    found = run_ranks(on_rank, WORLD, run, sources, timeout_s=1800.0, fork=True)[0]
    figures: dict[str, Cell] = {}
    rows: list[list[Cell]] = []
    for ratio, (totals, tokens) in found.items():
        row: list[Cell] = [f"{ratio} x {middle}", tokens]
        for name in ("grouped_ddp", "padded"):
            pairs = [*zip(totals[name], totals["dcpc"], strict=True)]
            for kind, each in (
                ("", [b.busy_s / a.busy_s for b, a in pairs]),
                ("wall_", [b.seconds_s / a.seconds_s for b, a in pairs]),
            ):
                figures[f"{kind}speedup_over_{name}_at_{ratio}"] = median(each)
                row.append(median(each))
        rows.append(row)
    header = (
        "longest", "tokens", "over grouped DDP", "by the wall", "over padded DDP", "by the wall",
    )  # fmt: skip
    print_table("speedups, by the longest sample", header, rows)
    for name in ("speedup_over_grouped_ddp", "speedup_over_padded"):
        figures[name] = figures[f"{name}_at_30"]
    return figures


def main() -> None:
    """Runs the benchmark."""
    args = parser("loop", __doc__.partition("\n")[0]).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    run = Run(4, 16_384, 7, 150.0, 61)
    if args.quick:
        run = Run(1, 4096, 4, 2.0, 7, 4, (3, 30), Path(asyncio.__file__).parent)
    figures = races(run) | overheads(run, args.quick)
    hand, figures["lines_of_loop"] = (lines.total() for lines in of_both_loops())
    figures["lines_of_loop_by_hand"] = hand
    finish("loop", figures, args.json, digits=5)


if __name__ == "__main__":
    main()
