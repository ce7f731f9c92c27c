"""Kinds: calls, evaluate, train steps, checkpoints and files that dcpc reads."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import dcpc
from dcpc.commands.simulate import read_cost, source_of
from dcpc.errors import (
    BucketError,
    CheckpointError,
    DataError,
    DispatchError,
    PlanError,
    ProfileError,
)
from dcpc.runtime.planner.plan_file import PlanFile
from dcpc.symbolic_profile import Calibration
from tests.cases.bad_input.kinds import QUICK, Ground, Kind, Model, buckets

IDS = torch.zeros(2, 4, dtype=torch.int64)


def _call(name: str, advice: str = "", **changed: Any) -> Kind:
    inputs = {"ids": IDS, "labels": IDS, **changed}
    return Kind(name, DispatchError, lambda g: g.compiled(**inputs), advice)


def _evaluate(
    name: str, batch: Any = None, error: type[dcpc.DcpcError] = DispatchError, **options: Any
) -> Kind:
    short = {"ids": IDS[:, :3], "labels": IDS[:, :3]}
    given = short if batch is None else batch
    return Kind(name, error, lambda g: g.compiled.evaluate(given, **options))


def _step(name: str, error: type[dcpc.DcpcError] = DataError, **options: Any) -> Kind:
    return Kind(name, error, lambda g: g.compiled.train_step(g.step(), **options))


def _other_step(ground: Ground) -> None:
    other = dcpc.compile(Model(), buckets(16), **QUICK)
    other.train_step(ground.step())


def _frozen(ground: Ground) -> None:
    frozen = dcpc.compile(Model().requires_grad_(False), buckets(), **QUICK)
    frozen.train_step(ground.step())


def _without_gradients(ground: Ground) -> None:
    with torch.no_grad():
        ground.compiled.train_step(ground.step())


def _infinite(ground: Ground) -> None:
    head = ground.compiled.model.head
    was = head.bias.detach().clone()
    version = head.bias._version
    try:
        head.bias.data[0] = math.nan
        ground.compiled.train_step(ground.step())
    finally:
        head.bias.data.copy_(was)
        assert head.bias._version == version, "what is changed by data is not counted"


def _save(name: str, step: Any = 1, **options: Any) -> Kind:
    return Kind(
        name,
        CheckpointError,
        lambda g: g.compiled.save(g.folder / "runs", step, wait=True, **options),
    )


def _saved(ground: Ground) -> Path:
    folder = ground.folder / "größere läufe"
    if not folder.exists():
        ground.compiled.save(folder, 1, wait=True)
    return folder


def _mistyped(ground: Ground) -> None:
    folder = ground.folder / "every run"
    ground.compiled.save(folder / "lr 3e-4", 120, wait=True)
    ground.compiled.load(folder / "lr 3e4")


def _load(name: str, **options: Any) -> Kind:
    return Kind(name, CheckpointError, lambda g: g.compiled.load(_saved(g), **options))


def _damaged(name: str, change: Callable[[str], str]) -> Kind:
    def load(ground: Ground) -> None:
        folder = ground.folder / f"damaged {abs(hash(name))}"
        ground.compiled.save(folder, 1, wait=True)
        [manifest] = folder.glob("*/*.json")
        manifest.write_text(change(manifest.read_text()))
        try:
            ground.compiled.load(folder)
        except CheckpointError as error:
            raise CheckpointError(str(error).replace(folder.name, "runs")) from error

    return Kind(name, CheckpointError, load)


def _next_format(text: str) -> str:
    whole = json.loads(text)
    whole["content"]["format"] = 99
    return json.dumps(whole)


def _read(name: str, error: type[dcpc.DcpcError], read: Any, content: str) -> Kind:
    return Kind(name, error, lambda g: read(g.file(content)))


def _lengths(file: Path) -> None:
    source_of(file, None)


def _histogram(file: Path) -> None:
    source_of(None, file)


def _cost(file: Path) -> None:
    read_cost(file, 1)


_DEEP, _HUGE = "[" * 100_000, "9" * 6000

CALLS = {
    "Calls": (
        Kind("an input that is missing", DispatchError, lambda g: g.compiled(ids=IDS)),
        _call("an input too many", x=IDS),
        Kind("too many by position", DispatchError, lambda g: g.compiled(IDS, IDS, IDS)),
        Kind("an input twice", DispatchError, lambda g: g.compiled(IDS, ids=IDS, labels=IDS)),
        _call("a numpy array", ids=IDS.numpy()),
        Kind("a call within torch.func", DispatchError, lambda g: torch.func.grad(
            lambda scale: g.compiled(ids=IDS, labels=IDS) * scale)(torch.tensor(2.0))),
        Kind("a batch as it is", DispatchError,
             lambda g: g.compiled({"ids": IDS, "labels": IDS})),
        _call("another dtype", ids=IDS.int()),
        _call("a dim that is missing", ids=IDS[0], labels=IDS[0]),
        _call("lengths that no bucket holds", ids=IDS.repeat(1, 3), labels=IDS.repeat(1, 3)),
        _call("a length that the trace is not for", ids=IDS[:, :1], labels=IDS[:, :1]),
        _call("inputs of two batches", labels=IDS[:1]),
        _call("an empty batch", ids=IDS[:0], labels=IDS[:0]),
        _call("an input on another device", ids=IDS.to("meta")),
        _call("a sparse input", ids=IDS.to_sparse()),
        _call("an id beyond the vocabulary", ids=IDS + 17),
        _call("a label below 0", labels=IDS - 1),
        Kind("a bucket that there is not", BucketError, lambda g: g.compiled.source({"seq": 5})),
        Kind("a batch below 1", DispatchError, lambda g: g.compiled.predict({"seq": 4}, batch=-1)),
        Kind("a logger that cannot be called", DataError, lambda g: g.compiled.log_to(3)),
    ),
    "evaluate": (
        _evaluate("a batch that is a list", [IDS, IDS]),
        _evaluate("an unknown between=", between="cut"),
        Kind("between= by position", DispatchError, lambda g: g.compiled.evaluate({}, "pad")),
        _evaluate("pad= without between=", pad={"ids": 0}),
        _evaluate("pad= that is a list", between="pad", pad=[1]),
        _evaluate("pad= with a text", error=DataError, between="pad", pad={"ids": "x"}),
        _evaluate("outputs of a padded batch", between="pad", outputs=True),
        _evaluate("a length beyond all buckets", {"ids": IDS.repeat(1, 3), "labels":
                  IDS.repeat(1, 3)}, between="pad", pad={"ids": 0, "labels": -100}),
        _evaluate("an id beyond the vocabulary", {"ids": IDS + 17, "labels": IDS}),
    ),
    "train_step": (
        Kind("a batch for a step", DataError,
             lambda g: g.compiled.train_step({"ids": IDS, "labels": IDS})),
        Kind("an unknown outputs=", DispatchError,
             lambda g: g.compiled.train_step(g.step(), outputs="all")),
        Kind("a step of other buckets", DispatchError, _other_step),
        Kind("nothing that learns", PlanError, _frozen),
        Kind("no gradients", PlanError, _without_gradients, late=True),
        _step("a largest norm of 0", clip=0.0),
        _step("a largest norm that is NaN", clip=math.nan),
        _step("a largest norm as text", clip="1"),
        _step("an unknown nonfinite=", nonfinite="ignore"),
        _step("a misspelt clip=", cilp=1.0),
        Kind("a largest norm by position", DataError,
             lambda g: g.compiled.train_step(g.step(), 1.0)),
        Kind("no step", DataError, lambda g: g.compiled.train_step()),
        Kind("a loss that is NaN", DataError, _infinite, late=True),
    ),
    "Checkpoints": (
        Kind("a state of another model", CheckpointError,
             lambda g: g.compiled.load_state_dict({"head.weight": torch.zeros(3, 3)})),
        Kind("a file for a state", CheckpointError, lambda g: g.compiled.load_state_dict("at.pt")),
        _save("a step below 0", -1),
        _save("a fraction of a step", 1.5),
        _save("a step beyond all integers", 10**30),
        _save("none to keep", keep=0),
        _save("a number for an optimizer", optimizer=3),
        _save("a loader without a state", loader=3),
        _save("a function to save", extra=len),
        Kind("no folder", CheckpointError, lambda g: g.compiled.save(None, 1)),
        Kind("a file for a folder", CheckpointError, lambda g: g.compiled.load(g.file("x"))),
        Kind("a folder that is not there", CheckpointError, _mistyped),
        _load("an unknown missing=", missing="begin"),
        Kind("an optimizer by position", CheckpointError, lambda g: g.compiled.load(
            g.folder, torch.optim.SGD([torch.zeros(1)], 0.1))),
        _load("a part that was not saved", scheduler=torch.optim.lr_scheduler.ConstantLR(
            torch.optim.SGD([torch.zeros(1)], 0.1))),
        _load("an optimizer that was not saved",
              optimizer=torch.optim.SGD([torch.zeros(1)], 0.1)),
        _damaged("a manifest that is empty", lambda text: ""),
        _damaged("a manifest that was edited", lambda text: text.replace('"step":1', '"step":2')),
        _damaged("a manifest of another format", _next_format),
        _damaged("a manifest of 100,000 levels", lambda text: _DEEP),
    ),
    "Files": (
        _read("a plan of another version", PlanError, PlanFile.read, '{"version": 99}'),
        _read("a plan of 100,000 levels", PlanError, PlanFile.read, _DEEP),
        _read("a plan that is a number of 6000 digits", PlanError, PlanFile.read, _HUGE),
        Kind("a plan's folder that is not there", PlanError,
             lambda g: g.loader().save_plan(g.step(), g.folder / "none" / "plan.json")),
        Kind("the plan of no step", DataError,
             lambda g: g.loader().save_plan(None, g.folder / "plan.json")),
        _read("a calibration of another version", ProfileError, Calibration.read,
              '{"version": 99}'),
        _read("a calibration of 100,000 levels", ProfileError, Calibration.read, _DEEP),
        _read("a cost of 100,000 levels", PlanError, _cost, _DEEP),
        _read("lengths below 1", PlanError, _lengths, '{"lens": [-1]}'),
        _read("lengths that are huge", PlanError, _lengths, '{"lens": [' + "9" * 30 + "]}"),
        _read("lengths that are infinite", PlanError, _lengths, '{"lens": [Infinity]}'),
        _read("a histogram without rows", PlanError, _histogram, "range,count\n"),
        _read("a histogram with NaN", PlanError, _histogram, 'range,count\n"[1, 2]",nan\n'),
    ),
}  # fmt: skip
