"""The report as a page: one file, with the numbers of the plan's own table, and the what-ifs."""

import html
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

import dcpc
from dcpc.api import plan
from dcpc.commands.report import (
    crossing_lines,
    degree_crossings,
    draw_plots,
    html_page,
    overview_png,
    what_if,
    what_if_text,
)
from dcpc.commands.report.degrees import cells
from dcpc.commands.report.plots import class_seconds, fullest, live_points, peak_curves
from dcpc.plan.choose import elements, stretches
from dcpc.plan.planning import plan_buckets
from dcpc.symbolic_profile import bytes_text, seconds_text
from dcpc.symbolic_profile.seconds.hardware import H200
from models.gpt import GPT, GPTConfig

SIZES = (512, 2048, 32768)
PNG = b"\x89PNG"


class Page(HTMLParser):
    """Collects tags, attributes and text; every tag that is opened has to be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def attributes(self, name: str) -> Iterator[str | None]:
        return (attrs[name] for _, attrs in self.found if name in attrs)


@pytest.fixture(scope="module")
def planned():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=16, dim=32, n_layers=2, n_heads=4))
    buckets = dcpc.Buckets(
        inputs={"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"},
        sizes=[{"seq": seq} for seq in SIZES],
    )
    # Not as a GPU's allocator counts: its segments of 20 MiB are most of so little memory.
    device = replace(H200, gpu=False)
    return plan(model, buckets, world=4, device=device, memory=90e6, backend="eager")


@pytest.fixture(scope="module")
def plots(planned):
    return draw_plots(planned)


@pytest.fixture(scope="module")
def page(planned, plots):
    cases = [what_if(planned, memory_bytes=45_000_000), what_if(planned, world=1)]
    return html_page(planned, "<b>a & b</b>", cases, degree_crossings(planned), plots)


def test_page_is_one_file_that_parses(page):
    parsed = Page(page)
    assert not parsed.open
    assert all(src.startswith("data:image/png;base64,") for src in parsed.attributes("src"))
    assert sum(tag == "img" for tag, _ in parsed.found) == 3
    assert not {tag for tag, _ in parsed.found} & {"script", "link", "iframe", "object"}
    assert not list(parsed.attributes("href"))
    assert "http" not in page
    assert "url(" not in page


def test_costs_have_the_peak_that_the_plan_was_made_with(planned, plots):
    plans = {b: replace(p, peak_bytes=123_400_000) for b, p in planned.plans.items()}
    page = html_page(replace(planned, plans=plans), "x", [], {}, plots)
    assert page.count("<td>123 MB</td>") == len(SIZES)


def test_page_escapes_its_title(page):
    assert "<b>a &amp; b</b>" not in page
    assert "&lt;b&gt;a &amp; b&lt;/b&gt;" in page


def test_page_has_the_numbers_of_the_table(page, planned):
    text = html.unescape(page)
    for bucket, plan_ in planned.plans.items():
        assert str(bucket) in text
        assert plan_.reason in text
        for sp in {row.sp for row in planned.tables[bucket]}:
            row, own = cells(planned, bucket)[sp].row, planned.tables[bucket]
            assert row in own
            most = row.micro_batch == max(r.micro_batch for r in own if r.sp == sp)
            limit = " (the most tried)" if sp > 1 and most else ""
            assert f"batch {row.micro_batch}{limit} · recompute {row.recompute}" in text
            if row.fits:
                assert f"<b>{seconds_text(row.seconds_s / row.micro_batch)}</b>" in text
                assert f"peak {bytes_text(row.peak_bytes)}" in text
            else:
                assert f"needs {bytes_text(row.needed_bytes)}" in text
    assert page.count("setting chosen") == len(planned.plans)
    assert page.count('class="setting over"') > 0


def test_chosen_cell_is_the_plan_and_costs_least(planned):
    for bucket, plan_ in planned.plans.items():
        found = cells(planned, bucket)
        assert [sp for sp, cell in found.items() if cell.chosen] == [plan_.sp]
        row = found[plan_.sp].row
        assert (row.micro_batch, row.menu_step) == (plan_.micro_batch, plan_.menu_step)
        assert row.peak_bytes == plan_.peak_bytes
        assert all(cell.cost > 0.95 for cell in found.values())  # MICRO_BATCH_GAIN
        for sp, cell in found.items():
            again = f"{cell.cost:.2f} times the rank-time" if cell.row.fits else "does not fit: "
            assert (plan_.reason if sp == plan_.sp else again) in cell.binds


def test_report_and_page_have_the_formulas_and_crossovers(page, planned):
    text = html.unescape(page)
    for line in planned.report(full=True).splitlines():
        if " bytes = " in line or "FLOPs = " in line:
            assert line.strip() in text
    assert "sp 1 -> 2 between {seq: 2048} and {seq: 32768}" in planned.report()
    assert "sp 1 → 2 between {seq: 2048} and {seq: 32768}" in text
    (line,) = crossing_lines(planned, degree_crossings(planned))
    assert line in text


def test_crossing_is_where_the_planner_changes_the_degree(planned):
    ((low, high),) = degree_crossings(planned).values()
    assert 2048 < low["seq"] < high["seq"] < 32768
    assert high["seq"] - low["seq"] <= 0.01 * low["seq"]
    plans, *_ = plan_buckets(dict.fromkeys((low, high), planned.runnable.priced), planned.request)
    assert [plan_.sp for plan_ in plans.values()] == [1, 2]


def test_neighbours_with_one_choice_are_merged(planned):
    first, second, third = (planned.plans[b] for b in planned.plans)
    alike = replace(second, micro_batch=first.micro_batch, again_bytes=0)
    merged = stretches([third, alike, replace(first, again_bytes=0)])
    assert [len(stretch) for stretch in merged] == [2, 1]
    assert [len(stretch) for stretch in stretches([first, second, third])] == [1, 1, 1]


def test_what_if_is_what_a_plan_for_it_says(planned):
    less = what_if(planned, memory_bytes=45_000_000)
    assert all(p is None or p.peak_bytes < 45_000_000 for p in less.plans.values())
    assert any(less.plans[b].sp > p.sp for b, p in planned.plans.items() if less.plans[b])
    alone = what_if(planned, world=1)
    assert alone.plans[fullest_of(SIZES, alone)] is None
    same = what_if(planned)
    assert dict(same.plans) == dict(planned.plans)
    text = what_if_text([less, alone])
    assert "45.0 MB on 4 ranks" in text
    assert "90.0 MB on 1 rank" in text
    assert "does not fit" in text


def fullest_of(sizes, case):
    return next(b for b in case.plans if b["seq"] == max(sizes))


def test_curves_are_predictions_and_fall_with_recompute(planned):
    none, half, everything = peak_curves(planned, 1)
    assert set(SIZES) <= set(none.lengths)
    assert len(none.lengths) > 20
    for a, b, c in zip(none.needed_bytes, half.needed_bytes, everything.needed_bytes, strict=True):
        assert a > b > c > planned.request.resident_bytes
    tried = {r.needed_bytes for r in planned.tables[first(planned)] if r.menu_step == 0}
    assert none.needed_bytes[0] in tried


def first(planned):
    return next(iter(planned.plans))


def test_timeline_peaks_where_the_plan_says(planned):
    bucket = fullest(planned)
    points = live_points(planned, bucket)
    assert max(size for _, size in points) == planned.plans[bucket].peak_bytes
    assert [name for name, _ in points].count("backward") == 1


def test_classes_add_up_to_the_plans_seconds(planned):
    for bucket, plan_ in planned.plans.items():
        assert sum(class_seconds(planned, bucket).values()) == pytest.approx(plan_.seconds_s)
        assert elements(bucket) == bucket["seq"]


def test_pictures_are_png(planned, plots):
    for png in (plots.peak, plots.classes, plots.timeline, overview_png(planned)):
        assert png.startswith(PNG)
        assert len(png) > 5000
    assert re.search(r"\{seq: \d+\}, sp \d", plots.timeline_note)
