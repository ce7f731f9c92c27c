"""What the report says of parameters that graphs gather: when, at what price, and why."""

from __future__ import annotations

from collections.abc import Mapping

from dcpc.buckets import BATCH, Bucket
from dcpc.ir import BucketPlan
from dcpc.plan.priced import Priced
from dcpc.plan.traced import Traced
from dcpc.symbolic_profile import bytes_text


def gather_lines(priced: Mapping[Bucket, Priced], plans: Mapping[Bucket, BucketPlan]) -> list[str]:
    """Returns a line a bucket, and what is gathered; none where ranks have parameters whole.

    Args:
        priced: prices of each bucket's trace.
        plans: the setting of each bucket.
    """
    first, found = "", dict[str, list[str]]()
    for bucket, plan in plans.items():
        first = first or _units_line(priced[bucket].traced)
        sizes = {**bucket.sizes, BATCH: plan.micro_batch}
        study = priced[bucket].at(priced[bucket].placement(sizes, plan.sp, near=True))
        turn = study.turn
        if turn is None:
            continue
        kept, again = study.predict(turn, sizes), study.predict(turn + 1, sizes)
        price = f"{again.seconds_s - kept.seconds_s:.3g} s"
        room = bytes_text(max(0, kept.peak_bytes - again.peak_bytes))
        line = (
            f"kept from forward to backward, as they fit; to gather them again takes {price} and "
            f"frees {room} at the peak"
        )
        if study.gathers_again(plan.menu_step):
            line = (
                f"gathered again in backward, which takes {price}; kept from forward on they take "
                f"{room} more at the peak, more than cheaper recompute leaves"
            )
        found.setdefault(line, []).append(str(bucket))
    lines = [f"{', '.join(buckets)}: {line}" for line, buckets in found.items()]
    return [first, *lines] if first else []


def _units_line(traced: Traced) -> str:
    units, info = traced.units, traced.program.info
    if units is None:
        return ""
    each = [sum(int(info[n].size_bytes) for n in unit) for unit in units.units]
    again_bytes = sum(each[k] for k in units.again)
    return (
        f"parameters: {units.ranks} ranks have their rows of {bytes_text(sum(each))}, gathered as "
        f"{len(each)} units of at most {bytes_text(max(each))}; {len(units.again)} of them, "
        f"{bytes_text(again_bytes)}, may be gathered again in backward, the others stay from "
        "forward on"
    )
