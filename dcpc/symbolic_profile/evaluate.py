"""A profile's expressions at given sizes, in microseconds a point.

The monomials of all expressions are compiled once, from sympy objects, never from text; an
expression is then one row of integers. Sizes are integers, or arrays of integers for many points
at once.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
from torch import fx

from dcpc.ir import Profile, Work
from dcpc.symbolic_profile.memory.allocator import Usage, rounded, usage
from dcpc.symbolic_profile.ops.facts import at_ranks, groups_in
from dcpc.symbolic_profile.polynomials import Basis, Floats, Integers, values_of
from dcpc.symbolic_profile.profile import Costs, Ledger
from dcpc.symbolic_profile.seconds.hardware import Device
from dcpc.symbolic_profile.seconds.time import MATMUL_CLASSES, Roofline


class Evaluator:
    """A profile, compiled.

    Every method takes `dims`: symbol name -> integer, or array of integers (all of one shape).

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


@dataclass(frozen=True, slots=True)
class Prediction:
    """Memory, FLOPs and seconds of one forward and backward on one rank, at given sizes.

    Attributes:
        peak_bytes: peak of the activations and new gradients.
        saved_bytes: activations kept between forward and backward.
        input_bytes: the inputs.
        returned_bytes: outputs of forward that backward does not read; within the peak they live to
            the end.
        shared_bytes: outputs of forward that backward reads, too.
        flops: FLOPs of matmuls, convolutions and attention.
        wire_bytes: bytes sent in collectives.
        seconds_s: seconds by the device's roofline, or by its calibration.
        forward_s: forward's part of `seconds_s`.
        seconds_error: median relative error of such seconds, where the device is calibrated.
        away_bytes: activations that leave the device between forward and backward.
    """

    peak_bytes: int
    saved_bytes: int
    input_bytes: int
    returned_bytes: int
    shared_bytes: int
    flops: int
    wire_bytes: int
    seconds_s: float
    forward_s: float
    seconds_error: float | None = None
    away_bytes: int = 0


