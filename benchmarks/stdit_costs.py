"""What STDiT3-XL/2 costs on each bucket of VideoSys' workload, from dcpc's symbolic profile.

Blocks repeat, so a model of 28 pairs of blocks costs what a trace of three pairs tells: dcpc plans
any deep model as the first, a middle and the last of its blocks (`dcpc/plan/folding.py`), exactly;
here the blocks between are not traced to begin with. `tests/benchmarks/test_stdit_costs.py`
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
from typing import Any

import torch

import dcpc
from benchmarks.harness import timed
from dcpc.codegen import Library
from dcpc.plan.folding import Lift, fold
from dcpc.plan.prices.priced import Priced
from dcpc.plan.traced import traced
from dcpc.symbolic_profile import find
from models.stdit import XL, RectifiedFlow, STDiT, STDiTConfig

DEVICE = "a100-80gb"
DEGREES = (1, 2, 4, 8)
DEPTH = 3  # pairs of blocks that are traced; the second stands for the rest
WORKERS = 2
LEVELS = 8  # of recompute, from nothing to all
ROOT = Path(__file__).parents[1]
CACHE = ROOT / "build" / "stdit_costs"
# What a profile depends on: the cache is good as long as these say the same.
SOURCES = (
    "dcpc/trace", "dcpc/passes", "dcpc/codegen", "dcpc/symbolic_profile", "dcpc/plan/traced.py",
    "dcpc/plan/folding.py", "dcpc/plan/prices/placements.py", "dcpc/plan/prices/priced.py",
    "dcpc/plan/prices/studies.py", "dcpc/ir", "models/stdit.py", "benchmarks/stdit_costs.py",
)  # fmt: skip
INPUTS = {
    "latents": "{dtype}[batch, {channels}, frames, tokens*2, 2]",
    "noise": "{dtype}[batch, {channels}, frames, tokens*2, 2]", "timestep": "float32[batch]",
    "text": "{dtype}[batch, {text_len}, {text_dim}]", "text_mask": "bool[batch, {text_len}]",
    "fps": "float32[batch]", "pixel_height": "float32[batch]", "pixel_width": "float32[batch]",
}  # fmt: skip


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


def priced_of(
    config: STDiTConfig,
    image: bool,
    dtype: torch.dtype = torch.bfloat16,
    libraries: dict[str, Library] | None = None,
) -> Priced:
    """Returns what dcpc makes of a model on the meta device: placements, graphs, profiles.

    Args:
        config: of the whole model; three pairs of its blocks are traced.
        image: whether of one frame.
        dtype: of the weights.
        libraries: shared by the traces of one model, as `dcpc.api.plan` does.
    """
    with torch.device("meta"):
        model = RectifiedFlow(STDiT(replace(config, depth=min(config.depth, DEPTH)))).to(dtype)
    fields = {**asdict(config), "dtype": str(dtype).removeprefix("torch.")}
    inputs = {name: spec.format(**fields) for name, spec in INPUTS.items()}
    frames = (1,) if image else (2, 120)
    sizes = [{"frames": f, "tokens": t} for f in frames for t in (16, 3600)]
    buckets = dcpc.Buckets(inputs, sizes)
    known = traced(model, buckets, find(DEVICE), "eager", libraries=libraries)
    folded = fold(known.program, 3)
    assert folded is not None, f"{DEPTH} pairs of blocks are not alike"
    assert folded.others == (0,), f"{folded.others} pairs are left out, and would count twice"
    folded = replace(folded, others=(folded.others[0] + config.depth - DEPTH,))
    return Priced(Lift(replace(known, reference=sizes[-1]), folded=folded))


def costs_of_levels(
    priced: Priced, image: bool, sp: int, points: Sequence[Point]
) -> list[list[Cost]]:
    """Returns the costs at each point, one list a level of recompute.

    All are split as a middle-sized sample is.
    """
    middle = Point(1, 1620, 1) if image else Point(60, 1620, 1)
    study = priced.at(priced.placement(middle.sizes, sp))
    most = study.steps
    levels = sorted({round(i * most / (LEVELS - 1)) for i in range(LEVELS)})
    found = []
    for k in levels:
        costs = []
        for point in points:
            p = study.predict(k, point.sizes)
            peak = float(p.peak_bytes + p.input_bytes)
            costs.append(Cost(p.seconds_s, peak, float(p.wire_bytes), float(p.saved_bytes)))
        found.append(costs)
    return found


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
        cache: folder; a file for images and one for videos, written once they are profiled.
    """
    folder = cache / _key(points, config)
    if refresh and folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    jobs = [
        (config, image, _of(points, image), folder)
        for image in (False, True)
        if not _file(folder, image).exists()
    ]
    if jobs:
        print(f"profiling STDiT; kept in {folder} ...", flush=True)
        with timed() as watch, ProcessPoolExecutor(WORKERS, get_context("spawn")) as pool:
            list(pool.map(_job, jobs))
        print(f"profiled in {watch.elapsed_s:.0f} s")
    return _assemble(points, folder)


def _file(folder: Path, image: bool) -> Path:
    return folder / f"{'image' if image else 'video'}.json"


def _key(points: Sequence[Point], config: STDiTConfig) -> str:
    digest = hashlib.sha256(repr((points, config, DEVICE, DEPTH, torch.__version__)).encode())
    for name in SOURCES:
        path = ROOT / name
        for file in sorted(path.rglob("*.*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".yaml"):
                digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _of(points: Sequence[Point], image: bool) -> list[Point]:
    return [p for p in points if (p.frames == 1) == image]


def _job(job: tuple[STDiTConfig, bool, Sequence[Point], Path]) -> None:
    """Profiles the model on images or on videos."""
    config, image, points, folder = job
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    priced = priced_of(config, image)
    whole_model = priced.at(priced.placement(points[0].sizes, 1)).profile(0)
    found: dict[str, Any] = {"gradient_bytes": whole_model.gradient_bytes, "levels": {}}
    for sp in DEGREES:
        levels = costs_of_levels(priced, image, sp, points)
        found["levels"][str(sp)] = [[asdict(c) for c in level] for level in levels]
    whole = _file(folder, image).with_suffix(".part")
    whole.write_text(json.dumps(found))
    whole.rename(_file(folder, image))


def _assemble(points: Sequence[Point], folder: Path) -> Table:
    costs: dict[int, dict[Point, tuple[Cost, ...]]] = {sp: {} for sp in DEGREES}
    gradients = 0.0
    for image in (False, True):
        found = json.loads(_file(folder, image).read_text())
        gradients = max(gradients, float(found["gradient_bytes"]))
        for sp in DEGREES:
            levels = [[Cost(**c) for c in level] for level in found["levels"][str(sp)]]
            for i, point in enumerate(_of(points, image)):
                costs[sp][point] = tuple(level[i] for level in levels)
    # parameters, accumulated gradients and two moments in one dtype, as dcpc.api.plan counts them
    return Table(tuple(points), costs, 4 * gradients, gradients)
