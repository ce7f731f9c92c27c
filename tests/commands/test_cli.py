"""The command line: plans for any number of ranks from one process, and says what is wrong."""

import re
import sys

import pytest
import torch
from typer.testing import CliRunner

import dcpc
from dcpc.commands.cli import app, parse_bucket
from dcpc.commands.shared.factories import load_model
from dcpc.errors import BucketError, PlanError
from tests.cases.ready import traced_once

MODELS = """
from functools import cache
from torch import nn
from models.gpt import GPT, GPTConfig

number = 3

@cache
def tiny():
    return GPT(GPTConfig(vocab_size=16, dim=32, n_layers=1, n_heads=4))

def sized(dim):
    return GPT(GPTConfig(dim=dim))

class Logits(nn.Sequential):
    def forward(self, input_ids):
        return super().forward(input_ids)

def logits():
    return Logits(nn.Embedding(16, 8), nn.Linear(8, 16))

def loss(outputs, labels):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())

def nothing():
    return None

def broken():
    raise OSError("no weights\\nat all")
"""
BUCKETS = """
inputs:
  input_ids: int64[batch, seq]
  labels: int64[batch, seq]
sizes:
  - {seq: 32, batch: 2}
  - {seq: 65536, batch: 1}
"""


@pytest.fixture(scope="module", autouse=True)
def _traces_are_made_once():
    """Commands plan one module again and again."""
    with traced_once():
        yield


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "cli_models.py").write_text(MODELS)
    (tmp_path / "cli_unfinished.py").write_text("tiny = nn.Linear")
    (tmp_path / "buckets.yaml").write_text(BUCKETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def run(command, *options, model="cli_models:tiny"):
    given = [command, model, "--buckets", "buckets.yaml", "--backend", "eager", *options]
    return CliRunner().invoke(app, given)


def test_plan_lists_every_degree_and_what_fits(folder):
    result = run("plan", "--device", "h200", "--world", "4", "--memory", "90e6")
    assert result.exit_code == 0, result.output
    rows = [line for line in result.stdout.splitlines() if line.endswith(("chosen", "not fit"))]
    assert [row.split()[-1] for row in rows] == ["chosen", "fit", "fit", "chosen"]
    assert "{batch: 1, seq: 65536}: sp 2 does not fit 90 MB" in result.stdout


def test_loss_of_a_model_without_one_is_named(folder):
    def planned(*options):
        arguments = ["plan", "cli_models:logits", "--buckets", "buckets.yaml", *options]
        return CliRunner().invoke(app, arguments)

    assert "sp" in planned("--loss", "cli_models:loss").stdout
    assert "give what a loss takes to loss=fn" in planned().stderr
    assert "got nothing of this name in cli_models" in planned("--loss", "cli_models:los").stderr


def test_report_with_forced_values(folder):
    options = ("--world", "2", "--sp", "2", "--recompute", "all", "--full")
    result = run("report", "--device", "h200", *options)
    assert result.exit_code == 0, result.output
    assert "sp 2" in result.stdout
    assert re.search(r"sp 2, recompute \d+% \(", result.stdout)
    assert "sent bytes = " in result.stdout


def test_report_as_a_page_with_what_ifs(folder):
    options = ("--memory", "90e6", "--memory", "60e6", "--world", "4", "--html", "out/page.html")
    result = run("report", "--device", "h200", "--png", "out/page.png", *options)
    assert result.exit_code == 0, result.output
    assert "crossover lengths of the degree" in result.stdout
    assert "60.0 MB on 4 ranks" in result.stdout
    assert re.search(r"sp 1 up to \{batch: 1, seq: \d+\}", result.stdout) is None  # batches differ
    page = (folder / "out" / "page.html").read_text()
    assert "<title>dcpc: cli_models:tiny</title>" in page
    assert "60.0 MB on 4 ranks" in page
    assert (folder / "out" / "page.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--html", "--png"])
