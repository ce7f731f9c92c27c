"""The page: one HTML file with its style and its pictures in it, nothing to fetch."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from dcpc.buckets import Bucket
from dcpc.commands.report.degrees import Cell, cells
from dcpc.commands.report.plots import Plots, draw_plots
from dcpc.commands.report.what_if import WhatIf, cell_text, crossing_lines
from dcpc.ir.thresholds import WIDER_GROUP_GAIN
from dcpc.plan.choose import choice_text, degree_changes, lengths_text, stretches
from dcpc.plan.planning import Planned
from dcpc.symbolic_profile import (
    COLUMNS,
    bytes_text,
    cells_of,
    dominating_term,
    evaluator,
    seconds_text,
    variant_formulas,
)

STYLE = """
:root { --ink: #1c2530; --soft: #5d6b7a; --line: #d9dfe6; --pick: #e3f0e4; --pick-edge: #228833; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 2rem 1.5rem 4rem; color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; background: #fff; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; }
h2 { font-size: 1.15rem; margin: 2.4rem 0 .5rem; }
p { margin: .3rem 0 .8rem; max-width: 60rem; }
.soft { color: var(--soft); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .35rem .5rem; text-align: left;
  vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
tr > :first-child { position: sticky; left: 0; background: #fff; }
td:first-child, td.setting { white-space: nowrap; }
td.setting b { font-size: 14px; }
td.setting small, td small { color: var(--soft); display: block; }
td.chosen { background: var(--pick); box-shadow: inset 3px 0 0 var(--pick-edge); }
td.over { color: var(--soft); background: #f6f7f8; }
td.why { min-width: 11rem; }
td.changed { background: #fff4dd; }
img { max-width: 100%; height: auto; display: block; }
figure { margin: .5rem 0 1rem; }
figcaption { color: var(--soft); font-size: 13px; }
pre { background: #f6f7f8; padding: .8rem 1rem; overflow-x: auto; font-size: 12.5px;
  white-space: pre-wrap; }
details { margin: .3rem 0; }
summary { cursor: pointer; }
"""


def html_page(
    planned: Planned,
    title: str,
    cases: Sequence[WhatIf] = (),
    crossings: Mapping[tuple[Bucket, Bucket], tuple[Bucket, Bucket]] | None = None,
    plots: Plots | None = None,
) -> str:
    """Returns the report as one page of HTML that needs nothing else.

    Args:
        planned: plan to report.
        title: title of the page, such as the model's name.
        cases: other memory or ranks, from `what_if`.
        crossings: result of `degree_crossings`; default: changes of degree between buckets only.
        plots: plots, if they were drawn already.
    """
    plots = draw_plots(planned) if plots is None else plots
    attention = _lines(planned.attention)
    body = [
        _head(planned, title),
        _section("Settings: buckets and degrees", SETTINGS_NOTE, _settings(planned)),
        _section("Choices by rising length", CHOICES_NOTE, _choices(planned, crossings or {})),
        _section("Peak against length", PEAK_NOTE, _image(plots.peak, "memory against length")),
        _section("Time by class of ops", CLASSES_NOTE, _image(plots.classes, "time by class")),
        _section(
            "Live memory", TIMELINE_NOTE, _image(plots.timeline, "live memory", plots.timeline_note)
        ),
        *([_section("What if", WHAT_IF_NOTE, _cases(planned, cases))] if cases else []),
        *([_section("Attention", ATTENTION_NOTE, attention)] if attention else []),
        _section("Costs of the chosen settings", COSTS_NOTE, _costs(planned)),
        _section("Formulas", FORMULAS_NOTE, _formulas(planned)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>dcpc: {escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


SETTINGS_NOTE = (
    "The best micro-batch of each degree: seconds of a sample on its group, then the micro-batch, "
    "share of the activations' bytes that is recomputed, peak of activations and gradients on a "
    "rank, and the ranks' time a sample as a multiple of the chosen one's. Green is chosen; point "
    "at a cell for what binds it. Not tried: degrees above twice the last that made a sample "
    f"{WIDER_GROUP_GAIN:.0%} faster, and batches of sp samples or more at degree sp, which would "
    "split by samples as sp ranks of their own do: small batches take longer a sample, as each "
    "call has its launches."
)
CHOICES_NOTE = "Neighbouring buckets with the same choice are merged; a line ends where it changes."
PEAK_NOTE = (
    "Memory a rank needs for one sample (all that stays included) with nothing, half and all steps "
    "of recompute, at the least degree and at the widest that was chosen; axes are logarithmic."
)
CLASSES_NOTE = "Predicted seconds of forward and backward in the chosen setting."
TIMELINE_NOTE = "The bucket that needs most memory, in its chosen setting."
WHAT_IF_NOTE = "The same model with other memory or ranks; marked cells differ from the plan."
ATTENTION_NOTE = (
    "Of the buckets that are split: seconds of one attention, forward and backward, by each way to "
    "split it, with everything around it split along the sequence."
)
COSTS_NOTE = "Of one full micro-batch on one rank; the term that most of the peak is."
FORMULAS_NOTE = (
    "As expressions of the dims and of a rank's pieces of them; they hold at every length. Of the "
    "peak's terms those that bind at some bucket are shown."
)


def _head(planned: Planned, title: str) -> str:
    asked, device = planned.request, planned.device
    ranks = "1 rank" if asked.world == 1 else f"{asked.world:,} ranks"
    line = (
        f"{len(planned.plans)} shape buckets on {ranks} of {device.name}, "
        f"{bytes_text(asked.memory_bytes)} each, of which {bytes_text(asked.resident_bytes)} for "
        "parameters, gradients and the optimizer. Predicted; nothing was run."
    )
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in planned.notes)
    return f"<h1>{escape(title)}</h1>\n<p>{escape(line)}</p>\n{notes}"


def _section(heading: str, note: str, content: str) -> str:
    return f'<h2>{escape(heading)}</h2>\n<p class="soft">{escape(note)}</p>\n{content}'


def _table(header: Iterable[str], rows: Iterable[str]) -> str:
    heads = "".join(f"<th>{escape(h)}</th>" for h in header)
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return (
        f'<div class="scroll"><table>\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def _settings(planned: Planned) -> str:
    by_bucket = {bucket: cells(planned, bucket) for bucket in planned.plans}
    degrees = sorted({sp for found in by_bucket.values() for sp in found})
    rows = []
    for bucket, found in by_bucket.items():
        every = planned.tables[bucket]
        tried = {sp: max(r.micro_batch for r in every if r.sp == sp) for sp in found}
        each = "".join(
            _setting(found[sp], tried[sp]) if sp in found else "<td>not tried</td>"
            for sp in degrees
        )
        why = escape(planned.plans[bucket].reason)
        rows.append(f'<td>{escape(str(bucket))}</td><td class="why">{why}</td>{each}')
    return _table(["bucket", "what binds the choice", *(f"sp {sp}" for sp in degrees)], rows)


def _setting(cell: Cell, tried: int) -> str:
    row = cell.row
    most = " (the most tried)" if row.sp > 1 and row.micro_batch == tried else ""
    again = f"batch {row.micro_batch}{most} · recompute {row.recompute}"
    if not row.fits:
        needed = f"needs {bytes_text(row.needed_bytes)}"
        return (
            f'<td class="setting over" title="{escape(cell.binds)}">does not fit'
            f"<small>{escape(again)}</small><small>{escape(needed)}</small></td>"
        )
    kind = "setting chosen" if cell.chosen else "setting"
    peak, cost = f"peak {bytes_text(row.peak_bytes)}", f"{cell.cost:.2f} rank-time"
    return (
        f'<td class="{kind}" title="{escape(cell.binds)}"><b>{seconds_text(cell.sample_s)}</b>'
        f"<small>{escape(again)}</small><small>{escape(peak)}</small><small>{escape(cost)}</small></td>"
    )


def _choices(
    planned: Planned, crossings: Mapping[tuple[Bucket, Bucket], tuple[Bucket, Bucket]]
) -> str:
    plans = list(planned.plans.values())
    rows = [
        f"<td>{escape(lengths_text(s))}</td><td>{escape(choice_text(s[0]))}</td>"
        for s in stretches(plans)
    ]
    lines = [
        f"sp {a.sp} → {b.sp} between {a.bucket} and {b.bucket}" for a, b in degree_changes(plans)
    ]
    lines = lines or [f"The degree is {plans[0].sp} throughout."]
    lines += crossing_lines(planned, crossings)
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return (
        _table(["lengths", "choice"], rows) + f"\n<p>Crossovers of the degree:</p><ul>{items}</ul>"
    )


def _image(png: bytes, alt: str, caption: str = "") -> str:
    data = base64.b64encode(png).decode()
    under = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><img alt="{escape(alt)}" src="data:image/png;base64,{data}">{under}</figure>'


def _cases(planned: Planned, cases: Sequence[WhatIf]) -> str:
    rows = []
    for bucket, plan in planned.plans.items():
        own = cell_text(plan)
        texts = [cell_text(case.plans[bucket]) for case in cases]
        marked = "".join(
            f'<td class="changed">{escape(t)}</td>' if t != own else f"<td>{escape(t)}</td>"
            for t in texts
        )
        rows.append(f"<td>{escape(str(bucket))}</td><td>{escape(own)}</td>{marked}")
    return _table(["bucket", "as planned", *(case.title for case in cases)], rows)


def _costs(planned: Planned) -> str:
    rows = []
    for row in planned.report_rows:
        at = evaluator(row.profile)
        term, share = dominating_term(at.peak_point(row.dims)[1], row.dims)
        sent = bytes_text(at.wire_bytes(row.dims))
        texts = (*cells_of(row), sent, f"{term} ({share:.0%})")
        rows.append("".join(f"<td>{escape(text)}</td>" for text in texts))
    return _table((*COLUMNS, "sent", "dominating term"), rows)


def _lines(lines: Sequence[str]) -> str:
    return "<pre>" + escape("\n".join(lines)) + "</pre>" if lines else ""


def _formulas(planned: Planned) -> str:
    blocks = []
    for title, lines in variant_formulas(planned.report_rows):
        text = escape("\n".join(lines))
        blocks.append(f"<details><summary>{escape(title)}</summary><pre>{text}</pre></details>")
    return "\n".join(blocks)
