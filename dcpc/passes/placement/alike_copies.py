"""Makes the copies of a repeated block that stand for more of them be split alike.

The middle copy stands for all copies between the first and the last. Its cost is that of each of
these only if its inputs have the labels that it passes on itself. A tie may split the first or the
last copy differently, and then the middle one would differ from the copies it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dcpc.ir import Fold
from dcpc.passes.placement.choices import PlacementChoice, choice_of
from dcpc.passes.placement.node_options import PlacementModel
from dcpc.passes.placement.state_graph import Option

FIRST, MIDDLE, LAST = range(3)
Options = tuple[int, ...]  # for each of the model's variables: index into its alternatives
Reads = tuple[tuple[int, int], ...]  # (variable, position of the operand)


@dataclass(frozen=True, slots=True)
class _OuterValue:
    """A value from outside the middle copy that it reads; each label change is made once."""

    value: int
    here: Reads
    before: Reads


@dataclass(frozen=True, slots=True)
class _Handed:
    """A value that the last copy reads from the middle one.

    Attributes:
        values: variables of the value in the first and in the middle copy.
        inside: readers of each within its own copy.
        on: readers of each in the next copy.
    """

    values: tuple[int, int]
    inside: tuple[Reads, Reads]
    on: tuple[Reads, Reads]


class AlikeCopies:
    """The copies of one model's repeated blocks."""

    def __init__(self, model: PlacementModel, fold: Fold) -> None:
        self.model, self._fold = model, fold
        self._choices: dict[Options, tuple[PlacementChoice, ...]] = {}
        self._twins: dict[tuple[int, int], list[int | None]] = {}
        calls = {n.name for n in model.program.gm.graph.nodes if n.op == "call_function"}
        found: dict[tuple[int, int], list[int]] = {}
        for variable, name in enumerate(model.names):
            if name in calls:
                found.setdefault(fold.copy(name), []).append(variable)
        self._rows = [
            (found[r, FIRST], found[r, MIDDLE], found[r, LAST])
            for r, others in enumerate(fold.others)
            if others
        ]
        self._readers: dict[int, list[tuple[int, int]]] = {}
        for variable, sources in enumerate(model.nodes.sources):
            for position, source in enumerate(sources):
                self._readers.setdefault(source, []).append((variable, position))
        own = {v for v, name in enumerate(model.names) if fold.copy(name)[1] == MIDDLE}
        self._handed = [each for rows in self._rows for each in self._find_handed(rows)]
        self._shared = [each for rows in self._rows for each in self._find_shared(rows, own)]

    def _find_handed(self, rows: Sequence[list[int]]) -> Iterator[_Handed]:
        first, middle, last = (set(copy) for copy in rows)
        for a, b in zip(rows[FIRST], rows[MIDDLE], strict=True):
            if on := self._reads(b, last):
                inside = self._reads(a, first), self._reads(b, middle)
                yield _Handed((a, b), inside, (self._reads(a, middle), on))

    def _find_shared(self, rows: Sequence[list[int]], own: set[int]) -> Iterator[_OuterValue]:
        middle = {*rows[MIDDLE]}
        read = {s for v in middle for s in self.model.nodes.sources[v]}
        for value in read - own - {*rows[FIRST]}:
            before = self._reads(value, set(range(rows[MIDDLE][0])))
            yield _OuterValue(value, self._reads(value, middle), before)

    def _reads(self, value: int, by: set[int]) -> Reads:
        return tuple(read for read in self._readers.get(value, ()) if read[0] in by)

    def hand_on_alike(self, options: Options) -> bool:
        """Returns whether every copy that the middle one stands for gets the same labels."""

        def wants(reads: Reads) -> set[int]:
            return {self._option(v, options).operands[position] for v, position in reads}

        for handed in self._handed:
            first, middle = (self._option(v, options).output for v in handed.values)
            # A form that the copy itself wants, too, is made there and not by the next one.
            alike = all(wants(a) == wants(b) for a, b in (handed.inside, handed.on))
            if first != middle or not alike:
                return False
        return all(
            wants(s.here) <= wants(s.before) | {self._option(s.value, options).output}
            for s in self._shared
        )

    def choices(self, options: Options) -> tuple[PlacementChoice, ...]:
        """Returns alternatives to a choice whose copies are not split alike.

        It is empty if they are, or if no similar choice has this property.
        """
        if options not in self._choices:
            made = () if self.hand_on_alike(options) else self.made_alike(options)
            self._choices[options] = tuple(choice_of(self.model, self._fold, m) for m in made)
        return self._choices[options]

    def made_alike(self, options: Options) -> Iterator[Options]:
        """Yields similar choices whose copies are alike: some copies are split like another one."""
        for changed, like in (
            ((LAST,), MIDDLE),
            ((FIRST, LAST), MIDDLE),
            ((MIDDLE, LAST), FIRST),
            ((FIRST, MIDDLE), LAST),
        ):
            made = [*options]
            try:
                for rows in self._rows:
                    for copy in changed:
                        for variable, source in zip(rows[copy], rows[like], strict=True):
                            made[variable] = self._same(variable, source, options[source])
            except ValueError:
                continue  # one copy lacks an option of another one
            if self.hand_on_alike(tuple(made)):
                yield tuple(made)

    def _same(self, variable: int, source: int, option: int) -> int:
        """Returns a variable's option that equals another variable's.

        Raises:
            ValueError: there is none.
        """
        pair = variable, source
        if pair not in self._twins:
            names, alternatives = self.model.names, self.model.sharding.alternatives
            own = [a.placed for a in alternatives.get(names[variable], ())]
            theirs = [a.placed for a in alternatives.get(names[source], ())]
            self._twins[pair] = [own.index(p) if p in own else None for p in theirs] or [0]
        found = self._twins[pair][option]
        if found is None:
            raise ValueError(f"variable {variable} has no option like {option} of {source}")
        return found

    def _option(self, variable: int, options: Options) -> Option:
        return self.model.kinds[self.model.nodes.kinds[variable]].options[options[variable]]
