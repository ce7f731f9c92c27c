"""Loss and gradients of the user's own model, beside which everything is held.

Of a branch on values it says which side is right for all: the judge of a trace. The plain model
runs on drawn inputs, among them masks of ones and of zeros, as it is and with the answer of a side.
That side is right where loss and gradients agree for inputs whose own answer is the other one.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from dcpc.buckets import Buckets
from dcpc.ir import Program
from dcpc.trace import casting
from dcpc.trace.capture.module_state import holding, untouched
from dcpc.trace.loss import Loss, find_outputs, one_number, returned, returns_statistics
from dcpc.trace.statistics import new_statistics, running_names
from dcpc.trace.value_branches import JUDGES, Answers, refused
from dcpc.verify.draws import KnownDraws
from dcpc.verify.exactness import EXACT, Gaps, LossAndGradients, error_of, gaps_of
from dcpc.verify.float64 import float64_throughout
from dcpc.verify.inputs import KINDS, draw
from dcpc.verify.points import Point
from dcpc.verify.replay import RightKernels

# Runs of the plain model at each of two sizes of what its ops' results are moved by, and how many
# times smaller the second size is.
RUNS, FINER = 3, 16
EACH = 4  # inputs that a side of a branch is tried with

# Losses that differ by less are alike: relative to the largest of them, and at all (a loss that is
# 0 but for rounding has no digit that counts). In float64 the first leaves room for an op of the
# user's that computes in float32 inside; in other dtypes for other kernels at other batches.
WIDE_LIMITS = (1e-6, 1e-12)
LEAST_LIMIT, ROUNDINGS = 1e-3, 4


@dataclass(frozen=True, slots=True)
class Asked:
    """Losses of the plain model for some inputs.

    Attributes:
        point: lengths of the inputs.
        losses: loss of each input.
        inputs: input name -> tensor, for each loss.
        eps: rounding of the dtype in which they were computed; None: float64 throughout.
    """

    point: Point
    losses: tuple[float, ...]
    inputs: tuple[Mapping[str, Tensor], ...]
    eps: float | None

    def apart(self, a: float, b: float) -> float:
        """Returns how far two numbers made of the losses are apart, beside the largest of all.

        0.0 where that may be rounding.
        """
        scale, apart = max(map(abs, (a, b, *self.losses))), abs(a - b)
        share, least = WIDE_LIMITS
        if self.eps is not None:
            least = ROUNDINGS * self.eps
            share = max(LEAST_LIMIT, least)
        return apart / scale if apart > max(share * scale, least) else 0.0


def widened(tensor: Tensor, wide: bool) -> Tensor:
    """Returns a tensor in float64, or as it is."""
    return tensor.double() if wide and tensor.is_floating_point() else tensor


def valued(name: str, p: Tensor, device: torch.device) -> Tensor:
    """Returns a parameter's values, the same for a name, where it has none here."""
    if not p.is_meta:
        return p
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    drawn = torch.randn(p.shape, generator=generator, dtype=torch.float64)
    drawn = 1 + drawn / 10 if p.dim() < 2 else drawn / max(1, math.prod(p.shape[1:])) ** 0.5
    return torch.empty_like(p, device=device).copy_(drawn)


