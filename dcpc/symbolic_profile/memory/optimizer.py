"""Bytes of an optimizer's state for each parameter, and of its step: a formula a class.

An optimizer of a class without a formula is made for small parameters of several shapes and steps
once. If its state is then so many bytes an element plus so many a parameter, that is its formula.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dcpc.errors import PlanError

Options: TypeAlias = Mapping[str, Any]
Formula: TypeAlias = Callable[[nn.Parameter, Options], int]
# What a user may pass: a class, `functools.partial(torch.optim.SGD, momentum=0.9)`, an optimizer.
OptimizerLike: TypeAlias = Optimizer | Callable[..., Optimizer]

SCALAR_BYTES = 4  # a count of steps and the like: one float32, on the CPU unless it is fused


def _tensors(count: int, scalars: int = 0, *, more: Sequence[str] = ()) -> Formula:
    """So many tensors like the parameter, one more for each of these options, and scalars."""

    def formula(p: nn.Parameter, options: Options) -> int:
        wanted = count + sum(bool(options.get(name)) for name in more)
        return wanted * p.nbytes + scalars * SCALAR_BYTES

    return formula


def _adafactor(p: nn.Parameter, options: Options) -> int:
    """A row's and a column's variance of each matrix; of a vector all of it."""
    if p.dim() < 2:
        return p.nbytes + SCALAR_BYTES
    rows, columns = p.shape[-2:]
    matrices = p.numel() // max(rows * columns, 1)
    return matrices * (rows + columns) * p.dtype.itemsize + SCALAR_BYTES


def _lbfgs(p: nn.Parameter, options: Options) -> int:
    """Once its history is full: a step and a change of gradient each, the last two tensors."""
    return (2 * int(options["history_size"]) + 2) * p.nbytes


# Source: torch 2.13, `_init_group` of each class; a test runs every line.
STATES: Mapping[type[Optimizer], Formula] = {
    torch.optim.SGD: _tensors(0, more=["momentum"]),
    torch.optim.Adam: _tensors(2, 1, more=["amsgrad"]),
    torch.optim.AdamW: _tensors(2, 1, more=["amsgrad"]),
    torch.optim.Adamax: _tensors(2, 1),
    torch.optim.NAdam: _tensors(2, 2),
    torch.optim.RAdam: _tensors(2, 1),
    torch.optim.RMSprop: _tensors(1, 1, more=["momentum", "centered"]),
    torch.optim.Adagrad: _tensors(1, 1),
    torch.optim.Adadelta: _tensors(2, 1),
    torch.optim.ASGD: _tensors(1, 3),
    torch.optim.Rprop: _tensors(2, 1),
    torch.optim.Adafactor: _adafactor,
    torch.optim.Muon: _tensors(1),
    torch.optim.LBFGS: _lbfgs,
}


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Transient memory of an optimizer step.

    Attributes:
        one: number of tensors like one parameter, where parameters are stepped one after the other.
        all: number of tensors like each parameter, where all are stepped together (`foreach`);
            None: never.
        decay: further tensors of either kind if the optimizer has a weight decay.
    """

    one: int
    all: int | None
    decay: tuple[int, int] = (0, 0)


# Measured with torch.profiler's allocator events, torch 2.13, the second step; a test measures
# every line. One after the other, what the one before took may still be there.
STEPS: Mapping[type[Optimizer], StepMemory] = {
    torch.optim.SGD: StepMemory(0, 0, (1, 1)),
    torch.optim.Adam: StepMemory(2, 1, (1, 0)),
    torch.optim.AdamW: StepMemory(2, 1),
    torch.optim.Adamax: StepMemory(1, 1, (1, 0)),
    torch.optim.NAdam: StepMemory(2, 1, (1, 1)),
    torch.optim.RAdam: StepMemory(2, 1, (1, 0)),
    torch.optim.RMSprop: StepMemory(1, 1, (1, 1)),
    torch.optim.Adagrad: StepMemory(1, 2, (1, 0)),
    torch.optim.Adadelta: StepMemory(2, 2, (1, 1)),
    torch.optim.ASGD: StepMemory(0, 1, (1, 0)),
    torch.optim.Rprop: StepMemory(3, 2),
    torch.optim.Adafactor: StepMemory(1, 1),
    torch.optim.Muon: StepMemory(4, None),
}


