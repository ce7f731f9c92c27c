"""Ranks that run out of memory, and slow ranks: one injection each, and what was found.

For `benchmarks.faults`, whose rows these are; alone it runs some of both:

    python -m tests.faults.memory [--quick] [--json FILE]
"""

import copy
import random
import time
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

import dcpc
from dcpc.compiled.dispatch import Dispatch
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.local_ranks import RanksError, run_ranks
from dcpc.runtime.step.on_group import OnGroup
from models.gpt import GPT, GPTConfig
from tests.fuzz.memory_limit import MemoryLimit

SAME = 1e-10
LIMIT_S = 120.0
MODES = ("whole", "step", "pull")
INPUTS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")


@dataclass(frozen=True)
class Found:
    """What an injection came to.

    Attributes:
        kind: of the fault.
        injected: how many times an op had no memory; slow ranks: 1.
        survived: whether training went on to its end with exact numbers and every sample once.
        loss_difference: largest relative difference of a loss or a gradient to the plain model's.
        samples_lost: of the epochs.
        samples_repeated: of the epochs.
        replans: how often a bucket got smaller plans.
        speeds: as learned; nothing: equal.
        text: why it did not survive.
    """

    kind: str
    injected: int = 0
    survived: bool = False
    loss_difference: float = 0.0
    samples_lost: int = 0
    samples_repeated: int = 0
    replans: int = 0
    speeds: tuple[float, ...] = ()
    text: str = ""


class Samples:
    """Sixteen of 3 to 24 tokens."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(11, (3 + i * 7 % 22,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": (ids + 1) % 11}


class Training:
    """A compiled model, its loader, and what came of its steps beside the plain model's."""

    def __init__(self, mode: str, sp: int | str, speeds: str, sizes: tuple[int, ...]) -> None:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = GPT(GPTConfig(vocab_size=11, dim=16, n_layers=2, n_heads=4)).double()
        buckets = dcpc.Buckets(INPUTS, [{"seq": n} for n in sizes])
        self.compiled = dcpc.compile(
            model, buckets, backend="eager", parameters=mode, sp=sp, speeds=speeds, verify="off"
        )
        self.loader = dcpc.DataLoader(
            Samples(), self.compiled, tokens_per_step=70, weight="labels",
            pad={"input_ids": 0, "labels": -100},
        )  # fmt: skip
        self.worst, self.samples = 0.0, []

    def run(self, step: Step) -> None:
        """Runs a step and compares it."""
        alone, compiled = copy.deepcopy(self.compiled.model), self.compiled
        alone.zero_grad()
        compiled.zero_grad()
        loss = float(compiled.train_step(step).loss)
        ids = [i for mb in step.plan.micro_batches for i in mb.sample_ids]
        total, count = torch.zeros((), dtype=torch.float64), 0
        for x in map(Samples().__getitem__, ids):
            logits = alone.logits(x["input_ids"][None])[0]
            total = total + F.cross_entropy(logits, x["labels"], reduction="sum")
            count += len(x["labels"])
        (total / count).backward()
        differences = [abs(loss * count / float(total.detach()) - 1)]
        named = zip(alone.named_parameters(), compiled.named_parameters(), strict=True)
        for (_, p), (_, own) in named:
            grad: Any = own.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            differences.append(float((whole - p.grad).norm() / p.grad.norm()))
        self.worst = max(self.worst, *differences)
        self.samples += ids

    def facts(self, injected: int) -> dict[str, Any]:
        """Returns what this rank found."""
        stats = self.compiled.stats()
        return {
            "injected": injected, "worst": self.worst, "samples": self.samples,
            "replans": self.compiled.replans, "speeds": stats.speeds,
        }  # fmt: skip


def short_of_memory(rank: int, seed: int, mode: str, sp: int | str, world: int) -> dict[str, Any]:
    """Two epochs in which some ops of one rank have no memory; run by each rank."""
    rng = random.Random(seed)
    victim, at = rng.randrange(world), [rng.randint(1, 900) for _ in range(3)]
    if rank != victim:
        at = []
    training = Training(mode, sp, "equal", (9, 24))

    def fails(call: int) -> bool:
        # Some of them in a row would be a rank that has too little for anything.
        hit = bool(at) and call >= at[0]
        if hit:
            at[1:2] = [call + at[1]] if at[1:] else []
            at.pop(0)
        return hit

    limit = MemoryLimit(at=fails)
    with limit.around(OnGroup, "run_turns"):
        for _ in range(2):
            for step in training.loader:
                training.run(step)
    return training.facts(limit.raised)


def slow(rank: int, seed: int, world: int, factor: float, epochs: int) -> dict[str, Any]:
    """Epochs in which one rank sleeps in each micro-batch; run by each rank."""
    victim = random.Random(seed).randrange(world)
    training = Training("whole", 1, "auto", (24,))
    given = Dispatch.run_micro_batch

    def slept(self: Dispatch, *args: Any) -> torch.Tensor:
        begin_s = time.perf_counter()
        found = given(self, *args)
        if rank == victim:  # forward is about a third of a micro-batch
            time.sleep(3 * (factor - 1) * (time.perf_counter() - begin_s))
        return found

    Dispatch.run_micro_batch = slept  # type: ignore[method-assign]
    for _ in range(epochs):
        for step in training.loader:
            training.run(step)
    return training.facts(int(rank == victim))


def inject_shortage(seed: int, world: int = 2, mode: str = "whole", sp: int | str = 1) -> Found:
    """Returns what comes of a rank that runs out of memory at random ops, in a job of its own.

    Args:
        seed: of the rank and the ops.
        world: ranks.
        mode: who holds the parameters.
        sp: degree, or "auto".
    """
    name = f"out of memory, sp {sp}, {mode}"
    return _found(name, 2, world, short_of_memory, seed, mode, sp, world)


def inject_slowness(seed: int, world: int = 2, factor: float = 3.0, epochs: int = 6) -> Found:
    """Returns what comes of a rank that is slower by a factor, in a job of its own.

    Args:
        seed: of the rank.
        world: ranks.
        factor: how much slower.
        epochs: of some three steps each; speeds are learned every eight steps.
    """
    return _found("slow rank", epochs, world, slow, seed, world, factor, epochs)


def _found(kind: str, epochs: int, world: int, run: Any, *args: Any) -> Found:
    try:
        ranks = run_ranks(run, world, *args, fork=True, timeout_s=LIMIT_S)
    except RanksError as e:
        return Found(kind, text=str(e))
    worst = max(each["worst"] for each in ranks)
    counts = [ranks[0]["samples"].count(i) for i in range(len(Samples()))]
    lost = sum(max(0, epochs - n) for n in counts)
    repeated = sum(max(0, n - epochs) for n in counts)
    alike = all(each["samples"] == ranks[0]["samples"] for each in ranks)
    return Found(
        kind, sum(each["injected"] for each in ranks),
        alike and not lost and not repeated and worst < SAME, worst, lost, repeated,
        ranks[0]["replans"], ranks[0]["speeds"],
    )  # fmt: skip
