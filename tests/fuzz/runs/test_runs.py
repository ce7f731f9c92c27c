"""A fixed slice of random training runs, alone and on two ranks."""

import pytest
import torch

from tests.fuzz.judge import Outcome
from tests.fuzz.runs.draw import PER_SETUP, Options, Run, generate
from tests.fuzz.runs.hunt import outcomes, smallest
from tests.fuzz.runs.models import Setup

MADE_OF = (Options, Setup)  # what the text of a run names besides `Run`
# Packed by documents and by positions, a grid, weights, a mean over samples, ignore_index=-1; and
# packed beside rows of one token, which was refused.
ALONE = [s * PER_SETUP + n for n in range(5) for s in (9, 19, 16, 24, 25, 11)] + [4 * PER_SETUP]
# Steps of one and of two ranks a micro-batch, and both; a parameter that no loss uses.
OF_TWO = [s * PER_SETUP + n for n in range(4) for s in (20, 9, 33)]
# The first two of each setup are quick; the others run in `make test-exact`.
PARTS = [slice(2), pytest.param(slice(2, None), marks=pytest.mark.slow)]


def chosen(seeds: list[int], setups: int, part: slice) -> list[int]:
    """Returns the seeds whose number within their setup is in a part.

    Those of one setup follow each other, as they share what is compiled.
    """
    rounds = [seeds[n : n + setups] for n in range(0, len(seeds), setups)]
    return sorted(seed for each in rounds[part] for seed in each)


def check(runs: list[Run]) -> None:
    found = outcomes(runs)
    bad = [(o, run) for run, o in zip(runs, found, strict=False) if o.kind in ("wrong", "crash")]
    assert not bad, f"{bad[0][0].text}\n{bad[0][1].text()}"
    assert [o.kind for o in found].count("right") >= 0.9 * len(runs)


@pytest.mark.parametrize("part", PARTS, ids=["quick", "rest"])
def test_random_runs_alone_train_as_the_plain_model(part):
    check([generate(seed) for seed in chosen(ALONE, 6, part)])


def test_rows_of_one_token_do_not_keep_others_from_being_packed():
    run = generate(ALONE[-1])
    assert run.options.packing
    assert ((1,), 2) in run.setup.sizes
    assert outcomes([run])[0].kind == "right"


@pytest.mark.multirank
@pytest.mark.parametrize("part", PARTS, ids=["quick", "rest"])
def test_random_runs_on_two_ranks_train_as_the_plain_model(part):
    check([generate(seed, 2) for seed in chosen(OF_TWO, 3, part)])


FAULTS = {
    "a weight is dropped": ("data.making.weighed", lambda weigh, inputs, ids: 1.0),
    "samples done ahead are forgotten": ("data.progress.frozenset", lambda places: frozenset()),
    "nothing is clipped": ("step.on_group.clip_gradients", lambda params, clip: clip),
    "packed sequences are joined": (
        "data.packing.RowMaker._marks",
        lambda *a: torch.ones(a[-1]).long(),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, monkeypatch):
    where, wrong = FAULTS[fault]
    builtin = where.endswith("frozenset")  # found in no module by name
    monkeypatch.setattr(f"dcpc.runtime.{where}", wrong, raising=not builtin)
    assert any(outcomes([generate(seed)])[0].kind == "wrong" for seed in sorted(ALONE))


def test_a_run_that_fails_is_made_smaller(monkeypatch):
    def faulty(runs):
        return [Outcome("wrong" if (5,) in r.lengths and r.clip else "right") for r in runs]

    monkeypatch.setattr("tests.fuzz.runs.hunt.outcomes", faulty)
    run = Run(lengths=((3,), (5,), (8,)), clip=0.1, epochs=2, stop=1)
    assert smallest(run, Outcome("wrong")).text() == "Run(lengths=((5,),), clip=0.1)"


def test_a_run_is_the_same_at_every_call_and_its_text_makes_it():
    run = generate(77, 2)
    assert run == generate(77, 2) != generate(78, 2)
    assert eval(run.text()) == run
