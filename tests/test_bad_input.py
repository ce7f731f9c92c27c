"""Every kind of bad input is a `DcpcError` that says what it got, what it expected, what to do.

The table is in tests/cases/bad_input/, and docs/error_messages.md is made from it.
"""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dcpc.commands.cli import app
from tests.cases.bad_input import SECTIONS
from tests.cases.bad_input.commands import USAGE, run
from tests.cases.bad_input.kinds import Ground, Kind, Met, samples
from tests.cases.bad_input.page import PAGE, met_alone, page_with, parts, tables
from tests.cases.bad_input.ranks import RANKS, WORLD, meet_all
from tests.cases.launch import run_ranks

ALONE = [(name, at) for name, kinds in SECTIONS.items() for at in range(len(kinds))]

Alone = dict[str, list[tuple[Kind, Met]]]
Ranks = list[tuple[list[Met], tuple[Any, ...]]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return met_alone(tmp_path_factory.mktemp("alone"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(meet_all, WORLD, str(tmp_path_factory.mktemp("ranks")))


def refuse_incomplete(kind: Kind, met: Met) -> None:
    """Fails unless a kind was met as it should be."""
    assert met.error == kind.error.__name__, met
    said, advice = parts(met.text)
    got, _, expected = said.rpartition("expected")
    assert "got" in got, f"says what it got, then what it expected: {met.text}"
    assert expected.strip(), f"says what it expected: {met.text}"
    assert advice, f"says what to do: {met.text}"
    assert met.touched == ()


def test_there_are_at_least_80_kinds_each_by_a_name_of_its_own():
    assert len(ALONE) + len(RANKS) >= 80
    for kinds in (*SECTIONS.values(), RANKS):
        assert len({kind.name for kind in kinds}) == len(kinds)


@pytest.mark.parametrize(
    ("section", "at"), ALONE, ids=[f"{s}: {SECTIONS[s][at].name}" for s, at in ALONE]
)
def test_a_kind_is_refused_by_name_before_anything_is_computed(alone: Alone, section: str, at: int):
    refuse_incomplete(*alone[section][at])


@pytest.mark.parametrize("at", range(len(RANKS)), ids=[kind.name for kind in RANKS])
def test_ranks_raise_the_same_where_one_of_them_is_wrong(ranks: Ranks, at: int):
    own = [met[at] for met, _ in ranks]
    assert own[0] == own[1]
    refuse_incomplete(RANKS[at], own[0])


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all_and_counted(ranks: Ranks):
    """Skipped, gradients put back, counted once; the next one is not skipped."""
    assert [skipped for _, skipped in ranks] == [(True, True, 1, False)] * WORLD


@pytest.mark.parametrize("words", USAGE, ids=" ".join)
def test_the_command_line_says_how_it_is_used(words: tuple[str, ...], tmp_path: Path):
    result = CliRunner().invoke(app, [w.replace("BUCKETS", str(tmp_path)) for w in words])
    assert result.exit_code == 2
    assert "Error" in result.stderr
    assert "Traceback" not in result.output


def test_folders_and_files_may_have_spaces_and_other_letters(tmp_path: Path):
    ground = Ground(tmp_path / "läufe 日本 1")
    ground.folder.mkdir()
    run(ground, "plan", "tests.cases.bad_input.kinds:Model", "--buckets", "BUCKETS",
        "--backend", "eager")  # fmt: skip
    ground.compiled.save(ground.folder / "ein lauf", 3, wait=True)
    assert ground.compiled.load(ground.folder / "ein lauf").step == 3
    loader = ground.loader()
    loader.save_plan(next(iter(loader)), ground.folder / "plan ü.json")
    run(ground, "replay", str(ground.folder / "plan ü.json"))


def test_ignored_labels_are_no_labels_out_of_range(tmp_path: Path):
    data = samples()
    data[3]["labels"][:] = -100
    ground = Ground(tmp_path)
    ground.trained(data)
    assert ground.compiled.stats().steps > 0


def test_the_page_of_errors_is_what_the_kinds_raise(alone: Alone, ranks: Ranks):
    page = PAGE.read_text(encoding="utf-8")
    made = tables(alone, ranks[0][0])
    assert page == page_with(made, page), "run python -m tests.cases.bad_input.page"