def state(
    model: nn.Module, wide: bool, wanted: Collection[str], device: torch.device
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns leaves that stand for the model's parameters, and its buffers, by name.

    Args:
        model: model of the user; not changed.
        wide: whether they are copies in float64; else they share the model's memory, but for
            running statistics, to which forward may write.
        wanted: names of the parameters whose gradients are compared.
        device: device of the drawn values of parameters of which this rank has rows alone.
    """
    parameters = {
        n: widened(valued(n, p.detach(), device), wide).detach().requires_grad_(n in wanted)
        for n, p in model.named_parameters()
    }
    buffers = {n: widened(b.detach(), wide) for n, b in model.named_buffers()}
    return parameters, buffers | {n: buffers[n].clone() for n in running_names(model)}


def trainable(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of the parameters that get a gradient."""
    return tuple(n for n, p in model.named_parameters() if p.requires_grad)


def plain(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    wide: bool = False,
    alike: bool = False,
    autocast: torch.dtype | None = None,
    wanted: Collection[str] | None = None,
    loss: Loss | None = None,
    nudged: Nudged | None = None,
) -> LossAndGradients:
    """Returns the loss and the gradients of the model itself.

    Neither its parameters nor their `grad` change, nor torch's random numbers, nor anything that
    another thread of this process sees: a dataset may be read in one meanwhile.

    Args:
        model: model of the user.
        inputs: input name -> tensor.
        wide: whether parameters, inputs, and every cast to a lower dtype are in float64.
        alike: whether all random numbers of a tensor are equal.
        autocast: dtype that it is trained under, where it is not `wide`.
        wanted: names of the parameters, and `input_name` of inputs, whose gradients are compared;
            None: all trainable parameters.
        loss: function from forward's outputs to the loss; None: forward returns it.
        nudged: mode that moves each op's results; None: nothing does.
    """
    if wanted is None:
        wanted = trainable(model)
    given = leaves_of({n: _copied(x) for n, x in inputs.items()}, wide, wanted)
    device = next(iter(given.values())).device
    parameters, buffers = state(model, wide, wanted, device)
    own = (*model.named_parameters(), *model.named_buffers())
    others = {id(t): {**parameters, **buffers}[n] for n, t in own}
    with (
        nudged or nullcontext(),  # outermost: it draws numbers that are not the known ones
        untouched(model),
        holding(model, others),
        torch.enable_grad(),
        KnownDraws(alike) as draws,
    ):
        with float64_throughout() if wide else casting(device.type, autocast):
            value = one_number(_outputs(model, given, loss))
        if not value.isfinite().all():  # nothing is compared with it
            return LossAndGradients(value.detach(), {}, draws.drew)
        with casting(device.type, None), RightKernels() as kernels:
            leaves = {**parameters, **{input_name(n): x for n, x in given.items()}}
            found = gradients_of(value, [leaves[n] for n in wanted])
    gradients = dict(zip(wanted, found, strict=True))
    return LossAndGradients(value.detach(), gradients, draws.drew, frozenset(kernels.misread))


def _outputs(
    model: nn.Module, given: Mapping[str, Tensor], loss: Loss | None
) -> tuple[Tensor, ...]:
    found = find_outputs(returned(model, given, loss))
    return (*found, *new_statistics(model)) if returns_statistics(loss) else found


class Nudged(TorchDispatchMode):
    """Moves at random each result of values that have a gradient, and each gradient.

    As if each op rounded its result to fewer digits. Masks, positions and other preparations stay
    as they are, and so does 0.

    Args:
        share: fraction of a number by which it is moved at most, up or down.
        seed: seed of the random numbers.
    """

    def __init__(self, share: float, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._share, self._seed = share, seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an op."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if any(r.alias_info is not None for r in func._schema.returns):
            return out  # a view, or written in place
        if torch.is_grad_enabled():  # in forward
            operands = tree_leaves((args, kwargs))
            if not any(isinstance(x, Tensor) and x.requires_grad for x in operands):
                return out
        if func is torch.ops.aten._softmax.default:
            return self._moved(out, _again(*args[:2]))
        return tree_map_only(Tensor, self._moved, out)

    def _moved(self, x: Tensor, times: float | Tensor = 1.0) -> Tensor:
        if not x.is_floating_point() or x.layout != torch.strided:
            return x
        generator = self._generators.get(x.device)
        if generator is None:
            generator = torch.Generator(x.device).manual_seed(self._seed)
            self._generators[x.device] = generator
        shares = torch.empty_like(x).uniform_(-self._share, self._share, generator=generator)
        moved = x + x * shares * times
        return torch.where(moved.isfinite(), moved, x)


def _again(scores: Tensor, dim: int) -> Tensor:
    """Returns by how many roundings the weights of a softmax move that are made of scores anew.

    Kernels of attention keep a row's logsumexp alone, and make its weights again: an error of the
    scores, a share of their size, is one of the exponent.
    """
    return 1 + scores.nan_to_num(0.0, 0.0, 0.0).abs().amax(dim, keepdim=True)


def rounding_of(run: Callable[[Nudged | None], LossAndGradients], dtype: torch.dtype) -> Gaps:
    """Returns the move of loss and gradients if each op's result moves by an epsilon.

    Moves at a larger share are scaled down to the epsilon: nothing else rounds there, and a
    decision that flips (the larger of two equal numbers) is told from rounding, as its effect does
    not shrink with the share. Such a number is left out.

    Returns:
        "loss" and the name of each gradient -> its largest move.
    """
    exact = run(None)
    wide = torch.finfo(exact.loss.dtype)
    share = wide.eps**0.5  # as of a finite difference
    far, near = ([gaps_of(run(Nudged(size, seed)), exact) for seed in range(RUNS)]
                 for size in (share, share / FINER))  # fmt: skip
    found = {}
    for name in far[0]:
        large, small = (max(gaps[name] for gaps in each) for each in (far, near))
        if small <= large / FINER**0.5:
            found[name] = large * torch.finfo(dtype).eps / share
    return found


def gradients_of(loss: Tensor, leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Returns the gradients of some leaves, as dense tensors; there may be none."""
    found = torch.autograd.grad(loss, leaves, allow_unused=True) if leaves else ()
    return [None if gradient is None else gradient.to_dense() for gradient in found]


def input_name(name: str) -> str:
    """Returns the name of an input's gradient beside those of parameters."""
    return f"input '{name}'"


def _copied(x: Tensor) -> Tensor:
    """Returns a copy that forward may write to, with the same strides where that takes no room."""
    small = x.untyped_storage().nbytes() <= 2 * x.nbytes
    return copy.deepcopy(x.detach()) if small else x.detach().clone()


def leaves_of(
    inputs: Mapping[str, Tensor], wide: bool, wanted: Collection[str]
) -> dict[str, Tensor]:
    """Returns the inputs, those whose gradients are compared as leaves of their own."""
    learning = {n for n in inputs if input_name(n) in wanted}
    given = {n: widened(t, wide) for n, t in inputs.items()}
    return {n: t.detach().requires_grad_() if n in learning else t for n, t in given.items()}


@dataclass(frozen=True, slots=True)
class _TakenRun:
    """A run of the plain model by its own answers."""

    inputs: Mapping[str, Tensor]
    outcome: LossAndGradients
    answers: Answers


class _Judge:
    def __init__(
        self, model: nn.Module, buckets: Buckets, program: Program, loss: Loss | None
    ) -> None:
        self._model, self._loss = model, loss
        tensors = [t for t in (*model.parameters(), *model.buffers()) if not t.is_meta]
        device = tensors[0].device if tensors else torch.device("cpu")
        every = (self._run(x, {}) for x in _drawn(program, buckets, device))
        self._runs = [run for run in every if run is not None]

    def _run(self, inputs: Mapping[str, Tensor], forced: Mapping[str, bool]) -> _TakenRun | None:
        """Returns a run; None where the model refuses the inputs, or makes no numbers of them."""
        with Answers(forced) as answers:
            try:
                found = plain(self._model, inputs, wide=True, loss=self._loss)
            except Exception:  # of any model
                return None
        return _TakenRun(inputs, found, answers) if found.finite else None

    def _right(self, forced: Mapping[str, bool], runs: Iterable[_TakenRun]) -> bool:
        for run in runs:
            found = self._run(run.inputs, forced)
            if found is None or error_of(found.outcome, run.outcome, limit=EXACT)[1]:
                return False
        return True

    def _others(self, line: str, side: bool) -> list[_TakenRun]:
        """Returns runs that took the other side."""
        return [run for run in self._runs if (not side) in run.answers.met.get(line, ())][:EACH]

    def side(self, line: str) -> bool:
        """Returns the answer of a line that is right for all values."""
        others = {side: self._others(line, side) for side in (False, True)}
        for side, runs in others.items():
            if runs and self._right({line: side}, runs):
                return side
        ends = {k: at for run in self._runs for k, at in run.answers.goes_on.items()}
        if not (others[False] and others[True]):
            none = next(side for side, runs in others.items() if not runs)
            said = (
                f"no drawn inputs for which it is {not none}, to compare its side for {none} with"
            )
            raise refused(line, said)
        goes = [f"{side} goes on{ends.get((line, side), ' to the end')}" for side in (True, False)]
        raise refused(line, f"two sides with other numbers ({'; '.join(goes)})")

    def all(self, lines: Iterable[str]) -> dict[str, bool]:
        """Returns the answer of each line that is right for all values."""
        found = {line: self.side(line) for line in lines}
        if len(found) > 1 and not self._right(found, self._runs[:EACH]):
            raise refused(next(iter(found)), "other numbers where several branches go these ways")
        return found


def _drawn(program: Program, buckets: Buckets, device: torch.device) -> Iterator[dict[str, Tensor]]:
    """Yields inputs of the trace's sizes: usual ones, and each input of integers as one number."""
    sizes = dict(program.hints)
    for kind in KINDS:
        yield draw(program, buckets, sizes, kind, device)
    for name, x in (base := draw(program, buckets, sizes, "wide", device)).items():
        if not x.is_floating_point() or "mask" in name:
            yield from ({**base, name: torch.full_like(x, number)} for number in (0, 1))


def right_sides(
    model: nn.Module, buckets: Buckets, program: Program, loss: Loss | None, lines: Iterable[str]
) -> dict[str, bool]:
    """Returns the answer of each line that is right for all values.

    Args:
        model: model of the user.
        buckets: specs of its inputs.
        program: a trace of it, with sides of whichever answers.
        loss: function from forward's outputs to the loss; None: forward returns it.
        lines: lines of forward that branch on values.

    Raises:
        TraceError: no side of a line is known to be.
    """
    return _Judge(model, buckets, program, loss).all(lines)


JUDGES.append(right_sides)
