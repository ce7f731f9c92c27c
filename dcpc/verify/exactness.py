"""Loss and gradients of a run, how far two runs are apart, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dcpc.buckets import Sizes

Gradients = dict[str, Tensor | None]
Gaps = dict[str, float]

# How far loss and gradients may be from the plain model's, relative to their largest element.
# EXACT: both in float64 with the same constants; sums in another order differ by far less.
# LIMIT: both in float64, one of them from a trace of a lower dtype: what torch rounds while it
# takes a float32 op apart, a constant such as a norm's epsilon, is a float32 number.
# ROUNDINGS: in a lower dtype, roundings of it that may add up.
EXACT, LIMIT, ROUNDINGS = 1e-10, 1e-7, 64
# Beside float64, in a lower dtype: times what the plain model itself loses in it. Two ways to round
# the same numbers differ by at most twice that, on average; a wrong kernel by far more.
OWN_TIMES = 4.0
# Elsewhere, what differs by more than the limits above: times what the plain model moves by if each
# of its ops rounds once more (`rounding_of`). Softmaxes that are full were off by up to 7 of these.
MOVES = 16.0
# A gradient smaller than this share of the largest one is compared with that share of it: what is
# left of sums that cancel is rounding.
FINELY, ROUGHLY = 1e-3, 0.1


@dataclass(frozen=True, slots=True)
class LossAndGradients:
    """Loss and gradients of one run.

    Attributes:
        loss: the loss; where forward returns other tensors, `one_number` of them.
        gradients: name of a trainable parameter, or `input_name` of an input, -> its gradient, None
            where it has none.
        draws: random ops that ran, where they were counted.
        misread: ops whose kernel misread its operands in this run; the gradients here are right.
    """

    loss: Tensor
    gradients: Gradients
    draws: int = 0
    misread: frozenset[str] = frozenset()

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are numbers."""
        values = [self.loss, *(g for g in self.gradients.values() if g is not None)]
        return all(bool(v.isfinite().all()) for v in values)


@dataclass(frozen=True, slots=True)
class Difference:
    """Difference of an outcome from the plain model's.

    Attributes:
        loss: relative difference of the loss; infinite where it is no number.
        gradient: relative difference of the gradient that is worst beside its limit.
        parameter: name of that gradient's parameter.
        where: "loss" or that name: the worse of the two beside their limits.
        got: loss, or the largest difference of that gradient.
        expected: loss of the plain model, or the largest element of its gradient.
        sizes: length of every dim of the call.
        recompute: "none" or "all" of the segments.
    """

    loss: float
    gradient: float
    parameter: str
    where: str
    got: float = 0.0
    expected: float = 0.0
    sizes: Sizes = field(default_factory=dict)
    recompute: str = "none"

    @property
    def worst(self) -> float:
        """Relative difference of the one that is worse."""
        return self.loss if self.where == "loss" else self.gradient

    @property
    def gap(self) -> str:
        """Got and expected, as text."""
        if self.where == "loss":
            return f"loss: got {self.got:.6g}, expected {self.expected:.6g}"
        return (
            f"gradient of {self.where}: largest difference {self.got:.6g}, "
            f"largest element {self.expected:.6g}"
        )


def gap(got: Tensor | None, want: Tensor | None) -> float:
    """Returns the largest difference of two tensors; none is as good as zeros."""
    if got is None or want is None:
        given = want if got is None else got
        return 0.0 if given is None else float(given.abs().max())
    return float((got - want).abs().max())


def gaps_of(found: LossAndGradients, expected: LossAndGradients) -> Gaps:
    """Returns the largest difference of the loss and of each gradient; none is as good as zeros."""
    gaps = {n: gap(g, expected.gradients[n]) for n, g in found.gradients.items()}
    return {**gaps, "loss": gap(found.loss.detach(), expected.loss)}


def gradient_errors(model: nn.Module, expected: Gradients) -> dict[str, float]:
    """Returns `relative_errors` of the gradients that a model's parameters hold."""
    return relative_errors({n: p.grad for n, p in model.named_parameters()}, expected)


