"""Predicted seconds against measured ones: `python -m benchmarks.timing [--quick] [--json FILE]`.

Two ranks calibrate on a model, and predict forward and backward at sizes and settings that the
calibration never ran. Then they run them, interleaved; a point's seconds are the lower quartile of
its rounds, the mean of both ranks. On one rank they are those that its one thread computed, so that
other processes do not count; of a group, which waits, those that passed. `disturbed` is what passed
over what was computed: near 1 on a quiet machine; else a group's seconds say little. `slower_since`
is what a fixed piece of work took after the measurements over what it took before the calibration:
of a machine whose speed changed in between all predictions are off by that. `median_time_error` is
without regard to it, `median_error_at_that_speed` of predictions times it.

A ranking error is a pair of settings of one shape whose seconds that passed differ by more than 10%
and whose predicted seconds are in the other order.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn

import dcpc
from benchmarks import harness
from dcpc.buckets import BATCH
from dcpc.commands.calibrate import calibrate
from dcpc.plan.runnable import Runnable
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.symbolic_profile import evaluator, find
from dcpc.verify.inputs import example_inputs
from examples.forced import ForcedVariant
from models.gpt import GPT, GPTConfig
from models.stdit import RectifiedFlow, STDiT, STDiTConfig, input_specs

RANKS = 2
VOCAB = 258
DIFFERS = 1.10
LIMIT_S = 900.0
FIXED_ROUNDS = 41


@dataclass(frozen=True, slots=True)
class Job:
    """A model to calibrate on and to predict.

    Attributes:
        model: makes it.
        buckets: to calibrate for.
        shapes: to predict, other than the buckets'.
        backend: "eager" or "inductor".
        example: returns some of the inputs, as for `dcpc check`.
        rounds: of measuring.
        budget_s: of calibrating.
    """

    model: Callable[[], nn.Module]
    buckets: dcpc.Buckets
    shapes: tuple[Mapping[str, int], ...]
    backend: str
    example: Callable[[Mapping[str, int]], dict[str, Tensor]] | None = None
    rounds: int = 9
    budget_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Point:
    """One comparison.

    Attributes:
        shape: batch included.
        setting: sp and share of the recompute.
        predicted_s: after calibration.
        uncalibrated_s: by the roofline of the device's figures.
        measured_s: what it took.
        passed_s: by the clock on the wall.
    """

    shape: Mapping[str, int]
    setting: tuple[int, float]
    predicted_s: float
    uncalibrated_s: float
    measured_s: float
    passed_s: float

    @property
    def error(self) -> float:
        """Relative."""
        return abs(self.predicted_s / self.measured_s - 1)

    def row(self) -> tuple[harness.Cell, ...]:
        """A line of the table."""
        sizes = " ".join(f"{n} {s}" for n, s in self.shape.items())
        sp, share = self.setting
        off = 100 * (self.predicted_s / self.measured_s - 1)
        seconds = (self.predicted_s, self.measured_s, self.uncalibrated_s)
        return (f"{sizes}, sp {sp}, recompute {share:.0%}", *(1e3 * s for s in seconds), off)


def gpt() -> nn.Module:
    """Returns a four-layer GPT of ours."""
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=VOCAB, dim=256, n_layers=4, n_heads=8))


def stdit() -> nn.Module:
    """Returns two spatial and two temporal blocks of STDiT-3, and their loss."""
    torch.manual_seed(0)
    return RectifiedFlow(STDiT(VIDEO))


def clips(sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Returns the inputs of the STDiT whose values matter: times and sizes above 0."""
    batch = sizes["batch"]
    return {
        "timestep": 1000 * torch.rand(batch), "fps": torch.full((batch,), 24.0),
        "pixel_height": torch.full((batch,), 8.0 * sizes["height"]),
        "pixel_width": torch.full((batch,), 8.0 * sizes["width"]),
    }  # fmt: skip


VIDEO = STDiTConfig(depth=2, dim=96, heads=4, text_dim=48, text_len=12)
CLIPS = ((4, 11, 15), (8, 16, 17), (8, 23, 24), (16, 24, 31))
TEXT = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
SETTINGS = ((1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0))


def _clip(frames: int, height: int, width: int) -> dict[str, int]:
    return {"frames": frames, "height": height, "width": width}


def jobs(quick: bool) -> dict[str, Job]:
    """Returns the models to measure, by name."""
    text = dcpc.Buckets(TEXT, [{"seq": n} for n in (64, 128, 256, 512, 1024)])
    shapes = ({"batch": 1, "seq": 777}, {"batch": 3, "seq": 203}, {"batch": 2, "seq": 450})
    if quick:
        return {"GPT": Job(gpt, text, shapes, backend="eager", rounds=4, budget_s=9.0)}
    video = dcpc.Buckets(input_specs(VIDEO), [_clip(*clip) for clip in CLIPS])
    unseen = ((1, 7, 17, 23), (3, 5, 12, 17), (1, 13, 22, 30))
    videos = tuple({"batch": batch, **_clip(*clip)} for batch, *clip in unseen)
    return {
        "GPT": Job(gpt, text, shapes, "eager"), "GPT, Inductor": Job(gpt, text, shapes, "inductor"),
        "STDiT": Job(stdit, video, videos, "eager", clips),
    }  # fmt: skip


