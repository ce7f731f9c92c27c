"""What is recognised in a program: masks, rows of several sequences, ranges of integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Which keys anybody sees, or which sequence a position is of, as an expression of tensors by
# (sample, key): `("get", name, fixed dims and their positions, dim of the sample or -1, dim of the
# key or -1)`, or an op and its arguments, each another expression or a number.
Recipe = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class MaskDecision:
    """What a mask of an attention says, recognised by the positions it compares.

    Attributes:
        before: keys before its own position that a query sees; None: all.
        after: keys after it; None: all.
        keep: which keys anybody sees; None: all.
        empty: what a query gives that sees no key, see `dcpc.attention`; "" leaves it as it is.
        segment: which sequence of its row a position is of, an integer: queries see only keys of
            their own; None: there is one.
    """

    before: int | None
    after: int | None
    keep: Recipe | None
    empty: str = ""
    segment: Recipe | None = None


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """The masks of a program's attentions.

    Attributes:
        decisions: name of an attention -> what its mask says.
        notes: why others stay as they are, a line each, for the report.
    """

    decisions: Mapping[str, MaskDecision]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Packable:
    """Whether a row of a model's inputs may hold several sequences, and by what it knows them.

    Attributes:
        marks: inputs that its attentions tell the sequences of a row apart by.
        dropped: input -> elements at the beginning of a row that the loss does not depend on.
        reason: why sequences of one row would not be as they are alone; "" where they are.
        by_positions: whether these inputs may hold positions that begin at 0 in each sequence.
        by_numbers: whether they may hold the number of each sequence, from 1.
    """

    marks: tuple[str, ...]
    dropped: Mapping[str, int]
    reason: str = ""
    by_positions: bool = False
    by_numbers: bool = False


@dataclass(frozen=True, slots=True)
class Extent:
    """The elements of one dim that an op reads; counts below 0 are padding beside the dim.

    Attributes:
        dim: which one.
        first: elements at its beginning that are not read.
        last: elements at its end that are not read.
    """

    dim: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ValueRange:
    """What an op needs of an integer input's elements: torch raises an `IndexError` for others.

    Attributes:
        size: each is from 0 to below this,
        ignored: or this; None: there is no such value.
        reader: what reads them, for an error.
        extents: which elements are read; a dim without one is read whole.
    """

    size: int
    ignored: int | None
    reader: str
    extents: tuple[Extent, ...]
