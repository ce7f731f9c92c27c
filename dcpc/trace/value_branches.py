"""Branches of forward on values: a graph has the side that is right for all of them.

    return x if mask.all() else x * mask[..., None]   ->  the second
    if torch.isinf(x).any(): x = x.clamp(-m, m)       ->  the clamp

A trace has no values, so it asks `Branching`. Whether a side is right is for the judge (`verify/`),
which runs the plain model with either answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.overrides import TorchFunctionMode

from dcpc.buckets import Buckets
from dcpc.errors import TraceError, running_line
from dcpc.ir import Program
from dcpc.trace.loss import Loss

Judge = Callable[[nn.Module, Buckets, Program, Loss | None, Iterable[str]], dict[str, bool]]
JUDGES: list[Judge] = []  # `verify/reference.py` joins, which a trace cannot import
MOST_LINES = 16
MOST_ASKS = 256  # of a run: `while not (x < 1).all()` asks for ever
_ASKS = {Tensor.__bool__, Tensor.is_nonzero, torch.is_nonzero, Tensor.__contains__}
_ASKS |= {Tensor.equal, torch.equal, Tensor.allclose, torch.allclose}


def asks(func: Any, args: Any) -> bool:
    """Whether a call is a question for values, answered by true or false."""
    return func in _ASKS or (func is Tensor.item and args[0].dtype == torch.bool)


def has_values(args: Iterable[Any]) -> bool:
    """Whether all tensors among some arguments have values."""
    return not any(isinstance(x, FakeTensor) and x.constant is None for x in args)


class Branching:
    """The answers that a trace gives to forward's questions for values.

    Attributes:
        answers: line of forward, as ` at FILE:LINE: code`, -> answer; False unless judged.
        judged: lines whose answer was found to be right.
    """

    def __init__(self) -> None:
        self.answers: dict[str, bool] = {}
        self.judged: set[str] = set()

    def answer(self, line: str) -> bool | None:
        """Returns the answer to a line's question, None where torch is to refuse it."""
        if not JUDGES or len(self.answers) > MOST_LINES:
            return None
        return self.answers.setdefault(line, False)

    def turn(self) -> bool:
        """Turns the last answer that was not judged to True; returns whether there was one."""
        free = [n for n, answer in self.answers.items() if n not in self.judged and not answer]
        self.answers.update({n: True for n in free[-1:]})
        return bool(free)

    def judge(
        self, model: nn.Module, buckets: Buckets, program: Program, loss: Loss | None
    ) -> bool:
        """Has all lines judged; returns whether the program has the sides that are right.

        Raises:
            TraceError: neither side of a line is known to be right.
        """
        if self.judged == self.answers.keys():
            return True
        before = {**self.answers}
        for judge in JUDGES:
            self.answers.update(judge(model, buckets, program, loss, [*before]))
        self.judged |= before.keys()
        return before == self.answers

    def notes(self) -> tuple[str, ...]:
        """Returns the report's line about each branch."""
        return tuple(
            f"branch on values{line}: captured as if its value were {answer}, with the plain "
            f"model's loss and gradients also for drawn values of which it is {not answer}"
            for line, answer in self.answers.items()
        )


class Answers(TorchFunctionMode):
    """Answers the questions of some lines in a run of the plain model, and notes all.

    Attributes:
        met: line -> answers that values gave.
        goes_on: (line, answer) -> line of the call after that question.
    """

    def __init__(self, forced: Mapping[str, bool]) -> None:
        super().__init__()
        self._forced, self._last, self._asked = forced, ("", False), 0
        self.met: dict[str, set[bool]] = {}
        self.goes_on: dict[tuple[str, bool], str] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Makes a call, or answers a question."""
        if self._last not in self.goes_on:
            self.goes_on[self._last] = running_line()
        found = func(*args, **(kwargs or {}))
        if asks(func, args):
            line, self._asked = running_line(), self._asked + 1
            if self._asked > MOST_ASKS:
                raise RecursionError(line)
            self.met.setdefault(line, set()).add(bool(found))
            found = self._forced.get(line, found)
            self._last = line, bool(found)
        return found


def refused(line: str, got: str) -> TraceError:
    """Returns the error for a branch."""
    return TraceError(
        f"forward branches on the values in a tensor{line}: got {got}; expected a side that is "
        "right for all values, as a graph has one side and no values; rewrite it with torch.where "
        "/ masking, or move it out of forward"
    )
