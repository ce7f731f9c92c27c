"""Every pair of options runs with the plain model's numbers, or is refused as the table says."""

from itertools import combinations

import pytest

from tests.cases.combinations import PAGE, REFUSED, SAME, met, page, pairs, rows
from tests.cases.launch import run_ranks

PARTS = 2  # of the rows, for two processes


def met_by(rank: int, names: list[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    return {each: met(each) for each in names}


def check(names: list[tuple[str, ...]], timeout_s: float) -> None:
    for found in run_ranks(met_by, 2, names, timeout_s=timeout_s):
        for each, said in found.items():
            refused = frozenset(each) in REFUSED
            by_name = said.startswith(("refused: pipeline=2", "refused: got parameters="))
            assert by_name if refused else not said, (each, said)


@pytest.mark.multirank
def test_what_the_table_refuses_is_refused():
    check([each for each in pairs() if frozenset(each) in REFUSED], 60.0)


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_other_pair_has_the_plain_models_numbers(part):
    check(rows()[part::PARTS], 900.0)


def test_every_pair_that_runs_is_in_two_rows_and_no_other_is():
    every = [{frozenset(p) for p in combinations(row, 2)} for row in rows()]
    for pair in map(frozenset, pairs()):
        exact = [
            r
            for r in every
            if pair in r and ("autocast" in pair or "autocast" not in set().union(*r))
        ]
        assert (len(exact) >= 2) != (pair in REFUSED)
    assert not set().union(*every) & {*SAME, *REFUSED}


def test_the_page_is_made_of_the_table():
    assert PAGE.read_text(encoding="utf-8") == page()
