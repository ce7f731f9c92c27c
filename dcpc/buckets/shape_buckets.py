"""Input specs and shape buckets, as declared and checked, and the look-up by shape.

    buckets = Buckets(
        inputs={"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"},
        sizes=[{"seq": 512}, {"seq": 2048}],
    )

The same as a file for `Buckets.from_yaml`:

    inputs:
      input_ids: int64[batch, seq]
      labels: int64[batch, seq]
    sizes:
      - {seq: 512}
      - {seq: 2048}
"""

import keyword
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self, TypeVar

import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError

from dcpc.buckets.choosing import sizes_for
from dcpc.buckets.specs import MAX_SIZE, DimExpr, InputSpec, Sizes, completed, tokens_of
from dcpc.buckets.yaml_lines import FieldPath, path_of, read_yaml
from dcpc.errors import BucketError, DispatchError, checking_call

__all__ = [
    "BATCH", "MAX_BATCH", "Bucket", "Buckets", "DimExpr", "Fixed", "InputSpec", "Sizes", "held_by",
]  # fmt: skip

BATCH = "batch"
# Range of `batch` where a size leaves it to the planner: no plan has a larger micro-batch.
MAX_BATCH = 1 << 16


Fixed = frozenset[tuple[str, int]]  # (dim, length) that a trace has as numbers
Of = TypeVar("Of")


def held_by(traces: Mapping[Fixed, Of], sizes: Sizes) -> Of:
    """Returns the entry of the trace that is for some lengths."""
    return traces[max((fixed for fixed in traces if fixed <= sizes.items()), key=len)]


@dataclass(frozen=True, slots=True)
class Bucket:
    """One exact shape: a length for every named dim, and for `batch` if the user gave it.

    A given batch is the largest micro-batch of this bucket; otherwise the planner chooses it.
    """

    dims: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Self:
        """Returns the bucket of these lengths, in whatever order they come."""
        return cls(tuple(sorted(sizes.items())))

    @property
    def sizes(self) -> dict[str, int]:
        """Length of each name, as a new dict."""
        return dict(self.dims)

    @property
    def batch(self) -> int | None:
        """Largest micro-batch, None where the planner chooses it."""
        return self.sizes.get(BATCH)

    @property
    def shape_key(self) -> tuple[tuple[str, int], ...]:
        """The dims without `batch`: no two buckets have the same."""
        return tuple(dim for dim in self.dims if dim[0] != BATCH)

    @property
    def tokens(self) -> int:
        """Product of a sample's lengths, of which 0 counts as 1: buckets are in its order."""
        return tokens_of(size for _, size in self.shape_key)

    def __getitem__(self, name: str) -> int:
        return self.sizes[name]

    def __str__(self) -> str:
        return "{" + ", ".join(f"{name}: {size}" for name, size in self.dims) + "}"


