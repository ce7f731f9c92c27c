"""`torch.compile(backend="dcpc")` beside Inductor, both with dynamic=True, on the zoo's models.

A row a model, each in a process of its own, with Inductor's caches off:

    exact       float64, five shapes, dcpc's graphs by eager kernels: the loss, every other floating
                output and all gradients against the plain model's
    float32     the same by Inductor's kernels, and Inductor without dcpc beside it: models compute
                some values in float32 whatever their dtype, and fused kernels round otherwise
    recompiles  captures by Dynamo after the first shape that it does not make for backend "eager",
                too: a branch on a size in the model asks for another graph, whatever compiles it
    traces      of dcpc for the five shapes, and variants
    first call  forward and backward of the first shape, float32: seconds of dcpc over Inductor's,
                by the clock and of the processor (g++ with it), which what runs beside it leaves
    calls       forward and backward of all five shapes, medians of interleaved calls: the same, in
                seconds of the one thread that runs them: those it waits for others are not in it
    shortest    the same of the first shape alone, where most is Python

A model that dcpc refuses counts as not ok; its reason is in the table, as is Inductor's where that
fails. The zoo's models are narrow: a call of the first shape takes a millisecond, most of it
Python. A GPT of a real width stands beside them. `--quick` compares three models and times one.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median

import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

from benchmarks.harness import Cell, finish, parser, print_table
from dcpc.buckets import Sizes
from dcpc.dynamo import backend
from dcpc.verify.inputs import example_inputs
from models.gpt import GPT, GPTConfig
from tests.zoo.models import DEPTH, NAMED, ZooModel

QUICK = ("transformers Llama", "transformers T5", "diffusers PixArt")
QUICK_TIMED = "transformers Llama"
WIDE = GPTConfig(dim=512, n_layers=4, n_heads=8)
WIDE_LENGTHS = (96, 200, 312, 480, 512)
REPEATS = 15
NAN = float("nan")
SHAPES = 5
# Least lengths of each shape: of texts, of latents of images, of latents of videos.
LENGTHS = {
    "seq": (32, 94, 200, 350, 500), "source": (40, 120, 230, 400, 480), "text": (7, 12, 20, 32, 48),
    "height": (4, 8, 10, 12, 16), "width": (5, 9, 14, 20, 26),
}  # fmt: skip
VIDEO_LENGTHS = {
    "frames": (2, 3, 3, 4, 4), "height": (3, 4, 5, 6, 8), "width": (4, 5, 7, 9, 12),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Race:
    """dcpc beside Inductor in float32; ratios are dcpc's seconds over Inductor's.

    Attributes:
        baseline: why Inductor fails; "" if it does not.
        first_call: by the clock; NaN where Inductor fails in it.
        first_processor: the same of the processor, of this process and of those that it started.
        calls: later calls of all shapes.
        shortest: later calls of the first shape.
        rounding: dcpc's relative difference from the plain model in float32.
        inductors: the same of Inductor without dcpc.
    """

    baseline: str = ""
    first_call: float = NAN
    first_processor: float = NAN
    calls: float = NAN
    shortest: float = NAN
    rounding: float = NAN
    inductors: float = NAN


@dataclass(frozen=True, slots=True)
class BackendRow:
    """What was found of one model.

    Attributes:
        model: its name.
        error: largest relative difference from the plain model.
        recompiles: captures after the first shape, beyond those of `branches`.
        branches: captures after the first shape by backend "eager".
        refused: why dcpc does not take it; "" if it does.
        race: in float32, beside Inductor.
    """

    model: str
    error: float
    recompiles: int
    branches: int
    refused: str
    race: Race


def shapes(model: ZooModel) -> list[Sizes]:
    """Returns five shapes from about 32 to 512 tokens (videos: 250 to 1,300).

    Dims are all different, none of them 1: Dynamo takes dims that are equal in a first call for
    one, and captures again where they differ.
    """
    lengths = LENGTHS | (VIDEO_LENGTHS if "frames" in model.coverage_sizes else {})
    dims = [n for n in model.coverage_sizes if n != "batch"]
    return [_distinct({"batch": 2 + i % 2, **{n: lengths[n][i] for n in dims}}, i)
            for i in range(SHAPES)]  # fmt: skip


def _distinct(sizes: Sizes, more: int) -> dict[str, int]:
    found: dict[str, int] = {"batch": sizes["batch"]}
    for number, (name, size) in enumerate(sizes.items()):
        if name != "batch":
            least = size + 2 * number + more % 2 * 2
            taken = {n * k for n in found.values() for k in (1, 2)}
            found[name] = next(
                n for n in range(max(least, 4), least + 99) if not {n, 2 * n} & taken
            )
    return found


def outputs_of(returned: object) -> list[Tensor]:
    """Returns the floating tensors that a model's forward returned, the loss first."""
    if isinstance(returned, Tensor):
        return [returned]
    values = returned.values() if isinstance(returned, Mapping) else list(returned)  # type: ignore[call-overload]
    return [x for x in values if isinstance(x, Tensor) and x.is_floating_point()]


