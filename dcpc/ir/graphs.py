"""Graphs that one rank runs, and the order in which they gather parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import sympy
from torch import fx

from dcpc.ir.program import TensorInfo


@dataclass(frozen=True, slots=True)
class Partition:
    """The forward and backward graphs one rank runs, as plain ATen calls in execution order.

    Both graphs free a value after its last use. Every node's `meta["val"]` is a FakeTensor (or
    SymInt) whose sizes are expressions of torch's own symbols; `names` translates them.

    Attributes:
        forward: placeholders: parameters, buffers and constants, inputs, integers; outputs: what
            the program returns, the loss first, then the values saved for backward.
        backward: placeholders: the saved values, then the forward's placeholders it needs, then the
            gradients of the outputs in `begins`; outputs: one gradient (or None) for each parameter
            and input that learns.
        resident: names of forward placeholders that hold parameters, buffers, constants or inputs.
        saved: names of the forward's nodes that are saved for backward, in output order.
        backward_primals: names of the forward placeholders that backward takes, in order.
        names: torch symbol -> expression of the bucket's dims (a local length is a symbol of its
            own, e.g. `seq_local`).
        returned: number of values that the program returns.
        begins: positions of the returned values at which backward begins.
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
    """A backward graph in two parts: gradients that other ranks wait for, then the others.

    Attributes:
        first: graph with the inputs of backward; returns the gradients of `numbers`, then the
            inputs of `second`.
        second: graph that returns the gradients of `others`.
        numbers: numbers of the gradients that `first` returns.
        others: numbers of the remaining gradients that are not None.
    """

    first: fx.GraphModule
    second: fx.GraphModule
    numbers: tuple[int, ...]
    others: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """Nodes of the joint graph that a partition's graphs run, in execution order.

    Attributes:
        primals: placeholders of forward.
        forward: calls of forward.
        outputs: values that the program returns, the loss first.
        begins: positions in `outputs` at which backward begins.
        saved: further values that forward returns, saved for backward.
        backward_primals: placeholders of forward that backward takes as well.
        tangents: placeholders of the gradients of the outputs at which backward begins.
        backward: calls of backward; those that forward has, too, are recomputed.
        gradients: gradient (or None) of each parameter and input that learns.
        returning: call of backward that allocates memory for a value that left the device, and the
            value: other calls read it by its own node.
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
    returning: tuple[tuple[fx.Node, fx.Node], ...] = field(default=(), kw_only=True)


@dataclass(frozen=True, slots=True)
class GatherUnits:
    """Parameters sharded over ranks by rows, grouped into units that graphs gather at once.

    The order in which all ranks gather and reduce, whatever shape they run, follows from this
    alone.

    Attributes:
        units: placeholders of the parameters of each unit, units in the order of their first use.
        again: numbers of the units that backward may gather again; the others stay gathered.
        ranks: number of ranks that shard the parameters.
        lent: placeholders whose gradient is zeros, as the graphs of another trace sum one.
        away: whether a rank has its rows in the host's memory or on a disk.
    """

    units: tuple[tuple[str, ...], ...]
    again: frozenset[int]
    ranks: int
    lent: frozenset[str] = frozenset()
    away: bool = False

    def events(
        self, summed: Collection[int], again: Collection[int]
    ) -> tuple[tuple[str, int], ...]:
        """Returns the collectives of backward in order: ("gather" or "sum", number of a unit).

        A unit is gathered before the gradients of the one after it are summed, so that it is there
        when backward reaches it.
        """
        found: list[tuple[str, int]] = []
        for k in reversed(range(len(self.units))):
            if k - 1 in again:
                found.append(("gather", k - 1))
            if k in summed:
                found.append(("sum", k))
        return tuple(found)

    def size_bytes(self, info: Mapping[str, TensorInfo]) -> list[int]:
        """Returns the bytes of each unit, its parameters whole."""
        return [sum(int(info[n].size_bytes) for n in unit) for unit in self.units]

    def within(self, parameters: Collection[str]) -> GatherUnits:
        """Returns the units of a program that has only some of the parameters."""
        own = [tuple(n for n in unit if n in parameters) for unit in self.units]
        numbers = [k for k, unit in enumerate(own) if unit]
        again = frozenset(i for i, k in enumerate(numbers) if k in self.again)
        return replace(self, units=tuple(own[k] for k in numbers), again=again)


OUTSIDE = (-1, -1)  # run and copy of a node that is in no copy


@dataclass(frozen=True, slots=True)
class Fold:
    """Repeated blocks of which three copies (first, middle, last) stand for all.

    Attributes:
        copy_of: node of a graph -> number of its run of blocks and 0, 1 or 2; absent outside of
            blocks.
        others: for each run, the number of left-out copies like the middle one; they run between it
            and the last.
        kept: middle copy's call that gathers parameters again -> number of the left-out copies,
            from the last on, that keep theirs from forward.
    """

    copy_of: Mapping[str, tuple[int, int]]
    others: tuple[int, ...]
    kept: Mapping[str, int] = field(default_factory=dict)

    def copy(self, name: str) -> tuple[int, int]:
        """Returns the run and copy of a node; `OUTSIDE` for a node in no copy."""
        return self.copy_of.get(name, OUTSIDE)

    def count(self, name: str) -> int:
        """Returns the number of calls that a node stands for."""
        run, copy = self.copy(name)
        return 1 + self.others[run] if copy == 1 else 1

    def count_again(self, name: str) -> int:
        """Returns the number of calls that a node of backward stands for."""
        return self.count(name) - self.kept.get(name, 0)
