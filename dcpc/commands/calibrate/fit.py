"""Timed calls in, seconds of each class as a formula of FLOPs and bytes out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import nnls

from dcpc.symbolic_profile import ClassFit
from dcpc.symbolic_profile.seconds.fits import nearest

VIEW = "view"  # a call that only makes another view, or an integer: no profile counts it
# Its kernels take blocks of a size that depends on the length, so no one rate holds.
CURVED = frozenset({"attention"})
SAME = 1.001  # two intensities nearer than this are one knot
ROUNDS = 4  # of reweighting
BENDS = 5  # that are tried
FEWEST_WHOLES = 3  # from which launches and the rest change by factors of their own
LEAST_BUSY = 0.1  # of a call's seconds are not its launch


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One call, timed.

    Attributes:
        op_class: class of ops as in `ir.Work`, or `VIEW`.
        forward: whether of a forward graph.
        dtype: element type.
        flops: floating-point operations.
        bytes_moved: bytes read and written.
        seconds_s: measured seconds.
    """

    op_class: str
    forward: bool
    dtype: torch.dtype
    flops: float
    bytes_moved: float
    seconds_s: float


def fit_classes(samples: Sequence[TimedCall]) -> tuple[ClassFit, ...]:
    """Returns a fit for each class, direction and dtype among the samples, by name.

    The seconds of views are shared out evenly over the other calls of their direction.
    """
    groups: dict[tuple[str, bool, str], list[TimedCall]] = {}
    for s in samples:
        if s.op_class != VIEW:
            groups.setdefault((s.op_class, s.forward, str(s.dtype)), []).append(s)
    views_s = {forward: _views_s(samples, forward) for forward in (True, False)}
    found = []
    for (_, forward, _), mine in sorted(groups.items()):
        fit = curve(mine) if mine[0].op_class in CURVED else bent(mine)
        found.append(replace(fit, launch_s=fit.launch_s + views_s[forward]))
    return tuple(found)


def line(samples: Sequence[TimedCall]) -> ClassFit:
    """Returns seconds as launch + FLOPs * a + bytes * b, none of them negative."""
    rows = [(1.0, s.flops, s.bytes_moved) for s in samples]
    (launch_s, per_flop, per_byte), _ = _least(rows, samples)
    one = samples[0]
    return ClassFit(one.op_class, one.forward, one.dtype, launch_s, per_flop, per_byte)


def bent(samples: Sequence[TimedCall]) -> ClassFit:
    """Returns a line, with another price for the bytes beyond some: the bend that fits best.

    Calls that move more than a cache holds are slower; how much that is the samples tell.
    """
    moved = [s.bytes_moved for s in samples]
    bends = np.geomspace(max(min(moved), 1.0), max(max(moved), 1.0), BENDS + 2)[1:-1]
    found = []
    for near in bends:
        rows = [(1.0, s.flops, s.bytes_moved, max(s.bytes_moved - near, 0.0)) for s in samples]
        prices, off = _least(rows, samples)
        found.append((off, float(near), prices))
    _, near_bytes, (launch_s, per_flop, per_byte, per_far_byte) = min(found)
    one = samples[0]
    return ClassFit(
        one.op_class, one.forward, one.dtype, launch_s, per_flop, per_byte, near_bytes, per_far_byte
    )


def _least(
    rows: Sequence[tuple[float, ...]], samples: Sequence[TimedCall]
) -> tuple[tuple[float, ...], float]:
    """Returns the price of each column, none of them negative, and how far the sums are off.

    Weights are one over the root of the fitted seconds, so the fit's seconds of all samples add up
    to the measured ones, and small calls count too.
    """
    seconds = np.array([s.seconds_s for s in samples])
    columns = np.array(rows)
    scale = np.maximum(columns.max(axis=0), 1e-30)
    fitted = np.maximum(seconds, 1e-9)
    off, found = 0.0, np.zeros(len(scale))
    for _ in range(ROUNDS):
        weight = 1 / np.sqrt(fitted)
        found, off = nnls(columns / scale * weight[:, None], seconds * weight)
        fitted = np.maximum(columns / scale @ found, 1e-9)
    return tuple(map(float, found / scale)), float(off)


def curve(samples: Sequence[TimedCall]) -> ClassFit:
    """Returns seconds as launch + FLOPs times a rate that depends on the FLOPs a byte.

    The launch follows from calls that differ only in their number of rows.
    """
    priced = [s for s in samples if s.flops > 0 and s.bytes_moved > 0]
    if not priced:
        return line(samples)
    groups: list[list[TimedCall]] = []
    for s in sorted(priced, key=lambda s: (_intensity(s), s.flops)):
        if groups and _intensity(s) < SAME * _intensity(groups[-1][0]):
            groups[-1].append(s)
        else:
            groups.append([s])
    launch_s = _launch_s([g for g in groups if g[0].flops != g[-1].flops])
    knots = tuple((_mean_intensity(g), _rate(g, launch_s)) for g in groups)
    one = samples[0]
    return ClassFit(one.op_class, one.forward, one.dtype, launch_s, knots=knots)


