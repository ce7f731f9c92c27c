"""Derives the sharding rule of an op that has none, by running it on small random pieces.

    which dims go together    change one slice of an operand: does the output change there alone?
    a free name               pieces of these operands give pieces of the output, end to end
    a summed name             pieces of these operands give outputs that add up
    linear                    f(x + y) = f(x) + f(y)

A rule is derived, not proved: it holds for every draw of `operand_draws.py` at two sets of sizes
and some uneven cuts, with the graph's own non-tensor arguments, bit for bit or to 1e-12 in float64.
What it cannot see is an op that behaves otherwise at sizes or values that were not drawn.

Everything here follows from the graph alone (fixed seeds, a budget of calls and no clock), so that
all ranks derive the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import sympy
import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from dcpc.ir import TensorInfo, call_of
from dcpc.ops.own_functions import is_function
from dcpc.passes.sharding.gradient_trial import adds_up, splits_backward
from dcpc.passes.sharding.op_trial import (
    ENOUGH_DRAWS,
    Dims,
    NotDerivedError,
    Trial,
    TrialSample,
    apart,
    close,
)
from dcpc.passes.sharding.operand_draws import draw, redraw
from dcpc.passes.sharding.rule_types import Linear

PERTURBED_DRAWS = 6
MOST_CHOICES = 64  # ways of joining dims of equal size that are tried

Local = set[tuple[int, int, int]]  # (operand, dim, output dim)


@dataclass(frozen=True, slots=True)
class Derived:
    """A rule found by running an op.

    Attributes:
        rule: in the notation of `notation.py`.
        whole: names of which no rank may have a piece.
        sum: names whose pieces add up.
        linear: how partial sums pass through the op, see `Linear`.
        takes_empty: whether the op accepts empty pieces.
        adds_up: whether its backward is that of a sum of gradients, see `gradient_trial.py`.
    """

    rule: str
    whole: tuple[str, ...]
    sum: tuple[str, ...]
    linear: Linear
    takes_empty: bool
    adds_up: bool = True

    def line(self, op: str) -> str:
        """Returns the equivalent line of `sharding_rules.yaml`."""
        fields = [f'rule: "{self.rule}"']
        fields += [f"whole: {' '.join(self.whole)}"] * bool(self.whole)
        fields += [f"sum: {' '.join(self.sum)}"] * bool(self.sum)
        fields += [f"linear: {self.linear}"] * (self.linear != "none")
        return f"{op}: {{{', '.join(fields)}}}"


def derive(
    call: fx.Node,
    result: int,
    operands: Sequence[TensorInfo],
    output: TensorInfo,
    scalars: Mapping[str, sympy.Expr],
) -> Derived | str:
    """Returns the rule that an op's results on random pieces show, or why there is none."""
    try:
        trial = Trial(call, result, operands, output, scalars)
        return _Derivation(trial, trial.samples()).run()
    except NotDerivedError as reason:
        return str(reason)


class DerivedRules:
    """Derives rules, and caches them for repeated layers.

    Attributes:
        nodes: op -> line -> names of the nodes that use it.
    """

    def __init__(self, scalars: Mapping[str, sympy.Expr]) -> None:
        """Takes the expressions of the nodes whose value is a size."""
        self._scalars = scalars
        self._known: dict[tuple[object, ...], Derived | str] = {}
        self.nodes: dict[str, dict[str, list[str]]] = {}

    def find(
        self, node: fx.Node, op: str, operands: Sequence[TensorInfo], output: TensorInfo
    ) -> Derived | str:
        """Returns the rule of a node's call, or why there is none."""
        call = call_of(node)
        result = node.args[1] if call is not node else 0
        assert isinstance(result, int)
        shapes = [(o.shape, o.dtype) for o in (*operands, output)]
        key = (call.target, result, *shapes, str(self._arguments(call)))
        if key not in self._known:
            self._known[key] = derive(call, result, operands, output, self._scalars)
        found = self._known[key]
        if isinstance(found, Derived):
            self.nodes.setdefault(op, {}).setdefault(found.line(op), []).append(node.name)
        return found

    def _arguments(self, call: fx.Node) -> object:
        def plain(leaf: object) -> object:
            if isinstance(leaf, fx.Node):
                return self._scalars.get(leaf.name, "tensor")
            return leaf

        return tree_map(plain, (call.args, dict(call.kwargs)))


