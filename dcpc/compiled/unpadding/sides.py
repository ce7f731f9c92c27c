"""The programs of a model without its padding: of one length, of that and a second one, ...

    program ─► side 0: the rows of an encoder ─► side 1: besides, those of a decoder

Each side leaves the padded rows of one more length out, of the program that the side before made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from dcpc.buckets import BATCH, Sizes
from dcpc.codegen.lower.unpad_rewriting import apply_unpad, rows_name
from dcpc.compiled.unpadding.valid_rows import RowFinder, ValidRows
from dcpc.ir import Placement, UnpadPlan
from dcpc.passes.sharding.sharding import analyse
from dcpc.passes.unpad.unpad import unpad
from dcpc.plan.prices.studies import Study
from dcpc.plan.runnable import Runnable
from dcpc.symbolic_profile import Device
from dcpc.symbolic_profile.evaluate import Evaluator

# Seconds of one attention of one sample more in a row, forward and backward: a kernel call each.
SEQUENCE_S = 6e-5
FEW, MANY = 256, 4096  # rows at which a program is priced


@dataclass(frozen=True, slots=True)
class CallSetting:
    """The degree, recompute and place by which this rank runs a call.

    Attributes:
        sp: number of ranks that run it.
        menu_step: steps of recompute of the program with padding.
        place: place of this rank among them.
        sizes: lengths of the calls that its placement is made for.
        gathers_again: units of parameters that this round gathers again in backward.
    """

    sp: int
    menu_step: int
    place: int
    sizes: Sizes
    gathers_again: frozenset[int] | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Degree and lengths, which a placement follows from."""
        return (self.sp, *sorted(self.sizes.items()))


def placement_of(runnable: Runnable, sp: int, sizes: Sizes) -> Placement:
    """Returns the placement that calls of a program are compared by; of one rank there is one.

    Args:
        runnable: program to place.
        sp: number of ranks that run it.
        sizes: lengths of the calls that it is made for.
    """
    return runnable.priced.placement(sizes if sp > 1 else runnable.traced.program.hints, sp)


@dataclass(frozen=True, slots=True)
class _RowPrice:
    """Seconds of a program without padding at some lengths, by the valid rows of each side.

    Attributes:
        fixed: seconds that do not depend on the rows.
        row: seconds for each row of a side.
        pair: seconds for each two rows of one sample of a side.
    """

    fixed: float
    row: tuple[float, ...]
    pair: tuple[float, ...]


