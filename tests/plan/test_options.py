"""One type of options for compile, plan, the command line and the documents."""

import inspect
from dataclasses import fields, replace

import pytest
import torch
from typer.testing import CliRunner

import dcpc
from dcpc.api import plan, rank_memory_bytes
from dcpc.commands.cli import app
from dcpc.errors import DataError, PlanError
from dcpc.plan.options import (
    MOST_COMMUNICATORS,
    CompileOptions,
    PlanOptions,
    commanded,
    degrees,
    facts,
    few_degrees,
)
from dcpc.symbolic_profile import find
from dcpc.trace import checked_dtype

SHARED = {
    "memory": None,
    "device": "auto",
    "sp": "auto",
    "recompute": "auto",
    "tile": "auto",
    "host": None,
    "disk": None,
    "away": "auto",
    "backend": "inductor",
    "optimizer": None,
    "optimizer_bytes": None,
    "parameters": "whole",
    "block": None,
    "attention": "auto",
    "autocast": None,
    "calibration": None,
    "derive_rules": True,
    "loss": None,
    "batch_norm": "refuse",
}


@pytest.mark.parametrize(
    ("function", "kind", "own"),
    [
        (
            dcpc.compile,
            CompileOptions,
            {
                "group": None,
                "verify": "auto",
                "timeout": 60.0,
                "speeds": "equal",
                "unpad": False,
                "pipeline": None,
            },
        ),
        (plan, PlanOptions, {"world": 1}),
    ],
)
def test_names_and_defaults_are_what_users_write(function, kind, own):
    found = [*inspect.signature(function).parameters.values()]
    assert [p.name for p in found[:2]] == ["model", "buckets"]
    assert {p.name: p.default for p in found[2:]} == SHARED | own
    assert all(p.kind is p.KEYWORD_ONLY for p in found[2:])
    assert {o.name: o.default for o in fields(kind)} == SHARED | own
    for option in fields(kind):
        assert f"    {option.name}: {facts(option).meaning}" in function.__doc__


def test_unknown_option_is_refused_before_anything_runs():
    with pytest.raises(PlanError, match=r"^dcpc.compile: got memry=;.*did you mean memory=\?$"):
        dcpc.compile(None, None, memry=3)
    with pytest.raises(DataError, match=r"DataLoader: got weigth=;.*did you mean weight=\?$"):
        dcpc.DataLoader([], None, weigth="labels")
    with pytest.raises(PlanError, match=r"got xyz=;.*, memory, .*; leave it out$"):
        plan(None, None, xyz=3)
    with pytest.raises(PlanError, match=r"got 3 .*, 8 among.*, such as memory=$"):
        plan(None, None, 8)
    with pytest.raises(
        PlanError, match=r"by name some of memory.*mean memory= or host= or timeout=\?$"
    ):
        dcpc.compile(None, None, 1e9)
    with pytest.raises(PlanError, match=r"pass it by its name, such as memory=$"):
        dcpc.compile(None, None, "eager")
    with pytest.raises(PlanError, match=r"model, buckets by position.*pass it by its name$"):
        dcpc.compile(None, None, object())
    with pytest.raises(PlanError, match=r"dcpc.compile: got no buckets; .*; pass it$"):
        dcpc.compile(None)
    with pytest.raises(PlanError, match=r"got model twice; expected it once; "):
        dcpc.compile(None, model=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0}, r"memory=0; expected a positive"),
        ({"memory": "80Q"}, r"memory='80Q'; expected a positive"),
        ({"memory": "0GB"}, r"memory='0GB'; expected a positive"),
        ({"memory": True}, r"memory=True; expected a positive"),
        ({"memory": [1e9]}, r"memory=\[1000000000.0\]; expected a positive"),
        ({"device": "abacus"}, r"abacus.*expected one of h200"),
        ({"recompute": "some"}, r"recompute='some'; expected one of auto, pyramid"),
        ({"backend": "tpu"}, r"backend='tpu'; expected one of"),
        ({"attention": "tail"}, r"attention='tail'; expected one of auto"),
        ({"autocast": torch.int8}, r"autocast=torch.int8; expected"),
        ({"autocast": "float"}, r"autocast=torch.float32; expected"),
        ({"autocast": "bf17"}, r"autocast='bf17'; expected"),
        ({"tile": 0}, r"tile=0; expected 'auto', 'none' or the most rows"),
        ({"tile": True}, r"tile=True; expected"),
        ({"optimizer": torch.optim.SGD, "optimizer_bytes": 0}, r"expected one of them"),
    ],
)
def test_values_are_checked_when_options_are_made(options, message):
    for kind in (CompileOptions, PlanOptions):
        with pytest.raises(dcpc.DcpcError, match=message):
            kind(**options)
        with pytest.raises(dcpc.DcpcError, match=message):
            replace(kind(), **options)


