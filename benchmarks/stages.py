"""Cuts into pipeline stages: unequal devices, a mixture of lengths, and stages run on two ranks.

Sky Computing (arXiv 2202.11836) trains BERT of 160 layers on 64 nodes slowed down by different
factors, and cuts for one shape. Reference figures of such an instance, 320 layers (an attention and
a feed-forward one of each block) on 64 devices of 4 speeds: even cut 46.9, exact 17.03, fractional
bound 16.61, solved in under 1 s. Its layers and its order of devices are not recorded. The instance
here is drawn: speeds 1, 2, 3, 4 for 16 devices each in random order, layers even in 0.78 to 1.22,
the unit such that the bound is 16.61. The spread and the seed are those whose even and exact cut
come nearest to the reference among 60 that were drawn: its exact cut is the optimum of this
instance, whatever the reference's was. `sky_gap_mean` is the mean gap to the bound of ten others.

The mixture's models are traced, and priced for an H200 by the profile. The gain is over the best of
the cuts that are each best for one length.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from benchmarks.harness import Cell, parser, print_table, timed, write_report
from dcpc.buckets import Buckets
from dcpc.compiled.pipeline import (
    MixedBucket,
    ProgramCosts,
    ProgramStage,
    StageDevice,
    StagePlan,
    chain_of,
    pipeline_work,
    plan_stages,
)
from dcpc.compiled.pipeline.costs import mixture_dims
from dcpc.passes.stages.bottleneck import fractional_bound
from dcpc.passes.stages.costs import CutCosts
from dcpc.passes.stages.mixture import best_cut
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import traced
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.runtime.pipeline.executor import PipelineBatch
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.schedule import (
    Action,
    Hop,
    PipelineSchedule,
    PipelineWork,
    one_f_one_b,
    replay,
)
from dcpc.runtime.pipeline.step import pipeline_step
from dcpc.symbolic_profile import Device, find
from models.gpt import GPT, GPTConfig

Floats = npt.NDArray[np.float64]

SKY_BOUND = 16.61
LAYERS, SPEEDS, EACH = 320, (1.0, 2.0, 3.0, 4.0), 16
SPREAD, SEED = 0.22, 7
TOKENS = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
PAIRS = {"input_ids": "int64[batch, source]", "labels": "int64[batch, target]"}
# Micro-batches of one shape each; long ones are rare, as in a corpus of texts.
LONG = (
    MixedBucket({"batch": 32, "seq": 512}, 0.5),
    MixedBucket({"batch": 4, "seq": 4096}, 0.3),
    MixedBucket({"batch": 1, "seq": 16384}, 0.2),
)
# Tasks whose answers are short, of the same length, and long.
TASKS = (
    MixedBucket({"batch": 8, "source": 2048, "target": 64}, 0.5),
    MixedBucket({"batch": 16, "source": 512, "target": 512}, 0.3),
    MixedBucket({"batch": 16, "source": 128, "target": 1024}, 0.2),
)
# What two ranks run: shapes of the micro-batches of a step, and how slow the second is.
RUN = (
    MixedBucket({"batch": 4, "seq": 128}, 0.5),
    MixedBucket({"batch": 1, "seq": 512}, 0.5),
)
ORDER = (0, 1, 1, 0, 1, 0)
REPEATS = 2
RUN_DEVICES = (StageDevice(), StageDevice(1 / REPEATS))


# --------------------------------------------------------------------------------- Sky Computing


def sky_instance(seed: int, spread: float = SPREAD) -> tuple[Floats, Floats]:
    """Seconds of each layer on a device of speed 1, and the devices' speeds in their order."""
    rng = np.random.default_rng(seed)
    layers = rng.uniform(1 - spread, 1 + spread, LAYERS)
    speeds = rng.permutation(np.repeat(SPEEDS, EACH))
    return layers * SKY_BOUND / fractional_bound(layers, speeds), speeds


def even_cut_s(layers: Floats, speeds: Floats) -> float:
    """Seconds of the slowest device if each has as many layers."""
    return float((layers.reshape(len(speeds), -1).sum(axis=1) / speeds).max())


def exact_cut_s(layers: Floats, speeds: Floats) -> float:
    """Seconds of the slowest device in the best cut, the order of devices free."""
    kinds, counts = np.unique(speeds, return_counts=True)
    sums = np.concatenate([[0.0], np.cumsum(layers)])
    seconds = np.stack([(sums[None] - sums[:, None]) / kind for kind in kinds])[None, :, None]
    return best_cut(CutCosts(seconds, (1.0,), tuple(map(int, counts)))).expected_s