class Side:
    """One more length whose padded rows are left out.

    Args:
        before: program whose padded rows they are.
        plan: plan of the rows that this program leaves out.
        earlier: sides that made this program.

    Attributes:
        before: program whose padded rows they are.
        plan: plan that says which values are made for valid rows alone.
        number: number of sides before it.
    """

    def __init__(self, before: Runnable, plan: UnpadPlan, earlier: Sequence[Side]) -> None:
        self.before, self.plan, self.number = before, plan, len(earlier)
        self._every: tuple[Side, ...] = (*earlier, self)
        self._placements: dict[tuple[object, ...], Placement] = {}
        self._prices: dict[tuple[object, ...], _RowPrice] = {}
        self._evaluators: dict[int, tuple[Study, Evaluator]] = {}

    @cached_property
    def finder(self) -> RowFinder:
        """Finder of the valid rows."""
        placement = placement_of(self.before, 1, {})
        return RowFinder(self.before.traced, self.plan, placement, self.number)

    @cached_property
    def runnable(self) -> Runnable:
        """The program without padding."""
        traced = self.before.traced
        program = apply_unpad(traced.program, self.plan)
        sharding = analyse(program, derive_rules=False)
        reference = {BATCH: 1, **(traced.reference or program.hints)}
        batch, seq = self.plan.row_sizes
        rows = int((batch * seq).subs(traced.program.dims(reference)))
        reference[rows_name(self.number)] = rows
        return Runnable(
            replace(traced, program=program, sharding=sharding, reference=reference, tracers={})
        )

    def placement(self, how: CallSetting) -> Placement:
        """Returns the placement of the program without padding, one for all numbers of rows."""
        if how.key not in self._placements:
            rows = self._whole_rows(how.sizes)
            self._placements[how.key] = placement_of(self.runnable, how.sp, rows)
        return self._placements[how.key]

    def _whole_rows(self, sizes: Sizes) -> Sizes:
        """Returns sizes of a call with as many rows of each side as there are with padding."""
        found = dict(sizes)
        for side in self._every:
            batch, seq = side.plan.row_sizes
            dims = side.before.traced.program.dims(found)
            found[rows_name(side.number)] = int((batch * seq).subs(dims))
        return found

    def study(self, how: CallSetting) -> Study:
        """Returns the study of the costs of the program without padding."""
        return self.runnable.priced.at(self.placement(how))

    def given(self, rows: Sequence[ValidRows]) -> dict[str, Tensor]:
        """Returns the indices of valid rows that the program gets, by placeholder."""
        named = {name: x for side in rows for name, x in side.indices.items()}
        inputs = self.runnable.traced.program.inputs
        return {p: named[name] for p, name in inputs.items() if name in named}

    def sizes(self, sizes: Sizes, rows: Sequence[ValidRows]) -> Sizes:
        """Returns the lengths of the dims with the numbers of valid rows."""
        counts = {rows_name(i): found.count for i, found in enumerate(rows)}
        return {**sizes, **counts}

    def seconds(
        self, how: CallSetting, sizes: Sizes, rows: Sequence[ValidRows], device: Device
    ) -> float:
        """Returns the predicted seconds of a call, forward and backward.

        The profile knows the rows, and not of how many samples they are: it prices attention as if
        they were of one.
        """
        study = self.study(how)
        key = (id(study), *sorted(sizes.items()))
        if key not in self._prices:
            self._prices[key] = self._price(study, sizes, device)
        price = self._prices[key]
        of_rows = sum(s * found.count for s, found in zip(price.row, rows, strict=True))
        of_pairs = sum(s * found.squares for s, found in zip(price.pair, rows, strict=True))
        calls = sum(
            len(side.plan.attentions) * found.samples
            for side, found in zip(self._every, rows, strict=True)
        )
        return price.fixed + of_rows + of_pairs + calls * SEQUENCE_S

    def _evaluator(self, study: Study) -> Evaluator:
        if id(study) not in self._evaluators:  # the study is kept, as its id is the key
            self._evaluators[id(study)] = study, Evaluator(study.profile(0))
        return self._evaluators[id(study)][1]

    def _price(self, study: Study, sizes: Sizes, device: Device) -> _RowPrice:
        names = [rows_name(side.number) for side in self._every]
        few, evaluator = dict.fromkeys(names, FEW), self._evaluator(study)

        def at(counts: Mapping[str, int]) -> tuple[float, float]:
            local = study.local_sizes({**sizes, **counts})
            by_class = evaluator.seconds_by_class(local, device)
            attention_s = by_class.pop("attention", 0.0)
            return attention_s, sum(by_class.values())

        attention_s, rest_s = at(few)
        every = [at({**few, name: MANY}) for name in names]
        pair = tuple((a - attention_s) / (MANY**2 - FEW**2) for a, _ in every)
        row = tuple((rest - rest_s) / (MANY - FEW) for _, rest in every)
        fixed_s = rest_s - FEW * sum(row) + attention_s - FEW**2 * sum(pair)
        return _RowPrice(fixed_s, row, pair)


def sides_of(whole: Runnable, plan: UnpadPlan, returns: bool) -> tuple[Side, ...]:
    """Returns a side for each length whose padded rows can be left out.

    Args:
        whole: program with padding.
        plan: plan of its first side.
        returns: whether values may be returned of which padded rows are 0.
    """
    sides: list[Side] = []
    before = whole
    while not plan.reason and (returns or not plan.returned):
        sides.append(Side(before, plan, sides))
        before = sides[-1].runnable
        lengths = [side.plan.row_sizes[1] for side in sides]
        plan = unpad(before.traced.program, before.traced.sharding, lengths)
    return tuple(sides)
