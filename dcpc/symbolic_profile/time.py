"""Seconds of a profile on a device: a roofline per call, evaluated for all calls at once.

compute     max(FLOPs / FLOP/s, bytes / bytes/s) + launch
collective  alpha + sent bytes / link's bytes/s, and its local copies' bytes
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dcpc.ir import Work
from dcpc.symbolic_profile.hardware import Device
from dcpc.symbolic_profile.polynomials import Basis, Floats

# Classes that run at the matmul rate of their dtype; the others at the vector rate.
_MATMUL_CLASSES = frozenset({"matmul", "attention", "convolution"})


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
        self._rates: dict[Device, tuple[Floats, Floats, Floats]] = {}

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
        per_flop, per_wire_byte, fixed = (r if monomials.ndim == 1 else r[:, None] for r in rates)
        flops_s = (self._flops @ monomials) * per_flop
        bytes_s = (self._bytes @ monomials) / device.memory_bytes_per_s
        wire_s = (self._wire @ monomials) * per_wire_byte
        count = self._count if monomials.ndim == 1 else self._count[:, None]
        return np.asarray(count * (np.maximum(flops_s, bytes_s) + wire_s + fixed))

    def _of(self, device: Device) -> tuple[Floats, Floats, Floats]:
        """Returns seconds a FLOP, seconds a byte sent and seconds at least, of each group."""
        per_flop, per_wire_byte, fixed = [], [], []
        for w in self.work:
            matmul = w.op_class in _MATMUL_CLASSES
            rate = device.matmul_flops_per_s(w.dtype) if matmul else device.vector_flops_per_s
            link = device.link(w.ranks)
            collective = w.op_class == "collective" and w.ranks > 1
            per_flop.append(1 / rate)
            per_wire_byte.append(1 / link.bytes_per_s)
            fixed.append(device.launch_s + (link.alpha_s if collective else 0.0))
        return np.array(per_flop), np.array(per_wire_byte), np.array(fixed)
