"""What a user sees of steps: a trace of all ranks, the console, the table of counts."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import dcpc
from dcpc.errors import DataError
from dcpc.runtime.step.recording import named
from tests.cases.launch import run_prepared
from tests.cases.ragged import Ragged, gpt
from tests.cases.ready import Ready

STEPS = 2


def ready(world: int) -> Ready:
    inputs = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
    buckets = dcpc.Buckets(inputs=inputs, sizes=[{"seq": 9}, {"seq": 24}])
    return Ready(gpt(), buckets, world, backend="eager", sp=world, verify="off")


def train(compiled: Any) -> None:
    pad = {"input_ids": 0, "labels": -100}
    loader = dcpc.DataLoader(Ragged(), compiled, tokens_per_step=60, pad=pad, weight="labels")
    for _, step in zip(range(STEPS), loader, strict=False):
        compiled.train_step(step)


def with_folder(world: int, folder: Path) -> tuple[Ready, Path]:
    return ready(world), folder


def recorded(rank: int, made: tuple[Ready, Path]) -> str:
    compiled, folder = made[0].compile(), made[1]
    out = io.StringIO()
    compiled.log_to(dcpc.ConsoleLogger(steps=STEPS, every=2, console=Console(file=out, width=200)))
    with dcpc.timeline(compiled, folder / "trace.json"):
        train(compiled)
    return f"{compiled.stats()}\n---\n{out.getvalue()}"


@pytest.mark.multirank
def test_a_trace_has_all_ranks_and_names(tmp_path):
    shown, other = (
        text.split("\n---\n") for text in run_prepared(with_folder, recorded, 2, 2, tmp_path)
    )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    processes = {
        e["pid"]: e["args"]["name"]
        for e in events
        if e["ph"] == "M" and e["name"] == "process_name"
    }
    assert sorted(processes.values()) == ["rank 0", "rank 1"]
    for pid, rank in processes.items():
        names = {e["name"]: e for e in events if e["pid"] == pid and e["ph"] == "X"}
        steps = [f"train_step, step {n} of epoch 0, {rank}" for n in range(STEPS)]
        assert {*steps, f"sum of gradients, {rank}"} <= names.keys()
        own = [
            n
            for n in names
            if re.fullmatch(rf"micro-batch \d+: \d x {{seq: \d+}}, sp 2, {rank}", n)
        ]
        assert own
        assert any(name.startswith("aten::") for name in names)
    starts = [[e["ts"] for e in events if e["name"] == f"train_step, step 0 of epoch 0, rank {r}"]
              for r in (0, 1)]  # fmt: skip
    assert abs(starts[0][0] - starts[1][0]) < 5e6, "the ranks' clocks are one"
    table, lines = shown
    assert re.search(
        r"^bucket +calls +samples +micro-batches +measured s +predicted s$", table, re.M
    )
    assert re.search(r"^\{seq: 24\} +\d+ +\d+ +\d+ +\d+\.\d{3} +\d+\.\d{3}$", table, re.M)
    assert re.search(r"^1 +\d+\.\d{3} +\d+\.\d{3} +\d+\.\d{3} +1$", table, re.M)
    assert "2 steps (0 skipped)" in table
    assert re.match(r"step 1: loss \d\.\d{4}, [\d,]+ tokens/s, ranks idle \d+%\nstep 2: ", lines)
    assert other[1] == ""


@pytest.fixture(scope="module")
def compiled():
    return ready(1).compile()


def test_a_terminal_gets_a_bar_that_ends(compiled):
    out = io.StringIO()
    console = Console(file=out, width=120, force_terminal=True)
    compiled.log_to(dcpc.ConsoleLogger(steps=STEPS, console=console))
    train(compiled)
    assert "2/2" in out.getvalue()
    assert "tokens/s" in out.getvalue()
    assert out.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor is shown again"


def test_a_name_is_not_made_without_a_profiler():
    with named(lambda: pytest.fail("made")):
        pass
    with torch.profiler.profile() as found, named(lambda: "whole"):
        pass
    assert "whole" in {e.key for e in found.key_averages()}


def test_a_second_profiler_and_a_wrong_file_are_refused(compiled, tmp_path):
    with (
        pytest.raises(DataError, match="a profiler that runs already; expected none"),
        torch.profiler.profile(),
        dcpc.timeline(compiled, tmp_path / "trace.json"),
    ):
        pass
    with (
        pytest.raises(DataError, match="expected a file to write to; make its folder"),
        dcpc.timeline(compiled, tmp_path / "no" / "trace.json"),
    ):
        pass
    with pytest.raises(DataError, match="every: got 0"):
        dcpc.ConsoleLogger(every=0)
