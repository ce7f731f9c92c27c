"""THE price of time: seconds of calls on a device, a roofline each, all calls at once.

compute     max(FLOPs / FLOP/s, bytes / bytes/s) + launch
collective  alpha + sent bytes / link's bytes/s, and its local copies' bytes
ring        the longer of compute and what it sends, on a device that does both at once; their sum
calibrated  launch + FLOPs * seconds a FLOP + bytes * seconds a byte, of the call's class

A profile's calls (`Roofline`), which the report prints and recompute weighs, and the placement's
(`passes/placement/label_costs.py`) have their seconds of one `RateTable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dcpc.ir import Work
from dcpc.symbolic_profile.polynomials import Basis, Floats
from dcpc.symbolic_profile.seconds.fits import CallKind
from dcpc.symbolic_profile.seconds.hardware import Device

# Classes that run at the matmul rate of their dtype, and whose FLOPs count as the model's; the
# others run at the vector rate.
MATMUL_CLASSES = frozenset({"matmul", "attention", "convolution"})


class RateTable:
    """Seconds a FLOP, a byte moved, a byte sent and at least, of some calls on a device.

    Args:
        calls: kinds of the calls.
        device: device that runs them.
        start_s: seconds to count for the start of a collective, and for each wait of a ring; None:
            as many as it takes.
    """

    def __init__(
        self, calls: Sequence[CallKind | Work], device: Device, start_s: float | None = None
    ) -> None:
        known: dict[CallKind, tuple[float, ...]] = {}
        kinds = [CallKind(c.op_class, c.forward, c.dtype, c.ranks, c.op, c.messages) for c in calls]
        for kind in kinds:
            if kind not in known:
                known[kind] = _row(kind, device, start_s)
        table = np.array([known[kind] for kind in kinds], dtype=np.float64)
        self._columns = table.reshape(len(kinds), 8).T
        fits = {kind: None if device.fits is None else device.fits.of(kind) for kind in known}
        curves = ((i, fits[kind]) for i, kind in enumerate(kinds))
        self._curves = [(i, fit) for i, fit in curves if fit is not None and fit.knots]

    def seconds(self, flops: Floats, moved: Floats, wire: Floats) -> Floats:
        """Returns the seconds of each call.

        Args:
            flops: FLOPs of each; `[calls]` or `[calls, points]`.
            moved: bytes that it reads and writes; the same.
            wire: bytes that this rank sends; the same.
        """
        columns = self._columns if flops.ndim == 1 else self._columns[..., None]
        per_flop, per_byte, near, per_far_byte, per_wire_byte, fixed_s, overlap, hides = columns
        flops_s = flops * per_flop
        bytes_s = moved * per_byte + np.maximum(moved - near, 0.0) * per_far_byte
        for i, fit in self._curves:
            flops_s[i] = fit.busy_s(flops[i], moved[i])
        wire_s = wire * per_wire_byte
        busy_s = np.where(overlap > 0, np.maximum(flops_s, bytes_s), flops_s + bytes_s)
        sent_s = np.where(hides > 0, np.maximum(busy_s, wire_s) - busy_s, wire_s)
        return np.asarray(busy_s + sent_s + fixed_s)

    def sending_seconds(self, wire: Floats) -> Floats:
        """Returns the seconds of sending so many bytes in each call, hidden or not, and its start.

        Args:
            wire: bytes that this rank sends in each call, `[calls]`; 0 where it sends nothing.
        """
        per_wire_byte, fixed_s = self._columns[4], self._columns[5]
        return np.where(wire > 0, wire * per_wire_byte + fixed_s, 0.0)


class Roofline:
    """The work of a profile as matrices over a basis."""

    def __init__(self, work: Sequence[Work], basis: Basis) -> None:
        self.work = tuple(work)
        self._flops = basis.matrix([w.flops for w in work])
        self._bytes = basis.matrix([w.bytes_moved for w in work])
        self._wire = basis.matrix([w.wire_bytes for w in work])
        self._count = np.array([w.count for w in work], dtype=np.float64)
        self._rates: dict[Device, RateTable] = {}

    def seconds(self, monomials: Floats, device: Device) -> Floats:
        """Returns the seconds of each group of calls.

        Args:
            monomials: value of each monomial of the basis; `[monomials]` or `[monomials, points]`.
            device: device that runs them.

        Returns:
            `[groups]` or `[groups, points]`.
        """
        rates = self._rates.get(device)
        if rates is None:
            rates = self._rates[device] = RateTable(self.work, device)
        count = self._count if monomials.ndim == 1 else self._count[:, None]
        sizes = (matrix @ monomials for matrix in (self._flops, self._bytes, self._wire))
        return np.asarray(count * rates.seconds(*sizes))


def _row(call: CallKind, device: Device, start_s: float | None) -> tuple[float, ...]:
    """Returns seconds a FLOP and a byte, near bytes, seconds a byte beyond them and a byte sent.

    And seconds at least, whether arithmetic hides memory traffic, and whether it sends meanwhile.
    """
    collective = call.op_class == "collective" and call.ranks > 1
    if device.fits is not None and collective:
        sent = device.fits.collective(call.op, call.ranks)
        if sent is not None:
            alpha_s = sent.alpha_s if start_s is None else start_s
            return 0.0, 0.0, 0.0, 0.0, sent.s_per_byte, alpha_s, False, False
    if call.op_class == "host":
        among = replace(call, op_class="collective")
        *_, per_sent, fixed_s, _, _ = _row(among, device, start_s) if call.ranks > 1 else [0.0] * 4
        return 0.0, 1 / device.host_bytes_per_s, 0.0, 0.0, per_sent, fixed_s, False, False
    link = device.link(call.ranks)
    alpha_s = link.alpha_s if start_s is None else start_s
    ring = call.op_class != "collective" and call.ranks > 1
    waits_s = call.messages * alpha_s if ring else 0.0
    hides = ring and device.overlaps
    fit = None if device.fits is None else device.fits.of(call)
    if fit is not None:
        per_byte = fit.s_per_byte, fit.near_bytes, fit.s_per_far_byte
        fixed_s = fit.launch_s + waits_s
        return fit.s_per_flop, *per_byte, 1 / link.bytes_per_s, fixed_s, False, hides
    matmul = call.op_class in MATMUL_CLASSES
    rate = device.matmul_flops_per_s(call.dtype) if matmul else device.vector_flops_per_s
    launch_s = device.launch_s if start_s is None or not collective else 0.0
    fixed_s = launch_s + (alpha_s if collective else waits_s)
    per_byte = 1 / device.memory_bytes_per_s, 0.0, 0.0
    return 1 / rate, *per_byte, 1 / link.bytes_per_s, fixed_s, True, hides
