"""From samples of any length to a micro-batch: lengths, bucket, padding, stacking."""

from __future__ import annotations

import reprlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch

from dcpc.buckets import BATCH, Bucket, Buckets, DimExpr, InputSpec, completed, tokens_of
from dcpc.errors import DataError, DcpcError, meant
from dcpc.runtime.data.arguments import check_dataset
from dcpc.runtime.planner.own_lengths import Dims

# Samples of a stream whose lengths stay known: for saved plans, and advice on buckets.
_LENGTHS_KEPT = 100_000


class Dataset(Protocol):
    """Map-style: a sample is one tensor for each input, of its spec's shape without `batch`."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Mapping[str, torch.Tensor]:
        """Sample `index`."""


@runtime_checkable
class HasDims(Protocol):
    """A dataset that knows its samples' lengths without loading them."""

    def dims(self, index: int, /) -> Mapping[str, int]:
        """Length of each named dim of sample `index`, `batch` left out."""


@runtime_checkable
class ReadForward(Protocol):
    """A dataset whose samples are there once, as a stream is read; an epoch numbers its own."""

    def reaches(self, place: int, /) -> bool:
        """Whether there is a sample of this number."""


@dataclass(frozen=True, slots=True)
class SampleBucket:
    """Bucket of a sample of some lengths.

    Attributes:
        dims: lengths of the sample.
        bucket: smallest bucket that holds it; None: it is longer than all of them.
        tokens: product of the lengths.
    """

    dims: Dims
    bucket: Bucket | None
    tokens: int


