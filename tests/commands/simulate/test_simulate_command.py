"""`dcpc simulate` on a tiny model, by the command line: the table, the trace, what mistakes say."""

import json
import re

import pytest
from typer.testing import CliRunner

from dcpc.commands.cli import app
from dcpc.commands.simulate import default_degrees
from dcpc.plan.options import parse_degrees
from models.gpt import GPT, GPTConfig

BUCKETS = """
inputs: {input_ids: "int64[batch, seq]", labels: "int64[batch, seq]"}
sizes: [{seq: 32}, {seq: 128}]
"""
FACTORY = "tests.commands.simulate.test_simulate_command:tiny"


def tiny() -> GPT:
    return GPT(GPTConfig(vocab_size=32, dim=16, n_layers=1, n_heads=2))


def run(tmp_path, *more: str):
    (tmp_path / "b.yaml").write_text(BUCKETS)
    (tmp_path / "l.json").write_text(json.dumps({"lens": [20, 32, 50, 128]}))
    given = [FACTORY, "--buckets", str(tmp_path / "b.yaml"), "--device", "h200"]
    return CliRunner().invoke(app, ["simulate", *given, *more])


def test_simulate_prints_every_system_and_writes_a_trace(tmp_path):
    trace = tmp_path / "t.json"
    found = run(tmp_path, "--world", "4", "--sp", "1,2", "--lengths", str(tmp_path / "l.json"),
                "--steps", "2", "--tokens-per-step", "4096", "--trace", str(trace))  # fmt: skip
    assert found.exit_code == 0, found.output
    for name in ("padded bucket", "packing", "homogeneous", "VideoSys inter", "first fit", "dcpc"):
        assert name in found.output
    padding = 1 - (20 + 32 + 50 + 128) / (32 + 32 + 128 + 128)
    share = re.search(r"at its bucket's length: (\d+)% of the tokens are padding", found.output)
    assert float(share[1]) == pytest.approx(100 * padding, abs=10)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["pid"] for e in events} == set(range(10))
    assert all(e["dur"] >= 0 for e in events if e["ph"] == "X")


@pytest.mark.parametrize(
    ("more", "says"),
    [((), "--lengths, --histogram and --shares"), (("--shares", "1,x"), "expected numbers")],
)
def test_simulate_says_what_is_missing(tmp_path, more, says):
    found = run(tmp_path, *more)
    assert found.exit_code == 1
    assert says in found.output


def test_simulate_without_degrees_prices_powers_of_two(tmp_path):
    found = run(tmp_path, "--world", "6", "--shares", "1,1", "--steps", "1")
    assert found.exit_code == 0, found.output
    assert "dcpc" in found.output
    assert default_degrees(6) == (1, 2, 4)


def test_degrees_are_one_several_or_auto():
    assert parse_degrees("4") == 4
    assert parse_degrees("1,2, 4") == [1, 2, 4]
    assert parse_degrees("auto") == "auto"