def sky(seeds: int) -> dict[str, Cell]:
    """Figures of the instance, and the mean gap of some others."""
    layers, speeds = sky_instance(SEED)
    with timed() as watch:
        exact = exact_cut_s(layers, speeds)
    others = [exact_cut_s(*sky_instance(seed)) / SKY_BOUND - 1 for seed in range(seeds)]
    return {
        "sky_even": even_cut_s(layers, speeds),
        "sky_exact": exact,
        "sky_bound": fractional_bound(layers, speeds),
        "sky_solve_s": watch.elapsed_s,
        "sky_gap_mean": sum(others) / len(others),
    }


# ------------------------------------------------------------------------------------- a mixture


def runnable_of(
    model: nn.Module, inputs: dict[str, str], mixture: Sequence[MixedBucket], device: Device
) -> Runnable:
    """The traced model."""
    lengths = [{n: size for n, size in b.sizes.items() if n != "batch"} for b in mixture]
    return Runnable(traced(model, Buckets(inputs, lengths), device, "eager"))


def gains(
    model: nn.Module,
    inputs: dict[str, str],
    mixture: Sequence[MixedBucket],
    every: Sequence[Sequence[tuple[StageDevice, int]]],
) -> list[tuple[float, float]]:
    """Of each set of devices the gain of one cut for a mixture over the best cut for one length.

    And the seconds that the solver took.

    Args:
        model: to trace; on the meta device it takes no memory.
        inputs: specs.
        mixture: shapes and their shares.
        every: kinds of devices, and how many there are of each.
    """
    runnable = runnable_of(model, inputs, mixture, find("h200"))
    program = runnable.traced.program
    priced = ProgramCosts(runnable, chain_of(program, mixture_dims(program, mixture)))
    found = []
    for kinds in every:
        costs = priced.cut_costs(mixture, kinds)
        with timed() as watch:
            cut = best_cut(costs)
        assert cut.exact, "the search was not cut short"
        alone = [best_cut(costs.only(i)) for i in range(len(mixture))]
        others = [costs.expected(costs.bottlenecks(c.borders, c.kinds)) for c in alone]
        found.append((min(others) / cut.expected_s, watch.elapsed_s))
    return found


def mixtures(quick: bool) -> list[tuple[str, float, float]]:
    """Name, gain and seconds to solve of each mixture.

    A decoder's blocks are alike at every length, and only its head weighs less at long ones. An
    encoder's share of T5 goes from a twentieth to nearly all with the lengths of a task.
    """
    depth = 4 if quick else 12
    with torch.device("meta"):
        gpt = GPT(GPTConfig(vocab_size=32000, dim=512, n_layers=8, n_heads=8))
        sizes = {"d_model": 1024, "d_kv": 64, "d_ff": 4096, "num_heads": 16}
        config = T5Config(**sizes, num_layers=depth, dropout_rate=0, decoder_start_token_id=0)
        t5 = T5ForConditionalGeneration(config).bfloat16()
    equal, unequal = [(StageDevice(), 4)], [(StageDevice(), 2), (StageDevice(0.5), 2)]
    names = ("GPT, 4 equal", "GPT, 2 of 4 of half the speed")
    found = zip(names, gains(gpt, TOKENS, LONG, (equal, unequal)), strict=True)
    rows = [(name, gain, solve_s) for name, (gain, solve_s) in found]
    return [(f"T5 of {depth} + {depth}, 4 equal", *gains(t5, PAIRS, TASKS, [equal])[0]), *rows]


# -------------------------------------------------------------------------------------- two ranks


