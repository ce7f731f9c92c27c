"""Planted faults are caught, and models without one pass: `benchmarks.mutants` has them all."""

import pytest

from benchmarks.mutants import MUTANTS
from benchmarks.mutants_plant import PHASES, MisplantedError, edited
from benchmarks.mutants_run import CAUGHT, DROPPED, HARMLESS, run_mutant, run_sound
from dcpc.codegen.pieces import piece

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
    "caches: lowered graphs of any placement are one",
    "runtime: saved values in another order",
)


@pytest.mark.parametrize("name", CHEAP)
def test_a_planted_fault_is_caught_when_it_changes_numbers(name):
    verdict = run_mutant(BY_NAME[name])
    assert verdict.error > 1e-6
    assert verdict.end in (CAUGHT, DROPPED), verdict.said


@pytest.mark.parametrize("setting", ["gpt", "marked", "scaled", "ring 2", "called"])
def test_a_model_passes_when_nothing_is_planted(setting):
    verdict = run_sound(setting)
    assert verdict.end == HARMLESS, verdict.said
    assert verdict.error < 1e-12


def test_every_phase_has_faults_and_a_quick_one():
    for phase in PHASES:
        mine = [m for m in MUTANTS if m.phase == phase]
        assert len(mine) >= 3
        assert any(m.quick for m in mine)
    assert len(BY_NAME) == len(MUTANTS) >= 70


def test_every_fault_has_its_place():
    for mutant in MUTANTS:
        with mutant.plant():
            pass


def test_a_fault_is_gone_when_its_context_ends():
    before = piece(9, 9, 0, 2, 1)
    with edited("codegen.pieces:piece", "rank * base", "rank * base + 1")():
        assert piece(9, 9, 0, 2, 1) != before
    assert piece(9, 9, 0, 2, 1) == before


def test_a_fault_is_refused_when_its_place_is_gone():
    gone = edited("codegen.pieces:piece", "no such code", "")
    with pytest.raises(MisplantedError, match="0 times"), gone():
        pass
    with pytest.raises(MisplantedError, match="there is no"), edited("codegen:gone", "", "")():
        pass
