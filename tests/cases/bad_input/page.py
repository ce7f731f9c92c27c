"""Makes the tables of docs/error_messages.md from what the kinds of bad input raise.

.venv/bin/python -m tests.cases.bad_input.page     # writes the page's part between the marks
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cases.bad_input import SECTIONS
from tests.cases.bad_input.kinds import Ground, Kind, Met, meet
from tests.cases.bad_input.ranks import RANKS, WORLD, meet_all
from tests.cases.launch import run_ranks
from tests.cases.one_trace import traced_once

PAGE = Path(__file__).parents[3] / "docs" / "error_messages.md"
BEGIN = "<!-- made by `python -m tests.cases.bad_input.page`; change the kinds there -->\n"
END = "<!-- end of what is made -->\n"
_LONGEST = 260


def met_alone(folder: Path) -> dict[str, list[tuple[Kind, Met]]]:
    """Returns what came of each kind that one rank meets, by section."""
    ground = Ground(folder)
    with warnings.catch_warnings(), traced_once():
        warnings.simplefilter("ignore")
        return {
            name: [(kind, meet(kind, ground)) for kind in kinds] for name, kinds in SECTIONS.items()
        }


def tables(alone: Mapping[str, Sequence[tuple[Kind, Met]]], ranks: Sequence[Met]) -> str:
    """Returns the page's part: a table for each section."""
    every = {**alone, "Several ranks": list(zip(RANKS, ranks, strict=True))}
    return "\n".join(_table(name, rows) for name, rows in every.items())


def page_with(made: str, text: str) -> str:
    """Returns the page with another part between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def _table(name: str, rows: Sequence[tuple[Kind, Met]]) -> str:
    lines = [f"### {name}", "", "| got | message | what to do |", "|---|---|---|"]
    for kind, met in rows:
        said, advice = parts(met.text)
        told = kind.advice or _code(advice)
        lines.append(f"| {kind.name} | {_code(f'{met.error}: {said}')} | {told} |")
    return "\n".join([*lines, ""])


def parts(text: str) -> tuple[str, str]:
    """Returns what a message says up to what is expected, and what it says to do."""
    first, *_ = text.splitlines()
    whole = first if "; expected" in first else " ".join(text.split())
    begin, mark, rest = whole.partition("; expected" if "; expected" in whole else "expected")
    expected, _, advice = rest.partition("; ")
    return begin + mark + expected, advice


def _code(text: str) -> str:
    short = text if len(text) <= _LONGEST else text[:_LONGEST].rsplit(" ", 1)[0] + " ..."
    ticks = "``" if "`" in short else "`"
    room = " " if "`" in short else ""
    return f"{ticks}{room}{short.replace('|', chr(92) + '|')}{room}{ticks}"


def main() -> None:
    """Writes the page."""
    with tempfile.TemporaryDirectory() as folder:
        alone = met_alone(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        ranks, _ = run_ranks(meet_all, WORLD, folder)[0]
    made = tables(alone, ranks)
    PAGE.write_text(page_with(made, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
