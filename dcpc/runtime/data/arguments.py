"""Arguments of the loader, checked: each check raises a `DataError` that names its argument."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dcpc.errors import DataError, check_choice
from dcpc.runtime.data.steps import Step
from dcpc.runtime.planner.plans import Mode
from dcpc.runtime.planner.step_planner import Allowed


def allowed_steps(mode: Mode, least: int, most: int | None) -> Allowed:
    """Returns the limits of a step, by the number of micro-batches of a rank."""
    if most is not None:
        check_count("max_grad_accumulation_steps", most, least)
    if mode == "intra" and (least > 1 or most is not None):
        raise DataError(
            f"min_grad_accumulation_steps={least}, max_grad_accumulation_steps={most}: got mode "
            "'intra', whose steps have one bucket; expected none of both; leave them out, or "
            "choose mode='inter'"
        )
    return Allowed(least, most or 0)


def check_compiled(compiled: object) -> None:
    """Refuses an object that is no result of `dcpc.compile`."""
    if not (hasattr(compiled, "plans") and hasattr(compiled, "groups")):
        raise DataError(
            f"compiled: got {type(compiled).__name__}; expected what dcpc.compile returned; "
            "compile the model first, and pass DataLoader(dataset, compiled, ...)"
        )


def check_step(step: object) -> None:
    """Refuses an object that is no step of the loader."""
    if not isinstance(step, Step):
        raise DataError(
            f"step: got {type(step).__name__}; expected a step that dcpc.DataLoader yields; to run "
            "inputs of your own call the compiled model: compiled(...).backward(), then "
            "compiled.reduce_gradients()"
        )


def check_dataset(dataset: object) -> None:
    """Refuses a dataset that has no samples by number, and is no stream."""
    kind = type(dataset)
    if not (hasattr(kind, "__len__") and hasattr(kind, "__getitem__")):
        raise DataError(
            f"dataset: got {kind.__name__}; expected samples by number (len(dataset) and "
            "dataset[i]), or a stream whose __iter__ begins anew in each epoch; for a generator "
            "pass a class whose __iter__ makes it, or a list of its samples"
        )
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except Exception as error:
        raise DataError(
            f"dataset: got {type(error).__name__}: {error} from len({kind.__name__}); expected the "
            "number of its samples; correct its __len__"
        ) from error
    if isinstance(dataset, Mapping):
        raise DataError(
            f"dataset: got a {kind.__name__} with {size} keys; expected samples by number, from 0; "
            "pass a list of samples, each a mapping of the inputs"
        )
    if size == 0:
        raise DataError(
            "dataset: got 0 samples; expected at least 1; check the path or filter it is made from"
        )


def check_pad(pad: object) -> None:
    """Refuses padding values that are not given by input name."""
    if pad is not None and not isinstance(pad, Mapping):
        raise DataError(
            f"pad=: got {pad!r}; expected input name -> value; pass e.g. pad={{'labels': -100}}"
        )


def check_choices(name: str, value: object, choices: Sequence[str]) -> tuple[str, ...]:
    """Returns some of a few names, of which one may be given alone."""
    given = (value,) if isinstance(value, str) or not isinstance(value, Collection) else [*value]
    for each in given:
        check_choice(f"got {name}=", each, choices, DataError)
    return tuple(map(str, given))


def check_seconds(name: str, value: object) -> None:
    """Refuses a value that is no time limit."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise DataError(
            f"{name}: got {value!r}; expected a positive number of seconds; pass e.g. 60.0"
        )


def check_flags(**given: object) -> None:
    """Refuses switches that are neither on nor off."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise DataError(f"{name}: got {value!r}; expected True or False; pass one")


def check_stages(**given: bool) -> None:
    """Refuses arguments that a loader does not support for a model in stages."""
    for name in (name for name, asked in given.items() if asked):
        raise DataError(
            f"{name}: got it for a model that was compiled with pipeline=; expected a loader that "
            "plans each bucket's samples for the stages, mode='auto'; "
            "leave it out, or compile without pipeline="
        )


def check_reading(stream: bool, shuffle: bool | None, order: object, num_workers: int) -> None:
    """Refuses an order for a stream, and worker processes for samples by number."""
    check_count("num_workers", num_workers, 0)
    if stream and (shuffle or order is not None):
        what = "order=" if order is not None else "shuffle=True"
        raise DataError(
            f"{what}: got it for a stream, whose samples come in its own order; expected none of "
            "both; leave it out, and shuffle in the stream: "
            "dataset.shuffle(seed=0, buffer_size=10_000) of datasets, .shuffle(10_000) of "
            "webdataset, or set_epoch(epoch), which the loader calls if the dataset has it"
        )
    if num_workers and not stream:
        raise DataError(
            f"num_workers={num_workers}: got it for samples by number, of which each rank's thread "
            "reads those that it runs; expected a stream, which rank 0 reads for all; leave it "
            "out, or raise lookahead="
        )


def check_step_size(tokens: int | None, samples: int | None) -> int:
    """Returns how many tokens or samples a step has, whichever is given."""
    if (tokens is None) == (samples is None):
        raise DataError(
            f"tokens_per_step={tokens}, samples_per_step={samples}: got "
            f"{'neither' if tokens is None else 'both'}; expected one of them, the size of a "
            "global batch; pass tokens_per_step="
        )
    if samples is not None:
        return check_count("samples_per_step", samples, 1)
    return check_count("tokens_per_step", tokens, 1)


def check_count(name: str, value: object, least: int) -> int:
    """Returns an integer that is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(
            f"{name}: got {value!r}; expected an integer >= {least}; pass one that is at least "
            f"{least}"
        )
    return value
