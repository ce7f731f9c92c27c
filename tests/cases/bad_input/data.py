"""Kinds: datasets, samples, options and states of the loader."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

import dcpc
from dcpc.errors import DataError, NoLengthError
from tests.cases.bad_input.kinds import Ground, Kind, samples, with_sample


class Lies(list[Any]):
    def __len__(self) -> int:
        return 20


class Negative(list[Any]):
    def __len__(self) -> int:
        return -1


class Fails(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        raise OSError(f"sample {index} is on a disk that is gone")


class OtherDims(list[Any]):
    def dims(self, index: int) -> dict[str, int]:
        return {"seq": 4}


class HalfDims(list[Any]):
    def dims(self, index: int) -> dict[str, float]:
        return {"seq": 4.5}


class Streamed:
    def __init__(self, data: list[Any], error: Exception | None = None) -> None:
        self.data, self.error = data, error

    def __iter__(self) -> Iterator[Any]:
        yield from self.data
        if self.error is not None:
            raise self.error


def _ids(n: int, value: int = 0) -> torch.Tensor:
    return torch.full((n,), value)


def _both(n: int) -> dict[str, torch.Tensor]:
    return {"ids": _ids(n), "labels": _ids(n)}


def _data(name: str, data: Any, advice: str = "", **options: Any) -> Kind:
    return Kind(name, DataError, lambda g: g.trained(data, **options), advice)


def _loader(name: str, advice: str = "", **options: Any) -> Kind:
    return Kind(name, DataError, lambda g: g.loader(**options), advice)


def _trained(name: str, **options: Any) -> Kind:
    return Kind(name, DataError, lambda g: g.trained(**options))


def _state(name: str, **changed: Any) -> Kind:
    def load(ground: Ground) -> None:
        loader = ground.loader()
        loader.load_state_dict({**loader.state_dict(), **changed})

    return Kind(name, DataError, load)


class FloatInputs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x).square().mean()


def _nan(ground: Ground, **options: Any) -> None:
    only = dcpc.Buckets({"x": "float32[batch, seq, 2]"}, [{"seq": 4}])
    compiled = dcpc.compile(FloatInputs(), only, backend="eager", verify="off")
    data = [{"x": torch.zeros(4, 2)}, {"x": torch.full((4, 2), math.nan)}]
    for step in dcpc.DataLoader(data, compiled, samples_per_step=2, shuffle=False, **options):
        compiled.train_step(step)


_PAD = "pass `pad=` with a value for this input"

DATA = {
    "Datasets and samples": (
        Kind("an order without every sample", DataError,
             lambda g: list(g.loader(order=lambda epoch: [0, 1, 1]))),
        Kind("an order of fractions", DataError,
             lambda g: list(g.loader(order=lambda epoch: [0.5] * 8))),
        Kind("an order that is None", DataError,
             lambda g: list(g.loader(order=lambda epoch: None))),
        _loader("an order that is no function", order=[*range(8)]),
        _data("a dataset of none", []),
        _data("a generator", (s for s in samples()),
              "pass a class whose `__iter__` makes the generator, or a list of its samples"),
        _data("a stream of none", Streamed([])),
        _data("a stream that raises", Streamed([], OSError("the shard is gone"))),
        _data("a mapping of columns", {"ids": [1], "labels": [1]}),
        Kind("a `__len__` that lies", DataError, lambda g: list(g.loader(Lies(samples())))),
        _data("a `__len__` below 0", Negative(samples())),
        _data("a dataset that raises", Fails(samples())),
        _data("dims() of other lengths", OtherDims(samples())),
        _data("dims() of fractions", HalfDims(samples())),
        _data("samples that are tuples", [(1, 2)]),
        _data("a sample without an input", [{"ids": _ids(4)}]),
        _data("a sample with another input", with_sample(x=_ids(4))),
        _data("a numpy array in a sample", with_sample(ids=np.zeros(8, dtype=int))),
        _data("a list in a sample", with_sample(ids=[1] * 8)),
        _data("another dtype in a sample", with_sample(ids=_ids(8).int())),
        _data("a tensor on another device", with_sample(ids=_ids(8).to("meta"))),
        _data("a sparse tensor", with_sample(ids=_ids(8).to_sparse())),
        _data("inputs of two lengths", with_sample(ids=_ids(7))),
        _data("a sample of length 0", with_sample(**_both(0))),
        _data("a sample longer than every bucket", with_sample(**_both(9)),
              'add a larger bucket, cut the sample, or pass `on_too_long="skip"`'),
        _data("a sample between buckets, without pad=", with_sample(**_both(7)), _PAD),
        _data("an id beyond the vocabulary", with_sample(ids=_ids(8, 17))),
        _data("an id below 0", with_sample(ids=_ids(8, -1))),
        _data("a label beyond the classes", with_sample(labels=_ids(8, 17))),
        _data("a label below 0", with_sample(labels=_ids(8, -1))),
        _data("padding beyond the vocabulary", with_sample(**_both(7)),
              pad={"ids": 99, "labels": -100}),
        Kind("NaN in an input", DataError, _nan),
    ),
    "dcpc.DataLoader": (
        Kind("a model that is not compiled", DataError,
             lambda g: dcpc.DataLoader(samples(), torch.nn.Linear(1, 1), tokens_per_step=4)),
        _loader("an argument that is mistyped", weigth="labels"),
        Kind("an option by position", DataError,
             lambda g: dcpc.DataLoader(samples(), g.compiled, 32)),
        Kind("the length of a loader of tokens", NoLengthError, lambda g: len(g.loader())),
        _loader("no tokens", tokens_per_step=0),
        _loader("a fraction of tokens", tokens_per_step=1.5),
        _loader("a numpy integer of tokens", tokens_per_step=np.int64(32)),
        _loader("tokens and samples", samples_per_step=3),
        _loader("neither tokens nor samples", tokens_per_step=None),
        _loader("an unknown mode", mode="outer"),
        _loader("fewer micro-batches than 1", min_grad_accumulation_steps=0),
        _loader("a window below 0", window=-1),
        _loader("a seed below 0", seed=-1),
        _loader("shuffle= of another type", shuffle="yes"),
        Kind("shuffle=True for a stream", DataError,
             lambda g: g.loader(Streamed(samples()), shuffle=True)),
        Kind("the number of steps of a stream", DataError,
             lambda g: g.loader(Streamed(samples())).count_steps(0)),
        _loader("workers for samples by number", num_workers=2),
        _loader("pad= that is a list", pad=[1]),
        _loader("pad= of no input", pad={"x": 1}),
        _loader("pad= with a text", pad={"ids": "a"}),
        _loader("pad= with NaN for integers", pad={"ids": math.nan}),
        _loader("pad_to_longer without pad", pad_to_longer=True),
        _loader("packing without marks", packing=True),
        _loader("a weight of no input", weight="x"),
        _loader("a weight that cannot be called", weight=3),
        _loader("an unknown loss_depends_on=", loss_depends_on="batch"),
        _loader("an unknown on_too_long", on_too_long="cut"),
        _loader("lookahead below 0", lookahead=-1),
        _loader("a time limit below 0", plan_timeout_s=-1),
        _trained("a weight function that raises", weight=lambda inputs: inputs["none"]),
        _trained("a weight below 0", weight=lambda inputs: -1.0),
        _trained("weights that are all 0", weight=lambda inputs: 0.0),
        Kind("a shift below 0", DataError, lambda g: dcpc.CountLabels("labels", shift=-1)),
        Kind("an epoch below 0", DataError, lambda g: g.loader().set_epoch(-1)),
        Kind("a state that is none", DataError, lambda g: g.loader().load_state_dict(None)),
        Kind("a state without fields", DataError, lambda g: g.loader().load_state_dict({})),
        _state("a state of another dataset", samples=3),
        _state("a state beyond the dataset", consumed=99),
        _state("a state with an odd place", ahead=["x"]),
    ),
}  # fmt: skip