class Samples:
    """The samples of a dataset as the buckets see them.

    Loads a sample for its lengths at most once, and not at all where the dataset has `dims(i)`.
    """

    def __init__(
        self, dataset: Dataset, buckets: Buckets, pad: Mapping[str, int | float] | None
    ) -> None:
        """Checks the arguments against each other.

        Raises:
            DataError: the dataset has no samples by number, or none; `pad` names no input, or a
                spec cannot be stacked.
        """
        self._forward = isinstance(dataset, ReadForward)
        if not self._forward:
            check_dataset(dataset)
        self.dataset = dataset
        self.inputs = buckets.inputs
        self.pad = dict(pad or {})
        self.names = tuple(name for name in buckets.names if name != BATCH)
        self._smallest = {n: size for n, size in buckets.smallest.items() if n != BATCH}
        self._specs = {n: InputSpec(s.dtype, _sample_dims(s)) for n, s in self.inputs.items()}
        self._ascending = sorted(buckets, key=lambda b: (b.tokens, b.shape_key))
        self._fits: dict[Dims, SampleBucket] = {}
        self._dims: dict[int, Dims] = {}
        self._loaded: dict[int, dict[str, torch.Tensor]] = {}
        # A step that is planned again is loaded beside the thread that loads ahead.
        self._one_at_a_time = threading.RLock()
        unknown = sorted(self.pad.keys() - self.inputs.keys())
        if unknown:
            raise DataError(
                f"pad=: got {', '.join(unknown)}; expected names of inputs: "
                f"{', '.join(self.inputs)}; {meant(unknown[0], self.inputs, 'correct the name')}"
            )
        check_fills(self.inputs, self.pad)
        for name, spec in self.inputs.items():
            batches = [dim for dim in spec.dims if dim.name == BATCH]
            if len(batches) > 1 or any(dim != DimExpr(BATCH) for dim in batches):
                raise DataError(
                    f"input '{name}': got spec {spec}; expected at most one dim '{BATCH}', without "
                    "arithmetic, for samples to be stacked along; make this input in the model"
                )

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def fills_all(self) -> bool:
        """Whether there is something to fill up each input with that differs in length."""
        return all(
            name in self.pad or all(dim.name in (None, BATCH) for dim in spec.dims)
            for name, spec in self.inputs.items()
        )

    def fit(self, index: int) -> SampleBucket:
        """Returns bucket and tokens of a sample.

        Raises:
            DataError: the sample or its lengths contradict the input specs.
        """
        dims = self._dims.get(index)
        if dims is None:
            known = self.dataset
            if isinstance(known, HasDims):
                with self._one_at_a_time:
                    told = self._asked(f"dims({index})", partial(known.dims, index))
                dims = self._declared(index, told)
            else:
                self.load(index)
                dims = self._dims[index]
            self._dims[index] = dims
        fit = self._fits.get(dims)
        if fit is None:
            holding = [b for b in self._ascending if _holds(b, dims)]
            alike = (b for b in holding if not any(b[name] for name, size in dims if size == 0))
            bucket = next(alike, next(iter(holding), None))
            fit = SampleBucket(dims, bucket, tokens_of(size for _, size in dims))
            self._fits[dims] = fit
        return fit

    def counts(self) -> Counter[Dims]:
        """Returns how many samples of each combination of lengths were seen and have a bucket.

        Of a stream the last ones count.
        """
        fits = {dims for dims, fit in self._fits.items() if fit.bucket is not None}
        return Counter(dims for dims in self._dims.values() if dims in fits)

    def describe_largest(self) -> str:
        """Returns the longest length of every dim over the buckets, for an error."""
        most = {name: max(b[name] for b in self._ascending) for name in self.names}
        return "{" + ", ".join(f"{name}: {size}" for name, size in most.items()) + "}"

    def collate(self, ids: Sequence[int], bucket: Bucket) -> dict[str, torch.Tensor]:
        """Returns the inputs of a micro-batch, each sample padded to the bucket and stacked.

        Raises:
            DataError: a sample contradicts the specs, or needs a pad value that was not given.
        """
        samples = [self.load(i) for i in ids]
        sizes = {**bucket.sizes, BATCH: len(ids)}
        return {
            name: self._stack(name, spec, ids, [s[name] for s in samples], sizes)
            for name, spec in self.inputs.items()
        }

    def refuse_other(self, ids: Sequence[int], bucket: Bucket, shape: Bucket, longer: bool) -> None:
        """Refuses samples that differ from those that rank 0 planned with.

        Raises:
            DataError: their own bucket is another, or they are longer.
        """
        for i in ids:
            fit = self.fit(i)
            same = fit.bucket == bucket or (longer and _holds(bucket, fit.dims))
            if not same or not _holds(shape, fit.dims):
                raise DataError(
                    f"sample {i}: got lengths {_text(fit.dims)}; expected some of bucket {shape}, "
                    "as rank 0 has this sample; give every rank the same dataset in the same order"
                )

    def forget(self, ids: Iterable[int]) -> None:
        """Drops samples that were loaded; their lengths stay known, of a stream for a while."""
        for i in ids:
            self._loaded.pop(i, None)
            if self._forward:
                self._dims.pop(i - _LENGTHS_KEPT, None)

    def restart(self) -> None:
        """Drops all that is known of samples, as an epoch of a stream numbers its own."""
        self._loaded.clear()
        self._dims.clear()

    def _stack(
        self,
        name: str,
        spec: InputSpec,
        ids: Sequence[int],
        tensors: Sequence[torch.Tensor],
        sizes: Mapping[str, int],
    ) -> torch.Tensor:
        """Returns one input of a micro-batch: `tensors` at the end filled up to `sizes`."""
        at = next((k for k, dim in enumerate(spec.dims) if dim.name == BATCH), None)
        shape = [dim.evaluate(sizes) for dim in spec.dims if dim.name != BATCH]
        filled = [
            self.filled(name, f"sample {i}", x, shape, self.pad)
            for i, x in zip(ids, tensors, strict=True)
        ]
        if at is not None:
            return torch.stack(filled, at)
        for i, x in zip(ids, filled, strict=True):
            if not torch.equal(x, filled[0]):
                raise DataError(
                    f"input '{name}' {spec}: got different values in samples {ids[0]} and {i} of "
                    f"one micro-batch; expected one value, as it has no dim '{BATCH}'; add "
                    f"'{BATCH}' to its spec"
                )
        return filled[0]

    def filled(
        self,
        name: str,
        where: str,
        x: torch.Tensor,
        shape: Sequence[int],
        pad: Mapping[str, int | float],
    ) -> torch.Tensor:
        """Returns an input filled up at its end.

        Raises:
            DataError: `pad` lacks the input.
        """
        if list(x.shape) == list(shape):
            return x
        if name not in pad:
            suggested = -100 if "label" in name or "target" in name else 0
            raise DataError(
                f"{where}, input '{name}': got shape {tuple(x.shape)}; expected "
                f"{tuple(shape)}, its bucket's; pass pad={{'{name}': {suggested}}} to fill up its "
                "end (0 for ids and attention masks, -100 for labels that the loss ignores), or "
                "add buckets of the exact lengths"
            )
        if any(have > room for have, room in zip(x.shape, shape, strict=True)):
            raise DataError(
                f"{where}, input '{name}': got shape {tuple(x.shape)}; expected at most "
                f"{tuple(shape)}, as it was planned by rank 0's lengths; give every rank the same "
                "dataset in the same order"
            )
        out = x.new_full(list(shape), pad[name])
        out[tuple(slice(0, size) for size in x.shape)] = x
        return out

    def load(self, index: int) -> dict[str, torch.Tensor]:
        """Returns a checked sample; its lengths are known from then on."""
        with self._one_at_a_time:
            return self._load(index)

    def _load(self, index: int) -> dict[str, torch.Tensor]:
        if index in self._loaded:
            return self._loaded[index]
        raw = self._asked(f"dataset[{index}]", lambda: self.dataset[index])
        if isinstance(raw, Mapping):
            told = {**self._smallest, **dict(self._dims.get(index, ()))}
            raw = completed(self._specs, raw, told)
        if not isinstance(raw, Mapping) or raw.keys() != self.inputs.keys():
            got = ", ".join(map(str, raw)) if isinstance(raw, Mapping) else type(raw).__name__
            raise DataError(
                f"sample {index}: got {got or 'an empty mapping'}; expected a mapping with exactly "
                f"{', '.join(self.inputs)}; return these from the dataset"
            )
        for name, spec in self.inputs.items():
            _check_tensor(index, name, spec, raw[name])
        dims = self._solve(index, raw)
        known = self._dims.setdefault(index, dims)
        if known != dims:
            raise DataError(
                f"sample {index}: got lengths {_text(dims)}; expected {_text(known)}, as the "
                "dataset said before; make its dims() and its samples agree"
            )
        # Held until its step: the dataset may fill the same memory with the next sample.
        self._loaded[index] = {name: raw[name].clone() for name in self.inputs}
        return self._loaded[index]

    def _asked(self, what: str, ask: Callable[[], Any]) -> Any:
        """Returns the dataset's answer.

        Raises:
            DataError: the dataset raises; as a `DcpcError` it reaches all ranks.
        """
        try:
            return ask()
        except DcpcError:
            raise
        except Exception as error:
            n = len(self.dataset)
            number = isinstance(next(iter(error.args), None), int)
            short = isinstance(error, IndexError) or (isinstance(error, KeyError) and number)
            advice = (
                f"have len() say how many there are: it says {n}"
                if short
                else "look at its own lines above"
            )
            raise DataError(
                f"{what}: got {type(error).__name__}: {error} from the dataset; expected a sample "
                f"for each number below {n}; {advice}"
            ) from error

    def _solve(self, index: int, raw: Mapping[str, torch.Tensor]) -> Dims:
        """Returns the length of every name, solved from all tensors' shapes."""
        found: dict[str, int] = {}
        for name, spec in self.inputs.items():
            for dim, size in zip(_sample_dims(spec), raw[name].shape, strict=True):
                value = dim.solve(size, min(1, self._smallest.get(dim.name or "", 1)))
                if dim.name is not None and dim.name not in found and value is not None:
                    found[dim.name] = value
        for name, spec in self.inputs.items():
            for dim, size in zip(_sample_dims(spec), raw[name].shape, strict=True):
                known = dim.name is None or dim.name in found
                if not known or dim.evaluate(found) != size:
                    where = _text(tuple(found.items())) if found else "no length >= 1"
                    raise DataError(
                        f"sample {index}, input '{name}': got {size} for dim '{dim}', shape "
                        f"{tuple(raw[name].shape)}, where the sample has {where}; "
                        + _expected(dim, size)
                    )
        return tuple((name, found[name]) for name in self.names)

    def _declared(self, index: int, dims: Mapping[str, int]) -> Dims:
        good = isinstance(dims, Mapping) and dims.keys() == set(self.names)
        if not good or any(
            isinstance(n, bool) or not isinstance(n, int) or n < min(1, self._smallest[name])
            for name, n in dims.items()
        ):
            raise DataError(
                f"sample {index}, dims({index}): got {dims}; expected an integer >= 1 for each of "
                f"{', '.join(self.names) or 'no names'}; correct the dataset's dims()"
            )
        return tuple((name, dims[name]) for name in self.names)


