"""Report lines on gathered parameters: when they are gathered again, at what cost, and why."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dcpc.buckets import BATCH, Bucket
from dcpc.ir import BucketPlan
from dcpc.plan.prices.priced import Priced
from dcpc.plan.traced import Traced
from dcpc.symbolic_profile import bytes_text


def gather_lines(priced: Mapping[Bucket, Priced], plans: Mapping[Bucket, BucketPlan]) -> list[str]:
    """Returns a line on the units and one for each gather choice; none for whole parameters."""
    first, found = "", dict[str, list[str]]()
    for bucket, plan in plans.items():
        first = first or _units_line(priced[bucket].traced)
        sizes = {**bucket.sizes, BATCH: plan.micro_batch}
        placement = priced[bucket].placement(sizes, plan.sp, near=True)
        study = priced[bucket].at(placement)
        if not study.turns:
            continue
        priced_s, freed = study.gathers_cost(plan.menu_step), study.gathers_cost(study.steps)
        again = priced[bucket].gathered_again(placement, plan.menu_step)
        line = _line(priced[bucket].traced, again, priced_s, freed)
        found.setdefault(line, []).append(str(bucket))
    lines = [f"{', '.join(buckets)}: {line}" for line, buckets in found.items()]
    return [first, *lines] if first else []


def _line(
    traced: Traced, again: Collection[int], taken: tuple[float, int], every: tuple[float, int]
) -> str:
    """Returns the units that buckets gather again, with their cost and the reason."""
    units = traced.units
    assert units is not None, "they are gathered"
    if not again:
        return (
            f"kept from forward to backward, as they fit; to gather them again takes "
            f"{every[0]:.3g} s and frees {bytes_text(every[1])}"
        )
    if len(again) == len(units.again):
        return (
            f"gathered again in backward, which takes {taken[0]:.3g} s; kept from forward on they "
            f"take {bytes_text(taken[1])} more, more than cheaper recompute leaves"
        )
    return (
        f"{_ranges(traced, again)} gathered again in backward, {len(again)} of {len(units.again)}, "
        f"which takes {taken[0]:.3g} s for {bytes_text(taken[1])}; the others, "
        f"{bytes_text(every[1] - taken[1])}, kept from forward on, as they fit"
    )


def _ranges(traced: Traced, again: Collection[int]) -> str:
    """Returns the names of units, neighbours merged to the first and the last."""
    assert traced.units is not None, "they are gathered"
    names = [_common([traced.program.parameters[n] for n in unit]) for unit in traced.units.units]
    runs: list[list[int]] = []
    for k in sorted(again):
        if runs and runs[-1][-1] == k - 1:
            runs[-1].append(k)
        else:
            runs.append([k])
    return ", ".join(
        names[r[0]] if len(r) == 1 else f"{names[r[0]]} to {names[r[-1]]}" for r in runs
    )


def _common(names: Sequence[str]) -> str:
    """Returns the module that contains all these parameters; for a single one its name."""
    parts = [name.split(".") for name in names]
    shared = [same[0] for same in zip(*parts, strict=False) if len(set(same)) == 1]
    return ".".join(shared) or f"{names[0]} and {len(names) - 1} more"


def _units_line(traced: Traced) -> str:
    units, info = traced.units, traced.program.info
    if units is None:
        return ""
    each = units.size_bytes(info)
    again_bytes = sum(each[k] for k in units.again)
    of = f"{units.ranks} ranks have their rows of {bytes_text(sum(each))}, gathered as "
    if units.ranks == 1:
        of = f"{bytes_text(sum(each))}, fetched as "
    return (
        f"parameters: {of}"
        f"{len(each)} units of at most {bytes_text(max(each))}; {len(units.again)} of them, "
        f"{bytes_text(again_bytes)}, may be gathered again in backward, the others stay from "
        "forward on"
    )
