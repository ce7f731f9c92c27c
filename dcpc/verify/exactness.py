"""Loss and gradients of a model, and how far others are from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dcpc.buckets import Buckets, Sizes
from dcpc.errors import BucketError
from dcpc.trace.loss import Loss, find_outputs, one_number, returned
from dcpc.verify.replay import RightKernels

Gradients = dict[str, Tensor | None]
Example = Callable[[Sizes], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest relative differences of a group's loss and gradients from the plain model's.

    Attributes:
        sizes: the shape of the call.
        loss: of the loss.
        gradient: of all gradients, each relative to its own largest element.
        parameter: the parameter whose gradient differs most.
        recompute: "none" or "all" of the segments.
    """

    sizes: Sizes
    loss: float
    gradient: float
    parameter: str
    recompute: str = "none"

    @property
    def worst(self) -> float:
        """The larger of the two; NaN where one is."""
        return self.loss + self.gradient if self._is_nan else max(self.loss, self.gradient)

    @property
    def _is_nan(self) -> bool:
        return self.loss != self.loss or self.gradient != self.gradient


def plain(
    model: nn.Module, inputs: Mapping[str, Tensor], loss: Loss | None = None
) -> tuple[Tensor, Gradients]:
    """Returns loss and gradients of the model itself, on one device.

    Kernels of backward that misread a layout get one that they read right (`RightKernels`).

    Args:
        model: the user's.
        inputs: by name.
        loss: of what forward returned; None: forward returned it.
    """
    model.zero_grad()
    value = one_number(find_outputs(returned(model, inputs, loss)))
    with RightKernels():
        value.backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    # An embedding's may be sparse; in dcpc's graphs none is.
    found = {n: None if g is None else g.clone().to_dense() for n, g in grads.items()}
    model.zero_grad()
    return value.detach(), found


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
        expected: the same of the plain model.
        floor: that share.
        none_is_zero: whether no gradient is as good as zeros; else it has an infinite error.
    """
    scale = max((float(g.abs().max()) for g in expected.values() if g is not None), default=0.0)
    errors = {}
    for name, got in found.items():
        want = expected[name]
        if got is None or want is None:
            given = want if got is None else got
            size = 0.0 if given is None else float(given.abs().max()) if none_is_zero else math.inf
            errors[name] = size / max(floor * scale, 1e-12)
            continue
        own = max(float(want.abs().max()), floor * scale, 1e-12)
        errors[name] = float((got - want).abs().max()) / own
    return errors


def loss_error(got: Tensor, expected: Tensor) -> float:
    """Returns the relative difference of two losses; infinite where shape or dtype differ."""
    if got.shape != () or got.dtype != expected.dtype:
        return float("inf")
    return abs(float(got.detach() - expected)) / max(abs(float(expected)), 1e-12)


def nan_as_infinite(error: float) -> float:
    """Returns an error that compares: NaN is larger than any other."""
    return error if error == error else float("inf")


def float64_specs(buckets: Buckets) -> Buckets:
    """Returns the same buckets with every floating input in float64."""
    inputs = {}
    for name, spec in buckets.inputs.items():
        text = str(spec)
        if spec.dtype.is_floating_point:
            text = "float64" + text[text.index("[") :]
        inputs[name] = text
    return Buckets(inputs, [b.sizes for b in buckets.buckets])


def example_inputs(
    buckets: Buckets, sizes: Sizes, example: Example | None = None
) -> dict[str, Tensor]:
    """Returns inputs of one shape, the same on every rank.

    Args:
        buckets: the inputs' specs.
        sizes: length of every dim, batch included.
        example: returns some of the inputs for a shape; the others are drawn: normal numbers,
            integers 0 and 1, ones where a name has "mask" in it.

    Raises:
        BucketError: `example` returns an input that there is not, or one of another shape.
    """
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    for name, spec in buckets.inputs.items():
        shape = spec.shape(sizes)
        if "mask" in name:
            found[name] = torch.ones(shape, dtype=spec.dtype)
        elif spec.dtype.is_floating_point or spec.dtype.is_complex:
            found[name] = torch.randn(shape, generator=generator, dtype=spec.dtype)
        else:
            found[name] = torch.randint(0, 2, shape, generator=generator).to(spec.dtype)
    if example is not None:
        torch.manual_seed(0)
        for name, value in example(sizes).items():
            found[name] = _checked(name, value, buckets, sizes)
    return found


def _checked(name: str, value: Tensor, buckets: Buckets, sizes: Sizes) -> Tensor:
    spec = buckets.inputs.get(name)
    if spec is None or tuple(value.shape) != spec.shape(sizes):
        got = f"'{name}' of shape {tuple(value.shape)}"
        want = f"one of {', '.join(buckets.inputs)}" if spec is None else str(spec.shape(sizes))
        raise BucketError(
            f"the example at {dict(sizes)} returned {got}; expected {want}; correct the function"
        )
    return value.to(spec.dtype)
