"""Mode "rounds" beside torch's `fully_shard` (FSDP2), and beside ranks that run free of each other.

Two gloo ranks, one GPT, float32, Adam, nothing recomputed, sp 1. In one run each system takes the
same samples, one step after the other in turn:

    rounds, again   dcpc gathers parameters again in backward
    rounds, kept    dcpc keeps them from forward to backward, as it plans where memory is not short
    pull            dcpc's ranks run the same micro-batches free of each other; nothing is gathered
    fsdp2, again    each block and the root in `fully_shard(reshard_after_forward=True)`
    fsdp2, kept     the same with False

Of equal lengths a step has three micro-batches a rank. Of mixed lengths dcpc runs its loader's
steps; FSDP2 the same samples in batches of two a rank, dealt in the loader's order and padded to
the longest of the batches that ranks run at once; and, as it needs no padding then, one by one.

The price of rounds without their gathers: what a gather and sum cost is taken from equal lengths,
where no rank waits: seconds of "rounds, kept" less those of "pull", per round. That much for each
round is added to the seconds of "pull" on mixed lengths, and "rounds, kept" compared with the sum.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dcpc
from benchmarks import harness
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.runtime.planner.plans import rounds
from examples.allocator import measured_peak_bytes
from examples.race import rank0_decides
from examples.stdlib_source import PAD, StdlibSource
from models.gpt import GPT, GPTConfig
from tests.exact.parameters_steps import (
    ADAM,
    IGNORE,
    TEXT,
    Work,
    bytes_of,
    inputs_of,
    rest_bytes,
    step_of,
)

RANKS = 2
MICRO_BATCHES = 3
BATCH_FSDP2 = 2
LIMIT_S = 900.0

Inputs = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Race:
    """What is run.

    Attributes:
        model: sizes of the GPT.
        equal: length and batch of the micro-batches that are alike.
        lengths: of the buckets of real text.
        tokens_per_step: of mixed lengths.
        steps: of mixed lengths.
        repeats: at most.
        limit_s: no repeat but the second begins later than this.
    """

    model: GPTConfig
    equal: tuple[int, int]
    lengths: tuple[int, ...]
    tokens_per_step: int
    steps: int
    repeats: int
    limit_s: float


FULL = Race(
    GPTConfig(dim=256, n_layers=4, n_heads=8), (256, 4), (64, 128, 256, 512, 1024, 2048),
    tokens_per_step=8192, steps=2, repeats=7, limit_s=200.0,
)  # fmt: skip
QUICK = Race(
    GPTConfig(dim=128, n_layers=2, n_heads=4), (96, 2), (64, 512),
    tokens_per_step=1024, steps=1, repeats=3, limit_s=6.0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Raced:
    """What one rank found; seconds are those of the last rank.

    Attributes:
        seconds: of a system on "equal" or "mixed" steps -> of each repeat, all steps.
        peaks: of a system on the equal step: bytes.
        predicted_price: mean of the steps of `lockstep_s / free_s - 1`.
        rounds: of all mixed steps.
        losses: of each system's first equal step.
    """

    seconds: dict[tuple[str, str], list[float]]
    peaks: dict[str, int]
    predicted_price: float
    rounds: int
    losses: list[float]


class Ours:
    """A compiled model with its optimizer."""

    def __init__(self, race: Race, mode: str) -> None:
        torch.manual_seed(0)
        buckets = dcpc.Buckets(TEXT, [{"seq": n} for n in {*race.lengths, race.equal[0]}])
        self.compiled = dcpc.compile(
            GPT(race.model), buckets, backend="eager", parameters=mode, optimizer=ADAM, sp=1,
            recompute="none", verify="off",
        )  # fmt: skip
        self.optimizer = ADAM(self.compiled.parameters())

    def gather_again(self, again: bool) -> None:
        """Has backward gather parameters again although nothing is recomputed, or not."""
        # No menu has this alone: it is set where dispatch notes what its settings do.
        dispatch = self.compiled._core.dispatch
        units = dispatch._planned.traces[0].traced.units
        assert units is not None, "in rounds"
        chosen = units.again if again else frozenset()
        dispatch._gathers_again = lambda mb: chosen

    def run(self, step: Step) -> float:
        """Returns the loss of a step, once the optimizer has run."""
        loss = self.gradients(step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def gradients(self, step: Step) -> float:
        """Returns the loss of a step; adds its gradients."""
        return float(self.compiled.train_step(step).loss)

    def at_rest(self) -> int:
        """Returns the bytes of parameters and the optimizer's state."""
        return rest_bytes(self.compiled, self.optimizer, gradients=False)