def _launch_s(groups: Sequence[Sequence[TimedCall]]) -> float:
    """Returns the seconds of a call without FLOPs, of groups with a rate each; 0 without any."""
    if not groups:
        return 0.0
    rows = [
        (1.0, *(s.flops * (other is group) for other in groups)) for group in groups for s in group
    ]
    (launch_s, *_), _ = _least(rows, [s for group in groups for s in group])
    return launch_s


def predicted_s(fits: Sequence[ClassFit], samples: Iterable[TimedCall]) -> tuple[float, float]:
    """Returns the seconds of all samples' launches, those of views in them, and of the rest."""
    launches_s = rest_s = 0.0
    for s in samples:
        fit = nearest(fits, s.op_class, s.forward, s.dtype)
        if s.op_class != VIEW and fit is not None:
            launches_s += fit.launch_s
            rest_s += float(fit.busy_s(s.flops, s.bytes_moved))
    return launches_s, rest_s


def scaled(
    fits: Iterable[ClassFit], launches: float, rest: float, but: Collection[str] = ()
) -> tuple[ClassFit, ...]:
    """Returns the fits with their launches and the rest scaled, but for those of some classes."""
    return tuple(
        f
        if f.op_class in but
        else replace(
            f,
            launch_s=f.launch_s * launches,
            s_per_flop=f.s_per_flop * rest,
            s_per_byte=f.s_per_byte * rest,
            s_per_far_byte=f.s_per_far_byte * rest,
            knots=tuple((x, y * rest) for x, y in f.knots),
        )
        for f in fits
    )


def scales(parts: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Returns the scales of launches and of the rest with which their sums are nearest to wholes.

    Args:
        parts: seconds of launches, of the rest, and of both as they ran, of each whole.
    """
    rows = np.array([part for part in parts if part[2] > 0])
    if len(rows) < FEWEST_WHOLES:  # too few to tell the two apart
        one = float(np.median([whole / max(a + b, 1e-30) for a, b, whole in rows] or [1.0]))
        return one, one
    weighted = rows / np.sqrt(rows[:, 2:])
    (launches, rest), _ = nnls(weighted[:, :2], weighted[:, 2])
    return float(launches), float(rest)


def product_rates(samples: Iterable[TimedCall]) -> tuple[tuple[torch.dtype, float], ...]:
    """Returns (dtype, FLOP/s) of the products, the larger half of them."""
    by_dtype: dict[torch.dtype, list[TimedCall]] = {}
    for s in samples:
        if s.op_class in ("matmul", "convolution") and s.flops > 0:
            by_dtype.setdefault(s.dtype, []).append(s)
    return tuple(
        (dtype, sum(s.flops for s in large) / sum(s.seconds_s for s in large))
        for dtype, mine in sorted(by_dtype.items(), key=lambda item: str(item[0]))
        if (large := _larger_half({s: s.flops for s in mine}))
    )


def memory_rate(samples: Iterable[TimedCall]) -> float:
    """Returns bytes a second of pointwise calls and copies, the larger half; 0 without any."""
    bound = {s: s.bytes_moved for s in samples if s.op_class in ("pointwise", "copy")}
    large = _larger_half(bound)
    seconds_s = sum(s.seconds_s for s in large)
    return sum(s.bytes_moved for s in large) / seconds_s if seconds_s > 0 else 0.0


def _larger_half(sizes: Mapping[TimedCall, float]) -> list[TimedCall]:
    ordered = sorted(sizes, key=sizes.__getitem__)
    return ordered[len(ordered) // 2 :]


def _views_s(samples: Iterable[TimedCall], forward: bool) -> float:
    mine = [s for s in samples if s.forward is forward]
    views_s = sum(s.seconds_s for s in mine if s.op_class == VIEW)
    return views_s / max(sum(s.op_class != VIEW for s in mine), 1)


def _intensity(s: TimedCall) -> float:
    return s.flops / s.bytes_moved


def _mean_intensity(group: Sequence[TimedCall]) -> float:
    return float(np.exp(np.mean([np.log(_intensity(s)) for s in group])))


def _rate(group: Sequence[TimedCall], launch_s: float) -> float:
    """Returns seconds a FLOP beside the launch, which is never nearly all of a call."""
    busy_s = sum(max(s.seconds_s - launch_s, LEAST_BUSY * s.seconds_s) for s in group)
    return busy_s / sum(s.flops for s in group)