def check_fills(inputs: Mapping[str, InputSpec], fills: Mapping[str, int | float]) -> None:
    """Refuses values that an input's dtype cannot hold: torch makes another number of them.

    Raises:
        DataError: e.g. -100 for uint8, which would be the label 156.
    """
    for name, value in fills.items():
        dtype = inputs[name].dtype
        if not isinstance(value, bool | int | float):
            raise DataError(
                f"input '{name}': got {reprlib.repr(value)} to fill it up; expected a number; give "
                f"one in pad=, such as {{'{name}': 0}}"
            )
        if dtype.is_floating_point or dtype.is_complex:
            continue
        try:
            held = torch.full((), value, dtype=dtype).item()
        except (RuntimeError, ValueError, OverflowError):
            held = None
        if held != value:
            raise DataError(
                f"input '{name}': got {value} to fill up {dtype}, which does not have it; expected "
                "a number of that dtype; give another in pad=, or make the input int64, as torch's "
                "labels are"
            )


def _check_tensor(index: int, name: str, spec: InputSpec, x: object) -> None:
    dims = _sample_dims(spec)
    right = isinstance(x, torch.Tensor) and x.dtype == spec.dtype and x.dim() == len(dims)
    if isinstance(x, torch.Tensor) and (x.layout != torch.strided or x.device.type != "cpu"):
        raise DataError(
            f"sample {index}, input '{name}': got a {x.layout} tensor on {x.device}; expected a "
            "dense one on the CPU: micro-batches are made there, and moved when they run; convert "
            "it in the dataset by .to('cpu') or .to_dense()"
        )
    if right:
        return
    got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
    raise DataError(
        f"sample {index}, input '{name}': got {got}; expected a tensor "
        f"{InputSpec(spec.dtype, dims)} (its spec without '{BATCH}'); convert it in the dataset"
    )


def _sample_dims(spec: InputSpec) -> tuple[DimExpr, ...]:
    return tuple(dim for dim in spec.dims if dim.name != BATCH)


def _holds(bucket: Bucket, dims: Dims) -> bool:
    sizes = bucket.sizes
    return all(size <= sizes[name] for name, size in dims)


def _expected(dim: DimExpr, size: int) -> str:
    """Returns the sizes that a dim of a sample may have, and a remedy, as text."""
    if size > 0 and dim.name is not None and dim.divisor == 1 and dim.solve(size) is None:
        return f"expected a size that '{dim}' can have; cut or pad the sample to one"
    if size == 0 and dim.name is not None:
        return f"expected at least 1, or a bucket whose {dim.name} is 0; add one or drop the sample"
    return "expected the same lengths in all its inputs, each at least 1; correct the sample"


def _text(dims: Dims) -> str:
    return "{" + ", ".join(f"{name}: {size}" for name, size in dims) + "}"
