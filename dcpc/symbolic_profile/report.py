"""The report: profiles and plans in, text out."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from dcpc.ir import BucketPlan, PlanRow, Profile
from dcpc.symbolic_profile.evaluate import evaluator
from dcpc.symbolic_profile.polynomials import monomials, values_of

RECOMPUTE_NOTE = "recompute: share of the activations' bytes that backward makes again"
COLUMNS = ("bucket", "sp", "micro-batch", "recompute", "saved", "peak", "TFLOP", "time")
SHORT = 16  # characters of a bucket's name that leave the other columns their room
_SUPERSCRIPTS = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")


@dataclass(frozen=True, slots=True)
class ReportRow:
    """One line of the report: a bucket's plan and the profile of the variant it runs.

    Attributes:
        plan: plan of the bucket, with the reason.
        profile: costs of the variant's partition.
        dims: symbol name -> size for every symbol of the profile, `batch` and local lengths
            included, at a full micro-batch.
    """

    plan: BucketPlan
    profile: Profile
    dims: Mapping[str, int]

    @property
    def saved_bytes(self) -> int:
        """Bytes that forward keeps for backward."""
        return int(evaluator(self.profile).saved_bytes(self.dims))

    @property
    def reasons(self) -> list[str]:
        """The reasons of the plan, one by one."""
        return self.plan.reason.split("; ")


def as_text(*items: RenderableType, width: int = 120) -> str:
    """Returns tables and lines as plain text of so many columns, without spaces at line ends."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False, emoji=False)
    for item in items:
        console.print(item, markup=False, soft_wrap=isinstance(item, str))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def render_report(rows: Sequence[ReportRow]) -> str:
    """Returns the table of the report: a line for each row, and below it the reasons by number."""
    longest = max((len(str(row.plan.bucket)) for row in rows), default=0)
    width = 120 + max(0, longest - SHORT)
    reasons = list(dict.fromkeys(part for row in rows for part in row.reasons))
    lines = [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
    return as_text(_table(rows, reasons), *lines, RECOMPUTE_NOTE, width=width)


def render_formulas(rows: Sequence[ReportRow]) -> str:
    """Returns the formulas of each distinct profile of these rows, below a title."""
    found = variant_formulas(rows)
    return "".join("\n  ".join([f"\n{title}", *formulas]) + "\n" for title, formulas in found)


def cells_of(row: ReportRow) -> tuple[str, ...]:
    """Returns the texts of `COLUMNS`."""
    plan = row.plan
    return (
        str(plan.bucket),
        str(plan.sp),
        str(plan.micro_batch),
        recompute_text(plan),
        bytes_text(row.saved_bytes),
        bytes_text(plan.peak_bytes),  # of a GPU whole blocks, as what fits is decided by
        f"{evaluator(row.profile).flops(row.dims) / 1e12:,.4g}",
        seconds_text(plan.seconds_s),
    )


def recompute_text(row: PlanRow) -> str:
    """Returns a setting's recompute: its share of the activations' bytes, and its bytes."""
    again_bytes = row.again_bytes
    return f"{row.recompute} ({bytes_text(again_bytes)})" if again_bytes else row.recompute


def variant_formulas(rows: Sequence[ReportRow]) -> list[tuple[str, list[str]]]:
    """Returns title and formulas of each distinct profile, a line a formula."""
    seen: dict[Profile, list[ReportRow]] = {}
    for row in rows:
        seen.setdefault(row.profile, []).append(row)
    found = []
    for number, (profile, mine) in enumerate(seen.items(), 1):
        plan = mine[0].plan
        title = f"variant {number}: sp {plan.sp}, recompute {recompute_text(plan)}"
        found.append((title, _formulas(profile, mine)))
    return found


def formula(size: sympy.Expr) -> str:
    """Returns a size as people write it: `16·batch·seq² + 5384·batch·seq`, highest degree first."""
    terms = sorted(monomials(size), key=lambda term: (-_degree(term[0]), str(term[0])))
    if not terms:
        return "0"
    text = ""
    for monomial, coefficient in terms:
        sign = "-" if coefficient < 0 else "+"
        text += f" {sign} " if text else sign.replace("+", "")
        text += _term(monomial, abs(coefficient))
    return text


def dominating_term(size: sympy.Expr, dims: Mapping[str, int]) -> tuple[str, float]:
    """Returns the largest term of a sum of monomials at these dims, and its share of the whole."""
    values = [(m * c, _at(m * c, dims)) for m, c in monomials(size)]
    if not values:
        return "0", 0.0
    term, value = max(values, key=lambda pair: pair[1])
    return formula(term), value / sum(v for _, v in values)


def bytes_text(size_bytes: float) -> str:
    """Returns bytes with a unit of three digits: `1.23 GB`, `45.6 MB` (1 GB = 1e9 bytes)."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(size_bytes) >= scale:
            value = size_bytes / scale
            return f"{value:.{max(0, 2 - (value >= 10) - (value >= 100))}f} {unit}"
    return f"{size_bytes:.0f} B"


def seconds_text(seconds_s: float) -> str:
    """Returns seconds with a unit: `1.23 s`, `4.5 ms`, `67 µs`."""
    if seconds_s >= 1:
        return f"{seconds_s:.2f} s"
    return f"{seconds_s * 1e3:.1f} ms" if seconds_s >= 1e-3 else f"{seconds_s * 1e6:.0f} µs"


def headed(title: str, words: Sequence[str], numbers: Sequence[str], *notes: str) -> Table:
    """Returns an empty table: columns of words, of numbers (at the right), and of notes."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for heading in (*words, *numbers, *notes):
        right = heading in numbers
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    return table


def _table(rows: Sequence[ReportRow], reasons: Sequence[str]) -> Table:
    table = headed("plan per shape bucket, one rank", COLUMNS[:1], COLUMNS[1:], "why")
    for row in rows:
        why = " ".join(f"[{reasons.index(part) + 1}]" for part in row.reasons)
        table.add_row(*cells_of(row), why)
    return table


def _formulas(profile: Profile, rows: Sequence[ReportRow]) -> list[str]:
    """Returns the formulas of one profile; of its peak terms those that bind at some row."""
    at = evaluator(profile)
    lines = [
        f"parameters and buffers {bytes_text(profile.parameter_bytes)}, gradients "
        f"{bytes_text(profile.gradient_bytes)}",
        f"saved bytes = {formula(profile.saved_bytes)}",
    ]
    binding: dict[str, sympy.Expr] = {}
    buckets: dict[str, list[str]] = {}
    for row in rows:
        node, size = at.peak_point(row.dims)
        term, share = dominating_term(size, row.dims)
        binding[node] = size
        buckets.setdefault(node, []).append(f"{row.plan.bucket} ({share:.0%} is {term})")
    for node, size in binding.items():
        lines.append(f"peak bytes = {formula(size)}")
        lines.append(f"    at {node}, in {', '.join(buckets[node])}")
    lines.append(f"FLOPs = {formula(profile.flops)}")
    if profile.wire_bytes != 0:
        lines.append(f"sent bytes = {formula(profile.wire_bytes)}")
    if profile.unpriced:
        lines.append(f"ops without a cost: {', '.join(profile.unpriced)}")
    return lines


def _degree(monomial: sympy.Expr) -> int:
    powers = (factor.as_base_exp()[1] for factor in sympy.Mul.make_args(monomial))
    return 0 if monomial == 1 else sum(int(power) for power in powers)


def _term(monomial: sympy.Expr, coefficient: float) -> str:
    number = f"{coefficient:.15g}"
    if monomial == 1:
        return number
    factors = [_factor(f) for f in sympy.Mul.make_args(monomial)]
    return "·".join(([] if coefficient == 1 else [number]) + sorted(factors))


def _factor(factor: sympy.Expr) -> str:
    base, power = factor.as_base_exp()
    name = type(base).__name__
    if name == "FloorDiv":
        text = f"({formula(base.args[0])} // {formula(base.args[1])})"
    elif base.args:
        text = f"{name}({', '.join(formula(a) for a in base.args)})"
    else:
        text = str(base)
    return text if power == 1 else text + str(power).translate(_SUPERSCRIPTS)


def _at(size: sympy.Expr, dims: Mapping[str, int]) -> float:
    symbols = sorted(size.free_symbols, key=lambda s: s.name)
    values = values_of(symbols, dims)
    return float(size.xreplace(dict(zip(symbols, map(sympy.Integer, values), strict=True))))
