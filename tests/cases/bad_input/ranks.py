"""Kinds that take several ranks: what one of them does, all of them raise alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import dcpc
from dcpc.errors import DataError, GroupError, PlanError
from tests.cases.bad_input.data import Fails
from tests.cases.bad_input.kinds import (
    QUICK,
    Ground,
    Kind,
    Met,
    Model,
    buckets,
    meet,
    sample,
    samples,
    with_sample,
)
from tests.cases.one_trace import traced_once

WORLD = 2


class OneEach(Ground):
    """Each rank has micro-batches of its own."""

    def loader(self, data: Any = None, **options: Any) -> dcpc.DataLoader:
        return super().loader(data, **{"mode": "inter", "tokens_per_step": 24, **options})


def _compiled(*given: tuple[Any, ...], **options: Any) -> Any:
    """Compiles what is given for each rank; options by name, a tuple has one for each rank."""

    def run(ground: Ground, rank: int) -> None:
        model, shapes = given[rank] if given else (Model, buckets())
        own = {n: v[rank] if isinstance(v, tuple) else v for n, v in options.items()}
        dcpc.compile(model(), shapes, **(QUICK | own))

    return run


def _data(of_rank: Any, **options: Any) -> Any:
    def run(ground: Ground, rank: int) -> None:
        own = {n: v[rank] if isinstance(v, tuple) else v for n, v in options.items()}
        ground.trained(of_rank(rank), **own)

    return run


def _step(**options: Any) -> Any:
    def run(ground: Ground, rank: int) -> None:
        step = next(iter(ground.loader()))
        own = {n: v[rank] for n, v in options.items()}
        ground.compiled.train_step(own.pop("step", lambda s: s)(step), **own)

    return run


@contextmanager
def _infinite_on(ground: Ground, bad: bool) -> Iterator[None]:
    """Has the losses of this rank's micro-batches infinite, if it is the one."""
    dispatch = ground.compiled._core.dispatch
    run = dispatch.run_micro_batch
    try:
        if bad:
            dispatch.run_micro_batch = lambda *given: (run(*given)[0] * math.inf,)
        yield
    finally:
        dispatch.run_micro_batch = run


def _infinite(ground: Ground, rank: int) -> None:
    with _infinite_on(ground, rank == 1):
        ground.compiled.train_step(next(iter(ground.loader())))


def _no_mean(ground: Ground, rank: int) -> None:
    torch.manual_seed(0)
    compiled = dcpc.compile(Model(), buckets(), **(QUICK | {"verify": "auto"}))
    dcpc.DataLoader(samples(), compiled, tokens_per_step=32, pad={"ids": 0, "labels": -100})


def _wide() -> Model:
    return Model(16)


def _other_samples(rank: int) -> list[Any]:
    return samples() if rank == 0 else [sample(8, i) for i in range(8)]


def _shifted(rank: int) -> list[Any]:
    """The same lengths in another order: what is short on rank 0 is long on rank 1."""
    return samples() if rank == 0 else [*samples()[1:], samples()[0]]


def _bad_on_last(**values: int) -> Any:
    """Samples of the same lengths, whose inputs have one value on rank 1."""

    def made(rank: int) -> list[Any]:
        filled = [{n: torch.full_like(s[n], v) for n, v in values.items()} for s in samples()]
        return samples() if rank == 0 else filled

    return made


def _save(ground: Ground, rank: int) -> None:
    ground.compiled.save(ground.folder / "runs", rank, wait=True)


RANKS = (
    Kind("another model on a rank", GroupError, _compiled((Model, buckets()), (_wide, buckets()))),
    Kind("other buckets on a rank", GroupError,
         _compiled((Model, buckets()), (Model, buckets(4, 12)))),
    Kind("another option on a rank", GroupError, _compiled(sp=(1, 2))),
    Kind("a wrong option on a rank", PlanError, _compiled(memory=(1e9, -1))),
    Kind("a wrong degree on a rank", PlanError, _compiled(sp=(1, 3))),
    Kind("no model on a rank", dcpc.TraceError, _compiled((Model, buckets()), (int, buckets()))),
    Kind("a dataset of another size on a rank", DataError,
         _data(lambda rank: samples()[rank:])),
    Kind("samples of other lengths on a rank", DataError, _data(_other_samples)),
    Kind("samples in another order on a rank", DataError, _data(_shifted)),
    Kind("another seed on a rank", DataError, _data(lambda rank: None, seed=(0, 1))),
    Kind("another size of steps on a rank", DataError,
         _data(lambda rank: None, tokens_per_step=(24, 32))),
    Kind("a loss that is no mean over samples", DataError, _no_mean, late=True),
    Kind("an id beyond the vocabulary on a rank", DataError,
         _data(_bad_on_last(ids=17, labels=0), pad={"ids": 0, "labels": -100}, weight="labels")),
    Kind("a dataset that raises on a rank", DataError,
         _data(lambda rank: samples() if rank == 0 else Fails(samples()))),
    Kind("a sample that is wrong on all ranks", DataError,
         _data(lambda rank: with_sample(labels=torch.full((8,), -1)))),
    Kind("a batch for a step on a rank", DataError,
         _step(step=(lambda s: s, lambda s: {"ids": None}))),
    Kind("another largest norm on a rank", GroupError, _step(clip=(1.0, 2.0))),
    Kind("a largest norm below 0 on a rank", DataError, _step(clip=(1.0, -1.0))),
    Kind("another nonfinite= on a rank", GroupError, _step(nonfinite=("raise", "skip"))),
    Kind("a loss that is infinite on a rank", DataError, _infinite, late=True),
    Kind("another step to save on a rank", GroupError, _save),
)  # fmt: skip


def meet_all(rank: int, folder: str) -> tuple[list[Met], tuple[Any, ...]]:
    """Returns what came of each kind on this rank, and of a step that is skipped."""
    ground = OneEach(Path(folder))
    with traced_once():
        met = [meet(kind, ground, rank) for kind in RANKS]
    return met, _skipped(ground, rank)


def _skipped(ground: Ground, rank: int) -> tuple[Any, ...]:
    """A step that rank 1 alone finds infinite is skipped by both; the next one is taken."""
    compiled = ground.compiled
    first, then = list(ground.loader())[:2]
    weights = list(compiled.parameters())
    for p in weights:
        p.grad = torch.full_like(p, 0.5)
    counted = compiled.stats().skipped
    with _infinite_on(ground, rank == 1):
        skipped = compiled.train_step(first, clip=1.0, nonfinite="skip").skipped
    same = all(bool((p.grad == 0.5).all()) for p in weights if p.grad is not None)
    after = compiled.train_step(then, nonfinite="skip").skipped
    return skipped, same, compiled.stats().skipped - counted, after
