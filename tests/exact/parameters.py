"""Loss and gradients of shared out parameters against the plain model's, in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.runtime.groups.local_ranks import run_ranks
from models.gpt import GPT, GPTConfig
from tests.exact.parameters_steps import IGNORE, TEXT, Work, inputs_of, step_of, whole

VOCABULARY, WIDTH = 37, 16
LENGTHS = (4, 12)
MODES = ("step", "pull", "rounds")
RECOMPUTE = {"none": 0.0, "auto": 0.5, "all": 1.0}
LIMIT_S = 900.0


class OddModel(nn.Module):
    """Parameters of every kind: tied, frozen, a scalar, a single row, strided, unused, empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.up = nn.Linear(WIDTH, 7)
        self.down = nn.Parameter(torch.randn(7, WIDTH).t().contiguous().t())
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.randn(1, WIDTH))
        self.unused = nn.Parameter(torch.randn(3))
        self.empty = nn.Parameter(torch.zeros(0, 4))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Returns the mean cross-entropy of the labels that count."""
        x = self.frozen(self.embed(input_ids)) * self.gain + self.row
        x = x + F.gelu(self.up(x)) @ self.down
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)


def model(name: str) -> nn.Module:
    """Returns a model of `MODELS` in float64, the same on every rank."""
    torch.manual_seed(0)
    if name == "odd":
        return OddModel().double()
    heads = {"GPT": None, "Llama": 2}[name]  # Llama's: fewer heads of keys and values
    sizes = GPTConfig(VOCABULARY, WIDTH, 2, n_heads=4, n_kv_heads=heads, tie_embeddings=not heads)
    return GPT(sizes).double()


def shapes(
    world: int, block: int | None = None
) -> dict[str, tuple[tuple[int, int, tuple[int, ...]], ...]]:
    """Returns steps, as length, batch and ranks of each micro-batch.

    Args:
        world: ranks.
        block: of them share parameters out; None: all. Groups are within one, or of whole ones.
    """
    every = tuple(range(world))
    short, long = LENGTHS
    mixed = [(long, 2, every), (short, 3, (0,)), (long, 1, (world - 1,))]
    if world > 2:
        pair = (1, 2) if block is None else (2, 3)
        mixed += [(long, 2, pair), (short, 1, (0, 1))]
    return {
        "mixed degrees": tuple(mixed),
        "unequal numbers": tuple(
            (short, 1 + r, (r,)) for r in every for _ in range(1 + 2 * (r == 0))
        ),
        "a rank with none": ((long, 2, (0,)), (short, 1, (0,))),
    }


@dataclass(frozen=True, slots=True)
class Case:
    """A model compiled in a mode, and the steps that it runs.

    Attributes:
        name: of the model.
        mode: who holds the parameters.
        backend: "eager" or "inductor".
        steps: names of some of `shapes`.
        recompute: names of some of `RECOMPUTE`.
        block: ranks that share parameters out; None: all.
    """

    name: str
    mode: str
    backend: str = "eager"
    steps: tuple[str, ...] = ("mixed degrees", "unequal numbers", "a rank with none")
    recompute: tuple[str, ...] = tuple(RECOMPUTE)
    block: int | None = None


def cases(world: int, quick: bool) -> list[Case]:
    """Returns what is compiled on so many ranks."""
    blocks = [Case(name, "rounds", block=world // 2) for name in ("odd", "Llama") if world > 2]
    if quick:
        return blocks[:1] or [
            Case("odd", "step", recompute=("none",), steps=("mixed degrees",)),
            Case("odd", "pull", recompute=("none",), steps=("a rank with none",)),
            Case("odd", "rounds", recompute=("none", "all")),
        ]
    found = [Case(name, mode) for name in ("odd", "GPT", "Llama") for mode in MODES] + blocks
    if world == 2:
        found += [
            Case(name, mode, "inductor", ("mixed degrees",), ("none",))
            for name in ("GPT", "Llama")
            for mode in ("step", "rounds")
        ]
        found += [Case("GPT", "rounds", "inductor", ("a rank with none",), ("all",))]
    return found


def plain(alone: nn.Module, every: Sequence[Work]) -> tuple[float, dict[str, Tensor]]:
    """Returns the loss and the gradients of a step that one process takes, one after the other."""
    alone.zero_grad()
    batches = [inputs_of(number, work, VOCABULARY) for number, work in enumerate(every)]
    counts = [int((x["labels"] != IGNORE).sum()) for x in batches]
    loss = 0.0
    for x, count in zip(batches, counts, strict=True):
        part = alone(**x) * (count / sum(counts))
        part.backward()
        loss += float(part.detach())
    own = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
    return loss, own


def _far(got: Tensor, expected: Tensor) -> float:
    if not expected.numel():
        return 0.0
    assert got.shape == expected.shape, f"{got.shape}, {expected.shape}"
    return float((got - expected).abs().max() / expected.abs().max())


def _errors(
    compiled: dcpc.CompiledModel, loss: float, expected: tuple[float, Mapping[str, Tensor]]
) -> dict[str, float]:
    """Returns how far off the loss and each gradient are; infinite where one is missing."""
    found = {"loss": abs(loss / expected[0] - 1)}
    for name, p in compiled.named_parameters():
        own = expected[1].get(name)
        if own is None or p.grad is None:
            same = own is None and p.grad is None
            found[name] = 0.0 if same else float("inf")
        else:
            found[name] = _far(whole(p.grad), own)
        p.grad = None
    return found


def on_rank(rank: int, found: Sequence[Case], world: int) -> list[tuple[str, float, str]]:
    """Returns each case's text, its largest error, and of what."""
    warnings.simplefilter("ignore")
    results = []
    buckets = dcpc.Buckets(TEXT, [{"seq": n} for n in LENGTHS])
    for case in found:
        own = model(case.name)
        alone = copy.deepcopy(own)
        compiled = dcpc.compile(
            own, buckets, backend=case.backend, parameters=case.mode, block=case.block, verify="off"
        )
        compiled.comm_bucket_bytes = 2000  # several
        for index, (name, share) in enumerate((s, r) for s in case.steps for r in case.recompute):
            every = [Work(*w, RECOMPUTE[share]) for w in shapes(world, case.block)[name]]
            step = step_of(compiled, every, VOCABULARY, index)
            loss = float(compiled.train_step(step).loss)
            errors = _errors(compiled, loss, plain(alone, every))
            worst = max(errors, key=errors.__getitem__)
            mode = case.mode if case.block is None else f"{case.mode} of {case.block}"
            text = f"{case.name}, {case.backend}, {world} ranks, {mode}, {name}, {share}"
            results.append((text, errors[worst], worst))
    return results


def measure(quick: bool) -> list[tuple[str, float, str]]:
    """Returns all cases, with the largest error of any rank."""
    found = []
    for world in (2, 4):
        ranks = run_ranks(on_rank, world, cases(world, quick), world, timeout_s=LIMIT_S)
        found += [max(same, key=lambda c: c[1]) for same in zip(*ranks, strict=True)]
    return found
