"""Packed training against what one does without planning it: `python -m benchmarks.packing`.

Two gloo ranks train a small GPT on the standard library's functions and classes. All systems run
the same steps from the same weights, one step each in turn, and their losses are compared:

    packed     dcpc, `packing=`: the planner decides which sequences share a row, on which ranks
    unpacked   dcpc, samples padded to the longest of their micro-batch, which are of like length
    fit_sp1, fit_sp2   packs filled up to the longest bucket's length, best fit first, every one
               at that degree and recomputed, attention inside each sample alone; the faster counts
    padded     DistributedDataParallel, batches of 4 padded to their longest; no memory limit

Then one rank runs packed micro-batches of 12 mixtures of lengths (a quarter as long in `--quick`):
seconds that the process computes in these against the plan's. Plans are made after a calibration.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from statistics import median

import torch
from torch import Tensor

import dcpc
from benchmarks.gpu_checks.mixed import PACKED, PackableGPT, Texts
from benchmarks.gpu_checks.subjects import drawn_tokens
from benchmarks.harness import Cell, finish, parser, print_table
from benchmarks.throughput import Run as TrainingRun
from dcpc.buckets import BATCH, Sizes
from dcpc.commands.calibrate import calibrate
from examples.baselines import Dcpc, PlainDdp, System
from examples.launch import launch
from examples.packing import PackedSp
from examples.race import Entrant, Lap, repeats, replica
from examples.stdlib_source import PAD, StdlibSource
from examples.workload import DEMO, INPUTS, QUICK

WORLD, DDP_BATCH = 2, 4
# Largest relative difference of two systems' losses of a step, in float32.
LOSS_OFF = 1e-3
MIXTURES = {
    "256": [256], "8 x 32, 256": [32] * 8 + [256], "4 x 192": [192] * 4, "1,024": [1024],
    "16 x 96": [96] * 16, "1,536, 3 x 64": [1536] + [64] * 3, "2,048": [2048],
    "16 x 128, 2 x 384": [128] * 16 + [384] * 2, "1,024, 32 x 64": [1024] + [64] * 32,
    "2 x 1,792": [1792] * 2, "3,008, 16 x 64": [3008] + [64] * 16, "4,096": [4096],
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Run(TrainingRun):
    """How much is run.

    Attributes:
        segments: of the standard library, evenly spread; None: all.
        budget_s: seconds to calibrate for.
        rounds: of the mixtures.
        shrink: by which their lengths are divided.
    """

    segments: int | None
    budget_s: float
    rounds: int
    shrink: int = 1


def example(names: tuple[str, ...], vocabulary: int, sizes: Sizes) -> dict[str, Tensor]:
    """Returns inputs of rows that are one sequence each."""
    places = torch.arange(sizes["seq"]).expand(sizes[BATCH], -1).contiguous()
    made = {"position_ids": places, "segment_ids": torch.ones_like(places)}
    made |= drawn_tokens(vocabulary, sizes)
    return {name: made[name] for name in names}


def compiled(
    model: torch.nn.Module, inputs: dict[str, str], run: Run, memory: float, longest: int
) -> dcpc.CompiledModel:
    """Returns the model, compiled after a calibration at four of its lengths."""
    workload = run.workload
    lengths = [b["seq"] for b in workload.ladder if b["seq"] <= longest]
    chosen = [lengths[i * (len(lengths) - 1) // 3] for i in range(4)]
    calibration = calibrate(
        model, dcpc.Buckets(inputs, [{"seq": n} for n in chosen]), backend="eager",
        example=partial(example, tuple(inputs), workload.model.vocab_size), budget_s=run.budget_s,
    )  # fmt: skip
    return dcpc.compile(
        model, dcpc.Buckets(inputs, [{"seq": n} for n in lengths]), memory=memory,
        backend="eager", verify="off", calibration=calibration,
    )  # fmt: skip


class Ours(Dcpc):
    """dcpc, by a loader of its own."""

    def __init__(self, name: str, model: dcpc.CompiledModel, loader: dcpc.DataLoader) -> None:
        super().__init__(model, loader)
        self.name = name


def on_rank(run: Run) -> tuple[list[Lap], int, dict[str, float]]:
    """Returns the laps of all systems on one rank, tokens of all steps, padding of dcpc's."""
    start_s = time.monotonic()
    warnings.simplefilter("ignore")
    workload = run.workload
    data = StdlibSource(workload.longest, limit=run.segments)
    plain = workload.make_model()
    packable = PackableGPT(workload.model)
    packable.load_state_dict(plain.state_dict())
    loader = partial(
        dcpc.DataLoader, data, tokens_per_step=workload.tokens_per_step, seed=workload.seed,
        pad=PAD, weight="labels", pad_to="longest",
    )  # fmt: skip
    both = [
        compiled(model, dict(inputs), run, workload.memory_bytes, workload.longest)
        for model, inputs in ((plain, INPUTS), (packable, PACKED))
    ]
    unpacked = Ours("unpacked", both[0], loader(both[0]))
    packed = Ours("packed", both[1], loader(both[1], packing="segment_ids"))
    longest = workload.longest
    systems: dict[str, System] = {
        "unpacked": unpacked, "packed": packed,
        "fit_sp1": PackedSp(replica(plain), data, unpacked, longest, 1),
        "fit_sp2": PackedSp(replica(plain), data, unpacked, longest, 2),
        "padded": PlainDdp(replica(plain), data, unpacked, DDP_BATCH),
    }  # fmt: skip
    entrants = []
    for name, system in systems.items():
        system.name = name
        system.load(run.steps)
        entrants.append(Entrant(system, workload.make_optimizer(system.model)))
    # The first repeat compiles.
    laps = repeats(entrants, run.steps, run.repeats + 1, start_s + run.limit_s, least=2)
    padding = {ours.name: ours.loader.stats().padding_share for ours in (unpacked, packed)}
    return laps, sum(step.tokens for step in unpacked.steps), padding


