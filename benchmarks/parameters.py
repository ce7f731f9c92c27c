"""Parameters shared out over ranks: `python -m benchmarks.parameters [--quick] [--json FILE]`.

`dcpc.compile(parameters=)` against the plain model (`tests/exact/parameters.py`), the plan's bytes
(`tests/exact/parameters_bytes.py`), the largest model that trains within a memory
(`parameters_largest.py`), and torch's FSDP2 and ranks that run free of each other
(`parameters_race.py`). Each of these says what it measures. Figures with an aim are compared with
it in the last table.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import (
    harness,
    parameters_largest,
    parameters_race,
)
from tests.exact import parameters as parameters_exact
from tests.exact import parameters_bytes

AIMS = {
    "worst_relative_error": 1e-10, "rest_bytes_over_ideal": 1.01, "max_error_peak_eager": 0.005,
    "wire_bytes_off": 0.0, "peak_over_fsdp2": 1.0, "seconds_over_fsdp2": 1.05,
    "seconds_over_fsdp2_mixed": 0.7,
}  # fmt: skip
LEAST = {"largest_model_over_whole": 3.0}


def exact(quick: bool) -> dict[str, harness.Cell]:
    """Returns how far losses and gradients are off; prints the worst case of each mode."""
    found = parameters_exact.measure(quick)
    worst: dict[str, tuple[str, float, str]] = {}
    for case in found:
        mode = case[0].split(", ")[3]
        worst[mode] = max(case, worst.get(mode, case), key=lambda c: c[1])
    rows = [(text, f"{error:.1e}", of) for text, error, of in worst.values()]
    header = ("model, backend, ranks, mode, step, recompute", "error", "of")
    harness.print_table("worst case of each mode, float64", header, rows)
    return {"worst_relative_error": max(c[1] for c in found), "cases": len(found)}


def bytes_figures(
    found: Sequence[Sequence[parameters_bytes.RankBytes]],
) -> dict[str, harness.Cell]:
    """Returns the figures of all jobs, and prints what they are made of."""
    every = [r for job in found for r in job]
    modes = parameters_bytes.MODES
    ratios = {mode: max(r.rest[mode] / r.ideal_bytes for r in every) for mode in modes}
    harness.print_table(
        "bytes at rest", ("of the fullest rank, over all bytes / ranks", "ratio"),
        list(ratios.items()), digits=4,
    )  # fmt: skip
    rows: list[tuple[harness.Cell, ...]] = []
    for job in found:
        for same in zip(*(r.peaks for r in job), strict=True):
            p = max(same, key=lambda p: abs(p.error))
            off = 100 * p.error
            rows.append((p.setting, p.predicted_bytes / 1e6, p.measured_bytes / 1e6, off))
    header = ("rounds, the worse rank", "peak MB", "measured", "off %")
    harness.print_table("peak of a rank in a step", header, rows)
    sent = [s for r in every for s in r.sent]
    rows = [(s.setting, s.predicted_bytes, s.measured_bytes) for s in found[0][0].sent]
    harness.print_table("bytes that rank 0 sends in a step", ("rounds", "formula", "sent"), rows)
    return {
        "rest_bytes_over_ideal": ratios["rounds"],
        "max_error_peak_eager": max(abs(p.error) for r in every for p in r.peaks),
        "wire_bytes_off": sum(abs(s.predicted_bytes - s.measured_bytes) for s in sent),
    }


def aim(name: str, value: harness.Cell) -> tuple[str, str]:
    """Returns a figure's aim, and whether it is met."""
    assert isinstance(value, int | float)
    if name in LEAST:
        return f">= {LEAST[name]:g}", "" if value >= LEAST[name] else "missed"
    if name in AIMS:
        return f"<= {AIMS[name]:g}", "" if value <= AIMS[name] else "missed"
    return "", ""


def main() -> None:
    """Runs the benchmark."""
    args = harness.parser("parameters", __doc__.partition("\n")[0]).parse_args()
    with harness.timed() as watch:
        figures = exact(args.quick)
        found = [parameters_bytes.measure(job) for job in parameters_bytes.jobs(args.quick)]
        figures |= bytes_figures(found)
        figures |= parameters_largest.measure(args.quick)
        figures |= parameters_race.measure(args.quick)
    rows = [(name, f"{value:.4g}", *aim(name, value)) for name, value in figures.items()]
    title = f"parameters, in {watch.elapsed_s:.0f} s"
    harness.print_table(title, ("figure", "value", "aim", ""), rows)
    harness.write_report("parameters", figures, args.json)


if __name__ == "__main__":
    main()