@dataclass(frozen=True, init=False, repr=False, eq=False)
class Buckets:
    """The shapes a model is compiled for.

    Attributes:
        inputs: spec of each keyword argument of the model's forward.
        buckets: the shape buckets, in the order given.
        static: dims that forward takes for numbers, so that each length has a trace of its own, and
            a batch is 1 -> the user's line, as text; found when a model is traced.
    """

    inputs: Mapping[str, InputSpec]
    buckets: tuple[Bucket, ...]
    static: Mapping[str, str]

    @checking_call("dcpc.Buckets", BucketError)
    def __init__(self, inputs: Mapping[str, str], sizes: Sequence[Mapping[str, int]]) -> None:
        """Checks and parses a declaration.

        Args:
            inputs: argument name -> `dtype[dim, ...]`; a dim is a name, an integer, or a name with
                one or more of `*k`, `//k`, `+k`, `-k`, in this order.
            sizes: for each bucket, the exact length of every name; `batch` may be left out.

        Raises:
            BucketError: names each wrong field, what was got, what is expected, and what to do.
        """
        self._set({"inputs": inputs, "sizes": sizes}, _python_place)

    @classmethod
    @checking_call("dcpc.Buckets.from_lengths", BucketError)
    def from_lengths(
        cls,
        inputs: Mapping[str, str],
        lengths: object,
        *,
        count: int | None = None,
        padding: float | None = None,
        multiple_of: int | Mapping[str, int] = 1,
        seconds: Callable[[dict[str, int]], float] | None = None,
    ) -> Self:
        """Returns the buckets to which samples of these lengths are padded at least cost.

        One dim: no other choice costs less, up to 1,024 different lengths. Several dims: shapes are
        merged two at a time, and an image (a dim of 1) is not padded to a clip.

        Args:
            inputs: input specs as for `Buckets`.
            lengths: one entry a sample: an integer where the inputs have one named dim besides
                `batch`, else the length of each by name; or a dataset with `dims(i)`.
            count: maximum number of buckets.
            padding: share of the cost that padding may be, above 0 and below 1: the fewest buckets
                that keep it are taken. Default: 0.03, where `count` is not given either.
            multiple_of: number that sizes are rounded up to a multiple of; for all dims, or by
                name.
            seconds: cost of one sample of some sizes, such as a profile's seconds; it grows with
                each length. Default: the product of the lengths, in tokens.

        Raises:
            BucketError: an argument is none of these, or the inputs have no named dim.
        """
        names = [n for n in _names(_parse_inputs(inputs, _python_place)) if n != BATCH]
        if not names:
            raise BucketError(
                "Buckets.from_lengths: got inputs without a named dim besides batch; expected one "
                "that differs between samples; write e.g. int64[batch, seq]"
            )
        return cls(inputs, sizes_for(names, lengths, count, padding, multiple_of, seconds))

    @classmethod
    @checking_call("dcpc.Buckets.from_yaml", BucketError)
    def from_yaml(cls, file: str | Path) -> Self:
        """Returns the buckets declared in a YAML file with the fields `inputs` and `sizes`.

        Raises:
            BucketError: as from Python, with file and line of each wrong field.
        """
        document = read_yaml(file, BucketError)

        def place(path: FieldPath) -> str:
            return f"{document.place(path)}: {_field(path)}"

        buckets = cls.__new__(cls)
        buckets._set(document.data, place)
        return buckets

    def to_yaml(self, file: str | Path | None = None) -> str:
        """Returns the declaration as YAML for `from_yaml`, and writes it to `file` if given."""
        data = {
            "inputs": {name: str(spec) for name, spec in self.inputs.items()},
            "sizes": [bucket.sizes for bucket in self.buckets],
        }
        text = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)
        if file is not None:
            path = path_of(file, BucketError, "to_yaml")
            try:
                path.write_text(text, encoding="utf-8")
            except OSError as e:
                raise BucketError(
                    f"to_yaml({str(path)!r}): got {e.strerror}; expected a file that can be "
                    "written, in a folder that is there; name another"
                ) from e
        return text

    @property
    def names(self) -> tuple[str, ...]:
        """The named dims, in order of first appearance in the input specs."""
        return _names(self.inputs)

    def range_of(self, name: str) -> tuple[int, int]:
        """Returns the smallest and the largest length of a named dim over the buckets.

        `batch` goes from 1 to the largest given, and to `MAX_BATCH` if any bucket leaves it open.
        """
        if name == BATCH:
            return 1, max(bucket.batch or MAX_BATCH for bucket in self.buckets)
        sizes = [bucket[name] for bucket in self.buckets]
        return min(sizes), max(sizes)

    @property
    def smallest(self) -> dict[str, int]:
        """Shortest length of each named dim over the buckets. Only if it is 0 may one be 0."""
        return {name: self.range_of(name)[0] for name in self.names}

    def completed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns inputs by name; one that is lacking, and may be empty, is an empty tensor."""
        return completed(self.inputs, given, self.smallest)

    def by_trace(self) -> dict[Fixed, "Buckets"]:
        """Returns the buckets grouped by the numbers in a trace (`fixed`): one trace a group.

        A model may run other code where a dim is 1 (an image is a video of one frame) or 0 (a text
        without images), and torch takes such a size for a constant. Of a static dim each length is.
        """
        found: dict[Fixed, list[Bucket]] = {}
        for bucket in self.buckets:
            found.setdefault(self.fixed(bucket.sizes), []).append(bucket)
        return {fixed: self._only(mine, self.static) for fixed, mine in found.items()}

    def fixed(self, sizes: Sizes) -> Fixed:
        """Returns the dims, without `batch`, that a trace for some lengths has as numbers."""
        named = ((n, size) for n, size in sizes.items() if n != BATCH)
        return frozenset((n, size) for n, size in named if size <= 1 or n in self.static)

    def traces(self, sizes: Sizes) -> bool:
        """Whether the trace of these buckets, which share one, is for some lengths."""
        ranges = {n: self.range_of(n) for n in self.names if n != BATCH}
        within = all(low <= sizes[n] <= high for n, (low, high) in ranges.items())
        return within and self.fixed(sizes) == self.fixed(self.buckets[0].sizes)

    def with_static(self, static: Mapping[str, str]) -> "Buckets":
        """Returns the buckets with other dims static; with `batch` each has micro-batches of 1."""
        batch = {BATCH: 1} if BATCH in static else {}
        return self._only([Bucket.of({**b.sizes, **batch}) for b in self.buckets], static)

    def like(self, sizes: Sequence[Sizes]) -> "Buckets":
        """Returns buckets of other sizes for the same inputs, with the same dims static."""
        return self._only([*map(Bucket.of, sizes)], self.static)

    def match(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        dtypes: Mapping[str, torch.dtype],
        right: Callable[[Bucket, Sizes], bool] = lambda bucket, sizes: True,
    ) -> tuple[Bucket, dict[str, int]]:
        """Returns the smallest bucket that holds a call's arguments, and the length of every name.

        Among the lengths is that of the batch.

        Args:
            shapes: argument name -> shape.
            dtypes: argument name -> dtype.
            right: tells whether a bucket is for some lengths, all but the batch's; of those that
                hold the arguments one for which it is is taken, if there is any.

        Raises:
            DispatchError: names, dtypes, ndims or dims contradict the specs, or no bucket is as
                long.
        """
        dims = self.lengths(shapes, dtypes)
        own = {name: size for name, size in dims.items() if name != BATCH}
        bucket = (
            self._by_key.get(Bucket.of(own).dims)
            or self.holding(dims, lambda b: right(b, own))
            or self.holding(dims)
        )
        if bucket is None:
            got = ", ".join(f"'{arg}' {tuple(shape)}" for arg, shape in shapes.items())
            self._refuse(
                f"arguments {got}: got {Bucket.of(dims)}; expected lengths that some bucket holds; "
                "cut the samples to one, or add these lengths to sizes="
            )
        limit = bucket.batch or MAX_BATCH
        if dims.get(BATCH, 1) > limit:
            self._refuse(
                f"bucket {bucket}: got batch {dims[BATCH]}; expected at most {limit}; "
                + (
                    f"split the batch: forward takes it for a number{self.static[BATCH]}"
                    if BATCH in self.static else "split the batch, or raise batch in this size"
                )
            )  # fmt: skip
        return bucket, dims

    def lengths(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ) -> dict[str, int]:
        """Returns the length of every name, batch included, of arguments of any bucket or none.

        Raises:
            DispatchError: as from `match`, but for lengths that no bucket holds.
        """
        self._check_arguments(shapes, dtypes)
        dims = self._solve_dims(shapes)
        for arg, spec in self.inputs.items():
            if spec.shape(dims) != tuple(shapes[arg]):
                self._refuse(
                    f"argument '{arg}': got shape {tuple(shapes[arg])}; expected {spec}, which is "
                    f"{spec.shape(dims)} where {Bucket.of(dims)}; make the arguments agree"
                )
        return dims

    def holding(
        self, sizes: Mapping[str, int], right: Callable[[Bucket], bool] = lambda bucket: True
    ) -> Bucket | None:
        """Returns the smallest bucket with each dim as long or longer; None: none has room."""
        fits = [b for b in self if all(sizes[n] <= size for n, size in b.shape_key) and right(b)]
        return min(fits, key=lambda b: (b.tokens, b.shape_key), default=None)

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def __len__(self) -> int:
        return len(self.buckets)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Buckets):
            return NotImplemented
        own = (self.inputs, self.buckets, self.static)
        return own == (other.inputs, other.buckets, other.static)

    def __hash__(self) -> int:
        return hash((frozenset(self.inputs.items()), self.buckets))

    def __repr__(self) -> str:
        inputs = {name: str(spec) for name, spec in self.inputs.items()}
        return f"Buckets(inputs={inputs}, sizes={[bucket.sizes for bucket in self.buckets]})"

    def _only(self, buckets: Sequence[Bucket], static: Mapping[str, str]) -> "Buckets":
        mine = Buckets.__new__(Buckets)
        mine._fill(self.inputs, tuple(buckets), static)
        return mine

    def _set(self, raw: Any, place: Callable[[FieldPath], str]) -> None:
        inputs, sizes = _validate(raw, place)
        self._fill(inputs, tuple(map(Bucket.of, sizes)))

    def _fill(
        self,
        inputs: Mapping[str, InputSpec],
        buckets: tuple[Bucket, ...],
        static: Mapping[str, str] | None = None,
    ) -> None:
        object.__setattr__(self, "static", {**(static or {})})
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "buckets", buckets)
        object.__setattr__(self, "_by_key", {b.shape_key: b for b in buckets})

    _by_key: Mapping[tuple[tuple[str, int], ...], Bucket]

    def _refuse(self, problem: str) -> NoReturn:
        shown = ", ".join(map(str, self.buckets[:8])) + (", ..." if len(self) > 8 else "")
        raise DispatchError(f"{problem}\n  {len(self)} bucket(s): {shown}")

    def _check_arguments(
        self, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """Refuses names, dtypes and ndims that contradict the specs."""
        if shapes.keys() != self.inputs.keys():
            missing = ", ".join(sorted(self.inputs.keys() - shapes.keys())) or "none"
            unknown = ", ".join(sorted(shapes.keys() - self.inputs.keys())) or "none"
            self._refuse(
                f"arguments: got missing: {missing}; unknown: {unknown}; expected exactly "
                f"{', '.join(self.inputs)}; pass these by keyword"
            )
        for arg, spec in self.inputs.items():
            if dtypes.get(arg) != spec.dtype:
                self._refuse(
                    f"argument '{arg}': got dtype {dtypes.get(arg)}; expected {spec.dtype}; "
                    f"convert it by .to({spec.dtype})"
                )
            if len(shapes[arg]) != len(spec.dims):
                self._refuse(
                    f"argument '{arg}': got {len(shapes[arg])} dims, shape {tuple(shapes[arg])}; "
                    f"expected {len(spec.dims)}, {spec}; reshape it or correct its spec"
                )

    def _solve_dims(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Returns the length of every name, read where the name first stands without a `//`."""
        dims: dict[str, int] = {}
        for arg, spec in self.inputs.items():
            for i, (dim, size) in enumerate(zip(spec.dims, shapes[arg], strict=True)):
                if dim.name is None or dim.name in dims or dim.divisor > 1:
                    continue
                least = min(1, self.range_of(dim.name)[0])
                value = dim.solve(size, least)
                if value is None:
                    self._refuse(
                        f"argument '{arg}': got {size} in dim {i}, shape {tuple(shapes[arg])}; "
                        f"expected '{dim}' for an integer {dim.name} >= {least}; correct this "
                        "argument"
                    )
                dims[dim.name] = value
        return dims


