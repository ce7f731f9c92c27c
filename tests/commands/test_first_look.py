"""Inputs that are read from forward's signature, and models whose inputs cannot be."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, ViTConfig, ViTForImageClassification
from typer.testing import CliRunner

from dcpc.buckets import Buckets
from dcpc.commands.cli import app
from dcpc.commands.shared.first_look import first_look, lengths_of
from dcpc.errors import BucketError
from models.gpt import GPT, GPTConfig

TINY = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 8}
MODELS = """
from torch import nn
from torch.nn.functional import cross_entropy


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.out = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, idx, targets=None):
        logits = self.out(self.embedding(idx))
        if targets is None:
            return logits, None
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


class PerSequence(Small):
    def forward(self, input_ids, labels):
        return cross_entropy(self.out(self.embedding(input_ids).mean(1)), labels)
"""


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 4)

    def forward(self, x, y, attention_mask, position_ids=None):
        return self.embedding(x).sum()


class Vectors(nn.Module):
    def forward(self, x, y, labels=None):
        return x.sum()


class Anything(nn.Module):
    def forward(self, *args, **more):
        return args[0].sum()


def made(kind, config):
    with torch.device("meta"):
        return kind(config)


@pytest.mark.parametrize(
    ("model", "names", "said"),
    [
        (
            lambda: made(GPT, GPTConfig()),
            ("input_ids", "labels"),
            "GPT.forward(input_ids, labels);",
        ),
        (
            lambda: made(BertForMaskedLM, BertConfig(**TINY)),
            ("input_ids", "labels"),
            "BertForMaskedLM.forward(input_ids=..., labels=..., ...);",
        ),
        (Embedded, ("x", "y", "attention_mask"), "Embedded.forward(x, y, attention_mask, ...);"),
    ],
)
def test_inputs_are_known_by_their_names(model, names, said, tmp_path):
    look = first_look(model(), "8,32")
    assert look.buckets == Buckets(
        inputs=dict.fromkeys(names, "int64[batch, seq]"), sizes=[{"seq": 8}, {"seq": 32}]
    )
    assert f"assumed from {said}" in look.said
    (tmp_path / "b.yaml").write_text(look.said.partition("\n")[2])
    assert Buckets.from_yaml(tmp_path / "b.yaml") == look.buckets


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Vectors, ("Vectors.forward(x, y, labels=...)", "  x: float32[batch, seq, 64]  # correct")),
        (Anything, ("Anything.forward(...)", "  input_ids: int64[batch, seq]\n")),
        (
            lambda: made(ViTForImageClassification, ViTConfig(**TINY)),
            (
                "no argument known for token ids",
                "  pixel_values: float32[batch, seq, 64]  # correct",
            ),
        ),
    ],
)
def test_what_is_not_known_gets_a_file_to_begin_with(model, words, tmp_path):
    with pytest.raises(BucketError, match="expected token ids") as error:
        first_look(model(), "8,32")
    for word in words:
        assert word in str(error.value)
    (tmp_path / "b.yaml").write_text(str(error.value).partition("\n")[2])
    assert len(Buckets.from_yaml(tmp_path / "b.yaml")) == 2


def test_lengths():
    assert lengths_of("512, 2048") == [512, 2048]
    for wrong in ("", "8,", "0", "8,8", "-8", "8k", "8;9"):
        with pytest.raises(BucketError, match="expected lengths from 1 up"):
            lengths_of(wrong)


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "first_look_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)

    def invoke(command, name, *options):
        given = [command, f"first_look_models:{name}", "--device", "h200", "--backend", "eager"]
        return CliRunner().invoke(app, [*given, *options])

    return invoke


@pytest.mark.parametrize("command", ["report", "plan"])
def test_a_model_without_a_file_is_planned(run, command):
    result = run(command, "Small", "--seq", "16,64")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("assumed from Small.forward(idx, targets=...);")
    assert "{seq: 64}" in result.stdout


def test_source_is_python_and_says_what_was_assumed_beside_it(run):
    result = run("source", "Small", "--seq", "16,64", "--bucket", "seq=16")
    assert result.exit_code == 0, result.output
    compile(result.stdout, "variant", "exec")
    assert "assumed from Small" in result.stderr


def test_source_of_one_length_needs_no_bucket(run):
    result = run("source", "Small", "--seq", "16")
    assert result.exit_code == 0, result.output
    compile(result.stdout, "variant", "exec")
    several = run("source", "Small", "--seq", "16,64")
    assert "got bucket {}; expected one of {seq: 16}, {seq: 64}" in several.stderr


def test_a_wrong_assumption_is_said_with_what_it_led_to(run):
    result = run("plan", "PerSequence", "--seq", "16,64")
    assert result.exit_code == 1
    assert "TraceError: the model's forward: got AssertionError" in result.stderr
    assert "assumed from PerSequence.forward(input_ids, labels)" in result.stderr
    assert "where that is wrong, correct it and pass it as --buckets" in result.stderr


def test_shapes_are_given_once(run):
    neither, both = run("report", "Small"), run("plan", "Small", "--seq", "8", "--buckets", "b")
    assert "got neither of --buckets and --seq" in neither.stderr
    assert "got both of --buckets and --seq" in both.stderr
