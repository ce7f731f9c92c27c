"""The Trainer's example: five lines away from the plain script, and the same losses on ranks."""

import difflib
import re
from pathlib import Path

import pytest

from examples import hf_trainer, hf_trainer_plain
from tests.cases.launch import run_ranks

ROOT = Path(__file__).parents[2]
PLAIN, OURS = (ROOT / "examples" / f"{name}.py" for name in ("hf_trainer_plain", "hf_trainer"))
SCRIPTS = {"dcpc": hf_trainer, "plain": hf_trainer_plain}


def changed() -> list[str]:
    """Returns the lines by which the scripts differ, blank ones left out."""
    texts = (PLAIN.read_text().splitlines(), OURS.read_text().splitlines())
    lines = list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:]
    return [line for line in lines if not line.startswith("@@") and line[1:].strip()]


def test_the_diff_is_five_lines_and_in_the_document():
    assert len(changed()) <= 5
    (shown,) = re.findall(
        r"^```diff\n(.*?)^```", (ROOT / "docs/huggingface.md").read_text(), re.M | re.S
    )
    assert [line for line in shown.splitlines() if line[1:].strip()] == changed()


def train(rank, steps, script):
    hf_trainer.MyTrainer.compile_options = {"backend": "eager"}
    return SCRIPTS[script].main(steps)


@pytest.mark.slow
@pytest.mark.multirank
def test_same_losses_alone_and_on_two_ranks():
    (alone,) = run_ranks(train, 1, 3, "dcpc")
    assert alone[-1] < alone[0]
    for losses in run_ranks(train, 2, 3, "dcpc"):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_the_plain_script_trains():
    (losses,) = run_ranks(train, 1, 3, "plain")
    assert losses[-1] < losses[0]
