"""The state of an optimizer beyond the device: made, and kept, in the host's memory or a file.

Where its parameters are away too, or on a CPU, a step reads and writes it there. A GPU's parameters
are stepped in runs: the states of one run come to the device, and go back before those of the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dcpc.runtime.parameters.reduction import in_runs
from dcpc.runtime.parameters.store import AwayMemory, ParameterStore

STATE_RUN_BYTES = 1_000_000  # of parameters whose states are made, or come, at once


class AwayState:
    """The state that optimizers keep of a store's parameters, in memory beyond the device's.

    Args:
        store: store of the parameters.
        memory: memory in which states lie.
    """

    def __init__(self, store: ParameterStore, memory: AwayMemory) -> None:
        self._store, self._memory = store, memory
        self._aside: list[tuple[nn.Parameter, Any]] = []
        ref = weakref.ref(self)

        def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (found := ref()) is not None:
                found._before(optimizer, len(args) < 2 and not kwargs)

        def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (found := ref()) is not None:
                found._after(optimizer)

        for handle in (
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ):
            weakref.finalize(self, handle.remove)

    def _own(self, optimizer: Optimizer) -> list[nn.Parameter]:
        kept = {id(p) for p in self._store.kept}
        return [p for group in optimizer.param_groups for p in group["params"] if id(p) in kept]

    def _before(self, optimizer: Optimizer, alone: bool) -> None:
        """Steps the parameters whose states are made, or come, in runs; sets their gradients aside.

        Of optimizers of torch alone, which go parameter by parameter, and without a closure: else
        all states are made, or come, before the step, and go after it.
        """
        own = self._own(optimizer)
        self._move(optimizer, own)  # one that was loaded
        wanted = [p for p in own if p.grad is not None and (p.is_cuda or p not in optimizer.state)]
        step = getattr(type(optimizer).step, "__wrapped__", None)  # without the hooks of a step
        ours = type(optimizer).__module__.startswith("torch.optim.")
        if step is None or not (ours and alone) or isinstance(optimizer, LBFGS):
            self._fetch(optimizer, wanted)
            return
        every = [p for group in optimizer.param_groups for p in group["params"]] if wanted else []
        given = [(p, p.grad) for p in every]
        gradients = {id(p): p.grad for p in wanted}
        for p in every:
            p.grad = None
        for run in in_runs(wanted, STATE_RUN_BYTES):
            self._fetch(optimizer, run)
            for p in run:
                p.grad = gradients[id(p)]
            step(optimizer)
            for p in run:
                p.grad = None
            self._move(optimizer, run)
        for p, gradient in given:
            p.grad = None if id(p) in gradients else gradient
        self._aside = [(p, gradients[id(p)]) for p in wanted]

    def _after(self, optimizer: Optimizer) -> None:
        for p, gradient in self._aside:
            p.grad = gradient
        self._aside = []
        self._move(optimizer, self._own(optimizer))

    def _fetch(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Brings the states of parameters to where these are."""
        for p in params:
            for name, value in optimizer.state.get(p, {}).items():
                if isinstance(value, Tensor) and value.dim() and value.device != p.device:
                    optimizer.state[p][name] = value.to(p.device)

    def _move(self, optimizer: Optimizer, params: Sequence[nn.Parameter]) -> None:
        """Moves the states of parameters to the memory beyond the device's, but single numbers."""
        for p in params:
            state = optimizer.state.get(p, {})
            for name, value in state.items():
                if (
                    isinstance(value, Tensor)
                    and value.dim()
                    and not self._memory.has(_local(value))
                ):
                    state[name] = self._moved(value)

    def _moved(self, value: Any) -> Tensor:
        local = _local(value)
        lies = self._memory.tensor(local.shape, local.dtype).copy_(local)
        if local is value:
            return lies
        found: Tensor = value.from_local(
            lies, value.device_mesh, value.placements, run_check=False, shape=value.shape,
            stride=value.stride(),
        )  # fmt: skip
        return found


def _local(value: Any) -> Tensor:
    found: Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found
