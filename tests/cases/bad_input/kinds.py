"""What a kind of bad input is, and what they share: a tiny model, buckets, samples, a folder."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F

import dcpc
from dcpc.errors import DcpcError

VOCABULARY = 17
INPUTS = {"ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
QUICK: dict[str, Any] = {"backend": "eager", "verify": "off"}
Sample = dict[str, Tensor]


class Model(nn.Module):
    """Predicts labels from single tokens; counts how often it really ran."""

    forwards = 0

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, dim)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        Model.forwards += not isinstance(ids, FakeTensor)
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())


def buckets(*lengths: int) -> dcpc.Buckets:
    return dcpc.Buckets(INPUTS, [{"seq": n} for n in lengths or (4, 8)])


def sample(length: int, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randint(VOCABULARY, (length,), generator=generator) for n in INPUTS}


def samples() -> list[Sample]:
    return [sample(4 + 4 * (i % 2), i) for i in range(8)]


def with_sample(**changed: Any) -> list[Any]:
    """Eight samples, of which number 3 has other inputs."""
    found = samples()
    return [*found[:3], {**found[3], **changed}, *found[4:]]


@dataclass
class Ground:
    """What kinds are tried on.

    Attributes:
        folder: for their files.
    """

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp()))

    @cached_property
    def compiled(self) -> dcpc.CompiledModel:
        torch.manual_seed(0)
        return dcpc.compile(Model(), buckets(), memory=1e9, **QUICK)

    def loader(self, data: Any = None, **options: Any) -> dcpc.DataLoader:
        given = {"tokens_per_step": 32, "lookahead": 0, "shuffle": False, **options}
        return dcpc.DataLoader(samples() if data is None else data, self.compiled, **given)

    def trained(self, data: Any = None, **options: Any) -> None:
        for step in self.loader(data, **options):
            self.compiled.train_step(step)

    def step(self) -> Any:
        return next(iter(self.loader()))

    def file(self, content: str | bytes, name: str = "file") -> Path:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


@dataclass(frozen=True)
class Kind:
    """A kind of bad input.

    Attributes:
        name: what is wrong, in words.
        error: class that is raised.
        run: does it; with ranks also takes which one it is on.
        advice: what the page says to do, with links; "": what the message says.
        late: whether it shows only once something was computed.
    """

    name: str
    error: type[DcpcError]
    run: Callable[..., Any]
    advice: str = ""
    late: bool = False


Section = Mapping[str, tuple[Kind, ...]]


@dataclass(frozen=True)
class Met:
    """What came of a kind.

    Attributes:
        error: name of the class of what was raised; "" where nothing was.
        text: its message, without what differs from run to run.
        touched: what was computed or changed nevertheless.
    """

    error: str
    text: str
    touched: tuple[str, ...] = ()


def meet(kind: Kind, ground: Ground, *rank: int) -> Met:
    """Tries a kind."""
    compiled = ground.compiled
    weights = [(p, p._version, p.grad) for p in compiled.parameters()]
    ran = Model.forwards, sum(compiled.stats().calls.values())
    error, text = "", ""
    try:
        kind.run(ground, *rank)
    except Exception as raised:
        error, text = type(raised).__name__, str(raised)
    touched = []
    if (Model.forwards, sum(compiled.stats().calls.values())) != ran and not kind.late:
        touched.append("something was computed")
    if any(p._version != version or p.grad is not grad for p, version, grad in weights):
        touched.append("parameters or gradients are others")
    text = text.replace(str(ground.folder), "FOLDER").replace(os.getcwd(), "HERE")
    text = re.sub(r"\b[0-9a-f]{16}\b", "0123456789abcdef", text)  # fingerprints
    return Met(error, text, tuple(touched))
