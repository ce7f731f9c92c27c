"""Runs a call without its padding, where that pays and changes nothing.

    inputs ─► valid rows ─► checks ─► costs ─► the program of valid rows
                              └─────────┴────► the program with padding

Which rows are valid is found out before the graph runs, so no size in it depends on data, and one
graph serves every number of them. All numbers are those of the program with padding: at valid
rows, the loss, every gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dcpc.buckets import BATCH, Sizes
from dcpc.codegen import Variant
from dcpc.codegen.lower.unpad import ROWS, apply_unpad
from dcpc.compiled.unpadding.valid_rows import RowFinder, ValidRows
from dcpc.ir import Placement
from dcpc.passes.sharding.sharding import analyse
from dcpc.passes.unpad.unpad import unpad
from dcpc.plan.runnable import RewrittenCall, Runnable
from dcpc.plan.studies import Study
from dcpc.symbolic_profile.evaluate import Evaluator

# Seconds of looking for the valid rows of a call, and what share of the call they may be.
FIND_S, FIND_SHARE = 4e-4, 0.02
# Predicted seconds of a call with padding below which "auto" does not look for any.
WORTH_S = FIND_S / FIND_SHARE
# Share of them that must be saved: predictions are off.
MARGIN = 0.06
# Seconds of one attention of one sample more in a row, forward and backward: a kernel call each.
SEQUENCE_S = 6e-5
# Shares of the steps of recompute that are tried: each is a variant.
STEPS = (0.0, 0.25, 0.5, 0.75, 1.0)
FEW = 2  # samples of a call that are compared with the plain model's


@dataclass(frozen=True, slots=True)
class _RowPrice:
    """Seconds of a program without padding at some lengths, by its valid rows.

    Attributes:
        fixed: whatever they are.
        row: for each.
        pair: for each two of one sample.
    """

    fixed: float
    row: float
    pair: float


class Unpadding:
    """The calls of one program that run without padding.

    Args:
        whole: the program with padding.
        mode: "auto": where it pays; True: wherever it changes nothing; False: nowhere.

    Attributes:
        plan: which values are made for valid rows alone.
        reason: why all calls run with padding; "" where some may run without.
    """

    def __init__(self, whole: Runnable, mode: bool | str) -> None:
        self._whole, self._mode = whole, mode
        traced = whole.traced
        self.plan = unpad(traced.program, traced.sharding)
        self.reason = self.plan.reason
        if not self.reason and mode == "auto" and self.plan.returned:
            names = ", ".join(sorted(self.plan.returned))
            self.reason = f"{names} is returned with its padded rows"
        self._prices: dict[tuple[tuple[str, int], ...], _RowPrice] = {}
        self._compared = whole.inspector is None

    @cached_property
    def _placement(self) -> Placement:
        return self._whole.priced.placement(self._whole.traced.program.hints, 1)

    @cached_property
    def _finder(self) -> RowFinder:
        return RowFinder(self._whole.traced, self.plan, self._placement)

    @cached_property
    def runnable(self) -> Runnable:
        """The program without padding."""
        traced = self._whole.traced
        program = apply_unpad(traced.program, self.plan)
        sharding = analyse(program, derive_rules=False)
        reference = {BATCH: 1, **(traced.reference or program.hints)}
        batch, seq = self.plan.row_sizes
        reference[ROWS] = int((batch * seq).subs(traced.program.dims(reference)))
        return Runnable(
            replace(traced, program=program, sharding=sharding, reference=reference, tracers={})
        )

    @property
    def indices(self) -> Mapping[str, str]:
        """Placeholder -> name, of what the program without padding gets besides."""
        inputs, own = self.runnable.traced.program.inputs, self._whole.traced.program.inputs
        return {p: name for p, name in inputs.items() if p not in own}

    def rows(self, sizes: Sizes, inputs: Mapping[str, Tensor], menu_step: int) -> ValidRows | None:
        """Returns the rows that a call is run with; None: with all.

        Args:
            sizes: lengths of the dims, batch included.
            inputs: by placeholder.
            menu_step: steps of recompute that the program with padding is run with.
        """
        if self.reason or self._mode is False:
            return None
        if self.plan.returned and torch.is_grad_enabled():  # padded rows may get a gradient
            return None
        if self._mode is True:
            return self._finder.find(sizes, inputs)
        padded_s = self._padded.predict(menu_step, sizes).seconds_s
        if padded_s < WORTH_S:
            return None
        found = self._finder.find(sizes, inputs)
        if found is None or self._seconds(sizes, found) > (1 - MARGIN) * padded_s:
            return None
        return found

    def variant(
        self, sizes: Sizes, rows: ValidRows, menu_step: int
    ) -> tuple[Variant, tuple[int, ...]] | None:
        """Returns what runs a call without padding, and its integers.

        It is predicted to need no more memory than the same call with padding; None: that is not
        possible.

        Args:
            sizes: as for `rows`.
            rows: the valid ones.
            menu_step: as for `rows`.
        """
        limit_bytes = self._padded.predict(menu_step, sizes).peak_bytes
        step = self.step_within(sizes, rows, limit_bytes)
        if step is None:
            return None
        sizes = {**sizes, ROWS: rows.count}
        placement = self.runnable.priced.placement(sizes, 1)
        return self.runnable.variant(placement, step, sizes, 0)

    def compare(self, sizes: Sizes, inputs: Mapping[str, Tensor]) -> None:
        """Shows the first such call to the inspector of the program: two of its samples.

        Loss and every gradient are compared, in a call without gradients as well.

        Args:
            sizes: as for `rows`.
            inputs: by placeholder.

        Raises:
            VerifyError: it does not give what the plain model gives.
        """
        inspector, traced = self._whole.inspector, self._whole.traced
        if self._compared or inspector is None:
            return
        with torch.inference_mode(False), torch.enable_grad():
            sizes, few = self._few(sizes, inputs)
            few = {p: x.clone() for p, x in few.items()}  # out of a caller's inference_mode
            rows = self._finder.find(sizes, few)
            found = rows and self.variant(sizes, rows, 0)
            if not rows or not found:
                return
            self._compared = True
            named = {name: few[p] for p, name in traced.program.inputs.items()}
            program = self.runnable.traced.program
            call = RewrittenCall(program, sizes, named, rows.indices, *found, "without padding")
            inspector.rewritten(traced, call)

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

    def step_within(self, sizes: Sizes, rows: ValidRows, limit_bytes: int) -> int | None:
        """Returns the fewest steps of recompute of which the predicted peak is not above a limit.

        Args:
            sizes: as for `rows`.
            rows: the valid ones.
            limit_bytes: of activations and gradients.
        """
        sizes = {**sizes, ROWS: rows.count}
        for step in sorted({round(share * self._study.steps) for share in STEPS}):
            if self._study.predict(step, sizes).peak_bytes <= limit_bytes:
                return step
        return None

    # ----------------------------------------------------------------------------------- costs

    @cached_property
    def _padded(self) -> Study:
        return self._whole.priced.at(self._placement)

    @cached_property
    def _study(self) -> Study:
        hints = self.runnable.traced.program.hints
        return self.runnable.priced.at(self.runnable.priced.placement(hints, 1))

    @cached_property
    def _evaluator(self) -> Evaluator:
        return Evaluator(self._study.profile(0))

    def _seconds(self, sizes: Sizes, rows: ValidRows) -> float:
        """Returns the predicted seconds of a call without padding, forward and backward.

        The profile knows the rows, and not of how many samples they are: it prices attention as if
        they were of one.
        """
        key = tuple(sorted(sizes.items()))
        if key not in self._prices:
            self._prices[key] = self._price(sizes)
        price = self._prices[key]
        calls_s = len(self.plan.attentions) * rows.samples * SEQUENCE_S
        return price.fixed + price.row * rows.count + price.pair * rows.squares + calls_s

    def _price(self, sizes: Sizes) -> _RowPrice:
        few, many = 256, 4096
        by_class = {
            count: self._evaluator.seconds_by_class(
                self._study.local_sizes({**sizes, ROWS: count}), self._whole.traced.device
            )
            for count in (few, many)
        }
        padded = {n: of.get("attention", 0.0) for n, of in by_class.items()}
        pair = (padded[many] - padded[few]) / (many**2 - few**2)
        rest = {n: sum(s for c, s in of.items() if c != "attention") for n, of in by_class.items()}
        row = (rest[many] - rest[few]) / (many - few)
        fixed_s = rest[few] - few * row + padded[few] - few**2 * pair
        return _RowPrice(fixed_s, row, pair)
