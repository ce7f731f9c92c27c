"""Variants of small models on a device against the plain model in float64.

The plain model in the variant's own dtype is compared as well: dcpc may be as far from float64 as
`TIMES` that, or as `FLOORS` says, whichever is more. Of each parameter's gradient the norm of the
error counts, over the gradient's norm or a thousandth of the largest one: some gradients, a key's
bias for one, are 0 but for rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import dcpc
from benchmarks.gpu_checks.rows import NEEDS_A_CARD, Row, Setting, error, not_run, same_kind, tried
from benchmarks.gpu_checks.subjects import Subject, compared
from dcpc.buckets import Sizes
from examples.forced import ForcedVariant

FLOORS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 3e-2}
TIMES = 3.0
SMALL = 1e-3  # of the largest gradient's norm
AMPLE = 1e15  # bytes: what every run of these plans fits


def exact(name: str, setting: Setting) -> Iterator[Row]:
    """Yields a row for each dtype, backend, shape and share of recompute of a model."""
    for dtype in setting.dtypes:
        for backend in ("eager", "inductor"):
            check = f"{name}, {str(dtype).removeprefix('torch.')}, {backend}"
            first = name == "gpt" and dtype == setting.dtypes[-1]
            if backend == "inductor" and setting.small and not first:
                yield not_run(check, f"{NEEDS_A_CARD}: it takes minutes to compile on a CPU")
                continue
            yield from tried(check, partial(_variants, name, setting, dtype, backend, check))


def _variants(
    name: str, setting: Setting, dtype: torch.dtype, backend: str, check: str
) -> Iterator[Row]:
    eager = backend == "eager"
    subject = compared(name, dtype, layers=1 if setting.small and not eager else 2)
    with setting.device:
        model = subject.make()
    compiled = dcpc.compile(
        model, subject.buckets, backend=backend, recompute="none", memory=AMPLE,
        verify="auto" if eager and setting.numbers else "off",
        device="auto" if setting.device.type == "cuda" else "cpu",
    )  # fmt: skip
    few = 1 if setting.small or not eager else len(subject.shapes)
    for sizes in subject.shapes[-few:]:
        inputs = inputs_on(setting.device, subject, sizes)
        priced = compiled.runnable.priced
        placement = priced.placement(sizes, 1)
        steps = priced.at(placement).steps
        wanted, plain = references(model, inputs)
        for again in sorted({0, steps // 2, steps} if eager else {steps // 2}):
            forced = ForcedVariant(compiled, placement, again)
            loss, gradients = ran(forced, model, inputs)
            at = f"{check}, {'x'.join(map(str, sizes.values()))}, {again} of {steps} made again"
            yield judged(setting, at, dtype, (loss, gradients), wanted, plain)


Result = tuple[Tensor, dict[str, Tensor]]


def inputs_on(device: torch.device, subject: Subject, sizes: Sizes) -> dict[str, Tensor]:
    """Returns a model's inputs of a shape, on the device."""
    torch.manual_seed(1)
    return {name: x.to(device) for name, x in subject.example(sizes).items()}


def ran(call: Any, model: nn.Module, inputs: Mapping[str, Tensor]) -> Result:
    """Returns loss and gradients of a call that leaves gradients in the model's parameters."""
    model.zero_grad(set_to_none=True)
    found = call(**inputs)
    loss: Tensor = found if isinstance(found, Tensor) else found.loss
    loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


def references(model: nn.Module, inputs: Mapping[str, Tensor]) -> tuple[Result, Result]:
    """Returns the plain model's results in float64, and in its own dtype."""
    exact_model = copy.deepcopy(model).double()
    doubled = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    return ran(exact_model, exact_model, doubled), ran(model, model, inputs)


def judged(
    setting: Setting, check: str, dtype: torch.dtype, got: Result, wanted: Result, plain: Result
) -> Row:
    """Returns the row of a run's loss and gradients."""
    assert got[1].keys() == plain[1].keys(), (
        f"gradients of {sorted(got[1].keys() ^ plain[1].keys())} are not of both"
    )
    for name, x in got[1].items():
        same_kind(x, plain[1][name], name)
    ours, theirs = distances(got, wanted), distances(plain, wanted)
    limits = [max(FLOORS[dtype], TIMES * x) for x in theirs]
    return setting.judged(
        check, all(a <= b for a, b in zip(ours, limits, strict=True)),
        error_loss=ours[0], error_gradient=ours[1],
        plain_error_loss=theirs[0], plain_error_gradient=theirs[1], limit_gradient=limits[1],
    )  # fmt: skip


def distances(got: Result, wanted: Result) -> Sequence[float]:
    """Returns the relative error of the loss, and the worst one of a parameter's gradient."""
    floor = SMALL * max(float(g.norm()) for g in wanted[1].values())
    gradients = (error(x, wanted[1][name], floor) for name, x in got[1].items())
    return error(got[0], wanted[0]), max(gradients)
