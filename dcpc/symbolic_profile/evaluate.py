"""A profile's expressions at given sizes, in microseconds a point.

The monomials of all expressions are compiled once, from sympy objects, never from text; an
expression is then one row of integers. Sizes are integers, or arrays of integers for many points
at once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import sympy

from dcpc.ir import Profile
from dcpc.symbolic_profile.hardware import Device
from dcpc.symbolic_profile.polynomials import Basis, Floats, Integers, values_of
from dcpc.symbolic_profile.time import Roofline


class Evaluator:
    """A profile, compiled.

    Every method takes `dims`: symbol name -> integer, or array of integers (all of one shape).

    Args:
        profile: what to evaluate.

    Example:
        evaluator(profile).peak_bytes({"batch": 4, "seq": 2048})
    """

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        totals = (profile.saved_bytes, profile.input_bytes, profile.flops, profile.forward_flops)
        self._totals = (*totals, profile.bytes_moved, profile.wire_bytes)
        costs = [e for w in profile.work for e in (w.flops, w.bytes_moved, w.wire_bytes)]
        basis = Basis([*self._totals, *profile.peak_terms, *costs])
        self._monomials = basis.compile(profile.symbols)
        self._total_rows = basis.matrix(self._totals)
        self._saved_row = self._total_rows[:1].astype(np.int64)
        self._peak_rows = basis.matrix(profile.peak_terms).astype(np.int64)
        self._roofline = Roofline(profile.work, basis)

    def peak_bytes(self, dims: Mapping[str, Any]) -> Any:
        """Returns the peak of activations and gradients: an int, or an array of them."""
        live = self._peak_rows @ self._integers(dims)
        return int(live.max()) if live.ndim == 1 else live.max(axis=0)

    def peak_point(self, dims: Mapping[str, int]) -> tuple[str, sympy.Expr]:
        """Returns the node at which the peak is, and its expression."""
        i = int((self._peak_rows @ self._integers(dims)).argmax())
        return self.profile.peak_points[i], self.profile.peak_terms[i]

    def saved_bytes(self, dims: Mapping[str, Any]) -> Any:
        """Returns the bytes saved between forward and backward."""
        saved = (self._saved_row @ self._integers(dims))[0]
        return int(saved) if saved.ndim == 0 else saved

    def input_bytes(self, dims: Mapping[str, Any]) -> Any:
        """Returns the bytes of the inputs."""
        return self._total(1, dims)

    def flops(self, dims: Mapping[str, Any]) -> Any:
        """Returns the FLOPs of matmuls, convolutions and attention, forward + backward."""
        return self._total(2, dims)

    def forward_flops(self, dims: Mapping[str, Any]) -> Any:
        """Returns the forward's part of `flops`."""
        return self._total(3, dims)

    def bytes_moved(self, dims: Mapping[str, Any]) -> Any:
        """Returns the bytes read and written by all calls."""
        return self._total(4, dims)

    def wire_bytes(self, dims: Mapping[str, Any]) -> Any:
        """Returns the bytes this rank sends."""
        return self._total(5, dims)

    def seconds(self, dims: Mapping[str, Any], device: Device) -> Any:
        """Returns the predicted seconds of forward and backward: a float, or an array of them."""
        total = self._roofline.seconds(self._floats(dims), device).sum(axis=0)
        return float(total) if total.ndim == 0 else total

    def forward_seconds(self, dims: Mapping[str, Any], device: Device) -> Any:
        """Returns the forward's part of `seconds`."""
        forward = np.array([w.forward for w in self._roofline.work], dtype=bool)
        total = self._roofline.seconds(self._floats(dims), device)[forward].sum(axis=0)
        return float(total) if total.ndim == 0 else total

    def seconds_by_class(self, dims: Mapping[str, int], device: Device) -> dict[str, float]:
        """Returns op class -> seconds, the largest first."""
        found: dict[str, float] = {}
        each = self._roofline.seconds(self._floats(dims), device)
        for w, s in zip(self._roofline.work, each, strict=True):
            found[w.op_class] = found.get(w.op_class, 0.0) + float(s)
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _total(self, i: int, dims: Mapping[str, Any]) -> Any:
        total = self._total_rows[i] @ self._floats(dims)
        return round(float(total)) if total.ndim == 0 else total

    def _integers(self, dims: Mapping[str, Any]) -> Integers:
        values = self._monomials(*values_of(self.profile.symbols, dims))
        if any(isinstance(v, np.ndarray) and v.ndim for v in values):
            return np.stack(np.broadcast_arrays(*values)).astype(np.int64)
        return np.array(values, dtype=np.int64)

    def _floats(self, dims: Mapping[str, Any]) -> Floats:
        floats = {
            name: float(v) if isinstance(v, int) else np.asarray(v, dtype=np.float64)
            for name, v in dims.items()
        }
        values = self._monomials(*values_of(self.profile.symbols, floats))
        return np.asarray(np.stack(np.broadcast_arrays(*values)), dtype=np.float64)


@functools.lru_cache(maxsize=512)
def evaluator(profile: Profile) -> Evaluator:
    """Returns the profile's evaluator, compiled at the first call."""
    return Evaluator(profile)