def relative_errors(
    found: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    floor: float = 1e-3,
    none_is_zero: bool = False,
) -> dict[str, float]:
    """Returns for each parameter the largest difference, relative to its own largest gradient.

    A gradient that is zero but for rounding (a bias before a softmax) is compared with a share of
    the largest of all.

    Args:
        found: name of a parameter -> its gradient.
        expected: name of a parameter -> its gradient in the plain model.
        floor: lower bound of a gradient's scale, as a share of the largest gradient.
        none_is_zero: whether no gradient is as good as zeros; else it has an infinite error.
    """
    scale = max((float(g.abs().max()) for g in expected.values() if g is not None), default=0.0)
    errors = {}
    for name, got in found.items():
        want = expected.get(name)
        size = 0.0 if want is None else float(want.abs().max())
        one_is_none = (got is None) != (want is None)
        off = math.inf if one_is_none and not none_is_zero else gap(got, want)
        if got is None or want is None:
            size = 0.0
        errors[name] = off / max(size, floor * scale, 1e-12)
    return errors


def loss_error(got: Tensor, expected: Tensor) -> float:
    """Returns the relative difference of two losses; infinite where shape or dtype differ."""
    if got.shape != () or got.dtype != expected.dtype:
        return float("inf")
    return abs(float(got.detach() - expected)) / max(abs(float(expected)), 1e-12)


def nan_as_infinite(error: float) -> float:
    """Returns an error that compares: NaN is larger than any other."""
    return error if error == error else float("inf")


def error_of(
    found: LossAndGradients,
    expected: LossAndGradients,
    floor: float = FINELY,
    limit: float = 1.0,
    none_is_zero: bool = True,
) -> tuple[Difference, list[str]]:
    """Returns the largest difference of a loss and gradients, and all that are above a limit.

    Args:
        found: outcome to judge.
        expected: outcome of the plain model.
        floor: lower bound of a gradient's scale, as a share of the largest gradient.
        limit: maximum of relative differences.
        none_is_zero: whether no gradient counts as 0, see `relative_errors`.
    """
    off = relative_errors(found.gradients, expected.gradients, floor, none_is_zero)
    off["loss"] = loss_error(found.loss, expected.loss)
    return _worst(found, expected, off, dict.fromkeys(off, limit))


def own_error(
    found: LossAndGradients, plain: LossAndGradients, exact: LossAndGradients, dtype: torch.dtype
) -> tuple[Difference, list[str]]:
    """Returns the error in a lower dtype that is worst beside its limit, and names above limits.

    The limit is `OWN_TIMES` the plain model's error in this dtype against float64, of the same
    gradient or, if that is more, of all of them (root mean square).
    """
    off, lost = (
        relative_errors(x.gradients, exact.gradients, FINELY, none_is_zero=True)
        for x in (found, plain)
    )
    least = float(torch.finfo(dtype).eps)
    usual = math.sqrt(sum(e * e for e in lost.values()) / max(len(lost), 1))
    off["loss"], lost["loss"] = (loss_error(x.loss.double(), exact.loss) for x in (found, plain))
    allowed = {n: OWN_TIMES * max(lost[n], least, 0.0 if n == "loss" else usual) for n in off}
    return _worst(found, exact, off, allowed)


def _worst(
    found: LossAndGradients,
    expected: LossAndGradients,
    off: Mapping[str, float],
    allowed: Mapping[str, float],
) -> tuple[Difference, list[str]]:
    """Returns the error that is worst beside its limit, and the names of all above their limits."""
    off = {n: nan_as_infinite(e) for n, e in off.items()}
    worse = {n: (e / allowed[n], e) for n, e in off.items()}
    parameter = max((n for n in off if n != "loss"), key=worse.__getitem__, default="")
    where = max(off, key=worse.__getitem__)
    over = [n for n, e in off.items() if e > allowed[n]]
    got, want = float(found.loss), float(expected.loss)
    if where != "loss":
        gradient = expected.gradients.get(where)
        got = gap(found.gradients[where], gradient)
        want = 0.0 if gradient is None else float(gradient.abs().max())
    return Difference(off["loss"], off.get(parameter, 0.0), parameter, where, got, want), over
