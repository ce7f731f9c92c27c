"""Where a bucket does not fit, tables are printed, and what is said to fit does."""

import re

import pytest
from typer.testing import CliRunner

from dcpc.commands.cli import app
from dcpc.commands.report.needs import MOST_SOUGHT, option_text, round_up
from dcpc.commands.shared.planned import NamedModel
from dcpc.plan.choose import choice_text
from dcpc.plan.options import PlanOptions
from dcpc.symbolic_profile import bytes_of
from tests.cases.ready import traced_once

MODELS = """
from functools import cache
from models.gpt import GPT, GPTConfig

@cache
def tiny():
    return GPT(GPTConfig(vocab_size=16, dim=32, n_layers=2, n_heads=4))
"""
LONG = "12000,16384"
FITS = re.compile(r"^(\{.*?\}) fits with (--.*?): (sp \d+, micro-batch \d+, [^(\n]*)", re.M)


@pytest.fixture(scope="module", autouse=True)
def _traces_are_made_once():
    """Commands plan one module again and again."""
    with traced_once():
        yield


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "needs_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def invoke(command, *options, lengths="32,16384"):
        given = [command, "needs_models:tiny", "--seq", lengths, "--backend", "eager"]
        return CliRunner().invoke(app, [*given, *options])

    return invoke


def settings(text):
    """Returns option -> setting of every line that says what a bucket fits with."""
    return {(bucket, option): setting.strip() for bucket, option, setting in FITS.findall(text)}


def chosen(option, **given):
    """Returns bucket -> setting of a plan with one more option, or another value of one."""
    name, value = option.removeprefix("--").split()
    told = PlanOptions(**given | {name: int(value) if name == "world" else value})
    planned, _ = NamedModel("needs_models:tiny", None, LONG).planned(told, partly=True)
    return {str(bucket): choice_text(plan) for bucket, plan in planned.plans.items()}


@pytest.mark.parametrize("device", ["cpu", pytest.param("h200", marks=pytest.mark.slow)])
def test_what_is_said_to_fit_does(run, device):
    options = ("--device", device, "--memory", "9MB", "--world", "2")
    result = run("plan", *options, lengths=LONG)
    assert result.exit_code == 1
    assert "does not fit" in result.stdout
    assert "PlanError: bucket {seq: 12000} needs" in result.stderr
    found = settings(result.stdout)
    assert {option.split()[0] for _, option in found} == {"--memory", "--world"}
    others = {"device": device, "memory": "9MB", "world": 2, "backend": "eager"}
    (shared,) = re.findall(r"^all of these fit with (.*)$", result.stdout, re.M)
    all_fit = shared.split(", or with ")
    plans = {option: chosen(option, **others) for option in {*all_fit, *(o for _, o in found)}}
    assert all(len(plans[option]) == 2 for option in all_fit)
    assert found == {(bucket, option): plans[option][bucket] for bucket, option in found}


def test_forced_values_that_do_not_fit_are_freed(run):
    options = ("--device", "cpu", "--memory", "20MB", "--sp", "1", "--recompute", "none")
    result = run("report", *options, "--world", "4")
    assert result.exit_code == 1
    found = settings(result.stdout)
    assert {o for _, o in found if not o.startswith("--memory")} & {
        "--recompute auto", "--sp auto", "--recompute auto --sp auto",
    }  # fmt: skip
    assert re.search(r"\{seq: 32\} .* fits$", result.stdout, re.M)
    assert re.search(r"\{seq: 16384\} .* does not fit: [\d.]+ MB too much$", result.stdout, re.M)
    assert "of the buckets that fit:" in result.stdout
    assert "dcpc report --full" in result.stdout


def test_memory_for_nothing_prints_other_what_ifs_and_writes_no_page(run, tmp_path):
    options = ("--memory", "50kB", "--memory", "1GB", "--html", "page.html")
    result = run("report", "--device", "cpu", *options)
    assert result.exit_code == 1
    assert "all of these fit with --memory" in result.stdout
    assert "of the buckets that fit" not in result.stdout
    assert "1.00 GB on 1 rank" in result.stdout
    assert "--parameters auto shares out" in result.stdout
    assert "did not write page.html" in result.stderr
    assert "(1 more of 2 do not fit either)" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_source_of_a_bucket_that_fits_beside_one_that_does_not(run):
    options = ("--device", "cpu", "--memory", "5MB")
    assert run("source", "--bucket", "seq=32", *options).exit_code == 0
    missed = run("source", "--bucket", "seq=16384", *options)
    assert missed.exit_code == 1
    assert "PlanError: bucket {seq: 16384} needs" in missed.stderr


def test_of_many_buckets_those_that_need_most_are_looked_at(run):
    lengths = ",".join(str(64 + 2 * i) for i in range(MOST_SOUGHT + 2))
    result = run("plan", "--device", "cpu", "--memory", "400kB", lengths=lengths)
    assert result.exit_code == 1
    found = {bucket for bucket, _ in settings(result.stdout)}
    assert found == {f"{{seq: {64 + 2 * i}}}" for i in range(2, MOST_SOUGHT + 2)}
    assert "2 more do not fit and need less than these" in result.stdout


@pytest.mark.parametrize("size", [7, 999, 1001, 12_345, 999_999, 1_234_567_890, 3 * 10**12 + 1])
def test_sizes_are_rounded_up_and_read_back(size):
    rounded = round_up(size)
    assert size <= rounded <= size * 1.01
    assert bytes_of(option_text(rounded)) == rounded
