"""Models by `dcpc.compile(pipeline=)` on gloo ranks against the plain model, in float64.

Each rank compiles, loads with `dcpc.DataLoader`, and takes `train_step` and SGD over one epoch. The
plain model runs each sample alone. Micro-batches differ in shape, steps in their number.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor, nn

import dcpc
from dcpc.commands.check import SPLITTING
from dcpc.runtime.data.weights import SAMPLES, Weight
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.runtime.pipeline.schedule.actions import BACKWARD_INPUT
from tests.cases import language_models, video_models
from tests.cases.asks import far, trained
from tests.cases.stages import CASES, PipelineCase
from tests.exact.pipeline_peaks import largest_error

TIMEOUT_S = 600.0
# (ranks, stages, ranks of a stage): the last but one are 2 pipelines of 2 stages.
WORLDS, QUICK_WORLDS = ((2, 2, 1), (4, 4, 1), (4, 2, 1), (4, 2, 2)), ((2, 2, 1),)
BATCH = 3  # most samples of a micro-batch
PEAKS = 3  # steps of which bytes are measured


@dataclass(frozen=True, slots=True)
class ExactModel:
    """A model, and what it is trained on.

    Attributes:
        case: the model in float64, its inputs and random data.
        lengths: of the samples; the last is the longest, and every other one a bucket.
        weight: what its loss is a mean over.
        pad: what fills up samples; None: the model's numbers hang on padding, and each of the
            lengths is a bucket.
    """

    case: PipelineCase
    lengths: tuple[Mapping[str, int], ...]
    weight: Weight = SAMPLES
    pad: Mapping[str, int | float] | None = None

    @property
    def buckets(self) -> list[dict[str, int]]:
        every = self.lengths[:: 1 if self.pad is None else -2]
        return [{**sizes, "batch": BATCH} for sizes in every]


TEXT = tuple({"seq": n} for n in (5, 9, 16, 24, 31, 37, 48))
PAIRS = tuple({"source": n, "target": 1 + 3 * n % 17} for n in (5, 9, 16, 31, 48))
CLIPS = tuple(
    {"frames": frames, "height": height, "width": width}
    for frames, height, width in ((2, 4, 4), (3, 5, 6), (2, 7, 8), (4, 8, 6))
)
PAD = {"input_ids": 0, "labels": -100}
SHIFTED = dcpc.CountLabels("labels", shift=1)

MODELS = {
    "gpt_tied": ExactModel(CASES["gpt_tied"], TEXT, "labels", PAD),
    "t5": ExactModel(CASES["t5"], PAIRS, "labels", {**PAD, "attention_mask": 0}),
    "stdit": ExactModel(CASES["stdit"], CLIPS),
    "stdit of 1 layer": ExactModel(replace(CASES["stdit"], make=video_models.model), CLIPS),
    "llama": ExactModel(CASES["llama"], TEXT, SHIFTED, PAD),
    "gpt2": ExactModel(CASES["gpt2"], TEXT, SHIFTED, PAD),
}
QUICK, IN_GROUPS = ("gpt_tied", "gpt2"), ("gpt_tied", "t5", "llama")


@dataclass(frozen=True, slots=True)
class Samples:
    """Random samples of a model.

    Attributes:
        case: of the model.
        lengths: of each sample.
    """

    case: PipelineCase
    lengths: tuple[Mapping[str, int], ...]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        made = self.case.data({"batch": 1, **self.lengths[i]}, i)
        return {name: x[0] for name, x in made.items()}

    def dims(self, i: int) -> dict[str, int]:
        """Returns the named dims of a sample."""
        return dict(self.lengths[i])


@dataclass(frozen=True, slots=True)
class ExactRun:
    """A model on some ranks.

    Attributes:
        model: its name.
        ranks: of the run.
        stages: of each pipeline.
        counts: of each step, the micro-batches that each rank ran.
        shapes: distinct shapes of micro-batches on this rank.
        apart: backwards that ran in two parts, on all ranks.
        worst: relative error of a loss or gradient of a step, or of the state after the epoch.
        sp: ranks of a stage.
        peak: largest relative error of the bytes that a stage is told to need in a step.
    """

    model: str
    ranks: int
    stages: int
    counts: tuple[tuple[int, ...], ...]
    shapes: int
    apart: int
    worst: float
    sp: int
    peak: float


def run_exact(quick: bool) -> list[ExactRun]:
    """Returns each case: the worst of its ranks."""
    found = []
    for ranks, stages, sp in QUICK_WORLDS if quick else WORLDS:
        names = QUICK if quick else IN_GROUPS if sp > 1 else tuple(MODELS)
        found += run_world(names, ranks, stages, sp, 12 if quick else 40)
    return found


def run_world(
    names: tuple[str, ...], ranks: int, stages: int, sp: int, samples: int
) -> list[ExactRun]:
    """Returns models on some ranks: the worst of these.

    Args:
        names: of `MODELS`.
        ranks: that run.
        stages: of each pipeline.
        sp: ranks of a stage.
        samples: of the epoch.
    """
    every = run_ranks(_on_rank, ranks, names, stages, sp, samples, timeout_s=TIMEOUT_S, fork=True)
    found = []
    for same in zip(*every, strict=True):
        peak = max(run.peak for run in same)
        found.append(replace(max(same, key=lambda run: run.worst), peak=peak))
    return found


def _on_rank(
    rank: int, names: tuple[str, ...], stages: int, sp: int, samples: int
) -> list[ExactRun]:
    warnings.simplefilter("ignore")
    language_models.in_float64()  # transformers' losses and norms cast to float32
    return [_run(name, stages, sp, samples) for name in names]


def _run(name: str, stages: int, sp: int, samples: int) -> ExactRun:
    own = MODELS[name]
    case, drawn = own.case, random.Random(name)
    data = Samples(case, tuple(drawn.choice(own.lengths) for _ in range(samples)))
    compiled = dcpc.compile(
        case.make(), dcpc.Buckets(case.inputs, own.buckets), pipeline=stages, sp=sp,
        backend="eager", device=SPLITTING, verify="off",
    )  # fmt: skip
    tokens = 4 * max(prod(sizes.values()) for sizes in own.lengths)
    loader = dcpc.DataLoader(data, compiled, tokens_per_step=tokens, pad=own.pad, weight=own.weight)
    steps, alone = list(loader), case.make()
    found = trained(compiled, steps, alone, data, _counted(own.weight))
    if sorted(found.samples) != list(range(samples)):
        raise AssertionError(f"{name}: got samples {sorted(found.samples)}, not each once")
    worst = max(found.worst, _state_error(compiled, alone))
    shapes = {tuple(tuple(x.shape) for x in mb.inputs.values())
              for step in steps for mb in step.micro_batches}  # fmt: skip
    apart = sum(text.count(BACKWARD_INPUT) for step in steps for text in step.plan.pipelines)
    ranks = compiled.groups.world
    peak = largest_error(compiled, steps[:PEAKS])
    return ExactRun(name, ranks, stages, tuple(found.counts), len(shapes), apart, worst, sp, peak)


def _counted(weight: Weight) -> Callable[[Mapping[str, Tensor]], int]:
    if weight == SAMPLES:
        return lambda sample: 1
    counts = dcpc.CountLabels(weight) if isinstance(weight, str) else weight
    return lambda sample: int(counts(sample))


def _state_error(compiled: nn.Module, alone: nn.Module) -> float:
    got, plain = compiled.state_dict(), alone.state_dict()
    return max(far(got[name], plain[name]) for name in plain)