def rates(run: Run) -> dict[str, Cell]:
    """Returns tokens a second of all systems, and medians of the packed one's ratios to them."""
    laps, tokens, padding = launch(on_rank, WORLD, run)[0]
    losses: dict[int, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    for name in dict.fromkeys(lap.system for lap in laps):
        mine = [lap for lap in laps if lap.system == name]
        for turn, lap in enumerate(mine):
            losses.setdefault(turn, []).append(lap.loss)
        whole = [mine[i : i + run.steps] for i in range(run.steps, len(mine), run.steps)]
        seconds[name] = [sum(lap.seconds_s for lap in repeat) for repeat in whole]
    off = max(max(each) / min(each) - 1 for each in losses.values())
    assert off < LOSS_OFF, f"losses of the same steps differ by {off:.1e}"
    figures: dict[str, Cell] = {
        f"{name}_tokens_per_s": tokens / median(each) for name, each in seconds.items()
    }

    def over(*names: str) -> float:
        best = zip(*(seconds[name] for name in names), strict=True)
        return median(min(b) / a for a, b in zip(seconds["packed"], best, strict=True))

    figures |= {
        "speedup_over_padded": over("padded"),
        "speedup_over_fit": over("fit_sp1", "fit_sp2"),
        "speedup_over_unpacked": over("unpacked"),
        "repeats": len(seconds["packed"]), "largest_loss_difference": off,
    }  # fmt: skip
    return figures | {f"padding_of_{name}": share for name, share in padding.items()}


def mixtures(run: Run) -> tuple[list[list[Cell]], dict[str, Cell]]:
    """Returns a row for each mixture, and the figures: seconds measured against predicted."""
    torch.set_num_threads(1)
    vocabulary = run.workload.model.vocab_size
    model = PackableGPT(run.workload.model)
    mixed = {name: [max(1, n // run.shrink) for n in lengths] for name, lengths in MIXTURES.items()}
    longest = max(map(sum, mixed.values()))
    made = compiled(model, dict(PACKED), run, 4e9, longest)
    steps = {}
    for name, lengths in mixed.items():
        (steps[name],) = islice(
            dcpc.DataLoader(
                Texts(lengths, vocabulary), made, samples_per_step=len(lengths), lookahead=0,
                packing="segment_ids", pad_to="longest", weight="labels",
            ), 1,
        )  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(run.rounds + 1):
        for name, step in steps.items():
            begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
            result = made.train_step(step)
            wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
            if turn:  # the first compiles
                taken[name].append(cpu_s * sum(result.micro_batch_s) / wall_s)
    measured_s = {name: median(each) for name, each in taken.items()}
    planned_s = {name: step.plan.makespan_s for name, step in steps.items()}
    ratios = {name: planned_s[name] / measured_s[name] for name in steps}
    in_order = sorted(steps, key=planned_s.__getitem__)
    swapped = sum(measured_s[a] > measured_s[b] for a, b in pairwise(in_order))
    rows: list[list[Cell]] = [
        [name, 1e3 * planned_s[name], 1e3 * measured_s[name], ratios[name]] for name in in_order
    ]
    figures: dict[str, Cell] = {
        "worst_error": max(abs(ratio - 1) for ratio in ratios.values()),
        "median_error": median(abs(ratio - 1) for ratio in ratios.values()),
        "within_10_percent": sum(abs(ratio - 1) <= 0.1 for ratio in ratios.values()),
        "mixtures": len(ratios), "out_of_order": swapped,
    }  # fmt: skip
    return rows, figures


def main() -> None:
    """Runs the benchmark."""
    args = parser("packing", __doc__.partition("\n")[0]).parse_args()
    warnings.simplefilter("ignore")
    run = Run(DEMO, 8, 5, 300.0, None, 24.0, 9)
    if args.quick:
        run = Run(QUICK, 2, 2, 14.0, 2000, 3.0, 5, 4)
    rows, figures = mixtures(run)
    print_table("packed micro-batches, ms", ("lengths", "planned", "measured", "ratio"), rows)
    figures |= rates(run)
    finish("packing", figures, args.json)


if __name__ == "__main__":
    main()
