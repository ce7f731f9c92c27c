"""What STDiT3-XL/2 costs on each bucket of VideoSys' workload, from dcpc's symbolic profile.

Blocks repeat, so a model of 28 pairs of blocks costs what two shallow ones tell. Steps of recompute
that all pairs take alike are one *level*. At a level, with d pairs,

    seconds, sent and saved bytes    c + x d
    peak                             the larger of c1 + b d    when backward begins,
                                                   c2 + g d    when backward ends,

with b the bytes that a pair saves and g the bytes of its gradients. x, b and g are differences of
two profiles; c1 and c2 are the least that explain both. `tests/benchmarks/test_stdit_costs.py`
compares with a deeper trace.

A frame of S patches is traced as a strip of S x 1: the same ops on the same numbers of elements,
with one symbol fewer.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch

import dcpc
from benchmarks.harness import timed
from dcpc.api import plan
from dcpc.buckets import Bucket
from dcpc.ir import Placement
from dcpc.variants import Variants
from models.stdit import XL, RectifiedFlow, STDiT, STDiTConfig

DEVICE = "a100-80gb"
DEGREES = (1, 2, 4, 8)
DEPTHS = (2, 3)
WORKERS = 2
# Bytes freed a second of recompute: the levels between nothing and all.
WORTH = (3e11, 2.05e11, 1.3e11, 1e11, 6e10, 2e10)
ROOT = Path(__file__).parents[1]
CACHE = ROOT / "build" / "stdit_costs"
# What a profile depends on: the cache is good as long as these say the same.
SOURCES = ("dcpc/trace", "dcpc/passes", "dcpc/codegen", "dcpc/symbolic_profile", "dcpc/variants.py",
           "dcpc/ir.py", "models/stdit.py", "benchmarks/stdit_costs.py")  # fmt: skip
INPUTS = {
    "latents": "{dtype}[batch, {channels}, frames, tokens*2, 2]",
    "noise": "{dtype}[batch, {channels}, frames, tokens*2, 2]",
    "timestep": "float32[batch]",
    "text": "{dtype}[batch, {text_len}, {text_dim}]",
    "text_mask": "bool[batch, {text_len}]",
    "fps": "float32[batch]",
    "pixel_height": "float32[batch]",
    "pixel_width": "float32[batch]",
}


@dataclass(frozen=True, slots=True)
class Point:
    """Samples of one shape.

    Attributes:
        frames: latent frames; 1 is an image.
        tokens: of a frame.
        batch: samples.
    """

    frames: int
    tokens: int
    batch: int

    @property
    def sizes(self) -> dict[str, int]:
        """The dims of the trace."""
        return {"frames": self.frames, "tokens": self.tokens, "batch": self.batch}


@dataclass(frozen=True, slots=True)
class Cost:
    """One forward and backward, on the fullest rank of a group.

    Attributes:
        seconds_s: by the device's roofline.
        peak_bytes: activations and gradients; inputs included.
        wire_bytes: that a rank sends.
        saved_bytes: between forward and backward.
    """

    seconds_s: float
    peak_bytes: float
    wire_bytes: float
    saved_bytes: float


@dataclass(frozen=True, slots=True)
class Observed:
    """A shallow model at one level of recompute.

    Attributes:
        sp: degree.
        depth: pairs of blocks.
        level: 0: nothing is made again.
        gradient_bytes: of all parameters.
        costs: one a point.
    """

    sp: int
    depth: int
    level: int
    gradient_bytes: float
    costs: tuple[Cost, ...]


def variants_of(config: STDiTConfig, image: bool, dtype: torch.dtype = torch.bfloat16) -> Variants:
    """Returns what dcpc makes of a model on the meta device: placements, graphs, profiles."""
    with torch.device("meta"):
        model = RectifiedFlow(STDiT(config)).to(dtype)
    fields = {**asdict(config), "dtype": str(dtype).removeprefix("torch.")}
    inputs = {name: spec.format(**fields) for name, spec in INPUTS.items()}
    frames = (1,) if image else (2, 120)
    sizes = [{"frames": f, "tokens": t} for f in frames for t in (16, 3600)]
    planned = plan(model, dcpc.Buckets(inputs, sizes), memory=1e18, device=DEVICE, sp=1)
    return planned.by_bucket[Bucket.of(sizes[0])]


def observe(
    variants: Variants, depth: int, image: bool, sps: Sequence[int], points: Sequence[Point]
) -> list[Observed]:
    """Returns the costs of a model of `depth` pairs at each level of recompute."""
    middle = Point(1, 1620, 1) if image else Point(60, 1620, 1)
    found = []
    for sp in sps:
        placement = variants.placement(middle.sizes, sp)
        for level, k in enumerate(_levels(variants, placement)):
            costs = []
            for point in points:
                p = variants.predict(placement, k, point.sizes)
                peak = float(p.peak_bytes + p.input_bytes)
                costs.append(Cost(p.seconds_s, peak, float(p.wire_bytes), float(p.saved_bytes)))
            gradients = variants.profile(placement, k).gradient_bytes
            found.append(Observed(sp, depth, level, gradients, tuple(costs)))
    return found


def _levels(variants: Variants, placement: Placement) -> list[int]:
    """Returns numbers of plans, from none to all: those that free so many bytes a second or more.

    Equal blocks choose alike in them, whatever the depth.
    """
    menu = variants.menu(placement)
    return [0, *(menu.at_price(1 / worth) for worth in WORTH), menu.count]


def deeper(observed: Sequence[Observed], depth: int) -> list[tuple[Cost, ...]]:
    """Returns the costs at each point of a model of `depth` pairs, one list a level.

    Args:
        observed: of one degree, from two depths that differ by one.
        depth: pairs of blocks.
    """
    low, high = sorted({o.depth for o in observed})
    first = {o.level: o for o in observed if o.depth == low}
    second = {o.level: o for o in observed if o.depth == high}
    assert (high, second.keys()) == (low + 1, first.keys()), (
        f"depths {low} and {high} have {len(first)} and {len(second)} levels of recompute; "
        "expected neighbours with as many each"
    )
    gradient = second[0].gradient_bytes - first[0].gradient_bytes
    more = depth - high
    return [
        tuple(
            _extended(a, b, gradient, more)
            for a, b in zip(first[i].costs, second[i].costs, strict=True)
        )
        for i in sorted(first)
    ]


def _extended(a: Cost, b: Cost, gradient: float, more: int) -> Cost:
    """Returns the cost with `more` pairs than b, which has one more than a."""
    saved = b.saved_bytes - a.saved_bytes
    peak = max(
        min(b.peak_bytes + slope * more, a.peak_bytes + slope * (more + 1))
        for slope in (saved, gradient)
    )
    return Cost(
        seconds_s=b.seconds_s + (b.seconds_s - a.seconds_s) * more,
        peak_bytes=peak,
        wire_bytes=b.wire_bytes + (b.wire_bytes - a.wire_bytes) * more,
        saved_bytes=b.saved_bytes + saved * more,
    )


@dataclass(frozen=True, slots=True)
class Table:
    """The costs of the whole model.

    Attributes:
        points: what was priced.
        costs: sp -> point -> cost by level of recompute, from nothing to all that can be.
        resident_bytes: parameters, gradients and optimizer state of a rank; gradients are in the
            peak too, as while backward runs.
        gradient_bytes: what a step reduces.
    """

    points: tuple[Point, ...]
    costs: Mapping[int, Mapping[Point, tuple[Cost, ...]]]
    resident_bytes: float
    gradient_bytes: float


def price(
    points: Sequence[Point], config: STDiTConfig = XL, refresh: bool = False, cache: Path = CACHE
) -> Table:
    """Returns the table of a model at these points, from the cache if nothing has changed.

    Args:
        points: what to price; images and videos.
        config: the whole model.
        refresh: whether to profile again although the cache is good.
        cache: folder; a file for each shallow model and degree, written once it is profiled.
    """
    folder = cache / _key(points, config)
    if refresh and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        (replace(config, depth=depth), image, _of(points, image), folder)
        for depth in reversed(DEPTHS)
        for image in (False, True)
        if not all(_file(folder, depth, image, sp).exists() for sp in DEGREES)
    ]
    if jobs:
        names = ", ".join(f"{'image' if job[1] else 'video'} {job[0].depth}" for job in jobs)
        print(f"profiling shallow models ({names}); kept in {folder} ...", flush=True)
        with timed() as watch, ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
            list(pool.map(_job, jobs))
        print(f"profiled in {watch.elapsed_s:.0f} s")
    return _assemble(points, config, folder)


def _file(folder: Path, depth: int, image: bool, sp: int) -> Path:
    return folder / f"{'image' if image else 'video'}_depth{depth}_sp{sp}.json"


def _key(points: Sequence[Point], config: STDiTConfig) -> str:
    digest = hashlib.sha256(repr((points, config, DEVICE, DEPTHS, torch.__version__)).encode())
    for name in SOURCES:
        path = ROOT / name
        for file in sorted(path.rglob("*.*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".yaml"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _of(points: Sequence[Point], image: bool) -> list[Point]:
    return [p for p in points if (p.frames == 1) == image]


def _job(job: tuple[STDiTConfig, bool, Sequence[Point], Path]) -> None:
    """Profiles one shallow model at the degrees that are missing."""
    config, image, points, folder = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    variants = variants_of(config, image)
    for sp in DEGREES:
        file = _file(folder, config.depth, image, sp)
        if not file.exists():
            found = observe(variants, config.depth, image, (sp,), points)
            whole = file.with_suffix(".part")
            whole.write_text(json.dumps([asdict(o) for o in found]))
            whole.rename(file)


def _assemble(points: Sequence[Point], config: STDiTConfig, folder: Path) -> Table:
    costs: dict[int, dict[Point, tuple[Cost, ...]]] = {sp: {} for sp in DEGREES}
    gradients = 0.0
    for image in (False, True):
        mine = _of(points, image)
        observed = [
            Observed(**{**e, "costs": tuple(Cost(**c) for c in e["costs"])})
            for depth in DEPTHS
            for sp in DEGREES
            for e in json.loads(_file(folder, depth, image, sp).read_text())
        ]
        for sp in DEGREES:
            own = [o for o in observed if o.sp == sp]
            levels = deeper(own, config.depth)
            for i, point in enumerate(mine):
                costs[sp][point] = tuple(level[i] for level in levels)
            by_depth = sorted({(o.depth, o.gradient_bytes) for o in own})
            pair = by_depth[1][1] - by_depth[0][1]
            gradients = by_depth[0][1] + pair * (config.depth - by_depth[0][0])
    # parameters, accumulated gradients and two moments in one dtype, as dcpc.plan counts them
    return Table(tuple(points), costs, 4 * gradients, gradients)