class RepeatedStage:
    """A stage that does its work several times, as a slower device takes longer for it.

    Each of the runs has an equal part of the gradient, so that their sum is the stage's own.

    Attributes:
        busy_s: seconds of the processor in each call so far, in order.

    Args:
        stage: of a pipeline.
        repeats: how often.
    """

    def __init__(self, stage: ProgramStage, repeats: int) -> None:
        self.stage, self.repeats = stage, repeats
        self.index, self.count, self.parameters = stage.index, stage.count, stage.parameters
        self.received, self.sent = stage.received, stage.sent
        self.busy_s: list[float] = []

    def forward(
        self, inputs: Mapping[str, Tensor], received: tuple[Tensor, ...], seed: int = 0
    ) -> tuple[tuple[Tensor, ...], Any]:
        """What the stage sends, and what its backward needs."""
        start_s = time.thread_time()
        runs = [self.stage.forward(inputs, received, seed) for _ in range(self.repeats)]
        self.busy_s.append(time.thread_time() - start_s)
        return runs[0][0], [saved for _, saved in runs]

    def backward(self, saved: Any, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """Gradients of what it received."""
        shares = tuple(None if g is None else g / self.repeats for g in grads)
        start_s = time.thread_time()
        found = [self.stage.backward(each, shares) for each in saved]
        self.busy_s.append(time.thread_time() - start_s)
        return tuple(
            None if parts[0] is None else torch.stack(parts).sum(0)
            for parts in zip(*found, strict=True)
        )


def run_whole(stages: Sequence[ProgramStage], inputs: dict[str, Tensor]) -> tuple[float, float]:
    """Seconds of a micro-batch in one process, stage after stage: on the clock, and busy."""
    start_s, busy_s = time.perf_counter(), time.thread_time()
    sent: tuple[Tensor, ...] = ()
    kept = []
    for stage in stages:
        sent, saved = stage.forward(inputs, sent)
        kept.append(saved)
    gradients: tuple[Tensor | None, ...] = (torch.ones(()),)
    for stage, saved in zip(reversed(stages), reversed(kept), strict=True):
        gradients = stage.backward(saved, gradients)
    return time.perf_counter() - start_s, time.thread_time() - busy_s


@dataclass(frozen=True)
class RankSeconds:
    """What a rank measured, the fastest step and the fastest pass of the whole model.

    Attributes:
        step_s: of a step.
        busy_s: seconds of the processor in each action of a step.
        whole_s: of each micro-batch through the whole model, on the clock.
        whole_busy_s: the same, of the processor.
        error: the largest relative error of a gradient.
    """

    step_s: float
    busy_s: list[float]
    whole_s: list[float]
    whole_busy_s: list[float]
    error: float


def two_ranks(rank: int, model: nn.Module, plan: StagePlan, steps: int) -> RankSeconds:
    """Runs steps, and in between the whole model on both ranks at once."""
    torch.manual_seed(0)
    own = plan.stages[rank]
    stage = RepeatedStage(own, REPEATS if plan.devices[rank] == 1 else 1)
    sizes = [RUN[k].sizes for k in ORDER]
    data = [{n: torch.randint(512, (s["batch"], s["seq"])) for n in TOKENS} for s in sizes]
    batches = [PipelineBatch(d, s, 1.0) for d, s in zip(data, sizes, strict=True)]
    grid = PipelineGrid.make(Groups.default(), 2, stage.parameters)
    schedule = one_f_one_b(range(len(data)), ((0,) * len(data),) * 2)

    def step() -> float:
        model.zero_grad()
        named = model.named_parameters()
        return pipeline_step([stage], batches, schedule, grid, named).seconds_s

    step()
    made = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for inputs in data:
        (model(**inputs) / len(data)).backward()
    wanted = dict(model.named_parameters())
    error = max(_relative(made[n], wanted[n].grad) for n in own.learning)
    for inputs in data:  # compiles what the executor has not
        run_whole(plan.stages, inputs)
    stage.busy_s.clear()
    measured: list[float] = []
    passes: list[list[tuple[float, float]]] = []
    for _ in range(steps):
        dist.barrier()
        measured.append(step())
        dist.barrier()
        passes.append([run_whole(plan.stages, inputs) for inputs in data])
    count = 2 * len(data)
    busy = [stage.busy_s[i : i + count] for i in range(0, len(stage.busy_s), count)]
    whole_s, whole_busy_s = (
        min(([seconds[i] for seconds in each] for each in passes), key=sum) for i in (0, 1)
    )
    return RankSeconds(min(measured), min(busy, key=sum), whole_s, whole_busy_s, error)


def _scaled(
    work: PipelineWork, stages: Sequence[ProgramStage], whole_s: Sequence[float]
) -> PipelineWork:
    """The same work in seconds of this machine; messages, which are small, are left out.

    Args:
        work: as predicted.
        stages: of the model.
        whole_s: of each micro-batch what the whole model takes.
    """
    predicted_s = [sum(s.predict(RUN[k].sizes).seconds_s for s in stages) for k in ORDER]
    total = {k: sum(w for w, o in zip(whole_s, ORDER, strict=True) if o == k) for k in ORDER}
    each = [total[k] / ORDER.count(k) / p for k, p in zip(ORDER, predicted_s, strict=True)]
    costs = tuple(
        tuple(
            (replace(c, forward_s=c.forward_s * scale, backward_s=c.backward_s * scale),)
            for scale, (c,) in zip(each, row, strict=True)
        )
        for row in work.costs
    )
    return replace(work, costs=costs, hops=tuple((Hop(),) * len(ORDER) for _ in work.hops))


def _relative(found: Tensor, wanted: Tensor | None) -> float:
    assert wanted is not None, "the plain model has the gradient"
    return float((found - wanted).abs().max() / wanted.abs().max())


def measured(steps: int) -> dict[str, Cell]:
    """Figures of two ranks, one of which runs its work twice.

    The profile says what share of the model a stage is, forward and backward; how fast a core of
    this machine is says the whole model. On the clock, where whatever else runs on the machine is
    in; and in seconds of the processor, from which the same replay makes a step.

    Args:
        steps: that are measured.
    """
    torch.set_num_threads(1)
    model = GPT(GPTConfig(vocab_size=512, dim=192, n_layers=6, n_heads=6))
    plan = plan_stages(runnable_of(model, TOKENS, RUN, find("cpu")), model, RUN, RUN_DEVICES)
    assert sorted(plan.devices) == [0, 1], "both devices have a stage"
    found = run_ranks(two_ranks, 2, model, plan, steps, timeout_s=300.0, fork=True)
    schedule = one_f_one_b(range(len(ORDER)), ((0,) * len(ORDER),) * 2)
    devices = [RUN_DEVICES[d] for d in plan.devices]
    work = pipeline_work([[s] for s in plan.stages], [RUN[k].sizes for k in ORDER], devices)
    clock, busy = (
        replay(_scaled(work, plan.stages, np.mean(seconds, axis=0).tolist()), schedule).makespan_s
        for seconds in ([r.whole_s for r in found], [r.whole_busy_s for r in found])
    )
    ran = replay(_as_ran(work, schedule, [r.busy_s for r in found]), schedule).makespan_s
    step_s = max(r.step_s for r in found)
    return {
        "measured_s": step_s,
        "predicted_s": clock,
        "measured_over_predicted": step_s / clock,
        "busy_over_predicted": ran / busy,
        "gradient_error": max(r.error for r in found),
    }


def _as_ran(
    work: PipelineWork, schedule: PipelineSchedule, busy_s: Sequence[Sequence[float]]
) -> PipelineWork:
    """The same work with the seconds that each action took."""
    costs = []
    for row, order, seconds in zip(work.costs, schedule.orders, busy_s, strict=True):
        took = dict(zip(order, seconds, strict=True))
        pairs = ((c, took[Action("F", m)], took[Action("B", m)]) for m, (c,) in enumerate(row))
        costs.append(tuple((replace(c, forward_s=f, backward_s=b),) for c, f, b in pairs))
    return replace(work, costs=tuple(costs), hops=tuple((Hop(),) * len(ORDER) for _ in work.hops))


def main() -> None:
    """Prints and writes the figures."""
    args = parser("stages", "cuts into stages, for a mixture and unequal devices").parse_args()
    figures = sky(3 if args.quick else 10)
    print_table(
        "320 layers on 64 devices of 4 speeds",
        ["", "here", "reference"],
        [
            ["even cut", figures["sky_even"], 46.9],
            ["exact cut", figures["sky_exact"], 17.03],
            ["fractional bound", figures["sky_bound"], 16.61],
            ["seconds to solve", figures["sky_solve_s"], 1.0],
        ],
    )
    rows = mixtures(args.quick)
    print_table("one cut for a mixture", ["", "gain", "solve s"], rows)
    figures |= {
        "mixture_gain": rows[0][1],
        "mixture_gain_gpt": rows[1][1],
        "mixture_gain_gpt_unequal": rows[2][1],
        "mixture_solve_s": max(solve_s for _, _, solve_s in rows),
    }
    figures |= measured(10 if args.quick else 30)
    print_table(
        "two gloo ranks, one of half the speed",
        ["", "value"],
        [
            [n, figures[n]]
            for n in ("measured_s", "predicted_s", "measured_over_predicted", "busy_over_predicted")
        ],
    )
    write_report("stages", figures, args.json)


if __name__ == "__main__":
    main()
