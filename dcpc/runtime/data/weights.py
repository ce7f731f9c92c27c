"""The weight of a micro-batch in the gradient of the global batch.

A step's loss is `sum(weight * loss) / sum(weight)` over its micro-batches. It is the loss of the
whole batch on one device if `weight` is the divisor of the model's own mean: samples, or labels
that count.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

import torch

from dcpc.errors import DataError, meant

Inputs = Mapping[str, torch.Tensor]
Weight = str | Callable[[Inputs], float]

SAMPLES = "samples"


@dataclass(frozen=True, slots=True)
class CountLabels:
    """Weight of a loss that is a mean over the labels that are not ignored.

    Attributes:
        name: the input that holds the labels.
        ignore_index: labels of this value do not count.
        shift: leading labels along the last dim that the model drops: 1 for causal language models
            of the transformers library, which predict label t from the tokens before it.
    """

    name: str
    ignore_index: int = -100
    shift: int = 0

    def __post_init__(self) -> None:
        """Checks the numbers.

        Raises:
            DataError: one is no integer, or `shift` is below 0.
        """
        for field, value, least in (("ignore_index", self.ignore_index, None),
                                    ("shift", self.shift, 0)):  # fmt: skip
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or (least is not None and value < least):
                more = "" if least is None else f" >= {least}"
                raise DataError(
                    f"CountLabels: got {field}={value!r}; expected an integer{more}; correct it"
                )

    def __call__(self, inputs: Inputs) -> float:
        """Returns the number of labels that count."""
        labels = inputs[self.name][..., self.shift :]
        # In int64: torch compares a uint8 156 with -100 as equal.
        return float((labels.long() != self.ignore_index).sum())


def weight_function(
    weight: Weight, names: Mapping[str, object]
) -> Callable[[Inputs], float] | None:
    """Returns the function that weighs a micro-batch's inputs; None: its number of samples.

    Args:
        weight: "samples", the name of the input that holds labels, or a function.
        names: the model's inputs.

    Raises:
        DataError: a name of no input, or neither a name nor a function.
    """
    if weight == SAMPLES:
        return None
    name = weight if isinstance(weight, str) else getattr(weight, "name", None)
    if isinstance(weight, str | CountLabels) and name not in names:
        raise DataError(
            f"weight=: got '{name}'; expected '{SAMPLES}', an input ({', '.join(names)}) or a "
            f"function; {meant(name, (SAMPLES, *names), 'correct the name')}"
        )
    if not isinstance(weight, str) and not callable(weight):
        raise DataError(
            f"weight=: got {weight!r}; expected '{SAMPLES}', an input ({', '.join(names)}) or a "
            "function; pass the name of the input that has the labels"
        )
    return CountLabels(weight) if isinstance(weight, str) else weight


def weighed(weigh: Callable[[Inputs], float], inputs: Inputs, ids: tuple[int, ...]) -> float:
    """Returns the weight that a function gives a micro-batch, as a float.

    Raises:
        DataError: it raises, or its result is no number, negative or not finite.
    """
    got: object = None
    cause: Exception | None = None
    try:
        got = weigh(inputs)
        value = float(got)
        if isfinite(value) and value >= 0:
            return value
    except Exception as error:
        got, cause = f"{type(error).__name__}: {error}", error
    raise DataError(
        f"weight of the micro-batch of samples {list(ids)[:8]}: got {got}; expected a finite "
        "number >= 0; correct the function given as weight="
    ) from cause