class Meter:
    """Reads the costs of runs of one graph at given sizes, without an expression made for any."""

    def __init__(self, ledger: Ledger, nodes: Sequence[fx.Node]) -> None:
        self._ledger, self._symbols, self._nodes = ledger, ledger.facts.symbols, nodes
        sizes = {t.storage_bytes for n in nodes for t in ledger.facts.of(n)}
        calls = ledger.kinds(n for n in nodes if n.op == "call_function")
        sizes |= {ledger.transient(n) for n in calls}
        work = self._all_work(ledger)
        # The numbers of ranks of groups are symbols as the sizes are, so that one basis serves all.
        self._groups = sorted({s for size in sizes for s in groups_in(size)}, key=str)
        costs = [e for w in work for e in (w.flops, w.bytes_moved, w.wire_bytes)]
        basis = Basis([*sizes, *costs])
        self._rows = dict(zip(sizes, basis.matrix([*sizes]).astype(np.int64), strict=True))
        self._monomials = basis.compile([*self._symbols, *self._groups])
        self._basis = basis
        self._price(ledger, work)

    def at(self, ledger: Ledger) -> Meter:
        """Returns the meter for groups of another size."""
        work = self._all_work(ledger)
        if not self._basis.holds(e for w in work for e in (w.flops, w.bytes_moved, w.wire_bytes)):
            return Meter(ledger, self._nodes)
        other = copy.copy(self)
        other._price(ledger, work)
        return other

    def _all_work(self, ledger: Ledger) -> list[Work]:
        kinds = ledger.kinds(self._nodes)
        both = [ledger.work(n, forward=f) for n in kinds for f in (True, False)]
        return list(dict.fromkeys(w for each in both for w in each))

    def _price(self, ledger: Ledger, work: Sequence[Work]) -> None:
        """Stores the ledger's group sizes and the coefficients of each call's costs."""
        self._ledger, basis = ledger, self._basis
        self._ranks = [int(at_ranks(group, ledger.ranks)) for group in self._groups]
        self._known: dict[tuple[int, ...], tuple[Integers, Floats]] = {}
        self._matrices: dict[int, tuple[Costs, Integers]] = {}
        self._usages: dict[tuple[float, ...], tuple[Costs, Usage]] = {}
        self._roofline = Roofline(work, basis)
        self._counted: dict[int, tuple[Costs, Floats]] = {}
        self._numbers = {w: i for i, w in enumerate(work)}
        counted = [w.op_class in MATMUL_CLASSES for w in work]
        self._flops = basis.matrix([w.flops for w in work]) * np.array(counted)[:, None]
        self._wire = basis.matrix([w.wire_bytes for w in work])
        self._of: dict[fx.Node, tuple[list[int], list[int]]] = {}

    def read(self, costs: Costs, dims: Mapping[str, int], device: Device) -> Prediction:
        """Returns memory, FLOPs and seconds of a run."""
        whole, exact = self._at(dims)
        timeline = costs.timeline
        live = timeline.live(_in_blocks(self._matrix(costs) @ whole, device))
        counts = self._counts(costs)
        seconds = self._roofline.seconds(exact, device) * counts
        forward = np.array([w.forward for w in self._roofline.work], dtype=bool)
        return Prediction(
            peak_bytes=int(live.max()),
            saved_bytes=self._sum(timeline.saved, whole),
            input_bytes=self._sum(costs.inputs, whole, device.block_bytes),
            returned_bytes=self._sum(timeline.returned, whole, device.block_bytes),
            shared_bytes=self._sum(timeline.shared, whole, device.block_bytes),
            flops=round(float((self._flops @ exact) @ counts)),
            wire_bytes=round(float((self._wire @ exact) @ counts)),
            seconds_s=float(seconds.sum()),
            forward_s=float(seconds[forward].sum()),
            seconds_error=device.seconds_error,
        )

    def _counts(self, costs: Costs) -> Floats:
        """Returns how often a run does each kind of work."""
        if id(costs) not in self._counted:
            counts = np.zeros(len(self._numbers))
            for node, forward, count in costs.calls:
                for number in self._number(node)[0 if forward else 1]:
                    counts[number] += count
            self._counted[id(costs)] = costs, counts
        return self._counted[id(costs)][1]

    def _number(self, node: fx.Node) -> tuple[list[int], list[int]]:
        """Returns the numbers of a call's work in forward and in backward."""
        found = self._of.get(node)
        if found is None:
            both = (self._ledger.work(node, forward=f) for f in (True, False))
            forward, backward = ([self._numbers[w] for w in each] for each in both)
            found = self._of[node] = forward, backward
        return found

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The sizes that some cost depends on."""
        return frozenset(s.name for term in self._basis.terms for s in term.free_symbols)

    def most_alive(
        self, costs: Costs, ranks: Sequence[Mapping[str, int]], device: Device
    ) -> Integers:
        """Returns the maximum over ranks of the live bytes at each point, `[points]` bytes."""
        found: Integers = np.max([self.live_bytes(costs, dims, device) for dims in ranks], axis=0)
        return found

    def live_bytes(self, costs: Costs, dims: Mapping[str, int], device: Device) -> Integers:
        """Returns the live bytes at each point of a run's timeline, `[points]` bytes."""
        sizes = _in_blocks(self._matrix(costs) @ self._at(dims)[0], device)
        live: Integers = costs.timeline.live(sizes)
        return live

    def usage(
        self, costs: Costs, dims: Mapping[str, int], resident: Sequence[int], limit_bytes: float
    ) -> Usage:
        """Returns a run's GPU memory as torch's caching allocator reserves it.

        Args:
            costs: costs of the run, from the ledger.
            dims: symbol name -> size.
            resident: bytes of each tensor that stays, inputs excepted.
            limit_bytes: memory of the GPU.
        """
        key = id(costs), limit_bytes, *values_of(self._symbols, dims), *resident
        if key not in self._usages:
            whole = self._at(dims)[0]
            inputs = ([int(self._rows[size] @ whole)] * n for size, n in costs.inputs.items())
            values = (self._matrix(costs) @ whole).tolist()
            stays = [*resident, *itertools.chain(*inputs)]
            found = usage(costs.timeline, values, stays, limit_bytes=limit_bytes)
            self._usages[key] = costs, found
        return self._usages[key][1]

    def seconds(
        self, nodes: Sequence[fx.Node], dims: Mapping[str, int], device: Device, *,
        forward: bool = True,
    ) -> Floats:  # fmt: skip
        """Returns the seconds of each call, `[nodes]`; a view has 0."""
        each = self._roofline.seconds(self._at(dims)[1], device).tolist()
        work = [self._number(n)[0 if forward else 1] for n in nodes]
        return np.array([sum(each[w] for w in some) for some in work], dtype=np.float64)

    def sizes(self, nodes: Sequence[fx.Node], dims: Mapping[str, int]) -> Floats:
        """Returns the bytes of each call's value, `[nodes]`."""
        whole, _ = self._at(dims)
        values = [self._ledger.facts.of(n) for n in nodes]
        found = [self._rows[v[0].storage_bytes] @ whole if v else 0 for v in values]
        return np.array(found, dtype=np.float64)

    def memory(
        self, nodes: Sequence[fx.Node], dims: Mapping[str, int]
    ) -> tuple[dict[str, tuple[int, ...]], dict[int, float], dict[str, float]]:
        """Returns the storages of each call's value, their bytes, and each call's transient bytes.

        Storages of placeholders and calls without transients are left out.
        """
        whole, _ = self._at(dims)
        facts = self._ledger.facts
        resident = {t.storage for n in nodes if n.op == "placeholder" for t in facts.of(n)}
        calls = [n for n in nodes if n.op == "call_function"]
        held = {n.name: [t for t in facts.of(n) if t.storage not in resident] for n in calls}
        storages = {name: tuple(dict.fromkeys(t.storage for t in ts)) for name, ts in held.items()}
        sizes = {t.storage: t.storage_bytes for ts in held.values() for t in ts}
        transients = {n.name: self._ledger.transient(n) for n in calls}
        return (
            storages,
            {storage: float(self._rows[size] @ whole) for storage, size in sizes.items()},
            {n: float(self._rows[size] @ whole) for n, size in transients.items() if size != 0},
        )

    def _at(self, dims: Mapping[str, int]) -> tuple[Integers, Floats]:
        """Returns each monomial at these sizes, as an integer and as a float."""
        key = tuple(values_of(self._symbols, dims))
        if key not in self._known:
            whole = np.array(self._monomials(*key, *self._ranks), dtype=np.int64)
            floats = map(float, (*key, *self._ranks))
            exact = np.array(self._monomials(*floats), dtype=np.float64)
            self._known[key] = whole, exact
        return self._known[key]

    def _matrix(self, costs: Costs) -> Integers:
        """Returns the coefficients of the timeline's sizes."""
        if id(costs) not in self._matrices:
            rows = np.array([self._rows[size] for size in costs.timeline.sizes])
            self._matrices[id(costs)] = costs, rows
        return self._matrices[id(costs)][1]

    def _sum(self, sizes: Mapping[sympy.Expr, int], whole: Integers, block_bytes: int = 1) -> int:
        each = ((int(self._rows[size] @ whole), count) for size, count in sizes.items())
        return sum(rounded(size_bytes, block_bytes) * count for size_bytes, count in each)


def _in_blocks(sizes: Integers, device: Device) -> Integers:
    """Returns sizes as the device's allocator counts them."""
    block_bytes = device.block_bytes
    return sizes if block_bytes == 1 else -(-sizes // block_bytes) * block_bytes


@functools.lru_cache(maxsize=512)
def evaluator(profile: Profile) -> Evaluator:
    """Returns the profile's evaluator, compiled at the first call."""
    return Evaluator(profile)
