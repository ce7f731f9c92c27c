"""The tour: it plays, its numbers are equal, and the document shows what it prints."""

import re
from pathlib import Path

import pytest

from examples.tour import lengths_picture, main
from tests.cases.fresh import fresh

PAGE = Path(__file__).parents[2] / "docs" / "demos.md"


def test_lengths_are_told_by_octave():
    lines = lengths_picture([1, 2, 3, 900]).splitlines()
    assert [line.split()[:4] for line in lines[1:]] == [
        ["1", "to", "1", "25.0%"], ["2", "to", "3", "50.0%"], ["512", "to", "1023", "25.0%"],
    ]  # fmt: skip
    assert lines[-1].endswith("99.3% " + "#" * 40)


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(900)
def test_the_tour_plays_as_the_document_shows():
    seen = fresh(main, "--seconds", "45")
    assert seen.difference < 1e-10
    assert [each.name.partition(",")[0] for each in seen.compared] == ["dcpc", "DDP", "plain DDP"]
    losses = [each.loss for each in seen.compared]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)
    shown = (
        PAGE.read_text().split("<!-- tour output: begin -->")[1].split("<!-- tour output: end")[0]
    )
    heads = re.findall(r"^\d\. .*?:", shown, re.M)
    assert heads == [f"{n}. {name}:" for n, name in enumerate(
        ("The corpus", "The report", "A planned step", "The race", "The numbers"), 1)]  # fmt: skip
    assert all(each.name in shown for each in seen.compared)
    for part in (seen.lengths, seen.report):
        assert part.splitlines()[0] in shown
    for picture in (seen.picture, shown):
        assert re.search(r"^rank 1 \|[ab]+", picture, re.M)
