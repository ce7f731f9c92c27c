"""The graphs that one rank runs, and the order of what they gather."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import sympy
from torch import fx


@dataclass(frozen=True, slots=True)
class Partition:
    """The forward and backward graphs one rank runs, as plain ATen calls in execution order.

    Both graphs free a value after its last use. Every node's `meta["val"]` is a FakeTensor (or
    SymInt) whose sizes are expressions of torch's own symbols; `names` translates them.

    Attributes:
        forward: placeholders: parameters, buffers and constants, inputs, integers; outputs: what
            the program returns, the loss first, then the values saved for backward.
        backward: placeholders: the saved values, then the forward's placeholders it needs, then the
            gradients of what it begins at; outputs: one gradient (or None) for each parameter and
            input that learns.
        resident: names of forward placeholders that hold parameters, buffers, constants or inputs.
        saved: names of the forward's nodes that are saved for backward, in output order.
        backward_primals: names of the forward placeholders that backward takes, in order.
        names: torch symbol -> expression of the bucket's dims (a local length is a symbol of its
            own, e.g. `seq_local`).
        returned: how many values the program returns.
        begins: which of them, by position, backward begins at.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    resident: tuple[str, ...]
    saved: tuple[str, ...]
    backward_primals: tuple[str, ...]
    names: Mapping[sympy.Symbol, sympy.Expr]
    returned: int = 1
    begins: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class DividedBackward:
    """A backward graph as two: what others wait for, then the rest.

    Attributes:
        first: takes what backward takes; returns the gradients of `numbers`, then what `second`
            takes.
        second: returns the gradients of `others`.
        numbers: of the gradients that the first returns.
        others: of those that are left and are not None.
    """

    first: fx.GraphModule
    second: fx.GraphModule
    numbers: tuple[int, ...]
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """What the graphs of a partition run, as nodes of the joint graph in execution order.

    Attributes:
        primals: forward's placeholders.
        forward: its calls.
        outputs: what the program returns, the loss first.
        begins: positions among them that backward begins at.
        saved: values that forward returns for backward, besides.
        backward_primals: placeholders of forward that backward takes, too.
        tangents: the placeholders of the gradients of what backward begins at.
        backward: its calls; those of forward among them are made again.
        gradients: one (or None) for each parameter and input that learns.
    """

    primals: tuple[fx.Node, ...]
    forward: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    begins: tuple[int, ...]
    saved: tuple[fx.Node, ...]
    backward_primals: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]
    gradients: tuple[fx.Node | None, ...]


@dataclass(frozen=True, slots=True)
class GatherUnits:
    """Parameters whose rows ranks share out, and which graphs gather, some at once.

    The order in which all ranks gather and sum, whatever shape they run, follows from this alone.

    Attributes:
        units: placeholders of the parameters of each, in the order of their first use.
        again: those that backward may gather again; the others stay from forward on.
        ranks: that share them out.
    """

    units: tuple[tuple[str, ...], ...]
    again: frozenset[int]
    ranks: int

    def events(
        self, summed: Collection[int], again: Collection[int]
    ) -> tuple[tuple[str, int], ...]:
        """Returns what backward does in order: ("gather" or "sum", number of a unit).

        A unit is gathered before the gradients of the one after it are summed: what needs it then
        finds it there.

        Args:
            summed: units of which some parameter has a gradient.
            again: units that are gathered again.
        """
        found: list[tuple[str, int]] = []
        for k in reversed(range(len(self.units))):
            if k - 1 in again:
                found.append(("gather", k - 1))
            if k in summed:
                found.append(("sum", k))
        return tuple(found)

    def within(self, parameters: Collection[str]) -> GatherUnits:
        """Returns the units of a program that has some of the parameters.

        Args:
            parameters: placeholders.
        """
        own = [tuple(n for n in unit if n in parameters) for unit in self.units]
        numbers = [k for k, unit in enumerate(own) if unit]
        again = frozenset(i for i, k in enumerate(numbers) if k in self.again)
        return GatherUnits(tuple(own[k] for k in numbers), again, self.ranks)


OUTSIDE = (-1, -1)  # the run and copy of what is in no copy


@dataclass(frozen=True, slots=True)
class Fold:
    """Repeated blocks of which three copies, first, middle and last, stand for all.

    Attributes:
        copy_of: a graph's node -> number of its run of blocks, and 0, 1 or 2; absent outside.
        others: of each run, the copies like the middle one that are not there; they run between it
            and the last.
        kept: call of a middle copy that gathers parameters again in backward -> how many of the
            others, from the last on, keep theirs from forward instead.
    """

    copy_of: Mapping[str, tuple[int, int]]
    others: tuple[int, ...]
    kept: Mapping[str, int] = field(default_factory=dict)

    def copy(self, name: str) -> tuple[int, int]:
        """Returns the run and copy of a node, `OUTSIDE` of all copies."""
        return self.copy_of.get(name, OUTSIDE)

    def count(self, name: str) -> int:
        """Returns how many calls a node stands for."""
        run, copy = self.copy(name)
        return 1 + self.others[run] if copy == 1 else 1

    def count_again(self, name: str) -> int:
        """Returns how many calls of backward a node stands for."""
        return self.count(name) - self.kept.get(name, 0)
