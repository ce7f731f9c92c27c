"""The two parts of a variant's backward: what others wait for, and what may come later."""

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
    """Both parts, as plain Python calls whatever compiled the variant.

    Attributes:
        first: boxed first part.
        second: boxed second part.
        early: placeholders whose gradients the first part returns.
        late: those of the second part.
    """

    first: Boxed
    second: Boxed
    early: tuple[str, ...]
    late: tuple[str, ...]

    @classmethod
    def of(cls, variant: Variant, first: Collection[str]) -> DividedRun | None:
        """Returns a variant's; None where one of the parts would have nothing to do.

        Args:
            variant: whose parameters are whole.
            first: placeholders whose gradients come first, see `divided`.
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
        """Returns the gradients that come first, and what the second part takes.

        Args:
            call: of the variant.
            gradients: of each value that backward begins at.
        """
        arguments = call.arguments(gradients)
        with call.without_casts():
            found = list(self.first(arguments))
        count = len(self.early)
        return dict(zip(self.early, found[:count], strict=True)), found[count:]

    def run_second(self, call: VariantCall, rest: list[Any]) -> Gradients:
        """Returns the other gradients; `rest` is emptied."""
        with call.without_casts():
            return dict(zip(self.late, self.second(rest), strict=True))
