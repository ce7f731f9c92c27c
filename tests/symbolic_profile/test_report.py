import re
from dataclasses import replace

import sympy

from dcpc.buckets import Bucket
from dcpc.ir import BucketPlan
from dcpc.symbolic_profile import ReportRow, evaluator, find, formula, profile_partition
from dcpc.symbolic_profile.report import (
    bytes_text,
    cells_of,
    dominating_term,
    render_formulas,
    render_report,
    seconds_text,
)
from tests.cases.joint_graphs import BATCH, SEQ, case


def row(model: str, seq: int) -> ReportRow:
    profile = profile_partition(case(model).partition)
    dims = {"batch": 4, "seq": seq}
    at = evaluator(profile)
    plan = BucketPlan(
        bucket=Bucket.of({"seq": seq}),
        sp=1,
        micro_batch=4,
        menu_step=1,
        steps=2,
        seconds_s=at.seconds(dims, find("h200")),
        peak_bytes=at.peak_bytes(dims),
        reason="sp 1 does not fit 40 GB; largest that fits",
        again_bytes=int(at.saved_bytes(dims)),
        activation_bytes=2 * int(at.saved_bytes(dims)),
    )
    return ReportRow(plan, profile, dims)


def test_report_is_a_line_a_bucket_with_each_reason_once():
    rows = [row("llama", 128), row("gpt", 4096)] * 7
    rows[0] = replace(rows[0], plan=replace(rows[0].plan, reason="largest that fits"))
    lines = render_report(rows).splitlines()
    table = [line for line in lines if line.startswith("  {seq: ")]
    assert len(table) == len(rows)
    assert len(lines) < len(rows) + 10  # 15 buckets on one screen
    assert [line.split("  ")[-1].strip() for line in table[:2]] == ["[1]", "[2] [1]"]
    assert "[1] largest that fits" in lines
    assert "[2] sp 1 does not fit 40 GB" in lines
    assert max(map(len, lines)) <= 120


def test_recompute_is_a_share_of_what_forward_keeps_at_most():
    half = row("gpt", 128)
    assert cells_of(half)[3] == f"50% ({bytes_text(half.saved_bytes)})"
    none = replace(half, plan=replace(half.plan, again_bytes=0))
    assert cells_of(none)[3] == "0%"


def test_formulas_are_those_of_the_rows():
    first, second = row("llama", 128), row("gpt", 4096)
    text = render_formulas([first, second])
    assert "saved bytes = 8·batch·seq² + 4796·batch·seq + 64·seq + 4" in text
    assert text.count("variant ") == 2
    assert "sp 1, recompute 50% (" in text
    assert re.search(r"in \{seq: 4096\} \(\d+% is \d+·batch·seq\)", text)


def test_peak_is_the_one_that_the_plan_was_made_with():
    """Of a GPU it is in whole blocks, the formula is not: the page shows the plan's beside it."""
    found = row("gpt", 128)
    rounded = replace(found, plan=replace(found.plan, peak_bytes=123_400_000))
    assert "123 MB" in render_report([rounded])


def test_report_prints_a_profile_once():
    first = row("gpt", 128)
    second = replace(first, dims={"batch": 4, "seq": 512})
    assert render_formulas([first, second]).count("variant ") == 1


def test_formula_reads_like_one():
    half = sympy.Function("FloorDiv")(SEQ, 2)
    assert formula(16 * BATCH * SEQ**2 + 5384 * BATCH * SEQ) == "16·batch·seq² + 5384·batch·seq"
    assert formula(4 * BATCH * half - BATCH) == "4·(seq // 2)·batch - batch"
    assert formula(sympy.Integer(0)) == "0"


def test_dominating_term_depends_on_the_size():
    size = SEQ**2 + 100 * SEQ
    assert dominating_term(size, {"seq": 10}) == ("100·seq", 1000 / 1100)
    assert dominating_term(size, {"seq": 1000}) == ("seq²", 1e6 / 1.1e6)


def test_quantities_carry_their_unit():
    assert [bytes_text(b) for b in (12, 1234, 45.6e6, 1.2345e9)] == [
        "12 B", "1.23 kB", "45.6 MB", "1.23 GB",
    ]  # fmt: skip
    assert [seconds_text(s) for s in (67e-6, 4.5e-3, 1.234)] == ["67 µs", "4.5 ms", "1.23 s"]