class Fsdp2:
    """The plain model, each block and the root sharded, with its optimizer."""

    def __init__(self, race: Race) -> None:
        torch.manual_seed(0)
        self.model = GPT(race.model)
        mesh = init_device_mesh("cpu", (RANKS,))
        for module in (*self.model.blocks, self.model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        self.optimizer = ADAM(self.model.parameters())

    def gather_again(self, again: bool) -> None:
        """Has backward gather parameters again, or not."""
        for module in (*self.model.blocks, self.model):
            module.set_reshard_after_forward(again, recurse=False)

    def run(self, batches: Sequence[Inputs]) -> float:
        """Returns the loss of a step, once the optimizer has run."""
        loss = self.gradients(batches)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def gradients(self, batches: Sequence[Inputs]) -> float:
        """Returns the loss of a step; adds its gradients. Every rank has as many batches."""
        counts = [int((x["labels"] != IGNORE).sum()) for x in batches]
        total = torch.tensor(float(sum(counts)))
        dist.all_reduce(total)
        loss = torch.zeros(())
        for x, count in zip(batches, counts, strict=True):
            factor = count / float(total)
            if not count:  # a mean over nothing is NaN
                x = {**x, "labels": x["input_ids"]}
            part = self.model(**x) * factor
            (part * RANKS).backward()  # FSDP2 takes the mean over ranks
            loss += part.detach()
        dist.all_reduce(loss)
        return float(loss)

    def at_rest(self) -> int:
        """Returns the bytes of parameters and the optimizer's state."""
        state = [x for held in self.optimizer.state.values() for x in held.values()]
        return bytes_of([*self.model.parameters(), *state])


def batches_of(step: Step, data: StdlibSource, rank: int, size: int) -> list[Inputs]:
    """Returns a rank's batches of a step's samples, in the order of the data, padded.

    Args:
        step: with all samples.
        data: where they are from.
        rank: this one.
        size: samples in a batch.
    """
    ids = sorted({i for mb in step.plan.micro_batches for i in mb.sample_ids})
    found = []
    for start in range(0, len(ids), RANKS * size):
        together = [data[i] for i in ids[start : start + RANKS * size]]
        own = together[rank::RANKS]
        longest = max(len(x["labels"]) for x in (together if size > 1 else own or together[:1]))
        if not own:  # every rank takes part: a token that does not count
            own = [{n: torch.full((1,), fill) for n, fill in PAD.items()}]
            longest = longest if size > 1 else 1
        batch = {n: torch.full((len(own), longest), fill) for n, fill in PAD.items()}
        for i, x in enumerate(own):
            for n, values in x.items():
                batch[n][i, : len(values)] = values
        found.append(batch)
    return found


def _timed(run: Callable[[], object]) -> float:
    dist.barrier()
    start_s = time.perf_counter()
    run()
    took = torch.tensor([time.perf_counter() - start_s], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


Lane = tuple[Ours | Fsdp2, bool | None, Mapping[str, Sequence[object]]]


def lanes(race: Race, data: StdlibSource, rank: int) -> tuple[dict[str, Lane], list[Step]]:
    """Returns each system with its setting and its steps, and the mixed ones of dcpc."""
    gathered, pulled, sharded = Ours(race, "rounds"), Ours(race, "pull"), Fsdp2(race)
    seq, batch = race.equal
    works = [Work(seq, batch, (r,)) for _ in range(MICRO_BATCHES) for r in range(RANKS)]
    vocabulary = race.model.vocab_size
    loader = dcpc.DataLoader(
        data, gathered.compiled, tokens_per_step=race.tokens_per_step, pad=PAD, weight="labels"
    )
    mixed = list(islice(loader, race.steps))
    equal = [step_of(gathered.compiled, works, vocabulary)]
    theirs = [
        [inputs_of(n, w, vocabulary) for n, w in enumerate(works) if w.ranks == (rank,)],
    ]
    padded = [batches_of(s, data, rank, BATCH_FSDP2) for s in mixed]
    alone = [batches_of(s, data, rank, 1) for s in mixed]
    ours: dict[str, Sequence[object]] = {"equal": equal, "mixed": mixed}
    return {
        "rounds, again": (gathered, True, {"equal": equal}),
        "rounds, kept": (gathered, False, ours),
        "pull": (pulled, None, ours),
        "fsdp2, again": (sharded, True, {"equal": theirs, "mixed": padded, "unpadded": alone}),
        "fsdp2, kept": (sharded, False, {"equal": theirs, "mixed": padded}),
    }, mixed


def on_rank(rank: int, race: Race, data: StdlibSource) -> Raced:
    """Runs the race on one rank."""
    warnings.simplefilter("ignore")
    systems, mixed = lanes(race, data, rank)
    seconds: dict[tuple[str, str], list[float]] = {}
    peaks: dict[str, int] = {}
    first: dict[int, float] = {}  # of a system's first step
    start_s = time.monotonic()
    for turn in range(race.repeats + 1):  # the first compiles
        if turn > 2 and not rank0_decides(time.monotonic() - start_s < race.limit_s):
            break
        names = list(systems)
        shift = turn % len(names)
        for name in (*names[shift:], *names[:shift]):
            system, again, kinds = systems[name]
            if again is not None:
                system.gather_again(again)
            for kind, steps in kinds.items():
                took, seen = 0.0, list[float]()
                for step in steps:
                    took += _timed(lambda: seen.append(system.run(step)))  # type: ignore[arg-type]  # noqa: B023
                first.setdefault(id(system), seen[0])
                if turn:
                    seconds.setdefault((name, kind), []).append(took)
    for name, (system, again, kinds) in systems.items():
        if again is not None:
            system.gather_again(again)
        step = kinds["equal"][0]
        before = system.at_rest()
        peak = measured_peak_bytes(lambda: system.gradients(step))  # type: ignore[arg-type]  # noqa: B023
        system.optimizer.zero_grad()
        peaks[name] = before + peak
    prices = [s.plan.lockstep_s / s.plan.free_s - 1 for s in mixed]
    count = sum(len(rounds([m.ranks for m in s.plan.micro_batches], RANKS)) for s in mixed)
    return Raced(seconds, peaks, sum(prices) / len(prices), count, [*first.values()])


def figures(found: Sequence[Raced]) -> dict[str, harness.Cell]:
    """Returns the figures, and prints what they are made of."""
    one = found[0]
    rows: list[tuple[harness.Cell, ...]] = []
    for (name, kind), took in one.seconds.items():
        low, _, high = quantiles(took, n=4)
        rows.append((f"{name}, {kind}", median(took), low, high, len(took)))
    header = ("system, steps", "median s", "quartile", "quartile", "repeats")
    harness.print_table("seconds of all steps", header, rows)
    peaks = {name: max(r.peaks[name] for r in found) for name in one.peaks}
    harness.print_table(
        "peak of a rank in the equal step", ("system", "MB"),
        [(name, size / 1e6) for name, size in peaks.items()],
    )  # fmt: skip

    def ratio(kind: str, ours: str, theirs: str, their_kind: str = "") -> float:
        pairs = zip(one.seconds[ours, kind], one.seconds[theirs, their_kind or kind], strict=True)
        return median(a / b for a, b in pairs)

    def price(i: int) -> float:
        s = {key: took[i] for key, took in one.seconds.items()}
        gathers = (s["rounds, kept", "equal"] - s["pull", "equal"]) / MICRO_BATCHES
        return s["rounds, kept", "mixed"] / (s["pull", "mixed"] + one.rounds * gathers) - 1

    prices = [price(i) for i in range(len(one.seconds["pull", "mixed"]))]
    both = {
        "peak, kept over kept": peaks["rounds, kept"] / peaks["fsdp2, kept"],
        "equal seconds, kept over kept": ratio("equal", "rounds, kept", "fsdp2, kept"),
        "equal seconds, rounds kept over pull": ratio("equal", "rounds, kept", "pull"),
        "mixed seconds, over fsdp2 kept": ratio("mixed", "rounds, kept", "fsdp2, kept"),
        "mixed seconds, over fsdp2 unpadded": ratio(
            "mixed", "rounds, kept", "fsdp2, again", "unpadded"
        ),
        "mixed seconds, rounds kept over pull": ratio("mixed", "rounds, kept", "pull"),
        "lock-step price measured, least": min(prices),
        "lock-step price measured, most": max(prices),
        "first losses, furthest apart": max(one.losses) - min(one.losses),
    }
    harness.print_table("besides the figures", ("ratio", "value"), list(both.items()), digits=4)
    return {
        "peak_over_fsdp2": peaks["rounds, again"] / peaks["fsdp2, again"],
        "seconds_over_fsdp2": ratio("equal", "rounds, again", "fsdp2, again"),
        "seconds_over_fsdp2_mixed": ratio("mixed", "rounds, kept", "fsdp2, again"),
        "lockstep_price_predicted": one.predicted_price, "lockstep_price_measured": median(prices),
    }  # fmt: skip


def measure(quick: bool) -> dict[str, harness.Cell]:
    """Returns the figures."""
    race = QUICK if quick else FULL
    data = StdlibSource(max(race.lengths), limit=2000)
    return figures(run_ranks(on_rank, RANKS, race, data, timeout_s=LIMIT_S))