# Adam's two moments, in the parameters' dtype: what a plan counts where it is given no optimizer.
ADAM_STATES = 2


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Memory of an optimizer on one rank.

    Attributes:
        optimizer: class, `functools.partial` of one, or optimizer; None: Adam.
        given_bytes: bytes of its state on a rank; None: computed from the optimizer.
        together: whether it steps all parameters at once by default, as on a GPU.
        owners: number of ranks that shard each parameter of a stage by rows.
    """

    optimizer: OptimizerLike | None = None
    given_bytes: int | None = None
    together: bool = False
    owners: int = 1

    def state_bytes(
        self, whole: Sequence[nn.Parameter], own: Sequence[nn.Parameter] = ()
    ) -> dict[int, int]:
        """Returns `id(parameter)` -> bytes of its state; empty where `given_bytes` has them all."""
        own, chosen = own or whole, self.optimizer
        if self.given_bytes is not None:
            return {}
        if chosen is None:
            return {id(p): ADAM_STATES * p.nbytes for p in own if p.requires_grad}
        if not isinstance(chosen, Optimizer):
            return state_bytes(chosen, own)
        # It knows its parameters; of what it keeps a rank has as much as of them.
        states = state_bytes(chosen, whole)
        pairs = zip(whole, own, strict=True)
        return {id(q): -(-states.get(id(p), 0) * q.nbytes // max(p.nbytes, 1)) for p, q in pairs}

    def step_bytes(self, own: Sequence[nn.Parameter]) -> int:
        """Returns the most bytes that a step allocates and frees again; see `step_bytes`."""
        stepped = own if self.given_bytes is None else ()
        return step_bytes(self.optimizer or torch.optim.Adam, stepped, self.together)


def step_bytes(optimizer: OptimizerLike, parameters: Iterable[nn.Parameter], together: bool) -> int:
    """Returns the peak of an optimizer step's transient memory.

    Of a class that `STEPS` has not it is 0: gradients of one more backward, which a plan counts
    and which are gone by then, leave room for a tensor like each parameter.
    """
    if isinstance(optimizer, Optimizer):
        kind, options = type(optimizer), list(optimizer.param_groups)
    else:
        kind, defaults, _ = _defaults(optimizer)
        options = [dict(defaults)]
    found = STEPS.get(kind)
    sizes = sorted((p.nbytes for p in parameters if p.requires_grad), reverse=True)
    if found is None or not sizes or all(o.get("fused") for o in options):
        return 0
    decays = any(o.get("weight_decay") for o in options) and kind is not torch.optim.AdamW
    asked = [o.get("foreach") for o in options]
    if found.all is not None and (together if None in asked else any(asked)):
        return (found.all + decays * found.decay[1]) * sum(sizes)
    count = found.one + decays * found.decay[0]
    return (count * sizes[0] + sum(sizes[1:2])) if count else 0


def state_bytes(optimizer: OptimizerLike, parameters: Iterable[nn.Parameter]) -> dict[int, int]:
    """Returns `id(parameter)` -> bytes of its state, of those that the optimizer trains.

    Raises:
        PlanError: its class has no formula, and its state follows no formula of sizes.
    """
    trained = [p for p in parameters if p.requires_grad]
    if isinstance(optimizer, Optimizer):
        kind, groups = type(optimizer), optimizer.param_groups
        make: Callable[..., Optimizer] = functools.partial(kind, **optimizer.defaults)
        options: dict[int, Options] = {id(p): group for group in groups for p in group["params"]}
        trained = [p for p in trained if id(p) in options]
    else:
        kind, defaults, make = _defaults(optimizer)
        options = {id(p): defaults for p in trained}
    formula = STATES.get(kind)
    if formula is None:
        measured = {dtype: _measured(make, dtype) for dtype in {p.dtype for p in trained}}
        return {id(p): measured[p.dtype](p) for p in trained}
    return {id(p): formula(p, options[id(p)]) for p in trained}


def _defaults(make: Callable[..., Optimizer]) -> tuple[type[Optimizer], Options, Any]:
    """Returns the class that a factory makes and its options."""
    made = _tiny(make, nn.Parameter(torch.zeros(1, 1)))
    return type(made), made.defaults, make


def _tiny(make: Callable[..., Optimizer], p: nn.Parameter) -> Optimizer:
    try:
        made = make([p])
    except Exception as e:  # a user's class may raise anything
        raise _unknown(make, f"one for a small parameter raised {type(e).__name__}: {e}") from e
    if not isinstance(made, Optimizer):
        raise _unknown(make, f"a {type(made).__name__}")
    return made


def _measured(make: Callable[..., Optimizer], dtype: torch.dtype) -> Callable[[nn.Parameter], int]:
    """Returns the formula that one step on small parameters of several shapes obeys."""
    shapes = ((4, 6), (8, 6), (5, 7), (12,), (30,))
    counts = [torch.Size(s).numel() for s in shapes]
    kept = [_kept_bytes(make, shape, dtype) for shape in shapes]
    each = (kept[1] - kept[0]) // (counts[1] - counts[0])
    fixed = kept[0] - each * counts[0]
    if any(k != fixed + each * n for k, n in zip(kept, counts, strict=True)):
        found = ", ".join(f"{s}: {k}" for s, k in zip(shapes, kept, strict=True))
        raise _unknown(make, f"bytes of state that are no formula of a parameter's size ({found})")
    return lambda p: fixed + each * p.numel()


def _kept_bytes(make: Callable[..., Optimizer], shape: tuple[int, ...], dtype: torch.dtype) -> int:
    p = nn.Parameter(torch.ones(shape, dtype=dtype))
    p.grad = torch.full_like(p, 0.5)
    optimizer = _tiny(make, p)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    except Exception as e:  # of a user's class
        raise _unknown(make, f"a step that raised {type(e).__name__}: {e}") from e
    tensors = torch.utils._pytree.tree_leaves(dict(optimizer.state))
    storages = {t.untyped_storage().data_ptr(): t for t in tensors if isinstance(t, Tensor)}
    own = {x.untyped_storage().data_ptr() for x in (p, p.grad)}
    return sum(t.untyped_storage().nbytes() for at, t in storages.items() if at not in own)


def _unknown(make: Callable[..., Optimizer], got: str) -> PlanError:
    name = getattr(make, "__name__", None) or getattr(getattr(make, "func", make), "__name__", make)
    return PlanError(
        f"optimizer {name}: got {got}; expected a class of torch.optim, a partial of one with its "
        "options, an optimizer, or a class whose state has a size that follows from the "
        "parameter's; pass optimizer_bytes= instead"
    )
