"""VideoSys' workload, planned: dcpc against a padded bucket and VideoSys' own three systems.

25 buckets, 2,000 videos and 100,000 images, 8 ranks of one node, three mixes. What a
micro-batch costs is dcpc's symbolic profile of STDiT3-XL/2 in bf16 on an A100 of 80 GB
(`stdit_costs.py`); nothing is measured on a GPU. The baseline has one SP size for all, the smallest
at which the largest bucket fits, one micro-batch a replica and full recompute; it and VideoSys'
systems use VideoSys' batch sizes. A ratio is of trained tokens a second. All reduce gradients once
a step.

dcpc plans global batches of as many tokens as a mean step of inter+PAC has. With --quick every
n-th of them is planned and the others are taken to be alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from benchmarks.harness import Cell, parser, print_table, timed, write_report
from benchmarks.stdit_costs import DEVICE, Point, Table, price
from dcpc.buckets import Bucket
from dcpc.commands.simulate.model_rows import BucketCosts, ModelCosts, SimRow
from dcpc.commands.simulate.outcome import SimulatedOutcome, of_steps
from dcpc.commands.simulate.systems import dcpc_auto, padded_bucket, videosys_mode
from dcpc.commands.simulate.workload import Epoch
from dcpc.symbolic_profile import find

WORLD = 8
MEMORY_BYTES = 80e9
FRAMES = (1, 15, 30, 60, 120)  # latent frames of 1, 51, 102, 204, 408 frames
# Source: VideoSys' benchmark: pixels and its batch sizes, by latent frames.
SIZES = {
    (144, 256): (345, 48, 25, 12, 6), (240, 426): (128, 16, 8, 4, 2), (360, 640): (64, 7, 4, 2, 1),
    (480, 854): (32, 4, 2, 1, 1), (720, 1280): (14, 1, 1, 1, 1),
}  # fmt: skip
IMAGES, VIDEOS = 100_000, 2_000
MIXES = ("short", "balanced", "long")
# Source: VideoSys' figure, million tokens/s: baseline, intra, inter, inter+PAC.
PUBLISHED = {
    "short": (0.90, 1.40, 1.92, 2.24), "balanced": (1.16, 1.42, 1.95, 2.06),
    "long": (1.54, 1.64, 1.96, 1.97),
}  # fmt: skip
MOST_TOKENS = 864_000  # of a micro-batch that dcpc may choose
QUICK_BATCHES = 4  # planned of each mix


@dataclass(frozen=True, slots=True)
class Shape:
    """A bucket and VideoSys' batch size of it."""

    frames: int
    tokens: int
    usual: int

    @property
    def bucket(self) -> Bucket:
        """Its dims: their product is the tokens of a sample."""
        return Bucket.of({"frames": self.frames, "tokens": self.tokens})

    def points(self) -> list[Point]:
        """Micro-batches to price: powers of two, halfway between them, and VideoSys' own."""
        sample = self.frames * self.tokens
        menu = {1, self.usual, *(n << k for n in (2, 3) for k in range(10))}
        most = max(self.usual, MOST_TOKENS // sample)
        return [Point(self.frames, self.tokens, b) for b in sorted(menu) if b <= most]


def shapes() -> list[Shape]:
    """Returns the 25 buckets, the fewest tokens first."""
    found = [
        Shape(frames, -(-height // 16) * -(-width // 16), usual)
        for (height, width), batches in SIZES.items()
        for frames, usual in zip(FRAMES, batches, strict=True)
    ]
    return sorted(found, key=lambda s: (s.frames * s.tokens, s.frames))


def draw(mix: str, all_shapes: Sequence[Shape], images: int, videos: int, seed: int) -> Epoch:
    """Returns an epoch as one batch, shuffled.

    A bucket's share goes with 1 / (rank + 5)^3 of its place among those of its kind, by tokens.
    """
    rng = np.random.default_rng(seed)
    found: list[Bucket] = []
    for count, kind in ((images, True), (videos, False)):
        own = [s for s in all_shapes if (s.frames == 1) == kind]
        share = np.ones(len(own)) if mix == "balanced" else (np.arange(len(own)) + 5.0) ** -3
        share = share[::-1] if mix == "long" else share
        chosen = rng.choice(len(own), count, p=share / share.sum())
        found += [own[i].bucket for i in chosen]
    order = rng.permutation(len(found))
    samples = tuple((n, found[i]) for n, i in enumerate(order))
    return Epoch((samples,), {n: b["frames"] * b["tokens"] for n, b in samples})


def costs_of(table: Table, all_shapes: Sequence[Shape], world: int = WORLD) -> ModelCosts:
    """Returns the rows that fit a rank, of every bucket."""
    buckets = []
    for shape in all_shapes:
        least, full = [], []
        for sp, by_point in table.costs.items():
            for point in (p for p in shape.points() if p in by_point):
                rows = [
                    SimRow(sp, point.batch, level, cost.seconds_s, cost.wire_bytes * sp)
                    for level, cost in enumerate(by_point[point])
                    if table.resident_bytes + cost.peak_bytes <= MEMORY_BYTES
                ]
                least += [min(rows, key=lambda row: row.seconds_s)] if rows else []
                full += [r for r in rows if r.menu_step == len(by_point[point]) - 1]
        tokens = shape.frames * shape.tokens
        buckets.append(BucketCosts(shape.bucket, tokens, tuple(least), tuple(full), shape.usual))
    reduction_s = find(DEVICE).all_reduce_s(table.gradient_bytes, world)
    return ModelCosts(tuple(buckets), world, 8, table.gradient_bytes, reduction_s)


def rebatch(epoch: Epoch, tokens_per_step: float) -> Epoch:
    """Returns the samples in their order, in batches that reach so many tokens."""
    batches: list[tuple[tuple[int, Bucket], ...]] = []
    batch: list[tuple[int, Bucket]] = []
    total = 0
    for number, bucket in epoch.samples:
        batch.append((number, bucket))
        total += epoch.tokens[number]
        if total >= tokens_per_step:
            batches.append(tuple(batch))
            batch, total = [], 0
    if batch:
        batches.append(tuple(batch))
    return replace(epoch, batches=tuple(batches))


def run_dcpc(costs: ModelCosts, epoch: Epoch, most: int) -> SimulatedOutcome:
    """Returns dcpc's outcome; of more than `most` batches evenly spaced ones are planned."""
    every = max(1, -(-len(epoch.batches) // most)) if most else 1
    chosen = tuple(islice(epoch.batches, 0, None, every))
    tokens = {n: epoch.tokens[n] for batch in chosen for n, _ in batch}
    planned = Epoch(chosen, tokens)
    return of_steps("dcpc", dcpc_auto(costs, planned), costs, tokens)


def run(costs: ModelCosts, epoch: Epoch, most: int) -> dict[str, SimulatedOutcome]:
    """Returns every system's outcome on an epoch; dcpc's step is as large as inter+PAC's."""
    found = {"baseline": of_steps("baseline", padded_bucket(costs, epoch), costs, epoch.tokens)}
    for mode in ("intra", "inter", "pac"):
        plans = videosys_mode(mode)(costs, epoch)
        found[mode] = of_steps(mode, plans, costs, epoch.tokens)
    # Of few samples inter+PAC may drop all: then the padded bucket's step.
    like = found["pac"] if found["pac"].steps else found["baseline"]
    batches = rebatch(epoch, like.tokens / like.steps)
    found["dcpc"] = run_dcpc(costs, batches, most)
    return found


def figures_of(by_mix: Mapping[str, Mapping[str, SimulatedOutcome]]) -> dict[str, Cell]:
    """Returns the ratios over the baseline, and what was dropped."""
    figures: dict[str, Cell] = {}
    for mix, found in by_mix.items():
        base = found["baseline"].tokens_per_s
        for name in ("intra", "inter", "pac", "dcpc"):
            figures[f"{mix}_{name}_ratio"] = found[name].tokens_per_s / base
    figures["samples_dropped"] = sum(found["dcpc"].dropped for found in by_mix.values())
    for mix, found in by_mix.items():
        for name in ("intra", "inter", "pac"):
            figures[f"{mix}_{name}_samples_dropped"] = found[name].dropped
        figures[f"{mix}_dcpc_gap"] = found["dcpc"].seconds_s / found["dcpc"].bound_s - 1.0
        for name, outcome in found.items():
            figures[f"{mix}_{name}_mtokens_per_s"] = outcome.tokens_per_s / 1e6
            figures[f"{mix}_{name}_imbalance"] = outcome.idle_share
    return figures


def show(by_mix: Mapping[str, Mapping[str, SimulatedOutcome]], figures: Mapping[str, Cell]) -> None:
    """Prints each mix, and how far the simulated ratios are from VideoSys' figure."""
    for mix, found in by_mix.items():
        rows: list[list[Cell]] = []
        for name, o in found.items():
            ratio = o.tokens_per_s / found["baseline"].tokens_per_s
            rows.append([name, o.steps, o.step_s, o.tokens_per_s / 1e6, ratio, o.idle_share,
                         o.dropped])  # fmt: skip
        header = ["system", "steps", "mean step s", "Mtokens/s", "ratio", "idle", "dropped"]
        print_table(f"{mix}, predicted on 8 x {DEVICE}", header, rows)
    rows = []
    for mix, (base, *theirs) in PUBLISHED.items():
        for name, value in zip(("intra", "inter", "pac"), theirs, strict=True):
            ours = figures[f"{mix}_{name}_ratio"]
            assert isinstance(ours, float), "a ratio is a number"
            rows.append([f"{mix} {name}", value / base, ours, ours / (value / base) - 1])
    header = ["over the baseline", "VideoSys' figure", "simulated", "deviation"]
    print_table("The simulator against VideoSys' figure", header, rows)


def main() -> None:
    """Prices the model, runs the mixes, writes the figures."""
    p = parser("video", __doc__.splitlines()[0])
    p.add_argument("--profile", action="store_true", help="profile again, whatever is cached")
    p.add_argument("--seed", type=int, default=0, help="of the samples")
    args = p.parse_args()
    all_shapes = shapes()
    table = price([p for s in all_shapes for p in s.points()], refresh=args.profile)
    costs = costs_of(table, all_shapes)
    print(f"baseline: sp={costs.fixed_degree()} for all")
    most = QUICK_BATCHES if args.quick else 0
    with timed() as watch:
        by_mix = {
            mix: run(costs, draw(mix, all_shapes, IMAGES, VIDEOS, args.seed), most) for mix in MIXES
        }
    figures = figures_of(by_mix)
    show(by_mix, figures)
    print(f"simulated in {watch.elapsed_s:.0f} s")
    write_report("video", figures, args.json)


if __name__ == "__main__":
    main()
