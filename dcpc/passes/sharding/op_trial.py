"""Runs one call of a graph on small random operands, whole and in pieces, for `derive.py`.

Operands are float64 where the op takes that, sizes are small, non-tensor arguments are the graph's.
Integers stay below every size, and no piece is shorter than that, so that an integer which is an
index never points outside: kernels that do not check would read other memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd, prod
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from dcpc.ir import TensorInfo
from dcpc.ops.routed import as_tried
from dcpc.passes.sharding.operand_draws import INDICES, KINDS, draw

# Lengths of the named dims in the two runs: different in both, and from each other.
LENGTHS = ((7, 9, 8, 6, 11, 10, 13, 12), (9, 6, 7, 11, 8, 13, 10, 15))
MOST_ELEMENTS = 1 << 17  # of one operand: above it constant dims are shrunk
MOST_CALLS = 8000
ENOUGH_DRAWS = 4  # draws that the op must take and that must tell something
TOLERANCE = 1e-12
NOT_RUN = frozenset({"dcpc", "c10d", "_c10d_functional", "symm_mem"})

Dims = tuple[tuple[int, int], ...]  # (operand, dim), at most one of each operand
SymbolSizes = Mapping[sympy.Symbol, int]


class NotDerivedError(Exception):
    """Raised where an op cannot be tried, or its results show no rule."""


@dataclass(frozen=True, slots=True)
class TrialSample:
    """Operands of one draw, and the op's result.

    Attributes:
        sizes: length of each named dim.
        operands: operands of the op.
        whole: result of the op on whole operands.
        tells: whether the result has different values.
    """

    sizes: SymbolSizes
    operands: list[Tensor]
    whole: Tensor
    tells: bool


class Trial:
    """A call with its tensors replaced by drawn ones.

    Attributes:
        operands: tensor operands of the call.
        output: result of the call.
        exact: whether results are compared bit for bit, as the op takes no float64.
        several: whether the call has several results.
        result: index of the result that is tried.
    """

    def __init__(
        self,
        call: fx.Node,
        result: int,
        operands: Sequence[TensorInfo],
        output: TensorInfo,
        scalars: Mapping[str, sympy.Expr],
    ) -> None:
        """Reads the call.

        Raises:
            NotDerivedError: the op must not be run, or has arguments other than tensors and sizes.
        """
        _refuse(call)
        self.call, self.result, self.operands, self.output = call, result, operands, output
        self.exact = False
        self.several = not isinstance(call.meta["val"], Tensor)
        self._calls = 0
        self._leaves, self._tree = tree_flatten((call.args, dict(call.kwargs)))
        nodes = {i: leaf for i, leaf in enumerate(self._leaves) if isinstance(leaf, fx.Node)}
        self._scalars = {i: scalars[n.name] for i, n in nodes.items() if n.name in scalars}
        self._tensors = [i for i in nodes if i not in self._scalars]
        if len(self._tensors) != len(operands) or not operands:
            raise NotDerivedError("it has no tensor operands, or others than tensors and sizes")
        counts = [o for o in operands if not (_is_number(o.dtype) or o.dtype == torch.bool)]
        fixed = [int(s) for o in operands for s in o.shape if s.is_Integer and s > 1]
        self._indices = min(INDICES, *fixed, INDICES) if counts else 0
        self._device, self._op = torch.device("cpu"), as_tried(call.target, 1, True)

    # -------------------------------------------------------------------------------------- samples

    def samples(self) -> list[TrialSample]:
        """Returns the draws that the op accepts, at both sets of lengths.

        Raises:
            NotDerivedError: there are too few of them.
        """
        for device in self._devices():
            self._device = device
            for divisor in _divisors(self.operands):
                for exact in (False, True):
                    self.exact = exact
                    self._op = as_tried(self.call.target, divisor, not exact)
                    found = [self._at_any(seed, divisor) for seed in range(len(LENGTHS))]
                    if all(sum(s.tells for s in some) >= ENOUGH_DRAWS for some in found):
                        return [s for some in found for s in some]
        raise NotDerivedError("it does not run on small random operands")

    def _devices(self) -> list[torch.device]:
        """Returns the CPU, then the graph's device: an index out of range aborts a CUDA process."""
        value: Any = self.call.meta["val"]
        own = (value if isinstance(value, Tensor) else value[self.result]).device
        cpu = torch.device("cpu")
        return [cpu] if own.type in ("cpu", "meta") or self._indices else [cpu, own]

    def _at_any(self, seed: int, divisor: int) -> list[TrialSample]:
        """Returns the draws at one set of lengths, multiplied if sizes are quotients."""
        for multiple in (1, 2, 4, 12):
            if found := self._at(seed, divisor, multiple):
                return found
        return []

    def _at(self, seed: int, divisor: int, multiple: int) -> list[TrialSample]:
        shapes_known = [s for o in (*self.operands, self.output) for s in o.shape]
        symbols = {x for e in (*shapes_known, *self._scalars.values()) for x in e.free_symbols}
        ordered, lengths = sorted(symbols, key=str), LENGTHS[seed]
        sizes = {s: multiple * lengths[i % len(lengths)] for i, s in enumerate(ordered)}
        shapes = [_numbers(o.shape, sizes, divisor) for o in self.operands]
        known = [shape for shape in shapes if shape is not None]
        if len(known) < len(shapes):
            return []
        dtypes = [o.dtype if self.exact else _wider(o.dtype) for o in self.operands]
        found = []
        for kind in range(len(KINDS)):
            drawn = draw(kind, known, dtypes, seed, self._indices)
            sample = self._sample([x.to(self._device) for x in drawn], sizes)
            if sample is not None:
                found.append(sample)
            elif kind == 0 and any(map(_is_number, dtypes)):
                return []
        return found

    def _sample(self, operands: list[Tensor], sizes: SymbolSizes) -> TrialSample | None:
        before, state = [x.clone() for x in operands], torch.get_rng_state()
        whole = self.run(operands, sizes)
        if not torch.equal(torch.get_rng_state(), state):
            torch.set_rng_state(state)
            raise NotDerivedError("it draws random numbers")
        if whole is None or whole.ndim != len(self.output.shape):
            return None
        if not all(map(identical, before, operands)):
            raise NotDerivedError("it writes to its input")
        again = self.run(operands, sizes)
        if again is None or not identical(whole, again):
            raise NotDerivedError("it gives different results for the same operands")
        known = whole[~whole.isnan()] if _is_number(whole.dtype) else whole.flatten()
        differ = known.numel() > 1 and bool((known != known.flatten()[0]).any())
        one = whole.numel() == 1 and known.numel() == 1 and bool((known != 0).any())
        return TrialSample(sizes, operands, whole.clone(), differ or one)

    # ----------------------------------------------------------------------------------------- runs

    def run(self, operands: Sequence[Tensor], sizes: SymbolSizes) -> Tensor | None:
        """Returns the result; None if the op does not accept these operands."""
        try:
            with torch.no_grad():
                value = self.results(operands, sizes)[self.result]
        except NotDerivedError:
            raise
        except Exception:  # any error of a user's op: it does not accept these operands
            return None
        return value if isinstance(value, Tensor) else None

    def results(self, operands: Sequence[Tensor], sizes: SymbolSizes) -> Sequence[Any]:
        """Returns all results of the op, or raises the op's own error."""
        self._calls += 1
        if self._calls > MOST_CALLS:
            raise NotDerivedError(f"it takes more than {MOST_CALLS} calls to tell")
        leaves = list(self._leaves)
        for i, size in self._scalars.items():
            leaves[i] = int(size.subs(sizes))
        for i, x in zip(self._tensors, operands, strict=True):
            leaves[i] = x
        args, kwargs = tree_unflatten(leaves, self._tree)
        value = self._op(*args, **kwargs)
        return [value] if isinstance(value, Tensor) else value

    def piece(self, sample: TrialSample, dims: Dims, start: int, stop: int) -> Tensor | None:
        """Returns the result of the operands' pieces along some of their dims."""
        cut = list(sample.operands)
        for i, d in dims:
            cut[i] = cut[i].narrow(d, start, stop - start).contiguous()
        return self.run(cut, sample.sizes)

    def cuts(self, size: int) -> Iterator[list[int]]:
        """Yields borders of uneven pieces: halves, a short and a long one, three."""
        least = max(1, self._indices)
        third = (size + 2) // 3
        all_borders = [[0, (size + 1) // 2, size], [0, least, size], [0, size - least, size]]
        all_borders.append([0, third, third + (size + 1) // 3, size])
        for borders in dict.fromkeys(map(tuple, all_borders)):
            lengths = [b - a for a, b in pairwise(borders)]
            if min(lengths) >= least:
                yield list(borders)


def _refuse(call: fx.Node) -> None:
    target = call.target
    if not isinstance(target, torch._ops.OpOverload):
        raise NotDerivedError("it is no registered op")
    if target.namespace in NOT_RUN:
        raise NotDerivedError(f"ops of {target.namespace} are not run on their own")
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise NotDerivedError("it draws random numbers")
    if target._schema.is_mutable:
        raise NotDerivedError("it writes to its input")


def _divisors(operands: Sequence[TensorInfo]) -> list[int]:
    """Returns divisors of large constant sizes, 1 included if the sizes are small enough."""
    sizes = [int(s) for o in operands for s in o.shape if s.is_Integer and s > 16]
    common = gcd(*sizes) if sizes else 1
    shrunk = [common // keep for keep in (4, 3) if common % keep == 0 and common > keep]
    largest = max(prod(int(s) if s.is_Integer else 8 for s in o.shape) for o in operands)
    return [1, *shrunk] if largest <= MOST_ELEMENTS else shrunk


def _is_number(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _numbers(
    shape: Sequence[sympy.Expr], sizes: SymbolSizes, divisor: int
) -> tuple[int, ...] | None:
    """Returns a shape in numbers, large constants divided; None if a size is no integer."""
    found = []
    for size in shape:
        value = size.subs(sizes)
        if size.is_Integer and size > 16 and value % divisor == 0:
            value = value / divisor
        if not value.is_Integer or value < 1:
            return None
        found.append(int(value))
    return tuple(found)


def _wider(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def identical(a: Tensor, b: Tensor) -> bool:
    """Returns whether two tensors are the same, NaN included."""
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def close(got: Tensor, want: Tensor, scale: Tensor, exact: bool) -> bool:
    """Returns whether two results agree within rounding.

    Args:
        got: result on pieces.
        want: result on the whole, or its piece.
        scale: magnitude for rounding errors, beside each element of `want`: of the same shape, the
            sum of absolute addends; else the whole result, of which a hundredth counts.
        exact: whether no rounding is allowed.
    """
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    return identical(got, want) or not bool(apart(got, want, scale, exact).any())


def apart(got: Tensor, want: Tensor, scale: Tensor, exact: bool) -> Tensor:
    """Returns which elements of two results of one shape differ by more than rounding.

    The arguments are those of `close`.
    """
    differ = (got != want) & ~((got != got) & (want != want))
    if exact or not _is_number(want.dtype) or not scale.numel():
        return differ
    size = scale.abs().nan_to_num(0.0, 0.0, 0.0)
    near = size if scale.shape == want.shape else size.max() / 100
    return differ & ~((got - want).abs() <= TOLERANCE * (want.abs() + near))
