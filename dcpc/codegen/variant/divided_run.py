"""Runs a variant's backward in two parts: the gradients that others wait for, and the rest."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dcpc.codegen.joint.partition import divide
from dcpc.codegen.variant.boxed import Boxed, boxed_python
from dcpc.codegen.variant.call import VariantCall
from dcpc.codegen.variant.variant import Variant

Gradients = dict[str, Tensor]  # placeholder -> gradient


@dataclass(frozen=True, slots=True)
class DividedRun:
    """Both parts of a backward, as plain Python calls with any backend.

    Attributes:
        first: boxed first part.
        second: boxed second part.
        early: placeholder names whose gradients the first part returns.
        late: placeholder names whose gradients the second part returns.
    """

    first: Boxed
    second: Boxed
    early: tuple[str, ...]
    late: tuple[str, ...]

    @classmethod
    def of(cls, variant: Variant, first: Collection[str]) -> DividedRun | None:
        """Returns the divided backward of a variant, or None if one of the parts would be empty.

        Args:
            variant: variant with whole parameters.
            first: placeholder names whose gradients to produce first, see `divided`.
        """
        names = [variant.placeholders[position] for position in variant.trainable]
        numbers = [n for n, name in enumerate(names) if name in first]
        parts = divide(variant.partition.backward, numbers)
        if parts is None:
            return None
        return cls(
            boxed_python(parts.first),
            boxed_python(parts.second),
            tuple(names[n] for n in parts.numbers),
            tuple(names[n] for n in parts.others),
        )

    def run_first(
        self, call: VariantCall, gradients: list[Tensor | None]
    ) -> tuple[Gradients, list[Any]]:
        """Returns the first gradients, and the arguments of the second part."""
        arguments = call.arguments(gradients)
        with call.without_casts():
            found = list(self.first(arguments))
        count = len(self.early)
        return dict(zip(self.early, found[:count], strict=True)), found[count:]

    def run_second(self, call: VariantCall, rest: list[Any]) -> Gradients:
        """Returns the other gradients, and empties `rest`."""
        with call.without_casts():
            return dict(zip(self.late, self.second(rest), strict=True))