@pytest.mark.parametrize(
    ("file", "words"),
    [("buckets.yaml/page", "cannot be made (File exists"), (".", "got a folder; expected a file")],
)
def test_file_that_cannot_be_written_is_refused_before_planning(folder, option, file, words):
    result = run("report", "--device", "h200", option, file, model="no_such_module:tiny")
    assert result.exit_code == 1
    assert f"PlanError: {option} {file}: got" in result.stderr
    assert words in result.stderr


@pytest.mark.parametrize("wrong", ["-1", "0", "nan", "inf", "80Q", "GB"])
def test_wrong_memory_among_what_ifs_is_refused_before_planning(folder, wrong):
    options = ("--memory", "90e6", "--memory", wrong)
    result = run("report", "--device", "h200", *options, model="no_such_module:tiny")
    assert result.exit_code == 1
    assert f"PlanError: got memory='{wrong}'; expected a positive number" in result.stderr


def test_memory_is_read_with_units(folder):
    options = ("--sp", "1", "--world", "4", "--memory", "87890.625KiB")
    result = run("plan", "--device", "h200", *options)
    assert result.exit_code == 1
    assert "a rank has 90.0 MB" in result.stdout


def test_bytes_of_the_optimizer_are_read_with_units(folder):
    def kept(text):
        told = ("--sp", "1", "--optimizer-bytes", text)
        result = run("report", "--device", "h200", "--memory", "9GB", *told)
        return re.search(r"a rank keeps (.*?) besides", result.stdout)[1]

    assert kept("1e9") == "1.00 GB"
    assert kept("1GiB") == "1.07 GB"
    for wrong in ("-1", "much", "inf", "1e999"):
        assert (
            f"got --optimizer-bytes {wrong}; exp" in run("plan", "--optimizer-bytes", wrong).stderr
        )


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"dcpc {dcpc.__version__} (torch {torch.__version__}, Python ")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("dcpc pl", ["plan"]),
        ("dcpc plan --device h", ["h200", "h100"]),
        ("dcpc report --backend ", ["eager", "inductor"]),
        ("dcpc source --recompute ", ["auto", "pyramid", "none", "all"]),
        ("dcpc simulate --parameters ", ["whole", "step", "pull", "rounds", "auto"]),
        ("dcpc check --attention ", ["auto", "heads", "gathered", "ring", "hybrid"]),
        ("dcpc calibrate --device ", ["auto", "cpu", "cuda"]),
        ("dcpc replay --autocast b", ["bfloat16"]),
    ],
)
def test_shells_complete_names_and_choices(words, offered):
    env = {
        "_DCPC_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    result = CliRunner().invoke(app, [], env=env, prog_name="dcpc")
    assert result.stdout.split() == offered


def test_completion_can_be_shown_and_installed():
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "120"}).stdout
    assert "--install-completion" in shown
    assert "--show-completion" in shown


def test_calibration_with_what_ifs_of_other_ranks_is_refused(folder):
    result = run("report", "--calibration", "c.json", "--world", "2", "--world", "4")
    assert result.exit_code == 1
    assert "--calibration with --world 2, 4; expected one number of ranks" in result.stderr


def test_autocast_halves_what_is_saved(folder):
    def saved(*options):
        result = run("report", "--device", "h200", "--memory", "1e9", "--full", *options)
        assert result.exit_code == 0, result.output
        return int(re.search(r"saved bytes = (\d+)·batch·seq", result.stdout)[1])

    assert saved("--autocast", "bfloat16") < 0.75 * saved()
    assert "got --autocast 'int8'; expected one of none" in run("plan", "--autocast", "int8").stderr


