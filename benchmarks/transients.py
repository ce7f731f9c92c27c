"""Transients of kernels: tables and probes against the allocator.

`python -m benchmarks.transients [--quick] [--json FILE]`. A transient is what a kernel allocates
and frees in one call. Each case of `transients_cases.py` is told by the tables of
`dcpc/symbolic_profile/ops/` and by a probe (`transients_probe.py`: a polynomial through sizes of 4
to 10, checked at 14), and measured at three larger points. Then the peak of a GPT and of a U-Net,
and what probing adds to the planning of three models (`transients_models.py`).

--quick has the ops alone, in float32.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy
import torch

from benchmarks import harness
from benchmarks.plans import MODELS
from benchmarks.transients_cases import CASES, calls
from benchmarks.transients_models import CHOSEN, peaks, plan_cost
from benchmarks.transients_probe import SCALARS_BYTES, Call, ProbeError, Probes, Values
from dcpc.symbolic_profile.ops.facts import op_name
from dcpc.symbolic_profile.ops.transients import transient_bytes

POINTS: tuple[Values, ...] = ({"n": 2, "m": 38}, {"n": 3, "m": 202}, {"n": 2, "m": 902})
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Told:
    """One call, told and measured.

    Attributes:
        case: its name.
        op: the call's.
        dtype: of its operands.
        measured: bytes at each of `POINTS`.
        table: the same, by the table.
        probe: by a polynomial; none where the probe says that there is no such.
    """

    case: str
    op: str
    dtype: str
    measured: tuple[int, ...]
    table: tuple[int, ...]
    probe: tuple[int, ...]

    def verdict(self, told: Sequence[int]) -> str:
        """Returns "exact", "above", "below" (at one point at least) or "refused"."""
        if not told:
            return "refused"
        gaps = [t - m for t, m in zip(told, self.measured, strict=True)]
        if all(abs(gap) <= SCALARS_BYTES for gap in gaps):
            return "exact"
        return "below" if min(gaps) < -SCALARS_BYTES else "above"

    def worst(self, told: Sequence[int]) -> str:
        """Returns the verdict and how far it is off where it is so most, in percent."""
        verdict = self.verdict(told)
        if verdict in ("exact", "refused"):
            return verdict
        pairs = list(zip(told, self.measured, strict=True))
        if any(m == 0 for _, m in pairs):
            return f"{max(t - m for t, m in pairs)} B of 0"
        errors = [t / m - 1 for t, m in pairs]
        return " to ".join(f"{100 * e:+.0f}%" for e in (min(errors), max(errors)))


def measured(quick: bool) -> Iterator[Told]:
    """Yields all calls of all cases that a CPU has a kernel for."""
    for case in CASES:
        for dtype in DTYPES[:1] if quick else DTYPES:
            for call in calls(case, dtype):
                try:
                    real = tuple(call.transient_bytes(at) for at in POINTS)
                except RuntimeError:
                    continue  # no kernel of this dtype
                table = transient_bytes(call.node, call.facts, torch.get_num_threads())
                label = str(dtype).removeprefix("torch.")
                name = op_name(call.node)
                yield Told(case[0], name, label, real, _told(table), _probed(call))


def _probed(call: Call) -> tuple[int, ...]:
    try:
        return _told(Probes().fit(call))
    except ProbeError:
        return ()


def _told(size: sympy.Expr) -> tuple[int, ...]:
    symbols = {s: s.name for s in size.free_symbols}
    return tuple(int(size.subs({s: at[n] for s, n in symbols.items()}).doit()) for at in POINTS)


def figures(found: Sequence[Told]) -> dict[str, harness.Cell]:
    """Returns how many calls each way tells right."""
    verdicts = [(t.verdict(t.table), t.verdict(t.probe)) for t in found]
    every = ("exact", "above", "below", "refused")
    return {
        "calls": len(found),
        **{f"table_{v}": sum(t == v for t, _ in verdicts) for v in every[:3]},
        **{f"probe_{v}": sum(p == v for _, p in verdicts) for v in every},
        "both_exact": sum(pair == ("exact", "exact") for pair in verdicts),
        "probe_alone_exact": sum(t != "exact" and p == "exact" for t, p in verdicts),
        "table_alone_exact": sum(t == "exact" and p != "exact" for t, p in verdicts),
    }


def main() -> None:
    """Runs the benchmark."""
    args = harness.parser("transients", __doc__.partition("\n")[0]).parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with harness.timed() as watch:
        found = list(measured(args.quick))
        rows = [
            (f"{t.case}: {t.op}, {t.dtype}", t.worst(t.table), t.worst(t.probe))
            for t in found
            if {t.verdict(t.table), t.verdict(t.probe)} != {"exact"}
        ]
        harness.print_table("where one is not exact", ("call", "table", "probe"), rows)
        if not args.quick:
            header = ("model", "peak MB", "tables off %", "probes", "all probes")
            harness.print_table("peaks", header, [r for name in CHOSEN for r in peaks(name)])
            header = ("model", "calls", "kernels run", "left", "probe s", "table s", "plan s", "")
            harness.print_table("planning", header, [plan_cost(name).row() for name in MODELS])
    report = {**figures(found), "seconds": watch.elapsed_s}
    harness.print_table("transients", ("figure", "value"), list(report.items()))
    harness.write_report("transients", report, args.json)


if __name__ == "__main__":
    main()
