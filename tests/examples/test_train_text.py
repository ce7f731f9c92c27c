"""The training script of docs/train.md: the same losses alone, on two ranks, and started again.

Beside it the same loop by DistributedDataParallel: its losses, and its lines.
"""

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

import dcpc
from dcpc.runtime.data.steps import Step
from examples import train_text, train_text_ddp
from examples.code_lines import of_both_loops
from tests.cases.launch import run_ranks

PAGE = Path(__file__).parents[2] / "docs" / "from_ddp.md"


def train(rank, steps, folder=None):
    return train_text.main(steps, folder)


@pytest.mark.slow
@pytest.mark.multirank
def test_same_losses_alone_and_on_two_ranks():
    (alone,) = run_ranks(train, 1, 3)
    assert alone[-1] < alone[0]
    for losses in run_ranks(train, 2, 3):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.multirank
def test_it_goes_on_from_the_last_checkpoint_on_other_ranks(tmp_path):
    (straight,) = run_ranks(train, 1, 7)
    run_ranks(stopped, 2, 6, str(tmp_path))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]
    (rest,) = run_ranks(train, 1, 7, str(tmp_path))
    assert rest == pytest.approx(straight[5:], rel=1e-5)


def stopped(rank, steps, folder):
    """Trains, and lives until what it saves is written."""
    losses = train_text.main(steps, folder)
    for thread in [t for t in threading.enumerate() if t.name.startswith("dcpc save")]:
        thread.join()
    return losses


def both(rank: int, steps: int, folder: str) -> tuple[list[float], list[float]]:
    """Returns the losses of both scripts on the same samples a step, the last ones resumed."""
    samples: list[list[int]] = []

    class Recording(dcpc.DataLoader):
        def __iter__(self) -> Iterator[Step]:
            for step in super().__iter__():
                samples.append([i for mb in step.plan.micro_batches for i in mb.sample_ids])
                yield step

    with mock.patch.object(dcpc, "DataLoader", Recording):
        ours = train_text.main(steps)
    with mock.patch.object(train_text_ddp, "epoch_steps", return_value=samples):
        theirs = train_text_ddp.main(steps - 1, folder)
        return ours, theirs[:5] + train_text_ddp.main(steps, folder)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_loop_by_hand_has_the_same_losses(tmp_path, ranks):
    for ours, theirs in run_ranks(both, ranks, 7, str(tmp_path)):
        assert theirs == pytest.approx(ours, rel=1e-5)


def test_the_pages_count_the_lines_of_both_loops():
    hand, ours = of_both_loops()
    mine = ours.total()
    cut = hand["epoch_steps"] + hand["micro_batches"] + hand["dealt"]
    said = re.findall(r"^\| [a-z][^|]* \| (\d+) \| (\d+) \|$", PAGE.read_text(), re.M)
    assert [(int(a), int(b)) for a, b in said] == [
        (hand[""], ours[""]), (cut, 0), (hand["collated"], 0), (hand["main"], ours["main"]),
        (hand.total(), mine),
    ]  # fmt: skip
    readme = (PAGE.parents[1] / "README.md").read_text()
    assert f"has {hand.total()} lines by hand and {mine} with dcpc" in readme
