"""Batches whose lengths lie between those of the buckets: filled up to one, or run as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from dcpc.buckets import BATCH, Buckets, shapes_and_dtypes
from dcpc.compiled.editions import Edition, EditionCache
from dcpc.errors import DispatchError, check_choice
from dcpc.runtime.data.samples import check_fills

BETWEEN = (None, "pad", "compile")


def refuse_arguments(
    batch: object,
    between: str | None,
    pad: Mapping[str, int | float] | None,
    buckets: Buckets,
    outputs: bool,
) -> None:
    """Refuses arguments of `evaluate` that contradict each other.

    Raises:
        DispatchError: the batch is no mapping, `between` is none of its values, `pad` is given
            without "pad", or names no input, or outputs are asked for of a padded batch.
        DataError: an input's dtype has no such value.
    """
    if not isinstance(batch, Mapping):
        raise DispatchError(
            f"evaluate: got a batch of type {type(batch).__name__}; expected a mapping of inputs "
            f"by name; pass {{'{next(iter(buckets.inputs))}': ..., ...}}"
        )
    check_choice("evaluate: got between=", between, BETWEEN, DispatchError)
    if pad is not None and not isinstance(pad, Mapping):
        raise DispatchError(
            f"evaluate: got pad={pad!r}; expected input name -> number; pass e.g. "
            f"pad={{'{next(iter(buckets.inputs))}': 0}}"
        )
    unknown = [name for name in pad or {} if name not in buckets.inputs]
    if unknown or (pad and between != "pad"):
        raise DispatchError(
            f"evaluate: got pad={dict(pad or {})} with between={between!r}; expected what fills up "
            f"inputs ({', '.join(buckets.inputs)}), with between='pad'; correct the names, or "
            "leave pad= out"
        )
    if outputs and between == "pad":
        raise DispatchError(
            "evaluate: got outputs=True with between='pad'; expected outputs of the batch's own "
            "lengths; take between='compile', or pad the batch yourself and cut its outputs"
        )
    check_fills(buckets.inputs, pad or {})


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """Puts a model into eval() within its block, and every module back after it."""
    was, modes = model.training, [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        model.train(was)  # a model may do more there than set flags
        for module, training in modes:
            module.training = training


def filled_up(
    edition: Edition, inputs: dict[str, Tensor], pad: Mapping[str, int | float]
) -> dict[str, Tensor]:
    """Returns a batch with the lengths of the smallest bucket that holds it.

    That padding changes no number is looked up at small lengths, once for these values.

    Args:
        edition: edition of the mode that the model is in.
        inputs: tensors by input name.
        pad: value that each input is filled up with.

    Raises:
        DispatchError: an input has no value in `pad`, or padding changes the loss.
    """
    buckets = edition.buckets
    bucket, sizes = buckets.match(*shapes_and_dtypes(inputs))
    longer = [name for name, size in bucket.shape_key if sizes[name] < size]
    if not longer:
        return inputs
    found = {}
    for name, spec in buckets.inputs.items():
        shape = spec.shape({**bucket.sizes, BATCH: sizes.get(BATCH, 1)})
        x = found[name] = inputs[name]
        if tuple(x.shape) == shape:
            continue
        if name not in pad:
            raise DispatchError(
                f"evaluate: got '{name}' of shape {tuple(x.shape)} and no value to fill it up to "
                f"{shape}; expected one in pad=; pass e.g. pad={{'{name}': 0}} (0 for ids and "
                "attention masks, -100 for labels that the loss ignores), or between='compile'"
            )
        found[name] = x.new_full(shape, pad[name])
        found[name][tuple(slice(0, size) for size in x.shape)] = x
    problem = edition.verifier.padding_problem(
        edition.planned.by_bucket[bucket].traced, tuple(longer), pad
    )
    if problem is not None:
        raise problem
    return found


def length_edition(editions: EditionCache, base: Edition, inputs: Mapping[str, Tensor]) -> Edition:
    """Returns the edition of a batch's very lengths."""
    bucket, sizes = base.buckets.match(*shapes_and_dtypes(inputs))
    if all(sizes[name] == size for name, size in bucket.shape_key):
        return base
    return editions.at(base, sizes, bucket)
