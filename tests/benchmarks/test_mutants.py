"""Planted faults are caught, and models without one pass: `benchmarks.mutants` has them all.

And what the verifier says and draws for the models that faults are planted in.
"""

import pytest
import torch

from benchmarks.mutants import MUTANTS
from dcpc import api
from dcpc.commands.check.split import SPLITTING
from dcpc.ops.pieces import piece
from dcpc.verify import Verifier
from dcpc.verify.inputs import KINDS, draw
from tests.mutants.layers import SETTINGS
from tests.mutants.plant import PHASES, MisplantedError, edited
from tests.mutants.run import CAUGHT, DROPPED, HARMLESS, run_mutant, run_sound

BY_NAME = {f"{m.phase}: {m.name}": m for m in MUTANTS}
CHEAP = (
    "trace: another scale of attention",
    "masks: a limit is one key too wide",
    "rules: two names of a softmax exchanged",
    "placement: a summed name is lost: partial taken for whole",
    "lowering: second off by one",
    "derivatives: a wrong rename of a divisor",
    "schedule: two saved values exchanged",
    "attention: a block's gradient without delta",
)
ALSO = (
    "caches: lowered graphs of any placement are one",
    "runtime: saved values in another order",
    "derivatives: a gradient's dim of size 1 has the stride of a channel",
    "attention: padding of one sample is a key later",
    "lowering: groups are as many as the factor that is split is long",
    "lowering: a constant of ones is of twos",
)


def verified(setting):
    """A verifier that has compared the setting of this name."""
    case = SETTINGS[setting]
    model, buckets = case.model(), case.buckets()
    planned = api.plan(model, buckets, backend="eager", device=SPLITTING, **case.options)
    verifier = Verifier(model, buckets, planned, "auto")
    verifier.start(100.0)  # a tenth of it is for the graphs of the plans
    return verifier


@pytest.mark.parametrize(
    "name", [*CHEAP, *(pytest.param(name, marks=pytest.mark.slow) for name in ALSO)]
)
def test_a_planted_fault_is_caught_when_it_changes_numbers(name):
    verdict = run_mutant(BY_NAME[name])
    assert verdict.error > 1e-6
    assert verdict.end in (CAUGHT, DROPPED), verdict.said


@pytest.mark.parametrize(
    "setting",
    [
        *("gpt", "ring 2"),
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in ("marked", "scaled", "called", "pixels")
        ),
    ],
)
def test_a_model_passes_when_nothing_is_planted(setting):
    verdict = run_sound(setting)
    assert verdict.end == HARMLESS, verdict.said
    assert verdict.error < 1e-12


def test_every_phase_has_faults_and_a_quick_one():
    for phase in PHASES:
        mine = [m for m in MUTANTS if m.phase == phase]
        assert len(mine) >= 3
        assert any(m.quick for m in mine)
    assert len(BY_NAME) == len(MUTANTS) >= 110


def test_every_fault_has_its_place():
    for mutant in MUTANTS:
        with mutant.plant():
            pass


def test_a_fault_is_gone_when_its_context_ends():
    before = piece(9, 9, 0, 2, 1)
    with edited("ops.pieces:piece", "rank * base", "rank * base + 1")():
        assert piece(9, 9, 0, 2, 1) != before
    assert piece(9, 9, 0, 2, 1) == before


def test_a_fault_is_refused_when_its_place_is_gone():
    gone = edited("ops.pieces:piece", "no such code", "")
    with pytest.raises(MisplantedError, match="0 times"), gone():
        pass
    with pytest.raises(MisplantedError, match="there is no"), edited("codegen:gone", "", "")():
        pass


@pytest.mark.parametrize("setting", ["heads 2", "gathered 2", "ring 2"])
def test_all_ranks_are_compared_in_one_process_when_a_bucket_is_split(setting):
    *_, line = verified(setting).lines
    assert line.startswith("sp 2, ")
    assert "loss and every gradient at {seq: 8, batch: " in line


def test_a_sample_is_masked_but_for_its_first_element():
    case = SETTINGS["marked"]
    planned = api.plan(case.model(), case.buckets(), backend="eager")
    sizes, cpu = {"seq": 9, "batch": 3}, torch.device("cpu")
    found = (draw(planned.program, case.buckets(), sizes, k, cpu)["mask"] for k in KINDS)
    wide, ignored, narrow = found
    assert wide[-1].tolist() == [True] + [False] * 8
    assert ignored[-1].sum() > 1
    assert not ignored.all()
    assert narrow.all()
