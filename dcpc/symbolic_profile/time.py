"""Seconds of a profile on a device: a roofline per call, evaluated for all calls at once.

compute     max(FLOPs / FLOP/s, bytes / bytes/s) + launch
collective  alpha + sent bytes / link's bytes/s, and its local copies' bytes
ring        the longer of compute and what it sends, on a device that does both at once; their sum
calibrated  launch + FLOPs * seconds a FLOP + bytes * seconds a byte, of the call's class
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcpc.ir import Work
from dcpc.symbolic_profile.fits import ClassFit
from dcpc.symbolic_profile.hardware import Device
from dcpc.symbolic_profile.polynomials import Basis, Floats

# Classes that run at the matmul rate of their dtype, and whose FLOPs count as the model's; the
# others run at the vector rate.
MATMUL_CLASSES = frozenset({"matmul", "attention", "convolution"})


@dataclass(frozen=True, slots=True)
class _Rates:
    """Seconds a FLOP, a byte moved, a byte sent and at least, of each group of calls.

    Attributes:
        per_flop: `[groups]`, and so are the others but the last.
        per_byte: of memory.
        near: bytes of memory beyond which they cost more.
        per_far_byte: more of those.
        per_wire_byte: sent.
        fixed: at least.
        overlap: groups whose arithmetic hides their memory traffic or the other way round.
        hides: groups that send while they compute.
        curves: groups whose seconds a FLOP depend on the FLOPs a byte, and their fit.
    """

    per_flop: Floats
    per_byte: Floats
    near: Floats
    per_far_byte: Floats
    per_wire_byte: Floats
    fixed: Floats
    overlap: Floats
    hides: Floats
    curves: tuple[tuple[int, ClassFit], ...]


class Roofline:
    """The work of a profile as matrices over a basis.

    Args:
        work: groups of equal calls.
        basis: holds every monomial of their costs.
    """

    def __init__(self, work: Sequence[Work], basis: Basis) -> None:
        self.work = tuple(work)
        self._flops = basis.matrix([w.flops for w in work])
        self._bytes = basis.matrix([w.bytes_moved for w in work])
        self._wire = basis.matrix([w.wire_bytes for w in work])
        self._count = np.array([w.count for w in work], dtype=np.float64)
        self._rates: dict[Device, _Rates] = {}

    def seconds(self, monomials: Floats, device: Device) -> Floats:
        """Returns the seconds of each group of calls.

        Args:
            monomials: value of each monomial of the basis; `[monomials]` or `[monomials, points]`.
            device: what they run on.

        Returns:
            `[groups]` or `[groups, points]`.
        """
        rates = self._rates.get(device)
        if rates is None:
            rates = self._rates[device] = self._of(device)

        def column(x: Floats) -> Floats:
            return x if monomials.ndim == 1 else x[:, None]

        flops, moved = self._flops @ monomials, self._bytes @ monomials
        flops_s = flops * column(rates.per_flop)
        far = np.maximum(moved - column(rates.near), 0.0)
        bytes_s = moved * column(rates.per_byte) + far * column(rates.per_far_byte)
        for i, fit in rates.curves:
            flops_s[i] = fit.busy_s(flops[i], moved[i])
        wire_s = (self._wire @ monomials) * column(rates.per_wire_byte)
        longer = np.maximum(flops_s, bytes_s)
        busy_s = np.where(column(rates.overlap) > 0, longer, flops_s + bytes_s)
        sent_s = np.where(column(rates.hides) > 0, np.maximum(busy_s, wire_s) - busy_s, wire_s)
        return np.asarray(column(self._count) * (busy_s + sent_s + column(rates.fixed)))

    def _of(self, device: Device) -> _Rates:
        rows = [_row(w, device) for w in self.work]
        table = np.array(rows, dtype=np.float64).reshape(len(rows), 8)
        flop, byte, near, far, sent, fixed, both, hides = table.T
        fits = [None if device.fits is None else device.fits.of(w) for w in self.work]
        curves = tuple((i, f) for i, f in enumerate(fits) if f is not None and f.knots)
        return _Rates(flop, byte, near, far, sent, fixed, both, hides, curves)


def _row(w: Work, device: Device) -> tuple[float, ...]:
    """Returns the seconds of `_Rates` for one group of calls."""
    collective = w.op_class == "collective" and w.ranks > 1
    if device.fits is not None and collective:
        sent = device.fits.collective(w.op, w.ranks)
        if sent is not None:
            return 0.0, 0.0, 0.0, 0.0, sent.s_per_byte, sent.alpha_s, False, False
    link = device.link(w.ranks)
    ring = w.op_class != "collective" and w.ranks > 1
    waits_s = w.messages * link.alpha_s if ring else 0.0
    hides = ring and device.overlaps
    fit = None if device.fits is None else device.fits.of(w)
    if fit is not None:
        per_byte = fit.s_per_byte, fit.near_bytes, fit.s_per_far_byte
        fixed_s = fit.launch_s + waits_s
        return fit.s_per_flop, *per_byte, 1 / link.bytes_per_s, fixed_s, False, hides
    matmul = w.op_class in MATMUL_CLASSES
    rate = device.matmul_flops_per_s(w.dtype) if matmul else device.vector_flops_per_s
    fixed_s = device.launch_s + (link.alpha_s if collective else waits_s)
    per_byte = 1 / device.memory_bytes_per_s, 0.0, 0.0
    return 1 / rate, *per_byte, 1 / link.bytes_per_s, fixed_s, True, hides