class _Derivation:
    def __init__(self, trial: Trial, samples: list[TrialSample]) -> None:
        self.trial, self.samples = trial, samples
        self.operands, self.output = trial.operands, trial.output
        self.owns_backward = is_function(trial.call.target)

    def run(self) -> Derived:
        def backward(dims: Dims, e: int | None) -> bool:
            return not self.owns_backward or splits_backward(self.trial, self.samples, dims, e)

        sums = not self.owns_backward or adds_up(self.trial, self.samples)
        if not sums and self.trial.several:
            raise NotDerivedError("its backward takes the gradients of its results together")
        free: dict[int, Dims] = {}
        taken: set[tuple[int, int]] = set()
        local = self._local()
        for e in range(len(self.output.shape)):
            for dims in self._choices(local, e, taken):
                joins = all(self._joins(sample, dims, e) for sample in self.samples)
                if joins and backward(dims, e):
                    free[e] = dims
                    taken |= set(dims)
                    break
        summed: list[Dims] = []
        for dims in self._contractions(taken):
            if not taken & set(dims) and self._adds_up(dims) and backward(dims, None):
                summed.append(dims)
                taken |= set(dims)
        linear: Linear = "none" if self.owns_backward else self._linear()
        if not free and not summed:
            of = "result, forward and backward," if self.owns_backward else "result"
            raise NotDerivedError(f"no dim of its {of} depends on pieces of its operands alone")
        return replace(self._written(free, summed, linear), adds_up=sums)

    # ----------------------------------------------------------------------------- which dims agree

    def _local(self) -> Local:
        """Returns (operand, dim, output dim) where a changed slice changes only that slice."""
        found = {
            (i, d, e)
            for i, operand in enumerate(self.operands)
            for d, size in enumerate(operand.shape)
            for e, other in enumerate(self.output.shape)
            if size == other != 1
        }
        moved: set[tuple[int, int]] = set()
        telling = [s for s in self.samples if s.tells]
        some = telling[:: max(1, len(telling) // PERTURBED_DRAWS)]
        for sample, (i, d) in product(some, sorted({(i, d) for i, d, _ in found})):
            size = sample.operands[i].shape[d]
            for index in sorted({0, size - 1, size // 2, size // 3}):
                changed = self._changed(sample, i, d, index)
                if changed is None or not changed.any():
                    continue
                moved.add((i, d))
                for e in [e for a, b, e in found if (a, b) == (i, d)]:
                    elsewhere = changed.movedim(e, 0).clone()
                    elsewhere[index] = False
                    if elsewhere.any():
                        found.discard((i, d, e))
        return {(i, d, e) for i, d, e in found if (i, d) in moved}

    def _changed(self, sample: TrialSample, i: int, d: int, index: int) -> Tensor | None:
        operands = list(sample.operands)
        operands[i] = redraw(operands[i].cpu(), d, index, i).to(operands[i].device)
        new = self.trial.run(operands, sample.sizes)
        if new is None or new.shape != sample.whole.shape:
            return None
        return apart(new, sample.whole, sample.whole.flatten(), self.trial.exact)

    def _choices(self, local: Local, e: int, taken: set[tuple[int, int]]) -> Iterator[Dims]:
        """Yields ways to take one dim of each operand that may correspond to an output dim."""
        options = []
        for i in range(len(self.operands)):
            dims = sorted((a, d) for a, d, x in local if (a, x) == (i, e) and (a, d) not in taken)
            if dims:
                options.append(dims)
        if options:
            yield from list(product(*options))[:MOST_CHOICES]

    def _contractions(self, taken: set[tuple[int, int]]) -> Iterator[Dims]:
        """Yields dims of equal size, at most one an operand, that may be summed; widest first."""
        if not _adds(self.output):
            return
        for size in dict.fromkeys(s for o in self.operands for s in o.shape if s != 1):
            options: list[list[tuple[int, int] | None]] = []
            for i, operand in enumerate(self.operands):
                dims = [(i, d) for d, s in enumerate(operand.shape) if s == size]
                options.append([*(x for x in dims if x not in taken), None])
            chosen = [tuple(x for x in c if x is not None) for c in product(*options)]
            some = [c for c in chosen[:MOST_CHOICES] if c]
            yield from sorted(some, key=lambda c: (-len(c), c))

    # ------------------------------------------------------------------------------- what must hold

    def _joins(self, sample: TrialSample, dims: Dims, e: int) -> bool:
        """Whether pieces of the operands give pieces of the output, at every cut."""
        cuts = list(self.trial.cuts(sample.whole.shape[e]))
        for start, stop in (ends for borders in cuts for ends in pairwise(borders)):
            want = sample.whole.narrow(e, start, stop - start)
            got = self.trial.piece(sample, dims, start, stop)
            if got is None or not close(got, want, sample.whole, self.trial.exact):
                return False
        return bool(cuts)

    def _adds_up(self, dims: Dims) -> bool:
        """Whether outputs of pieces add up, in draws where more than one piece is not zero."""
        counted = 0
        for sample in self.samples:
            for borders in self.trial.cuts(sample.operands[dims[0][0]].shape[dims[0][1]]):
                parts = []
                for start, stop in pairwise(borders):
                    part = self.trial.piece(sample, dims, start, stop)
                    if part is None or part.shape != sample.whole.shape:
                        return False
                    parts.append(part)
                scale = torch.stack([part.abs() for part in parts]).sum(0)
                total = sum(parts[1:], parts[0])
                if not close(total, sample.whole, scale, self.trial.exact):
                    return False
                counted += sum(bool((part != 0).any()) for part in parts) > 1
        return counted >= ENOUGH_DRAWS

    def _linear(self) -> Linear:
        """Returns how partial sums of operands pass through the op."""
        adds = [_adds(o) for o in self.operands]
        if not adds[0] or not _adds(self.output):
            return "none"
        if len(adds) > 1 and all(adds):
            if self._passes(range(len(adds))):
                return "all"
            if all(self._passes([i]) for i in range(len(adds))):
                return "one"
        return "first" if self._passes([0]) else "none"

    def _passes(self, positions: Sequence[int]) -> bool:
        """Whether f(x + y) = f(x) + f(y) for sums of these operands."""
        for seed, sample in enumerate(self.samples):
            if not all(bool(x.isfinite().all()) for x in sample.operands):
                continue
            rest, other = list(sample.operands), list(sample.operands)
            for i in positions:
                x = sample.operands[i]
                other[i] = draw(0, [tuple(x.shape)], [x.dtype], 11 + i + seed)[0].to(x.device)
                rest[i] = x - other[i]
            one, two = (self.trial.run(operands, sample.sizes) for operands in (rest, other))
            if one is None or two is None or one.shape != sample.whole.shape != two.shape:
                return False
            scale = torch.zeros_like(one.abs()) + (one.abs() + two.abs()).max()
            if not close(one + two, sample.whole, scale, self.trial.exact):
                return False
        return True

    # ------------------------------------------------------------------------------------- notation

    def _written(self, free: Mapping[int, Dims], summed: Sequence[Dims], linear: Linear) -> Derived:
        names = iter([*"abcdefghijklmnopqrstuvwxyz", *(f"x{i}" for i in range(99))])
        known: dict[tuple[int, int], str] = {}
        whole: list[str] = []
        output = []
        for e in range(len(self.output.shape)):
            output.append(next(names))
            known |= dict.fromkeys(free.get(e, ()), output[-1])
            whole += [output[-1]] * (e not in free)
        added = [next(names) for _ in summed]
        for dims, name in zip(summed, added, strict=True):
            known |= dict.fromkeys(dims, name)
        operands = []
        for i, operand in enumerate(self.operands):
            skip = len(output) - len(operand.shape)
            for d, size in enumerate(operand.shape):
                if (i, d) not in known:
                    e = skip + d  # aligned at the right, as one would write it
                    alike = e >= 0 and e not in free and self.output.shape[e] == size
                    known[i, d] = output[e] if alike else next(names)
                    whole += [known[i, d]] * (not alike)
            operands.append(" ".join(known[i, d] for d in range(len(operand.shape))))
        return Derived(
            rule=f"{', '.join(operands)} -> {' '.join(output)}",
            whole=tuple(whole),
            sum=tuple(added),
            linear=linear,
            takes_empty=all(map(self._takes_empty, (*free.values(), *summed))),
        )

    def _takes_empty(self, dims: Dims) -> bool:
        return self.trial.piece(self.samples[0], dims, 0, 0) is not None


def _adds(tensor: TensorInfo) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex
