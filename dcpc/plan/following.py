"""Compares the model as it is now with the one that was compiled.

nothing is another object           the usual case, looked at in about 1 us a module
values, dtypes, flags are the same  other objects hold them (a loaded parameter): they are read
the trace would be the same         it is made again to know; what is used is the new objects
else                                DispatchError: what changed, and to compile it again
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dcpc.buckets import Buckets
from dcpc.errors import DispatchError, TraceError
from dcpc.ir import Program
from dcpc.plan.planning import Planned
from dcpc.plan.traced import Held
from dcpc.trace import trace
from dcpc.trace.capture.module_state import ModuleState
from dcpc.trace.loss import modules_in

# Known states of the model that have the same trace: a loop may alternate between so many.
_KNOWN = 8
# Number of new traces after which the user is warned that the model keeps changing.
_MANY = 3


class Followed:
    """Remembers the state that a model was traced from, and follows changes of the model."""

    def __init__(self, model: nn.Module, buckets: Buckets, planned: Planned) -> None:
        self._buckets = buckets
        self._planned = planned
        self._last = ModuleState(model)
        own = {id(m) for m in model.modules()}
        inner = [m for outer in modules_in(planned.loss) for m in outer.modules()]
        self._of_loss = [m for m in inner if id(m) not in own]
        self._loss_facts = self._facts_of_loss()
        self._known = [self._last]  # the first: as it was compiled
        self._traces = 0

    def holds(self, model: nn.Module) -> bool:
        """Whether each object of a model is the same as at the last look."""
        return self._last.holds(model) and self._facts_of_loss() == self._loss_facts

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """Parameters of the model at the last look, each once."""
        return self._last.parameters

    def _facts_of_loss(self) -> list[object]:
        """Returns mode, address and dtype of tensors in `loss=`, constants of the graphs."""
        found: list[object] = []
        for module in self._of_loss:
            held = (*module._parameters.values(), *module._buffers.values())
            found += [module.training, *((t.data_ptr(), t.dtype) for t in held if t is not None)]
        return found

    def problem(self, model: nn.Module, *, again: bool = False) -> DispatchError | None:
        """Returns the error if the traces no longer stand for the model, else None.

        Not raised here: ranks that act together have to tell each other first.

        Args:
            model: user's module.
            again: whether to look up the model's tensors even where nothing changed.
        """
        try:
            self._follow(model, again)
        except DispatchError as e:
            return e
        return None

    def materialized(self, model: nn.Module) -> None:
        """Adopts the tensors of a model that was on the meta device, its only allowed change.

        Raises:
            DispatchError: something else changed as well.
        """
        now = ModuleState(model)
        changes = self._last.changes(now, besides={*self._last.kinds, *now.kinds})
        if changes:
            raise self._refused(changes)
        self._last, self._known = now, [now]

    def _follow(self, model: nn.Module, again: bool) -> None:
        if self._facts_of_loss() != self._loss_facts:
            raise DispatchError(
                "loss= changed since the model was compiled: got a module in it with other tensors "
                "or in another mode; expected the tensors that were captured, whose values may "
                "change in place; compile the model again, or make the module a part of the model"
            )
        if self._last.holds(model):
            if again:
                self._bind(model)
            return
        now = ModuleState(model)
        same = next((n for n, k in enumerate(self._known) if k.entries == now.entries), None)
        if same is None:
            self._trace_again(model, now)
            self._known = [*self._known[:_KNOWN], now]
        else:
            self._known[same] = now
        self._bind(model)
        self._last = now

    def _bind(self, model: nn.Module) -> None:
        for runnable in self._planned.traces:
            held = runnable.traced.tensors
            assert isinstance(held, Held), "a compiled model's tensors are looked up in the model"
            held.bind(model)

    def _trace_again(self, model: nn.Module, now: ModuleState) -> None:
        start_s = time.perf_counter()
        compiled = self._known[0]
        changes, hooks = compiled.changes(now), compiled.added_hooks(now)
        if hooks:
            raise DispatchError(
                f"the model changed since it was compiled: got {_shown(hooks)}; expected the hooks "
                "it had: a compiled model runs no module, so they would never be called; remove "
                "them, or compile the model again: then what forward hooks make of tensors is "
                "captured"
            )
        # A graph does not say these of its inputs, and what was compiled counts on them.
        if any(now.kinds.get(n, k) != k for n, k in compiled.kinds.items()):
            raise self._refused(changes)
        try:
            groups = self._buckets.by_trace().values()
            for before, mine in zip(self._planned.captured(self._buckets), groups, strict=True):
                now_traced = trace(model, mine, self._planned.autocast, self._planned.loss)
                if not stands_for(before, now_traced):
                    raise self._refused(changes)
        except TraceError as e:
            raise self._refused(changes, f", and cannot be captured any more ({e})") from e
        self._traces += 1
        if self._traces == _MANY:
            warnings.warn(
                f"the model changed {_MANY} times since it was compiled ({_shown(changes)}); it "
                f"was captured again each time, in {time.perf_counter() - start_s:.2g} s, only to "
                "find that nothing depends on it; keep what changes often outside of the model",
                stacklevel=5,
            )

    @staticmethod
    def _refused(changes: Sequence[str], more: str = "") -> DispatchError:
        return DispatchError(
            f"the model changed since it was compiled: got {_shown(changes)}{more}; expected "
            "the model that was captured, which its graphs stand for; change it back, or compile "
            "it again (dcpc.compile; once for each state that you go back and forth between, but "
            "for train() and eval())"
        )


def state_tensors(model: nn.Module, planned: Planned) -> dict[str, Tensor]:
    """Returns name -> tensor of all parameters, buffers and constants of a model, each once.

    Tensors on the meta device have no values, and are left out.
    """
    constants = [
        (f"constant {name} of trace {number}", t)
        for number, v in enumerate(planned.traces)
        for name, t in v.traced.program.constants.items()
    ]
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *constants):
        if not tensor.is_meta:
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def stands_for(before: Program, now: Program) -> bool:
    """Whether a program can run in place of another: same graph, constants and trained parameters.

    The tensors have the same dtypes and shapes. A parameter frozen since the trace merely has a
    gradient that nobody reads.
    """

    def trained(program: Program) -> set[str]:
        return {n for n in program.parameters if program.info[n].requires_grad}

    return (
        before.graph_hash == now.graph_hash
        and before.parameters == now.parameters
        and before.buffers == now.buffers
        and before.constants.keys() == now.constants.keys()
        and all(_same(t, now.constants[n]) for n, t in before.constants.items())
        and trained(now) <= trained(before)
    )


def _same(before: Tensor, now: Tensor) -> bool:
    if before is now or before.data_ptr() == now.data_ptr():
        return True
    return before.dtype == now.dtype and torch.equal(before, now)


def _shown(changes: Sequence[str]) -> str:
    more = f" and {len(changes) - 4} more" if len(changes) > 4 else ""
    return "; ".join(changes[:4]) + more
