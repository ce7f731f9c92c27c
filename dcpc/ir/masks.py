"""Facts recognised in a program: masks, rows of several sequences, ranges of integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Expression over tensors, by (sample, key), for the keys that any query sees or for a position's
# sequence number: `("get", name, fixed dims and their positions, dim of the sample or -1, dim of
# the key or -1)`, or an op and its arguments, each another expression or a number.
Recipe = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class MaskDecision:
    """Meaning of an attention mask, recognised by the positions that it compares.

    Attributes:
        before: number of earlier keys that a query sees; None: all.
        after: number of later keys that a query sees; None: all.
        keep: keys that are visible to any query; None: all.
        empty: output of a query that sees no key, see `dcpc.attention`; "" leaves it as it is.
        segment: integer number of a position's sequence within its row: queries see only keys of
            the same sequence; None: a row is one sequence.
    """

    before: int | None
    after: int | None
    keep: Recipe | None
    empty: str = ""
    segment: Recipe | None = None


@dataclass(frozen=True, slots=True)
class MaskPlan:
    """Recognised masks of a program's attentions.

    Attributes:
        decisions: name of an attention -> meaning of its mask.
        notes: reasons why other masks stay as they are, a line each, for the report.
    """

    decisions: Mapping[str, MaskDecision]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Packable:
    """Whether a row of the inputs may hold several sequences, and the inputs that tell them apart.

    Attributes:
        marks: inputs by which the attentions tell the sequences of a row apart.
        dropped: input -> number of leading elements of a row on which the loss does not depend.
        reason: reason why sequences of one row would influence each other; "" where they do not.
        by_positions: whether `marks` may hold positions that restart at 0 in each sequence.
        by_numbers: whether `marks` may hold the number of each sequence, from 1.
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
        dim: index of the dim.
        first: elements at its beginning that are not read.
        last: elements at its end that are not read.
    """

    dim: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Range that an op requires of an integer input: torch raises an `IndexError` outside of it.

    Attributes:
        size: exclusive upper bound; values are from 0 on.
        ignored: one further allowed value, such as an ignore index; None: none.
        reader: op that reads the input, for an error text.
        extents: elements that are read; a dim without an entry is read whole.
    """

    size: int
    ignored: int | None
    reader: str
    extents: tuple[Extent, ...]