class _Declaration(BaseModel):
    """Types of the fields; relations between them are checked afterwards."""

    model_config = ConfigDict(extra="forbid")

    inputs: Annotated[dict[StrictStr, StrictStr], Field(min_length=1)]
    sizes: Annotated[
        list[dict[StrictStr, Annotated[int, Field(strict=True, ge=0, le=MAX_SIZE)]]],
        Field(min_length=1),
    ]


# pydantic's error type -> expected; what to do.
_EXPECTED = {
    "int": f"an integer from 0 to {MAX_SIZE}; write the exact length of this dim",
    "string": "a text; write names as plain words and specs as dtype[dim, ...]",
    "dict": "a mapping; write `name: value` pairs",
    "mapping": "a mapping; write `name: value` pairs",
    "list": "a list of sizes; write one mapping of lengths for each bucket",
    "model": "a mapping with the fields inputs and sizes; write both",
    "too": "at least one entry; add one",
    "missing": "this field; add it",
    "extra": "only the fields inputs and sizes; remove it",
    "invalid": "only the fields inputs and sizes; remove it",
    "greater": f"an integer from 0 to {MAX_SIZE}; write the exact length of this dim",
    "less": f"an integer from 0 to {MAX_SIZE}; write the exact length of this dim",
}


def _validate(
    raw: Any, place: Callable[[FieldPath], str]
) -> tuple[dict[str, InputSpec], list[dict[str, int]]]:
    try:
        declared = _Declaration.model_validate(raw)
    except ValidationError as e:
        problems = []
        for error in e.errors():
            path = tuple(part for part in error["loc"] if part != "[key]")
            got = "nothing" if error["type"] == "missing" else reprlib.repr(error["input"])
            expected = _EXPECTED.get(error["type"].split("_")[0], error["msg"])
            problems.append(f"{place(path)}: got {got}; expected {expected}")
        more = [f"and {len(problems) - 8} more"] if len(problems) > 8 else []
        raise BucketError("\n".join(problems[:8] + more)) from None
    inputs = _parse_inputs(declared.inputs, place)
    _check_sizes(inputs, declared.sizes, place)
    return inputs, declared.sizes


