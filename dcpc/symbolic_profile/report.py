"""The report: profiles and plans in, text out."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from dcpc.ir import BucketPlan, Profile
from dcpc.symbolic_profile.evaluate import evaluator
from dcpc.symbolic_profile.polynomials import monomials, values_of

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


def as_text(*items: RenderableType, width: int = 120) -> str:
    """Returns tables and lines as plain text of so many columns, without spaces at line ends."""
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, highlight=False, emoji=False)
    for item in items:
        console.print(item, markup=False, soft_wrap=isinstance(item, str))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def render_report(rows: Sequence[ReportRow]) -> str:
    """Returns the report: a table of the rows, then each distinct profile's formulas.

    Args:
        rows: one for each bucket, in the order to show.
    """
    longest = max((len(str(row.plan.bucket)) for row in rows), default=0)
    width = 120 + max(0, longest - SHORT)
    variants = [
        "\n".join(["", title, *(f"  {line}" for line in formulas)])
        for title, formulas in variant_formulas(rows)
    ]
    return as_text(_table(rows), *variants, width=width)


def variant_formulas(rows: Sequence[ReportRow]) -> list[tuple[str, list[str]]]:
    """Returns title and formulas of each distinct profile, a line a formula.

    Args:
        rows: one for each bucket.
    """
    seen: dict[Profile, list[ReportRow]] = {}
    for row in rows:
        seen.setdefault(row.profile, []).append(row)
    return [
        (
            f"variant {number}: sp {mine[0].plan.sp}, {_recompute(mine[0].plan)}",
            _formulas(profile, mine),
        )
        for number, (profile, mine) in enumerate(seen.items(), 1)
    ]


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
    """Returns the largest term of a size at these dims, and its share of the whole.

    Args:
        size: a sum of monomials.
        dims: symbol name -> size.

    Returns:
        The term as `formula` writes it, and a fraction; ("0", 0.0) for a size of nothing.
    """
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
    """Returns seconds with a unit: `1.23 s`, `4.5 ms`, `67 us`."""
    if seconds_s >= 1:
        return f"{seconds_s:.2f} s"
    return f"{seconds_s * 1e3:.1f} ms" if seconds_s >= 1e-3 else f"{seconds_s * 1e6:.0f} us"


def _table(rows: Sequence[ReportRow]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title="plan per shape bucket, one rank", title_justify="left"
    )
    table.add_column("bucket", no_wrap=True)
    for heading in ("sp", "micro-batch", "recompute", "peak", "saved", "TFLOP", "time"):
        table.add_column(heading, justify="right", no_wrap=heading != "micro-batch")
    table.add_column("dominating term of the peak")
    table.add_column("why")
    for row in rows:
        at = evaluator(row.profile)
        term, share = dominating_term(at.peak_point(row.dims)[1], row.dims)
        table.add_row(
            str(row.plan.bucket),
            str(row.plan.sp),
            str(row.plan.micro_batch),
            f"{row.plan.menu_step}/{row.plan.steps}",
            bytes_text(row.plan.peak_bytes),  # of a GPU whole blocks, as what fits is decided by
            bytes_text(at.saved_bytes(row.dims)),
            f"{at.flops(row.dims) / 1e12:.3g}",
            seconds_text(row.plan.seconds_s),
            f"{term} ({share:.0%})",
            row.plan.reason,
        )
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
        binding[node] = size
        buckets.setdefault(node, []).append(str(row.plan.bucket))
    for node, size in binding.items():
        lines.append(f"peak bytes = {formula(size)}")
        lines.append(f"    at {node}, in {', '.join(buckets[node])}")
    lines.append(f"FLOPs = {formula(profile.flops)}")
    if profile.wire_bytes != 0:
        lines.append(f"sent bytes = {formula(profile.wire_bytes)}")
    if profile.unpriced:
        lines.append(f"ops without a cost: {', '.join(profile.unpriced)}")
    return lines


def _recompute(plan: BucketPlan) -> str:
    if plan.menu_step == 0:
        return "nothing recomputed"
    return f"{plan.menu_step} of {plan.steps} steps of recompute"


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
