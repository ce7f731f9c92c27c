"""The tables of `docs/results/gpu.md`, made from the JSON of runs: `--page FILE ...`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "results" / "gpu.md"
BEGIN, END = "<!-- made by --page: begin -->", "<!-- made by --page: end -->"
STATUSES = ("passed", "failed", "measured", "ran", "not run")


def counted(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns how many rows have each status, those that none has left out."""
    found = Counter(row["status"] for row in rows)
    return ", ".join(f"{found[s]} {s}" for s in STATUSES if found[s])


def page(report: Mapping[str, Any]) -> str:
    """Returns a run as Markdown: what it ran on, a line a step, and each step's rows."""
    versions = ", ".join(f"{n} {v}" for n, v in report["versions"].items() if v is not None)
    lines = [
        f"### {report['device']}, {report['date']}",
        "",
        f"Commit {report['commit']}, {versions}; "
        f"`{report['command']}`, {report['seconds_s']:.0f} s.",
        "",
    ]
    if not report["numbers"]:
        lines += ["Run with `--no-numbers`: nothing was compared or measured.", ""]
    lines += ["| step | seconds | checks |", "|---|---|---|"]
    for step in report["steps"]:
        lines.append(f"| {step['about']} | {step['seconds_s']:.0f} | {counted(step['rows'])} |")
    for step in report["steps"]:
        lines += ["", f"#### {step['about'].capitalize()}", "", *_rows(step["rows"])]
    return "\n".join(lines) + "\n"


def _rows(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns tables: rows of the same figures share one."""
    lines: list[str] = []
    header: tuple[str, ...] | None = None
    for row in rows:
        figures = {n: v for n, v in row.items() if n not in ("check", "status", "where")}
        if tuple(figures) != header:
            header = tuple(figures)
            lines += [""] * bool(lines)
            lines += [f"| check | status |{''.join(f' {n} |' for n in header)}"]
            lines += ["|---" * (2 + len(header)) + "|"]
        cells = "".join(f" {_text(v)} |" for v in figures.values())
        lines.append(f"| {_text(row['check'])} | {row['status']} |{cells}")
    return lines


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, list):
        return ", ".join(map(_text, value)) or "none"
    if isinstance(value, int):
        return f"{value:,}"
    return "-" if value is None else str(value).replace("\n", " ").replace("|", "\\|")


def write(reports: Sequence[Mapping[str, Any]], file: Path = PAGE) -> None:
    """Puts runs' tables into the page, in place of what stands between its two marks.

    Raises:
        SystemExit: a run was not on a GPU, or its numbers are none.
    """
    for report in reports:
        if not report["gpu"] or not report["numbers"]:
            raise SystemExit(
                f"--page: got a run on {report['device']!r}"
                f"{'' if report['numbers'] else ' with --no-numbers'}; {file.name} holds figures "
                "of a GPU: pass the JSON of runs with --device cuda on one"
            )
    text = file.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    pages = "\n".join(map(page, reports))
    file.write_text(f"{before}{BEGIN}\n\n{pages}\n{END}{after}")
