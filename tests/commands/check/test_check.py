"""`dcpc check`: what it says of a good model, and that it says so of a bad one."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from dcpc.commands.check.check import CheckRequest, on_rank, verdicts_text
from dcpc.commands.check.verdict import Verdict
from dcpc.commands.cli import app
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.verify.exactness import Difference
from tests.commands.check.user_models import BUCKETS

MODELS = "tests.commands.check.user_models"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "buckets.yaml"
    path.write_text(BUCKETS)
    return str(path)


def verdicts(rank: int, file: str, names: tuple[str, ...]) -> list[list[Verdict]]:
    at = ({"seq": 9},)
    losses = {"Logits": f"{MODELS}:loss_of"}
    return [
        on_rank(rank, CheckRequest(f"{MODELS}:{n}", file, at=at, loss=losses.get(n))) for n in names
    ]


@pytest.mark.multirank
def test_good_model_is_accepted_from_the_command_line(file):
    options = ["--buckets", file, "--example", f"{MODELS}:ids", "--timeout", "250"]
    result = CliRunner().invoke(app, ["check", f"{MODELS}:good", *options])
    assert result.exit_code == 0, result.output
    assert "symbolic: batch, seq" in result.stdout
    assert "split over 2 ranks: 100.0% of the FLOPs" in result.stdout
    assert "recompute all" in result.stdout
    assert result.stdout.endswith("good: accepted\n")


@pytest.mark.multirank
def test_bad_models_are_refused_and_the_reason_is_named(file):
    names = ("replicated", "wrong", "drawing", "Logits", "unlabelled")
    for found in run_ranks(verdicts, 2, file, names, timeout_s=280):
        (replicated,), (wrong,), (drawing,), (logits,), (unlabelled,) = found
        assert "Logits.forward" in unlabelled.error
        assert logits.accepted, "its loss is that of --loss"
        assert replicated.worst < 1e-10
        assert ["accepted::centre" in p.replace(".", "::") for p in replicated.problems()] == [True]
        assert wrong.worst > 1e-3
        assert any("differs from the plain model" in p for p in wrong.problems())
        assert drawing.accepted, "both sides draw known numbers in eval(), too"


def test_static_dims_have_a_verdict_for_each_length(file):
    request = CheckRequest(f"{MODELS}:loop", file, example=f"{MODELS}:ids")
    found = on_rank(0, request)
    assert [[d.sizes for d in v.differences] for v in found] == [
        [{"batch": 1, "seq": 8}] * 2,
        [{"batch": 1, "seq": 32}] * 2,
    ]
    assert all(v.accepted and v.worst < 1e-14 for v in found)
    text = verdicts_text(request, found)
    assert text.count("dim 'seq' is static, as forward takes it for a number at ") == 2
    assert "every micro-batch has one sample" in text
    (other,) = on_rank(0, replace(request, at=({"seq": 9},)))
    assert (
        "expected lengths within the buckets' of one of 2 traces; compare at another (["
        in other.error
    )
    (one,) = on_rank(0, replace(request, at=({"seq": 32, "batch": 3},)))
    assert one.differences[0].sizes == {"batch": 1, "seq": 32}


def test_text_says_what_is_wrong(file):
    bad = Verdict(
        2, symbolic=("batch",), fixed=("seq",), differences=(Difference(0.1, 0.2, "w", "w"),)
    )
    text = verdicts_text(CheckRequest("m:f", file), [bad])
    assert "problem: dims fixed by the trace: seq" in text
    assert "problem: differs from the plain model by 2.0e-01, more than 1.0e-10" in text
    assert text.endswith("m:f: NOT accepted\n")


def test_not_a_number_is_no_small_difference():
    assert not Verdict(2, differences=(Difference(0.0, float("nan"), "w", "w"),)).accepted
    assert not Verdict(2, differences=(Difference(float("nan"), 0.0, "w", "loss"),)).accepted
    assert not Verdict(2).accepted
    assert Verdict(2, differences=(Difference(1e-16, 1e-15, "w", "w"),)).accepted


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (f"{MODELS}:god", (), "did you mean good"),
        (f"{MODELS}:good", ("--buckets", "none.yaml"), "none.yaml"),
        (f"{MODELS}:good", ("--at", "seq=999"), "lengths within the buckets'"),
        (f"{MODELS}:good", ("--at", "length=9"), "a length for each of seq"),
        (
            f"{MODELS}:good",
            ("--loss", f"{MODELS}:los"),
            "expected a callable that returns the loss",
        ),
        (f"{MODELS}:good", ("--example", "ids"), "got --example 'ids'; expected MODULE:NAME"),
    ],
)
def test_what_is_asked_for_wrongly_is_said_before_any_rank_starts(file, model, options, words):
    result = CliRunner().invoke(app, ["check", model, "--buckets", file, *options])
    assert result.exit_code == 1
    assert words in result.stderr
