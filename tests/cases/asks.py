"""Training against the plain model, sample by sample, for `tests/asks/`; and what its page says."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dcpc
from dcpc.runtime.data.steps import Step
from dcpc.verify.exactness import nan_as_infinite, relative_errors
from models.gpt import GPT, GPTConfig

PAGE = Path(__file__).parents[2] / "docs" / "asks.md"
TEXT = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
PAD = {"input_ids": 0, "labels": -100}
VOCABULARY = 64

Sample = Mapping[str, Tensor]


def entry(test: str) -> str:
    """Returns what the page says of a test's ask, in one line, for its figures to be compared.

    Args:
        test: its `__file__`.
    """
    name = Path(test).name
    parts = re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]
    found = [part for part in parts if name in part]
    assert len(found) == 1, f"{PAGE.name} has {len(found)} entries with {name}"
    return " ".join(found[0].split())


def gpt(heads: int = 2, kv_heads: int = 1, width: int = 8, layers: int = 2) -> GPT:
    """A float64 GPT, the same each time."""
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=VOCABULARY, dim=heads * width, n_layers=layers, n_heads=heads,
        n_kv_heads=kv_heads, hidden=24,
    )  # fmt: skip
    return GPT(config).double()


class Texts:
    """Tokens of the given lengths; no label of a silent sample counts."""

    def __init__(self, lengths: Iterable[int], silent: Iterable[int] = ()) -> None:
        self.lengths, self.silent = list(lengths), set(silent)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(i)
        ids, labels = torch.randint(VOCABULARY, (2, self.lengths[i]), generator=draw)
        return {"input_ids": ids, "labels": labels * 0 - 100 if i in self.silent else labels}

    def dims(self, i: int) -> dict[str, int]:
        return {"seq": self.lengths[i]}


def labels_that_count(sample: Sample) -> int:
    return int((sample["labels"] != -100).sum())


@dataclass
class Trained:
    """What came of training steps beside the plain model.

    Attributes:
        worst: largest relative error of a loss or a gradient, in any step.
        counts: of each step, the micro-batches that each rank ran.
        samples: that were in some step.
    """

    worst: float = 0.0
    counts: list[tuple[int, ...]] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def far(got: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest number expected; NaN counts as endless."""
    error = float((got - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


def plain_step(
    alone: nn.Module, data: Any, ids: Iterable[int], weight: Callable[[Sample], int]
) -> Tensor:
    """Adds the gradients of the mean loss of some samples, each run alone without padding."""
    every = [data[i] for i in ids]
    total, loss = sum(map(weight, every)), torch.zeros((), dtype=torch.float64)
    for sample in every:
        share = weight(sample) / total
        if share:
            out = alone(**{n: x[None] for n, x in sample.items()})
            part = (out if isinstance(out, Tensor) else out["loss"]) * share
            part.backward()
            loss += part.detach()
    return loss


def trained(
    compiled: dcpc.CompiledModel,
    steps: Iterable[Step],
    alone: nn.Module,
    data: Any,
    weight: Callable[[Sample], int] = labels_that_count,
) -> Trained:
    """Takes every step with SGD on both sides, and compares losses and gradients."""
    found = Trained()
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (compiled, alone)]
    for step in steps:
        ids = [i for mb in step.plan.micro_batches for i in mb.sample_ids]
        ids = [i for row in step.rows for i in row] or ids
        loss = plain_step(alone, data, ids, weight)
        result = compiled.train_step(step)
        found.worst = max(found.worst, far(result.loss, loss))
        got = {n: p.grad for n, p in compiled.named_parameters() if p.numel()}
        plain = {n: p.grad for n, p in alone.named_parameters()}
        expected = {n: plain[n] for n in got}  # in stages a rank has some of them
        dense = {n: None if g is None else whole(g) for n, g in got.items()}
        errors = relative_errors(dense, expected).values()
        found.worst = max([found.worst, *map(nan_as_infinite, errors)])
        found.counts.append(ran(step))
        found.samples += ids
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found


def ran(step: Step) -> tuple[int, ...]:
    """Returns how many micro-batches each rank runs in a step."""
    planned = step.plan.micro_batches
    ranks = range(len(step.plan.busy_s))
    return tuple(sum(r in mb.ranks for mb in planned) for r in ranks)


def next_after_checkpoint(
    folder: str,
    number: int,
    compiled: dcpc.CompiledModel,
    loader: dcpc.DataLoader,
    alone: nn.Module,
    plain: torch.optim.Optimizer,
    step_of: Callable[[list[int]], Tensor],
) -> tuple[Tensor, list[float]]:
    """Trains a step from checkpoint `number`, and the plain model likewise; saves the next one.

    Args:
        folder: of the checkpoints.
        number: of steps that are done.
        compiled: made anew, in any layout.
        loader: of it.
        alone: the plain model.
        plain: its optimizer, AdamW with a rate of 0.1.
        step_of: sample numbers -> loss of the plain model, whose gradients it leaves.

    Returns:
        The plain model's loss, and how far loss and parameters are from its.
    """
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=0.1)
    found = compiled.load(folder, optimizer=optimizer, loader=loader, missing="start")
    assert found.step == number
    step = next(iter(loader))
    loss = step_of([i for mb in step.plan.micro_batches for i in mb.sample_ids])
    found = [far(compiled.train_step(step).loss, loss)]
    for each in (plain, optimizer):
        each.step()
        each.zero_grad()
    state = compiled.state_dict()
    found += [far(state[n], x) for n, x in alone.state_dict().items()]
    compiled.save(folder, number + 1, optimizer=optimizer, loader=loader, wait=True)
    return loss, found