def _parse_inputs(
    declared: Mapping[str, str], place: Callable[[FieldPath], str]
) -> dict[str, InputSpec]:
    inputs = {}
    for name, text in declared.items():
        where = place(("inputs", name))
        if not name.isidentifier() or keyword.iskeyword(name):
            raise BucketError(
                f"{where}: got argument name {name!r}; expected the name of a keyword argument of "
                "the model's forward; correct it"
            )
        try:
            inputs[name] = InputSpec.parse(text)
        except BucketError as e:
            raise BucketError(f"{where}: {e}") from None
    determined = {d.name for spec in inputs.values() for d in spec.dims if d.divisor == 1}
    for name, spec in inputs.items():
        for dim in spec.dims:
            if dim.name not in determined:
                raise BucketError(
                    f"{place(('inputs', name))}: got dim '{dim}' and no other use of '{dim.name}'; "
                    f"expected a dim that determines it, without //; rename '{dim}' to one name"
                )
    return inputs


def _check_sizes(
    inputs: Mapping[str, InputSpec],
    sizes: Sequence[Mapping[str, int]],
    place: Callable[[FieldPath], str],
) -> None:
    names = _names(inputs)
    first: dict[tuple[tuple[str, int], ...], int] = {}
    for i, size in enumerate(sizes):
        bucket = Bucket.of(size)
        for name in size:
            if name not in names:
                raise BucketError(
                    f"{place(('sizes', i, name))}: got dim '{name}', which no input has; expected "
                    f"{', '.join(names) or 'none'}; remove it, or use it in an input spec"
                )
        missing = [name for name in names if name not in size and name != BATCH]
        if missing:
            planned = "" if BATCH in names else f", or name '{BATCH}' what the planner is to choose"
            raise BucketError(
                f"{place(('sizes', i))}: got {bucket}; expected a length for {', '.join(missing)} "
                f"too; add it{planned}"
            )
        _check_lengths(inputs, bucket, place(("sizes", i)))
        j = first.setdefault(bucket.shape_key, i)
        if j != i:
            raise BucketError(
                f"{place(('sizes', i))}: got {bucket}, the same shape as sizes[{j}] "
                f"{Bucket.of(sizes[j])}; expected each shape once (batch does not tell them "
                "apart); remove one"
            )


def _check_lengths(inputs: Mapping[str, InputSpec], bucket: Bucket, where: str) -> None:
    for arg, spec in inputs.items():
        for dim in spec.dims:
            length = dim.evaluate({BATCH: 1, **bucket.sizes})
            least = 0 if dim.name != BATCH and bucket.sizes.get(dim.name or "") == 0 else 1
            if length < least:
                raise BucketError(
                    f"{where}: got {bucket}, where dim '{dim}' of input '{arg}' is {length}; "
                    f"expected at least {least}; raise {dim.name} or correct the spec"
                )
    if all(0 in spec.shape({BATCH: 1, **bucket.sizes}) for spec in inputs.values()):
        raise BucketError(
            f"{where}: got {bucket}, where all inputs are empty; expected a length from 1 on of a "
            "dim of some input; correct it"
        )


def _names(inputs: Mapping[str, InputSpec]) -> tuple[str, ...]:
    found = (dim.name for spec in inputs.values() for dim in spec.dims if dim.name is not None)
    return tuple(dict.fromkeys(found))


def _field(path: FieldPath) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "the file"


def _python_place(path: FieldPath) -> str:
    return f"Buckets: {_field(path)}"
