"""Every pair of options runs with the plain model's numbers, or is refused as the table says."""

import pytest

from tests.cases.combinations import PAGE, REFUSED, met, page, pairs
from tests.cases.launch import run_ranks

PARTS = 6  # of the pairs, so that two processes share them


def met_by(rank: int, names: list[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    return {each: met(each) for each in names}


def check(names: list[tuple[str, ...]], timeout_s: float) -> None:
    for found in run_ranks(met_by, 2, names, timeout_s=timeout_s):
        for each, said in found.items():
            refused = frozenset(each) in REFUSED
            assert said.startswith("refused: pipeline=2") if refused else not said, (each, said)


@pytest.mark.multirank
def test_what_the_table_refuses_is_refused():
    check([each for each in pairs() if frozenset(each) in REFUSED], 60.0)


@pytest.mark.multirank
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_other_pair_has_the_plain_models_numbers(part):
    check([each for each in pairs() if frozenset(each) not in REFUSED][part::PARTS], 900.0)


def test_the_page_is_made_of_the_table():
    assert PAGE.read_text(encoding="utf-8") == page()
