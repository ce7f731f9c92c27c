"""Models of transformers and diffusers, unmodified: traced, split over gloo ranks, compared.

A row a model: which dims its one trace keeps symbolic, the largest relative difference of loss and
gradients from the plain model's in float64 (batch 1, lengths the ranks do not divide), the share of
its FLOPs that is split, collectives in forward, ops that are replicated for want of a rule.
Each is run again with every way to split attention that applies
(`dcpc/passes/sharding/attention_ways.py`). `--quick` takes models of one layer instead of two, at
sp 2 alone, and of these ways the ring in three of them.
`--more` runs other architectures of the same libraries too; the figures are of the named ones.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from benchmarks.harness import Cell, parser, print_table, write_report
from dcpc.commands.check import Verdict
from tests.zoo.models import NAMED
from tests.zoo.more import LEFT_OUT
from tests.zoo.verdicts import alone, table, verdicts

# A window, cross-attention with a learned bias, patches: what a ring may get wrong.
QUICK_RINGS = ("transformers Mistral", "transformers T5", "diffusers PixArt")
WORKERS = 2  # processes that trace at a time


def row(name: str, v: Verdict) -> list[Cell]:
    """Returns a verdict as a row of the table."""
    if v.error:
        return [name, v.sp, v.error.splitlines()[0][:60], *[None] * 7, "no"]
    share = None if v.coverage is None else v.coverage.sharded_share
    return [
        name, v.sp, ", ".join(v.symbolic), f"{v.worst:.1e}" + (f" ({v.low})" if v.lifted else ""),
        f"{v.worst_in_float64:.1e}", ", ".join(v.lowerings) or "-", share,
        None if v.coverage is None else v.coverage.collectives,
        None if v.coverage is None else len(v.coverage.blocked), round(v.trace_s, 1),
        "yes" if v.accepted else "no",
    ]  # fmt: skip


HEADER = [
    *("model", "sp", "symbolic dims", "difference", "in float64", "attention also by"),
    *("FLOPs split", "collectives", "replicated", "trace s", "ok"),
]


def main() -> None:
    p = parser("zoo", __doc__ or "")
    p.add_argument("--more", action="store_true", help="other architectures too, one by one")
    p.add_argument("--only", metavar="TEXT", default="", help="models with this in their name")
    args = p.parse_args()
    # Ranks have one thread each; set before they start, so that no pool of threads is made.
    os.environ["OMP_NUM_THREADS"] = "1"
    degrees = (2,) if args.quick else (2, 4)
    named = [n for n in NAMED if args.only.lower() in n.lower()]
    layers = 1 if args.quick else 2
    found: dict[tuple[str, int], Verdict] = {}
    for sp in degrees:
        rings = dict.fromkeys(QUICK_RINGS, ("ring",))
        ways = rings if args.quick else None
        mine = verdicts("named", named, sp, WORKERS, 3600.0, layers, start="fork", ways=ways)
        found |= {(name, sp): v for name, v in mine.items()}
    others: dict[tuple[str, int], Verdict] = {}
    if args.more:
        names = [n for n in table("more") if args.only.lower() in n.lower()]
        for name in names:
            others[name, 2] = alone("more", name, 2, 600.0)
            print_problems(name, others[name, 2])
        if LEFT_OUT:
            print(f"left out: {', '.join(f'{n} (no {p})' for n, p in LEFT_OUT.items())}")
    rows = [row(name, v) for (name, _), v in {**found, **others}.items()]
    print_table("zoo: batch 1, lengths the ranks do not divide", HEADER, rows, digits=4)
    for (name, _), v in found.items():
        print_problems(name, v)
    figures = figures_of(named, found)
    if others:
        fine = [v for v in others.values() if v.accepted]
        worst = max((v.worst_in_float64 for v in fine), default=None)
        figures |= {"more_accepted": len(fine), "more_total": len(others), "more_worst": worst}
    small = ("error", "more_worst")
    shown = [[k, f"{v:.1e}" if v is not None and any(s in k for s in small) else v]
             for k, v in figures.items()]  # fmt: skip
    print_table("zoo", ["figure", "value"], shown, digits=4)
    write_report("zoo", figures, args.json)
    if figures["models_ok"] != figures["models_total"]:
        sys.exit(1)


def print_problems(name: str, v: Verdict) -> None:
    """Prints why a model is not accepted."""
    for problem in v.problems():
        print(f"{name} (sp {v.sp}): {problem}", flush=True)


def figures_of(names: Sequence[str], found: Mapping[tuple[str, int], Verdict]) -> dict[str, Cell]:
    """Returns the figures over all named models and degrees; the share of FLOPs is that at sp 2.

    `worst_relative_error` is in float64 throughout; `worst_relative_error_as_is` lets a model round
    to float32 where its library says so.
    """
    good = [n for n in names if all(v.accepted for (m, _), v in found.items() if m == n)]
    run = [v for v in found.values() if not v.error]
    shares = [v.coverage.sharded_share for v in run if v.sp == 2 and v.coverage is not None]
    return {
        "models_ok": len(good), "models_total": len(names),
        "worst_relative_error": max((v.worst_in_float64 for v in run), default=None),
        "worst_relative_error_as_is": max((v.worst for v in run), default=None),
        "lowerings_run": sum(len(v.lowerings) for v in run),
        "worst_lowering_error": max((v.worst_by_lowering for v in run), default=None),
        "min_sharded_flops_share": min(shares, default=None),
        "ops_replicated": sum(len(v.coverage.blocked) for v in run if v.coverage is not None),
        "max_trace_s": max((v.trace_s for v in run), default=None),
    }  # fmt: skip


if __name__ == "__main__":
    main()
