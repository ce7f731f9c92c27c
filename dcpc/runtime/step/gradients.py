"""Gradients outside of backward: summed by hand, clipped, and put beside those of earlier steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from dcpc.errors import DataError
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.reduction import Reduction, summary, trained
from dcpc.runtime.parameters.store import ParameterStore
from dcpc.runtime.step.execution import StepState


def reduce_gradients(
    parameters: Iterable[torch.nn.Parameter], groups: Groups, state: StepState | None = None
) -> None:
    """Sums every parameter's gradient over all ranks, in place; alone: nothing.

    A parameter without a gradient here counts as zeros, one without a gradient anywhere stays
    without. Collective over all ranks, also those that ran nothing. To be called once per optimizer
    step.

    Args:
        parameters: parameters of the whole model, in the same order on every rank; tied ones count
            once.
        groups: the process groups.
        state: state of the model, as for `train_step`.

    Raises:
        GroupError: the ranks have different parameters, or one did not arrive.
    """
    params, state = trained(parameters), state or StepState()
    agree(groups, groups.world, "reduce_gradients of", summary(params) + state.text, state.problem)
    state.check()
    Reduction(params, groups).finish()


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scales gradients that are together longer than `max_norm` down to it, in place.

    After the sum over ranks: every rank has the whole gradient and finds the same norm.

    Args:
        parameters: parameters of the whole model.
        max_norm: largest 2-norm, above 0.

    Returns:
        The norm of all gradients together, before.

    Raises:
        DataError: `max_norm` is no positive number.
    """
    check_norm(max_norm)
    norm = torch.nn.utils.clip_grad_norm_(list(parameters), max_norm)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def check_norm(max_norm: object) -> None:
    """Refuses a largest norm that is no positive number.

    Raises:
        DataError: it is no positive number.
    """
    if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
        raise DataError(
            f"clipping of gradients: got a largest norm of {max_norm!r}; expected a positive "
            "number; pass e.g. 1.0"
        )


@contextmanager
def beside_earlier(store: ParameterStore) -> Iterator[list[float]]:
    """Has gradients made as if there were none, and adds them to those that are there.

    These were reduced by an earlier step: they are not summed again. Where making them fails there
    is what was there before: a part of a step's gradient is no gradient. So it is where the block
    puts something into the list that it gets.
    """
    params = trained(store.kept)
    earlier = [p.grad for p in params]
    for p in params:
        p.grad = None
    put_back, made = list[float](), False
    try:
        yield put_back
        made = not put_back
    finally:
        if not made:
            store.failed()
        for p, grad in zip(params, earlier, strict=True):
            if not made:
                p.grad = grad
            elif grad is not None:
                p.grad = grad if p.grad is None else grad.add_(p.grad)
