"""Times the calls of a model's own graph, and the whole of it, at chosen sizes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import sympy
import torch
from torch import Tensor, fx

from dcpc.buckets import BATCH, Sizes
from dcpc.commands.calibrate.fit import CURVED, VIEW, TimedCall
from dcpc.commands.calibrate.points import shorter_points, turning_points
from dcpc.commands.calibrate.timed import Timed
from dcpc.ir import Work
from dcpc.plan.runnable import Runnable
from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.flops import cost_of
from dcpc.symbolic_profile.polynomials import Basis, Floats, QueryBlock, values_of

Inputs = Callable[[Sizes], Mapping[str, Tensor]]

FEWEST_ROUNDS, MOST_ROUNDS = 3, 7
SHORTEST_S = 1e-9  # of a call: a clock may not move meanwhile


@dataclass(frozen=True, slots=True)
class Whole:
    """Measured seconds of an excerpt, forward and backward.

    Attributes:
        sizes: dim -> size, batch included.
        samples: calls of the excerpt, each with its seconds alone.
        forward_s: seconds of the whole forward, compiled.
        backward_s: seconds of the whole backward, compiled.
        alone: calls that ran by themselves at other sizes.
    """

    sizes: Sizes
    samples: tuple[TimedCall, ...]
    forward_s: float
    backward_s: float
    alone: tuple[TimedCall, ...] = ()

    def part(self, forward: bool) -> tuple[list[TimedCall], float]:
        """Returns the calls of one direction, and the seconds of all of it."""
        mine = [s for s in self.samples if s.forward is forward]
        return mine, self.forward_s if forward else self.backward_s


@dataclass(frozen=True, slots=True)
class _CompiledBlocks:
    """Two blocks of one trace, compiled."""

    timed: tuple[Timed, Timed]
    guards: tuple[sympy.Basic, ...]

    def holds(self, dims: Sizes) -> bool:
        """Whether it may run at these sizes; see `Variant.integer_values`."""
        for least in (2, 0):
            at = {s: max(dims[s.name], least) for g in self.guards for s in g.free_symbols}
            if all(g.subs(at) != sympy.false for g in self.guards):
                return True
        return False


class Bench:
    """Two blocks of one trace, ready to be timed."""

    def __init__(self, runnable: Runnable, inputs: Inputs, device: torch.device) -> None:
        self.runnable, self._inputs = runnable, inputs
        self.traced = runnable.traced
        self.placement = runnable.priced.placement(self.traced.program.hints, 1)
        # Inductor adds guards to what it compiles: such a graph is traced alone.
        hints = None if self.traced.backend == "eager" else ()
        self._device = device
        self._compiled = [self._compile(hints)]
        # What is compiled may have become that of one length; what is priced is of all.
        facts, self._timed = self._excerpts(None)
        self._study = runnable.priced.at(self.placement)
        self._work = [
            cost_of(n, facts, forward=forward)
            for timed, forward in zip(self._timed, (True, False), strict=True)
            for n in timed.calls
        ]
        priced = [w for w in self._work if w is not None]
        self._dtypes = [w.dtype for w in priced]
        self._symbols = facts.symbols
        self._owners = [timed for timed in self._timed for _ in timed.calls]
        self._calls = [n for timed in self._timed for n in timed.calls]
        made = [t.storage_bytes for n in self._calls for t in facts.fresh(n)]
        basis = Basis([*made, *(e for w in priced for e in (w.flops, w.bytes_moved))])
        self._made = basis.matrix(made)
        self._flops = basis.matrix([w.flops for w in priced])
        self._bytes = basis.matrix([w.bytes_moved for w in priced])
        self._monomials = basis.compile(self._symbols)

    def _compile(self, hints: tuple[int, ...] | None) -> _CompiledBlocks:
        """Returns the excerpts of a trace at these hints, compiled."""
        joint = self.traced.lowering(self.placement, hints).joint
        _, (forward, backward) = self._excerpts(hints)
        mode, backend = joint.fake_mode, self.traced.backend
        found = [*forward.compile(backend, mode), *backward.compile(backend, mode)]
        guards = (*joint.guards, *(g.subs(joint.names) for g in found))
        return _CompiledBlocks((forward, backward), guards)

    def _excerpts(self, hints: tuple[int, ...] | None) -> tuple[Facts, tuple[Timed, Timed]]:
        """Returns forward and backward of a trace at these hints, and the facts of their values."""
        parts = self.runnable.partition(self.placement, 0, hints)
        facts = Facts(parts.names)
        forward, backward = (
            Timed(gm, facts, self._device) for gm in (parts.forward, parts.backward)
        )
        return facts, (forward, backward)

    def _compiled_for(self, dims: Sizes) -> _CompiledBlocks:
        """Returns excerpts that may run at these sizes, compiled for them where none may.

        Inductor takes a length for a number where that suits its kernels.
        """
        for known in self._compiled:
            if known.holds(dims):
                return known
        integers = self.traced.lowering(self.placement).lowered.integers
        self._compiled.append(self._compile(tuple(max(2, dims[i.name]) for i in integers)))
        return self._compiled[-1]

    def expected_s(self, sizes: Sizes) -> float:
        """Returns the seconds of one run by the device's data sheet."""
        device = self.traced.device
        flops, moved = self._features(sizes)
        rates = np.array([device.matmul_flops_per_s(dtype) for dtype in self._dtypes])
        longer = np.maximum(flops / rates, moved / device.memory_bytes_per_s)
        return float((longer + device.launch_s).sum())

    def slowness(self, sizes: Sizes) -> float:
        """Returns how often a run takes its expected seconds, after one that warms up."""
        _, whole_s = [self._run(sizes) for _ in range(2)][-1]
        return max(sum(whole_s), SHORTEST_S) / self.expected_s(sizes)

    def made_bytes(self, sizes: Sizes) -> int:
        """Returns the bytes of all values that a run makes: more than it ever holds."""
        return int((self._made @ self._at(sizes)).sum())

    def measure(self, points: Sequence[Sizes], until_s: float) -> list[Whole]:
        """Returns the lower quartile of each point's seconds; a round runs every point once.

        Args:
            points: for each point: dim -> size, batch included.
            until_s: `time.perf_counter()` after which no round starts, but for the fewest.
        """
        each: list[list[list[float]]] = [[] for _ in points]
        whole: list[list[list[float]]] = [[] for _ in points]
        for number in range(MOST_ROUNDS):
            if number >= FEWEST_ROUNDS and time.perf_counter() > until_s:
                break
            for i, sizes in enumerate(points):
                calls, all_of_it = self._run(sizes)
                each[i].append(calls)
                whole[i].append(all_of_it)
        both = [_low(w) for w in whole]
        first, *others = found = [
            Whole(sizes, self._samples(sizes, _low(e)), forward_s, backward_s)
            for sizes, e, (forward_s, backward_s) in zip(points, each, both, strict=True)
        ]
        return [replace(first, alone=tuple(self._alone(found))), *others]

    def _alone(self, points: Sequence[Whole]) -> Iterator[TimedCall]:
        """Yields the curved classes' calls at lengths between the points', and at shorter ones.

        Alone a call finds its operands in the caches. How much longer it takes among the others is
        known at the points; between two of them it is taken to be the geometric mean. Sequences of
        a packed row may be shorter than the shortest point, of whose samples most run at once.
        """
        narrow = min(p.sizes.get(BATCH, 1) for p in points)
        lengths = [p for p in points if p.sizes.get(BATCH, 1) == narrow]
        shortest = [p for p in points if _length(p) == min(map(_length, points))]
        widest = max(shortest, key=lambda p: p.sizes.get(BATCH, 1))
        rows = iter(range(len(self._flops)))
        seen = set()
        for i, (timed, node, work) in enumerate(
            zip(self._owners, self._calls, self._work, strict=True)
        ):
            row = -1 if work is None else next(rows)
            kind = (str(node.target), str(node.meta["val"]))
            if work is None or work.op_class not in CURVED or kind in seen:
                continue
            seen.add(kind)
            slower = [p.samples[i].seconds_s / self._alone_s(timed, node, p.sizes) for p in lengths]
            for (low, a), (high, b) in itertools.pairwise(zip(lengths, slower, strict=True)):
                block = partial(self._block, timed, node)
                for sizes in turning_points(low.sizes, high.sizes, block):
                    yield self._one_alone(i, row, sizes, math.sqrt(a * b))
            for sizes in shorter_points(widest.sizes):
                whole_s = self._alone_s(timed, node, widest.sizes)
                yield self._one_alone(i, row, sizes, widest.samples[i].seconds_s / whole_s)

    def _one_alone(self, call: int, row: int, sizes: Sizes, slower: float) -> TimedCall:
        """Returns a call by itself at some sizes, in as many times the seconds."""
        flops, moved = self._features(sizes)
        spent = self._alone_s(self._owners[call], self._calls[call], sizes) * slower
        work = self._work[call]
        assert work is not None, "a view is not curved"
        return _sample(work, float(flops[row]), float(moved[row]), spent)

    def _alone_s(self, timed: Timed, node: fx.Node, sizes: Sizes) -> float:
        dims = self._study.local_sizes(sizes)
        return max(timed.seconds_alone(node, dims, FEWEST_ROUNDS), SHORTEST_S)

    def _block(self, timed: Timed, node: fx.Node, sizes: Sizes) -> int:
        """Returns the queries that the CPU's attention takes at a time."""
        dims = self._study.local_sizes(sizes)
        return int(QueryBlock(sympy.Integer(timed.length(node, dims))))

    def _run(self, sizes: Sizes) -> tuple[list[float], list[float]]:
        """Returns the seconds of each call, and of forward and backward as a whole.

        The whole comes first: the caches hold another point's data, as in training another step's.
        """
        program = self.traced.program
        given = {n: t for n, t in self.traced.tensors().items() if not t.is_meta}
        inputs = self._inputs(sizes)
        given |= {p: inputs[name] for p, name in program.inputs.items()}
        given = {n: t.detach() for n, t in given.items()}
        dims = self._study.local_sizes(sizes)
        with torch.no_grad():
            compiled = self._compiled_for(dims).timed
            whole = [timed.seconds(timed.arguments(dims, given)) for timed in compiled]
            each = [timed.seconds_each(timed.arguments(dims, given)) for timed in self._timed]
        return [*itertools.chain(*each)], whole

    def _samples(self, sizes: Sizes, seconds: Sequence[float]) -> tuple[TimedCall, ...]:
        flops, moved = self._features(sizes)
        found: list[TimedCall] = []
        priced = 0
        for work, spent in zip(self._work, seconds, strict=True):
            forward = len(found) < len(self._timed[0].calls)
            if work is None:
                found.append(TimedCall(VIEW, forward, torch.int64, 0.0, 0.0, spent))
                continue
            found.append(_sample(work, float(flops[priced]), float(moved[priced]), spent))
            priced += 1
        return tuple(found)

    def _features(self, sizes: Sizes) -> tuple[Floats, Floats]:
        monomials = self._at(sizes)
        return self._flops @ monomials, self._bytes @ monomials

    def _at(self, sizes: Sizes) -> Floats:
        dims = self._study.local_sizes(sizes)
        floats = {name: float(size) for name, size in dims.items()}
        return np.array(self._monomials(*values_of(self._symbols, floats)), dtype=np.float64)


def _length(whole: Whole) -> int:
    return math.prod(size for name, size in whole.sizes.items() if name != BATCH)


def _sample(work: Work, flops: float, moved: float, seconds_s: float) -> TimedCall:
    return TimedCall(work.op_class, work.forward, work.dtype, flops, moved, seconds_s)


def _low(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Returns the lower quartile of each call: other processes only ever add seconds."""
    return [sorted(each)[len(rounds) // 4] for each in zip(*rounds, strict=True)]
