"""The documents say what the code has: options, errors, examples."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dcpc
from dcpc.commands.cli import parse_bucket
from dcpc.commands.shared.factories import load_model
from dcpc.plan.options import CompileOptions, commanded, options_table

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


def blocks(file: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", file.read_text(), re.M | re.S)


def column(text: str, heading: str, n: int = 0) -> list[str]:
    """Returns cell n of each row of the table that begins with this heading, without backquotes."""
    rows = text.split(f"| {heading} |", 1)[1].split("\n\n")[0].splitlines()[2:]
    return [row.split("|")[n + 1].strip().strip("`") for row in rows]


def test_table_of_options_is_made_of_their_type():
    assert options_table(CompileOptions) in (DOCS / "options.md").read_text()


def test_table_of_the_loaders_options_has_their_names_and_defaults():
    text = (DOCS / "options.md").read_text().split("## Options of `dcpc.DataLoader`")[1]
    known = list(inspect.signature(dcpc.DataLoader.__init__).parameters.values())[1:]
    assert column(text, "option") == [p.name for p in known]
    empty = inspect.Parameter.empty
    said = ["" if p.default is empty else repr(p.default).replace("'", '"') for p in known]
    assert column(text, "option", 1) == said


def test_commands_name_the_options_that_they_share():
    (said,) = re.findall(r"share these options: (.*?)\.", (DOCS / "commands.md").read_text(), re.S)
    assert said.count("`--") == len(commanded())
    assert re.findall("`--(.*?)`", said) == [name.replace("_", "-") for name in commanded()]


def test_commands_run_as_they_are_written():
    text = (DOCS / "commands.md").read_text()
    lines = re.findall(r"^    dcpc (.*)$", text, re.M)
    buckets = dcpc.Buckets.from_yaml(ROOT / "examples/buckets.yaml")
    told = [parse_bucket(b) for line in lines for b in re.findall(r"--bucket (\S+)", line)]
    assert told
    assert all(any(b.sizes == sizes for b in buckets) for sizes in told)
    factories = set(re.findall(r" ([a-z_.]+:[a-z]+) ", " ".join(lines)))
    assert "examples.train_text:model" in factories
    with torch.device("meta"):
        assert all(isinstance(load_model(name), torch.nn.Module) for name in factories)
    assert "`examples.train_text:model`" in (ROOT / "README.md").read_text()


def test_every_error_is_explained():
    ours = {n for n in dir(dcpc) if n.endswith("Error") and n != "DcpcError"}
    assert set(column((DOCS / "errors.md").read_text(), "class")) == ours


def test_script_and_buckets_of_train_are_the_examples():
    assert (ROOT / "examples/train_text.py").read_text() in blocks(DOCS / "train.md", "python")
    assert (ROOT / "examples/buckets.yaml").read_text() in blocks(DOCS / "train.md", "yaml")


def test_python_of_documents_parses():
    found = [b for f in [ROOT / "README.md", *DOCS.glob("**/*.md")] for b in blocks(f, "python")]
    assert len([ast.parse(block) for block in found]) >= 3


@pytest.mark.slow
@pytest.mark.multirank
def test_the_readmes_loop_trains(tmp_path):
    (code,) = (b for b in blocks(ROOT / "README.md", "python") if "train_step" in b)
    (tmp_path / "train.py").write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500
    )
    assert ran.returncode == 0, ran.stderr
    shown = re.findall(r"^step (\d+): loss [\d.]+, [\d,]+ tokens/s", ran.stderr, re.M)
    assert shown == ["1", "2"], ran.stderr
    assert "import models" not in code
    assert "from models" not in code


def test_the_readmes_report_is_what_its_model_gets():
    (code,) = (b for b in blocks(ROOT / "README.md", "python") if "train_step" in b)
    (plan,) = re.findall(
        r"`print\((dcpc\.api\.plan\(model, .*?\))\.report\(\)\)`", (ROOT / "README.md").read_text()
    )
    names: dict[str, object] = {}
    exec(code.split("compiled =")[0] + "planned = " + plan, names)
    (shown,) = (b for b in blocks(ROOT / "README.md", "text") if b.startswith("plan per"))
    assert names["planned"].report().startswith(shown)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 160
