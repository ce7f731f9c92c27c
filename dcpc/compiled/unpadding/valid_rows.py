"""Finds the rows of a call's inputs that are no padding, before its graph runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dcpc.buckets import Sizes
from dcpc.codegen.lower.lower import Lowered, lower
from dcpc.codegen.lower.unpad_rewriting import index_name
from dcpc.ir import Placement, RowCheck, UnpadPlan
from dcpc.ops.attention import hiding
from dcpc.plan.traced import Traced


@dataclass(frozen=True, slots=True, eq=False)
class ValidRows:
    """The rows of a batch that are not padding.

    Attributes:
        indices: indices of the rows, by the name of an input of the program without padding.
        count: number of the rows.
        squares: sum over samples of the square of their number of rows.
        samples: number of samples that have any.
        padded: whether there are padded rows, too.
    """

    indices: Mapping[str, Tensor]
    count: int
    squares: int
    samples: int
    padded: bool


class RowFinder:
    """Finds the valid rows of calls of one program.

    Args:
        traced: program with padding.
        plan: plan made for it.
        placement: placement of it on one rank.
        number: number of sides whose padded rows that program leaves out already.
    """

    def __init__(
        self, traced: Traced, plan: UnpadPlan, placement: Placement, number: int = 0
    ) -> None:
        self._traced, self._plan, self._placement = traced, plan, placement
        self._number = number
        self._checks: list[RowCheck] = sorted(plan.checks, key=lambda c: (c.node, c.number))
        self._hiding = sorted(plan.hiding)

    @cached_property
    def _lowered(self) -> Lowered:
        """Graph that computes the valid rows, and the values that are checked."""
        checked = (c.node for c in self._checks)
        names = (self._plan.keep, *checked, *(name for name, _ in self._hiding))
        asked = replace(self._traced.program, outputs=names, begins=(), pieces=False)
        return lower(asked, self._placement, "")

    def find(self, sizes: Sizes, inputs: Mapping[str, Tensor]) -> ValidRows | None:
        """Returns the valid rows; None: there is but one, or something may read padded ones.

        Args:
            sizes: lengths of the dims, batch included.
            inputs: tensors by placeholder.
        """
        with torch.no_grad():
            mask, *checked = self._values(sizes, inputs)
            batch, seq = (
                int(n.subs(self._traced.program.dims(sizes))) for n in self._plan.row_sizes
            )
            shown = _shown_keys(mask.reshape(batch, -1, seq))
            if shown is None:
                return None
            keep = shown.any(1)
            rows = keep.reshape(-1).nonzero().squeeze(1)
            if rows.numel() < 2:
                return None
            lengths = keep.sum(1)
            if not self._is_safe(keep, lengths, checked):
                return None
            sample = rows.div(keep.shape[1], rounding_mode="floor")
            found = {"rows": rows, "sample": sample, "position": rows - sample * keep.shape[1]}
            found["sequence"] = sample.unsqueeze(0)
            indices = {index_name(which, self._number): x for which, x in found.items()}
            squares, samples = int((lengths * lengths).sum()), int((lengths > 0).sum())
            padded = rows.numel() < keep.numel()
            return ValidRows(indices, rows.numel(), squares, samples, padded)

    def _values(self, sizes: Sizes, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        dims, lowered = self._traced.program.dims(sizes), self._lowered
        held = {**self._traced.tensors(), **inputs}
        integers = {i.name: i.value(dims, 1, 0) for i in lowered.integers}
        given = [
            None if not node.users else integers.get(node.name, held.get(node.name))
            for node in lowered.gm.graph.nodes
            if node.op == "placeholder"
        ]
        return list(lowered.gm(*given))

    def _is_safe(self, keep: Tensor, lengths: Tensor, checked: list[Tensor]) -> bool:
        """Whether nothing reads padding in this call."""
        padded = ~keep.reshape(-1)
        holds = [
            (value.reshape(padded.numel(), -1)[padded] == check.number).all()
            for check, value in zip(self._checks, checked, strict=False)
        ]
        for (_, own), mask in zip(self._hiding, checked[len(self._checks) :], strict=True):
            if not _hides(mask, keep, own=own):
                return False
        holds += [keep[:, p].all() for p in self._plan.positions if p < keep.shape[1]]
        if self._plan.runs:
            begins = (keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, 0]
            holds.append((begins <= 1).all())
        if self._plan.nonempty:
            holds.append((lengths > 0).all())
        return all(map(bool, holds))


def _hides(mask: Tensor, keep: Tensor, *, own: bool) -> bool:
    """Whether a mask `[batch, 1, queries, seq]` hides padded keys and shows some to each query.

    Where the queries are rows (`own`), padded ones may see none.
    """
    shown = _shown_keys(mask.reshape(keep.shape[0], -1, keep.shape[1]))
    if shown is None:
        return False
    sees = shown.any(2)
    return bool(~(shown & ~keep[:, None]).any() & ((sees | ~keep) if own else sees).all())


def _shown_keys(mask: Tensor) -> Tensor | None:
    """Returns the keys that a mask shows; None: for some it is neither 0 nor hiding."""
    if mask.dtype == torch.bool:
        return mask
    seen = mask == 0
    return seen if bool((seen | (mask <= hiding(mask.dtype))).all()) else None