def test_verify_is_checked():
    with pytest.raises(dcpc.PlanError, match="verify='much'; expected one of auto, full, off"):
        CompileOptions(verify="much")


@pytest.mark.parametrize(
    ("memory", "size_bytes"),
    [("80GB", 80 * 10**9), ("512MiB", 2**29), ("8e9", 8 * 10**9), (0.5, 2**33), ("0.5", 2**33)],
)
def test_memory_of_a_rank(memory, size_bytes):
    device = replace(find("h200"), memory_bytes=2**34, communicator_bytes=0)
    assert rank_memory_bytes(CompileOptions(memory=memory).memory, device, 2) == size_bytes


def test_communicators_are_off_a_gpus_memory_and_not_off_bytes():
    device = replace(find("h200"), memory_bytes=80 * 10**9, communicator_bytes=10**9)
    # Of 4 ranks: all of them twice, and pairs.
    told = {memory: rank_memory_bytes(memory, device, 4) for memory in (None, 0.5, 70e9)}
    assert told == {None: 77 * 10**9, 0.5: 385 * 10**8, 70e9: 70 * 10**9}
    assert rank_memory_bytes(None, device, 1) == 80 * 10**9
    cpu = replace(find("cpu"), memory_bytes=80 * 10**9)
    assert rank_memory_bytes(None, cpu, 4) == 20 * 10**9


@pytest.mark.parametrize("world", [2, 8, 24, 48, 60, 256, 1000])
def test_few_degrees_serve_on_a_gpu(world):
    every = degrees("auto", world)
    kept = few_degrees(every, world)
    assert {1, world} <= {*kept} <= {*every}
    assert 2 + sum(1 < sp < world for sp in kept) <= MOST_COMMUNICATORS
    assert kept == every or len(kept) == MOST_COMMUNICATORS


def test_what_compile_is_told_reaches_the_plan():
    told = {"memory": 3, "parameters": "step", "recompute": "pyramid", "derive_rules": False}
    found = CompileOptions(verify="off", **told).planned_for(4)
    assert found == PlanOptions(world=4, **told)
    assert found.recompute_mode == "auto"


@pytest.mark.parametrize("command", ["plan", "report", "source", "simulate"])
def test_commands_have_every_option(command):
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
    for name in commanded():
        assert f"--{name.replace('_', '-')}" in shown


def test_what_a_shell_offers_is_what_an_option_takes():
    for name, (_, read, _) in commanded().items():
        for choice in read.choices:
            assert getattr(PlanOptions(**{name: read.value(choice)}), name) == read.value(choice)
    offering = {name for name, (_, read, _) in commanded().items() if read.choices}
    assert offering == {
        "device", "sp", "recompute", "tile", "away", "backend", "parameters", "attention",
        "autocast", "batch_norm",
    }  # fmt: skip


@pytest.mark.parametrize(
    "speeds", ["fast", [], [1.0, 0.0], [1.0, float("nan")], [True], 2.0, [1.0, "a"]]
)
def test_speeds_that_make_no_sense_are_refused(speeds):
    with pytest.raises(PlanError, match=r"got speeds=.*; expected 'auto'"):
        CompileOptions(speeds=speeds)


def test_speeds_are_words_or_numbers():
    for good in ("auto", "equal", [1, 0.5], (2.0,)):
        assert CompileOptions(speeds=good).speeds == good


@pytest.mark.parametrize("name", ["bf16", "bfloat16", torch.bfloat16])
def test_autocast_takes_a_name(name):
    assert checked_dtype(name) is torch.bfloat16