def run(model: Callable[..., object], own: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Returns the outputs of a call, then the gradients of the loss."""
    for p in own.parameters():
        p.grad = None
    found = outputs_of(model(**inputs))
    found[0].backward()
    gradients = (p.grad for p in own.parameters() if p.grad is not None)
    return [*(x.detach() for x in found), *gradients]


def worst(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Returns the largest difference, relative to each tensor's largest element."""
    scale = max(float(x.abs().max()) for x in want)
    gaps = (
        float((a - b).abs().max()) / max(float(b.abs().max()), 1e-3 * scale)
        for a, b in zip(got, want, strict=True)
    )
    return max(gaps)


def inputs_at(model: ZooModel, sizes: Sizes, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns inputs of one shape."""
    found = example_inputs(model.buckets, sizes, model.example)
    return {n: x.to(dtype) if x.is_floating_point() else x for n, x in found.items()}


def exact(model: ZooModel) -> tuple[float, int, int]:
    """Returns the largest relative difference in float64, and captures after the first shape.

    Of the latter those of dcpc beyond those of backend "eager", and those.
    """
    options = {"fallback": "error", "backend": "eager"}
    plain, own = model.make().double(), model.make().double()
    every = [inputs_at(model, sizes, torch.float64) for sizes in shapes(model)]
    compiled = torch.compile(own, backend=backend, dynamic=True, options=options)
    found, before = 0.0, 0
    for number, inputs in enumerate(every):
        found = max(found, worst(run(compiled, own, inputs), run(plain, plain, inputs)))
        if not number:
            before = counters["stats"]["unique_graphs"]
    captures = counters["stats"]["unique_graphs"] - before
    torch._dynamo.reset()
    captured = torch.compile(model.make().double(), backend="eager", dynamic=True)
    for number, inputs in enumerate(every):
        captured(**inputs)
        if not number:
            before = counters["stats"]["unique_graphs"]
    branches = counters["stats"]["unique_graphs"] - before
    return found, captures - branches, branches


def race(
    make: Callable[[], nn.Module], every: Sequence[Mapping[str, Tensor]], repeats: int
) -> Race:
    """Returns dcpc beside Inductor.

    Args:
        make: returns the model.
        every: inputs of each shape.
        repeats: calls of each shape.
    """
    systems: dict[str, tuple[Callable[..., object], nn.Module]] = {}
    first: dict[str, tuple[float, float]] = {}
    apart: dict[str, float] = {}
    plain = make().float()
    wanted = [[x.clone() for x in run(plain, plain, inputs)] for inputs in every]
    torch.compile(nn.Linear(3, 3), dynamic=True)(
        torch.ones(4, 3)
    ).sum().backward()  # loads Inductor
    torch._dynamo.reset()
    failure = ""
    for name, how in (("dcpc", backend), ("inductor", "inductor")):
        own = make().float()
        systems[name] = torch.compile(own, backend=how, dynamic=True), own
        try:
            start_s, began_s = time.perf_counter(), _processor_s()
            run(*systems[name], every[0])
            first[name] = time.perf_counter() - start_s, _processor_s() - began_s
            # The first again: Inductor's graph of one shape may not take another's, where it fails.
            pairs = zip([*every, every[0]], [*wanted, wanted[0]], strict=True)
            apart[name] = max(worst(run(*systems[name], x), w) for x, w in pairs)
        except Exception as error:
            if name == "dcpc":
                raise
            failure = _words(error)
    calls = shortest = NAN
    if not failure:
        try:
            ours, theirs = _seconds(systems, every, repeats)
            calls, shortest = sum(ours) / sum(theirs), ours[0] / theirs[0]
        except _BaselineError as error:
            failure = _words(error.__cause__ or error)
    first_call, first_processor = (
        ours / theirs
        for ours, theirs in zip(first["dcpc"], first.get("inductor", (NAN, NAN)), strict=True)
    )
    inductors = apart.get("inductor", NAN)
    return Race(failure, first_call, first_processor, calls, shortest, apart["dcpc"], inductors)


def _processor_s() -> float:
    """Returns processor seconds of this process and of what it started and has waited for."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


class _BaselineError(Exception):
    """Inductor without dcpc fails."""


def _seconds(
    systems: Mapping[str, tuple[Callable[..., object], nn.Module]],
    every: Sequence[Mapping[str, Tensor]],
    repeats: int,
) -> tuple[list[float], list[float]]:
    """Returns seconds of a call of each shape, of dcpc and of Inductor: medians, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for inputs in every:
        took: dict[str, list[float]] = {name: [] for name in systems}
        for turn in range(repeats):
            for name in sorted(systems, reverse=bool(turn % 2)):
                start_s = time.thread_time()
                try:
                    run(*systems[name], inputs)
                except Exception as failure:
                    if name == "dcpc":
                        raise
                    # Which graph a shape meets depends on which it met last: a call may fail later.
                    raise _BaselineError(failure) from failure
                took[name].append(time.thread_time() - start_s)
        for name, each in took.items():
            seconds[name].append(median(each))
    return seconds["dcpc"], seconds["inductor"]


def _words(failure: BaseException) -> str:
    lines = [line for line in str(failure).splitlines() if line.strip()]
    return f"{type(failure).__name__}: {' '.join(lines[:2])}"[:200]


def row(name: str, quick: bool) -> BackendRow:
    """Returns what is found of one model."""
    _alone()
    DEPTH["layers"] = 1
    model = NAMED[name]
    refused, error, recompiles, branches = "", NAN, 0, 0
    try:
        error, recompiles, branches = exact(model)
    except Exception as refusal:
        refused = _words(refusal)
    if quick and name != QUICK_TIMED:
        timed = Race("not timed")
    else:
        every = [inputs_at(model, sizes, torch.float32) for sizes in shapes(model)]
        try:
            timed = race(model.make, every, 5 if quick else REPEATS)
        except Exception as failure:  # of dcpc: its row is not ok, and the others are wanted
            refused, timed = refused or _words(failure), Race()
    found = BackendRow(name, error, recompiles, branches, refused, timed)
    print(found, file=sys.stderr, flush=True)
    return found


def wide() -> float:
    """Returns dcpc's seconds over Inductor's of a GPT of a real width."""
    _alone()
    every = []
    for number, seq in enumerate(WIDE_LENGTHS):
        torch.manual_seed(number)
        ids = torch.randint(WIDE.vocab_size, (2 + number % 2, seq))
        every.append({"input_ids": ids, "labels": ids})
    return race(lambda: GPT(WIDE), every, 5).calls


def _alone() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark; 1 where a number is wrong."""
    asked = parser("backend", "torch.compile(backend='dcpc') beside Inductor.")
    asked.add_argument("--models", nargs="+", choices=[*NAMED], help="these alone")
    arguments = asked.parse_args(argv)
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    start_s = time.perf_counter()
    names = tuple(arguments.models or (QUICK if arguments.quick else NAMED))
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        1, mp_context=spawn, max_tasks_per_child=None if arguments.quick else 1
    ) as pool:
        rows = [*pool.map(row, names, [arguments.quick] * len(names))]
        width = NAN if arguments.quick else pool.submit(wide).result()
    header = (
        "model", "error", "recompiles", "branches", "first call", "processor", "calls",
        "shortest", "float32", "Inductor's", "refused", "Inductor",
    )  # fmt: skip
    cells = [
        (
            r.model, f"{r.error:.1e}", r.recompiles, r.branches, r.race.first_call,
            r.race.first_processor, r.race.calls, r.race.shortest, f"{r.race.rounding:.1e}",
            f"{r.race.inductors:.1e}", r.refused, r.race.baseline,
        )
        for r in rows
    ]  # fmt: skip
    print_table("torch.compile(backend='dcpc') over Inductor", header, cells)
    ok = [r for r in rows if not r.refused]
    timed = [r.race for r in ok if not r.race.baseline]
    started = [r.race for r in ok if r.race.first_call > 0]
    found: dict[str, Cell] = {
        "models": len(rows), "models_ok": len(ok),
        "worst_relative_error": max((r.error for r in ok), default=NAN),
        "worst_float32_error": max((r.rounding for r in timed), default=NAN),
        "worst_float32_error_inductor": max((r.inductors for r in timed), default=NAN),
        "recompiles": sum(r.recompiles for r in ok),
        "seconds_over_inductor": median(r.calls for r in timed),
        "seconds_over_inductor_shortest": median(r.shortest for r in timed),
        "first_call_over_inductor": median(r.first_call for r in started),
        "first_call_over_inductor_processor": median(r.first_processor for r in started),
        "inductor_fails": sum(bool(r.race.baseline) for r in rows) if not arguments.quick else 0,
        "seconds_over_inductor_wide": width,
    }  # fmt: skip
    print(f"in {time.perf_counter() - start_s:.0f} s")
    finish("backend", found, arguments.json)
    return int(not found["worst_relative_error"] <= 1e-10)  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
