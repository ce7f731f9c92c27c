"""Runs a call without its padding, where that pays and changes nothing.

    inputs ─► valid rows ─► checks ─► costs ─► the program of valid rows
                              └─────────┴────► the program with padding

Which rows are valid is found out before the graph runs, so no size in it depends on data, and one
graph serves every number of them. All numbers are those of the program with padding: at valid
rows, the loss, every gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dcpc.buckets import BATCH, Sizes
from dcpc.codegen import LoweredPair, Variant
from dcpc.compiled.unpadding.sides import CallSetting, Side, placement_of, sides_of
from dcpc.compiled.unpadding.valid_rows import ValidRows
from dcpc.ir import Partition
from dcpc.ir.thresholds import UNPADDING_GAIN
from dcpc.passes.unpad.unpad import unpad
from dcpc.plan.prices.studies import Study
from dcpc.plan.runnable import RewrittenCall, Runnable

# Seconds of looking for the valid rows of a call, and what share of the call they may be.
FIND_S, FIND_SHARE = 4e-4, 0.02
# Predicted seconds of a call with padding below which "auto" does not look for any.
WORTH_S = FIND_S / FIND_SHARE
# Shares of the steps of recompute that are tried: each is a variant.
STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)
FEW = 2  # samples of a call that are compared with the plain model's


@dataclass(frozen=True, slots=True, eq=False)
class RowsOfCall:
    """The rows that a call is run with.

    Attributes:
        sides: valid rows of each length whose padded rows are left out.
    """

    sides: tuple[ValidRows, ...]


def fewest_steps(steps: int, peak_bytes: Callable[[int], int], limit_bytes: int) -> int | None:
    """Returns the fewest of some shares of the steps of recompute whose peak is within a limit.

    Returns:
        The number of steps; None: the peak is above the limit with each.
    """
    tried = sorted({round(share * steps) for share in STEPS})
    return next((step for step in tried if peak_bytes(step) <= limit_bytes), None)


class Unpadding:
    """The calls of one program that run without padding.

    Args:
        whole: program with padding.
        mode: "auto": where it pays; True: wherever it changes nothing; False: nowhere.

    Attributes:
        plan: plan that says which values are made for valid rows alone.
        reason: reason why all calls run with padding; "" where some may run without.
    """

    def __init__(self, whole: Runnable, mode: bool | str) -> None:
        self._whole, self._mode = whole, mode
        traced = whole.traced
        self.plan = unpad(traced.program, traced.sharding)
        self.reason = self.plan.reason
        if not self.reason and mode == "auto" and self.plan.returned:
            names = ", ".join(sorted(self.plan.returned))
            self.reason = f"{names} is returned with its padded rows"
        self._compared: set[tuple[int, int]] = set()  # sides of calls that were compared, and sp

    @cached_property
    def sides(self) -> tuple[Side, ...]:
        """The lengths whose padded rows may be left out."""
        return sides_of(self._whole, self.plan, self._mode is True)

    @property
    def runnable(self) -> Runnable:
        """The program without padding of the first side."""
        return self.sides[0].runnable

    def rows(
        self, sizes: Sizes, inputs: Mapping[str, Tensor], how: CallSetting
    ) -> RowsOfCall | None:
        """Returns the rows that a call is run with, alike on all ranks that run it; None: all.

        Args:
            sizes: lengths of the dims, batch included.
            inputs: tensors by placeholder.
            how: setting of the call.
        """
        if self.reason or self._mode is False:
            return None
        if self.plan.returned and torch.is_grad_enabled():  # padded rows may get a gradient
            return None
        if self._mode is True:
            return self._find(sizes, inputs)
        padded_s = self._padded(how).predict(how.menu_step, sizes).seconds_s
        if padded_s < WORTH_S:
            return None
        found = self._find(sizes, inputs)
        if found is None:
            return None
        device = self._whole.traced.device
        unpadded_s = self._last(found).seconds(how, sizes, found.sides, device)
        return found if unpadded_s <= (1 - UNPADDING_GAIN) * padded_s else None

    def _find(self, sizes: Sizes, inputs: Mapping[str, Tensor]) -> RowsOfCall | None:
        """Returns the valid rows of as many sides as have padding that nothing reads."""
        found: list[ValidRows] = []
        given = dict(inputs)
        for side in self.sides:
            if side.plan.returned and torch.is_grad_enabled():
                break
            rows = side.finder.find(side.sizes(sizes, found), given)
            if rows is None:
                break
            found.append(rows)
            given.update(side.given(found))
        while found and not found[-1].padded:
            found.pop()
        return RowsOfCall(tuple(found)) if found else None

    def _last(self, rows: RowsOfCall) -> Side:
        """Returns the side whose program runs a call."""
        return self.sides[len(rows.sides) - 1]

    def given(self, rows: RowsOfCall) -> Mapping[str, Tensor]:
        """Returns the indices of valid rows that a call's program gets, by placeholder."""
        return self._last(rows).given(rows.sides)

    def variant(
        self, sizes: Sizes, rows: RowsOfCall, how: CallSetting
    ) -> tuple[Variant, tuple[int, ...]] | None:
        """Returns the variant of a call without padding, and its integers.

        It is predicted to need no more memory than the same call with padding; None: that is not
        possible.
        """
        limit_bytes = self._padded(how).predict(how.menu_step, sizes).peak_bytes
        step = self.step_within(sizes, rows, how, limit_bytes)
        if step is None:
            return None
        side, again = self._last(rows), how.gathers_again
        placement, sizes = side.placement(how), side.sizes(sizes, rows.sides)
        if again is not None and not side.runnable.priced.gathered_again(placement, step) <= again:
            return None  # its round keeps units that this step of recompute was priced without
        return side.runnable.variant(placement, step, sizes, how.place, again)

    def compare(
        self, sizes: Sizes, inputs: Mapping[str, Tensor], rows: RowsOfCall, how: CallSetting
    ) -> None:
        """Shows the first call of each program to its inspector: two of its samples.

        Loss and every gradient are compared, in a call without gradients as well.

        Args:
            sizes: lengths, as for `rows`.
            inputs: tensors by placeholder.
            rows: valid rows.
            how: setting, as for `rows`.

        Raises:
            VerifyError: it does not give what the plain model gives.
        """
        inspector, traced = self._whole.inspector, self._whole.traced
        if (len(rows.sides), how.sp) in self._compared or inspector is None:
            return
        with torch.inference_mode(False), torch.enable_grad():
            sizes, few = self._few(sizes, inputs)
            few = {p: x.clone() for p, x in few.items()}  # out of a caller's inference_mode
            of_few = self._find(sizes, few)
            if not of_few or (len(of_few.sides), how.sp) in self._compared:
                return
            runs = self._compared_by(sizes, of_few, how)
            if runs is None:
                return
            self._compared.add((len(of_few.sides), how.sp))
            named = {name: few[p] for p, name in traced.program.inputs.items()}
            others = {name: x for side in of_few.sides for name, x in side.indices.items()}
            side = self._last(of_few)
            program = side.runnable.traced.program
            sizes = side.sizes(sizes, of_few.sides)
            name = "without padding" + (f" at sp {how.sp}" if how.sp > 1 else "")
            call = RewrittenCall(program, sizes, named, others, runs, name)
            inspector.rewritten(traced, call)

    def _compared_by(
        self, sizes: Sizes, rows: RowsOfCall, how: CallSetting
    ) -> tuple[Variant, tuple[int, ...]] | tuple[LoweredPair, Partition] | None:
        """Returns the graphs that a call is compared by: a variant on one rank that gathers none.

        Else the lowered graphs of all ranks, which take parameters whole.
        """
        if how.sp == 1 and self._whole.traced.units is None:
            return self.variant(sizes, rows, replace(how, menu_step=0))
        side = self._last(rows)
        runnable, placement, hints = side.runnable, side.placement(how), None
        traced = runnable.traced
        if traced.backend != "eager":  # graphs for Inductor are traced alone, for these few rows
            dims = traced.program.dims(side.sizes(sizes, rows.sides))
            hints = next(runnable.hints(placement, traced.backend, dims, how.place))
        whole = traced.lowering(placement, hints, gathers=False)
        return whole, runnable.partition(placement, 0, hints, gathers=False)

    def _few(
        self, sizes: Sizes, inputs: Mapping[str, Tensor]
    ) -> tuple[Sizes, Mapping[str, Tensor]]:
        """Returns the first and the last sample of a call, where its program takes any number."""
        program = self._whole.traced.program
        symbol = program.symbols.get(BATCH)
        if symbol is None or sizes[BATCH] <= FEW:
            return sizes, inputs
        few = dict(inputs)
        for p in program.inputs:
            for d, size in enumerate(program.info[p].shape):
                if size == symbol:
                    ends = torch.tensor([0, sizes[BATCH] - 1], device=few[p].device)
                    few[p] = few[p].index_select(d, ends)
        return {**sizes, BATCH: FEW}, few

    def step_within(
        self, sizes: Sizes, rows: RowsOfCall, how: CallSetting, limit_bytes: int
    ) -> int | None:
        """Returns the fewest steps of recompute of which the predicted peak is within a limit."""
        side = self._last(rows)
        sizes = side.sizes(sizes, rows.sides)
        study = side.study(how)
        return fewest_steps(
            study.steps, lambda step: study.predict(step, sizes).peak_bytes, limit_bytes
        )

    def _padded(self, how: CallSetting) -> Study:
        return self._whole.priced.at(placement_of(self._whole, how.sp, how.sizes))