def test_replay_takes_the_options_that_the_model_was_compiled_with(folder):
    (folder / "buckets.yaml").write_text(BUCKETS.replace("65536, batch: 1", "64, batch: 1"))
    compiled = dcpc.compile(
        load_model("cli_models:tiny"), dcpc.Buckets.from_yaml("buckets.yaml"),
        backend="eager", device="cpu", memory=1e9, autocast=torch.bfloat16, verify="off",
    )  # fmt: skip
    data = [{"input_ids": torch.ones(20, dtype=torch.int64), "labels": torch.ones(20).long()}] * 4
    pad = {"input_ids": 0, "labels": -100}
    loader = dcpc.DataLoader(data, compiled, tokens_per_step=80, pad=pad, weight="labels")
    loader.save_plan(next(iter(loader)), "step.json")

    def replayed(*options):
        given = ("replay", "step.json", "cli_models:tiny", "--buckets", "buckets.yaml")
        options = ("--backend", "eager", "--device", "cpu", "--memory", "1e9", *options)
        return CliRunner().invoke(app, [*given, *options])

    result = replayed("--autocast", "bfloat16")
    assert result.exit_code == 0, result.output
    assert "planned again: " in result.stdout
    assert "expected table" in replayed().stderr


def test_help_keeps_brackets():
    shown = CliRunner().invoke(app, ["simulate", "--help"], env={"COLUMNS": "120"}).stdout
    assert '{"lens": [tokens, ...]}' in shown
    assert '"[low, high]",count' in shown


def test_source_is_python(folder):
    result = run("source", "--bucket", "seq=32", "--device", "h200")
    assert result.exit_code == 0, result.output
    compile(result.stdout, "variant", "exec")
    assert "def forward(" in result.stdout
    assert "def backward(" in result.stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--memory", "1e5"), ("PlanError", "{batch: 2, seq: 32}", "100 kB")),
        (("--world", "2", "--sp", "3"), ("sp=3", "1, 2")),
        (("--sp", "many"), ("sp='many'", "auto")),
        (("--device", "abacus"), ("'abacus'", "h200")),
        (("--recompute", "some"), ("'some'", "pyramid, none, all")),
        (("--buckets", "none.yaml"), ("BucketError", "none.yaml")),
    ],
)
def test_wrong_option_is_named(folder, options, words):
    result = run("plan", "--device", "h200", *options)
    assert result.exit_code == 1
    for word in words:
        assert word in result.stderr


def test_unknown_bucket_lists_the_known_ones(folder):
    result = run("source", "--bucket", "seq=33", "--device", "h200", "--sp", "1")
    assert result.exit_code == 1
    assert "{seq: 33}" in result.stderr
    assert "65536" in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cli_models", "expected MODULE:NAME"),
        ("cli_models:", "expected MODULE:NAME"),
        ("no_such_module:tiny", "from importing no_such_module"),
        ("cli_models:tinny", "did you mean tiny"),
        ("cli_models:number", "got a int"),
        ("cli_models:sized", "needs no arguments"),
        ("cli_models:nothing", "got a NoneType; expected a torch.nn.Module"),
        ("cli_models:broken", "calling it raised OSError: no weights (at "),
        ("cli_unfinished:tiny", "got NameError: name 'nn'"),
    ],
)
def test_wrong_model_name_is_explained(folder, text, words):
    with pytest.raises(PlanError, match=r"expected .*; \w+") as error:
        load_model(text)
    assert words in str(error.value)


def test_parse_bucket():
    assert parse_bucket("height=3, width=4") == {"height": 3, "width": 4}
    with pytest.raises(BucketError, match="DIM=SIZE"):
        parse_bucket("seq:3")


@pytest.mark.parametrize(
    "options", [("report", "--html"), ("report", "--png"), ("simulate", "--png")]
)
def test_a_picture_without_matplotlib_is_refused_before_the_plan(options, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    command, option = options
    picture = (option, str(tmp_path / "picture"))
    result = CliRunner().invoke(app, [command, "no.module:here", "--buckets", "no.yaml", *picture])
    assert result.exit_code == 1
    assert "pip install matplotlib" in " ".join(result.stderr.split())