def on_rank(rank: int, job: Job) -> tuple[list[Point], float, float, float]:
    """Returns the points, the seconds of calibrating, its own fit error and `slower_since`."""
    warnings.simplefilter("ignore")
    model = job.model()
    before_s = _fixed_work_s()
    found = calibrate(
        model, job.buckets, backend=job.backend, example=job.example, budget_s=job.budget_s
    )
    planning = {"backend": job.backend, "device": "cpu", "recompute": "none", "memory": 1e12}
    unseen = dcpc.Buckets(
        {name: str(spec) for name, spec in job.buckets.inputs.items()},
        [{n: size for n, size in shape.items() if n != BATCH} for shape in job.shapes],
    )
    compiled = dcpc.compile(model, unseen, calibration=found, **planning)
    runnable = compiled.runnable
    runs: list[tuple[Mapping[str, int], tuple[int, float], ForcedVariant, Mapping[str, Tensor]]]
    runs = []
    for shape, (sp, share) in itertools.product(job.shapes, SETTINGS):
        placement = runnable.priced.placement(shape, sp)
        steps = runnable.priced.at(placement).steps
        forced = ForcedVariant(compiled, placement, round(share * steps))
        inputs = example_inputs(compiled.buckets, shape, job.example)
        runs.append((shape, (sp, share), forced, inputs))
    spent = [
        [_seconds(forced, inputs) for *_, forced, inputs in runs] for _ in range(job.rounds + 1)
    ]
    slower = _fixed_work_s() / before_s
    seconds = torch.tensor(spent[1:], dtype=torch.float64)  # the first round compiles
    dist.all_reduce(seconds)
    low = (seconds / dist.get_world_size()).sort(dim=0).values[len(seconds) // 4]
    points = []
    for (shape, setting, forced, _), (passed, computed) in zip(runs, low.tolist(), strict=True):
        measured = computed if setting[0] == 1 else passed
        points.append(Point(shape, setting, *_predicted(forced, runnable, shape), measured, passed))
    return points, found.seconds_s, found.fits.error, slower


def _fixed_work_s() -> float:
    """Returns the seconds of some products and passes over memory, the median, of both ranks."""
    x, weight = torch.randn(4096, 256), torch.randn(256, 256)
    product, made = torch.empty(4096, 256), torch.empty(4096, 256)  # no pages from the system
    spent = []
    for _ in range(FIXED_ROUNDS):
        start_s = time.thread_time()
        torch.tanh(torch.mm(x, weight, out=product), out=made)
        spent.append(time.thread_time() - start_s)
    typical = torch.tensor(median(spent), dtype=torch.float64)
    dist.all_reduce(typical)
    return typical.item() / dist.get_world_size()


def _predicted(
    forced: ForcedVariant, runnable: Runnable, shape: Mapping[str, int]
) -> tuple[float, float]:
    """Returns the seconds with and without calibration."""
    study = runnable.priced.at(forced.placement)
    at, dims = evaluator(study.profile(forced.menu_step)), study.local_sizes(shape)
    return forced.predict(shape).seconds_s, at.seconds(dims, find("cpu"))


def _seconds(forced: ForcedVariant, inputs: Mapping[str, Tensor]) -> tuple[float, float]:
    """Returns the seconds that passed, and those that this thread computed."""
    forced.zero_grad()
    dist.barrier()
    passed_s, computed_s = time.perf_counter(), time.thread_time()
    forced(**inputs).backward()
    return time.perf_counter() - passed_s, time.thread_time() - computed_s


def ranking_errors(points: Sequence[Point]) -> tuple[int, int]:
    """Returns how many pairs are in the wrong order, and how many there are to compare."""
    wrong = pairs = 0
    for a, b in itertools.combinations(points, 2):
        slow, fast = (a, b) if a.passed_s > b.passed_s else (b, a)
        if a.shape == b.shape and slow.passed_s > DIFFERS * fast.passed_s:
            pairs += 1
            wrong += slow.predicted_s <= fast.predicted_s
    return wrong, pairs


def main() -> None:
    """Runs the benchmark."""
    args = harness.parser("timing", __doc__.partition("\n")[0]).parse_args()
    points: list[Point] = []
    calibration_s = 0.0
    slower, at_that_speed = [], []
    header = ("point", "predicted ms", "measured", "uncalibrated", "off %")
    for name, job in jobs(args.quick).items():
        mine, seconds_s, error, since = run_ranks(on_rank, RANKS, job, timeout_s=LIMIT_S)[0]
        points += mine
        slower.append(since)
        at_that_speed += [abs(since * p.predicted_s / p.measured_s - 1) for p in mine]
        calibration_s = max(calibration_s, seconds_s)
        title = f"{name}: calibrated in {seconds_s:.1f} s, fit error {error:.1%}"
        title += f"; since then the machine is {since:.2f} times as slow"
        harness.print_table(title, header, [p.row() for p in mine], digits=1)
    wrong, pairs = ranking_errors(points)
    figures = {
        "points": len(points), "median_time_error": median(p.error for p in points),
        "median_error_at_that_speed": median(at_that_speed),
        "median_time_error_one_rank": median(p.error for p in points if p.setting[0] == 1),
        "max_time_error": max(p.error for p in points), "ranking_errors": wrong,
        "ranking_pairs": pairs, "calibration_s": calibration_s, "slower_since": median(slower),
        "disturbed": median(p.passed_s / p.measured_s for p in points if p.setting[0] == 1),
    }  # fmt: skip
    harness.finish("timing", figures, args.json, digits=4)


if __name__ == "__main__":
    main()
