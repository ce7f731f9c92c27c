"""Several sequences in one row of a micro-batch, one after the other.

    samples of a global batch -> rows -> what the planner sees as its samples -> tensors
                                 `pack`                                          `RowMaker.collate`

The planner deals out rows as samples. A row has the length of a bucket, begins with the longest
sequence that is left and is filled up with shorter ones. The rest at its end is one more sequence,
of padding, that no other one attends to and whose labels do not count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from dcpc.buckets import BATCH, Bucket, Buckets, DimExpr, InputSpec
from dcpc.errors import DataError
from dcpc.ir import Packable
from dcpc.runtime.data.samples import Samples, check_fills
from dcpc.runtime.data.weights import CountLabels, Inputs, Weight

POSITIONS = "position_ids"
# Sequences that are tried to fill up the rest of a row.
_TRIED = 256


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The rows of a global batch."""

    rows: tuple[tuple[int, ...], ...]
    buckets: tuple[Bucket, ...]


def pack(
    samples: Sequence[tuple[int, Bucket]],
    length: Callable[[int], int],
    buckets: Sequence[Bucket],
    seconds: Callable[[Bucket], float],
    one_bucket: bool = False,
) -> PackedBatch:
    """Returns the rows of a global batch, every sample in exactly one.

    Rows are as long as the bucket of their longest sequence, or longer where that is predicted to
    take less: many sequences that are a little longer than half of a bucket leave much of it empty.
    The last, less full rows go to shorter buckets.

    Args:
        samples: id and bucket of each sample; the bucket is the smallest that holds it.
        length: function from a sample to its length.
        buckets: all buckets, of one named dim.
        seconds: predicted rank-seconds of one row of a bucket.
        one_bucket: whether to keep to the samples' own bucket, which all of them share.
    """
    sizes = {bucket: _size(bucket) for bucket in buckets}
    ascending = sorted(buckets, key=lambda bucket: sizes[bucket])
    lengths = [(i, length(i)) for i, _ in samples]
    own = {i: sizes[bucket] for i, bucket in samples}
    best: tuple[tuple[float, int, int], PackedBatch] | None = None
    for least in {0} if one_bucket else {0, *sizes.values()}:
        rows = fill_rows(lengths, {i: max(size, least) for i, size in own.items()})
        if one_bucket:
            found = PackedBatch(tuple(rows), (samples[0][1],) * len(rows))
        else:
            known = dict(lengths)
            totals = [sum(known[i] for i in row) for row in rows]
            chosen = tuple(next(b for b in ascending if sizes[b] >= n) for n in totals)
            found = PackedBatch(tuple(rows), chosen)
        cost_s = sum(map(seconds, found.buckets))
        key = (cost_s, sum(sizes[b] for b in found.buckets), least)
        if best is None or key < best[0]:
            best = (key, found)
    assert best is not None, "there is a first candidate"
    return best[1]


def fill_rows(
    lengths: Iterable[tuple[int, int]], capacity: Mapping[int, int]
) -> list[tuple[int, ...]]:
    """Returns rows that hold every sequence once: the longest left, filled up best first."""
    pairs = sorted(lengths, key=lambda pair: pair[1])  # the longest is the last
    ids, left = [i for i, _ in pairs], [n for _, n in pairs]
    rows = []
    while left:
        first, room = ids.pop(), left.pop()
        chosen = _fullest(left, capacity[first] - room)
        rows.append((first, *(ids[k] for k in chosen)))
        for k in chosen:  # in descending order, so that the others' numbers stay
            del ids[k], left[k]
    return rows


def _fullest(lengths: Sequence[int], room: int) -> list[int]:
    """Returns which of these lengths, in ascending order, together fill a room most; longest first.

    Sums that can be reached are the bits of one integer, a subset-sum; it stops once the room is
    full, which takes few of many lengths. Of too many some are tried, evenly.
    """
    fitting = list(range(bisect_right(lengths, room)))[::-1]
    if len(fitting) > _TRIED:
        fitting = [fitting[k * len(fitting) // _TRIED] for k in range(_TRIED)]
    inside = (1 << (room + 1)) - 1
    reached = [1]
    for k in fitting:
        reached.append(reached[-1] | (reached[-1] << lengths[k]) & inside)
        if reached[-1] >> room:
            break
    total = reached[-1].bit_length() - 1
    chosen = []
    for at in range(len(reached) - 1, 0, -1):
        if not reached[at - 1] >> total & 1:
            chosen.append(fitting[at - 1])
            total -= lengths[fitting[at - 1]]
    return chosen[::-1]


def _size(bucket: Bucket) -> int:
    ((_, size),) = bucket.shape_key
    return size


class RowMaker:
    """Makes the inputs of rows from samples that do not say where a sequence begins.

    Args:
        buckets: buckets of the model: with all of its inputs.
        packing: True: the input `position_ids` counts from 0 in each sequence. A name: this input
            gets 1, 2, 3, ... for the sequences of a row; `position_ids`, if there is one, too.
        packable: way in which the traced model takes rows.
        weight: argument of the loader; it says which input has the labels.
        pad: input name -> value that does not count in it.

    Raises:
        DataError: the model would not keep sequences apart, or its inputs cannot be laid end to
            end.
    """

    def __init__(
        self,
        buckets: Buckets,
        packing: bool | str,
        packable: Packable,
        weight: Weight,
        pad: Mapping[str, int | float] | None,
    ) -> None:
        self.inputs = buckets.inputs
        self.dim = _only_dim(buckets)
        self.made = _made(self.inputs, packing)
        self.marks = POSITIONS if packing is True else str(packing)
        for name, spec in self.inputs.items():
            _check_spec(name, spec, self.dim, name in self.made)
        _check_model(packable, self.made)
        self.fill = _fills(self.inputs, self.made, weight, pad)
        known = {name: value for name, value in self.fill.items() if name in self.inputs}
        check_fills(self.inputs, known)
        self.dropped = {
            name: count
            for name, count in packable.dropped.items()
            if count and name not in self.made
        }
        for name, count in self.dropped.items():
            self._check_dropped(name, count)

    def given(self, buckets: Buckets) -> Buckets:
        """Returns the buckets of a sample: without the inputs that are made for a row."""
        inputs = {n: str(spec) for n, spec in self.inputs.items() if n not in self.made}
        return Buckets(inputs, [bucket.sizes for bucket in buckets])

    def _check_dropped(self, name: str, count: int) -> None:
        if name in self.fill:
            return
        raise DataError(
            f"packing=, input '{name}': got a model that does not use the first {count} of a row; "
            f"expected to know what does not count in it, as these are dropped in each sequence; "
            f"pass pad={{'{name}': ...}}, or weight='{name}' if these are the labels"
        )

    def collate(
        self, samples: Samples, rows: Sequence[tuple[int, ...]], bucket: Bucket
    ) -> dict[str, torch.Tensor]:
        """Returns the inputs of a micro-batch, `[rows, the bucket's length, ...]`.

        A model predicts a label from the tokens before it, so it does not use the labels at a row's
        beginning. They do not count at each sequence's beginning: alone they would not either.

        Raises:
            DataError: a sample contradicts the specs.
        """
        size = bucket[self.dim]
        loaded = [[samples.load(i) for i in row] for row in rows]
        first = next(name for name in self.inputs if name not in self.made)
        at = self._at(self.inputs[first])
        lengths = [[int(x[first].shape[at]) for x in row] for row in loaded]
        found = {}
        for name, spec in self.inputs.items():
            if name in self.made:
                parts = [self._marks(name, spec, own, size) for own in lengths]
            else:
                parts = [
                    self._joined(samples, name, ids, [x[name] for x in row], bucket)
                    for ids, row in zip(rows, loaded, strict=True)
                ]
            found[name] = torch.stack(parts, _place(spec, BATCH))
        return found

    def examples(self, rows: Inputs) -> list[Inputs]:
        """Returns two rows of several sequences, and each of these sequences alone.

        The first row ends with padding, where each input's filling is known.
        """
        name, spec = next(iter(self.inputs.items()))
        size, device = rows[name].shape[_place(spec, self.dim)], rows[name].device
        given = {n: spec for n, spec in self.inputs.items() if n not in self.made}
        half = size // 2
        first = [half, 1] if half + 1 < size else [half]
        if not given.keys() <= self.fill.keys():
            first.append(size - sum(first))
        cuts = [(0, sum(first[:k]), n) for k, n in enumerate(first)]
        cuts += [(1, 0, 1), (1, 1, size - 1)]
        data = [
            {
                n: rows[n].select(_place(spec, BATCH), row).cpu().narrow(self._at(spec), begin, k)
                for n, spec in given.items()
            }
            for row, begin, k in cuts
        ]
        fitting = [Bucket.of({self.dim: n}) for n in sorted({size, *(n for *_, n in cuts)})]
        specs = {n: str(spec) for n, spec in given.items()}
        samples = Samples(data, Buckets(specs, [b.sizes for b in fitting]), None)
        ids = [tuple(i for i, (r, *_) in enumerate(cuts) if r == row) for row in (0, 1)]
        whole = self.collate(samples, ids, Bucket.of({self.dim: size}))
        alone = []
        for i, (_, _, n) in enumerate(cuts):
            made = {m: self._marks(m, self.inputs[m], [n], n)[None] for m in self.made}
            alone.append({**samples.collate([i], Bucket.of({self.dim: n})), **made})
        return [{n: x.to(device) for n, x in found.items()} for found in (whole, *alone)]

    def counted(self, sequence: Inputs) -> Inputs:
        """Returns the inputs of one sequence as in a row: dropped labels do not count."""
        found = dict(sequence)
        for name, count in self.dropped.items():
            at = _place(self.inputs[name], self.dim)
            found[name] = found[name].clone()
            found[name].narrow(at, 0, min(count, found[name].shape[at])).fill_(self.fill[name])
        return found

    def _at(self, spec: InputSpec) -> int:
        """Returns the dim of a sample's tensor that is its length."""
        names = [dim.name for dim in spec.dims if dim.name != BATCH]
        return names.index(self.dim)

    def _joined(
        self,
        samples: Samples,
        name: str,
        ids: tuple[int, ...],
        tensors: Sequence[torch.Tensor],
        bucket: Bucket,
    ) -> torch.Tensor:
        """One input of a row: its sequences one after the other, then padding."""
        spec = self.inputs[name]
        at = self._at(spec)
        dropped = self.dropped.get(name, 0)
        if dropped:
            tensors = [x.clone() for x in tensors]
            for x in tensors:
                x.narrow(at, 0, min(dropped, x.shape[at])).fill_(self.fill[name])
        shape = [dim.evaluate(bucket.sizes) for dim in spec.dims if dim.name != BATCH]
        where = f"row of samples {', '.join(map(str, ids[:8]))}"
        return samples.filled(name, where, torch.cat(list(tensors), at), shape, self.fill)

    def _marks(self, name: str, spec: InputSpec, lengths: Sequence[int], size: int) -> torch.Tensor:
        """Positions in, or numbers of, the sequences of a row; padding is its last one."""
        rest = size - sum(lengths)
        counts = [*lengths, rest] if rest else list(lengths)
        if name != self.marks or name == POSITIONS:
            return torch.cat([torch.arange(n, dtype=spec.dtype) for n in counts])
        numbers = torch.arange(1, len(counts) + 1, dtype=spec.dtype)
        return numbers.repeat_interleave(torch.tensor(counts))


def _place(spec: InputSpec, name: str) -> int:
    """Returns the position of an input's dim of a name."""
    return next(k for k, dim in enumerate(spec.dims) if dim.name == name)


def _only_dim(buckets: Buckets) -> str:
    names = [name for name in buckets.names if name != BATCH]
    if len(names) != 1:
        raise DataError(
            f"packing=: got buckets of {', '.join(names) or 'no named dims'}; expected one named "
            "dim, along which sequences can follow each other; leave packing= out for this model"
        )
    return names[0]


def _made(inputs: Mapping[str, InputSpec], packing: bool | str) -> tuple[str, ...]:
    name = POSITIONS if packing is True else str(packing)
    if name not in inputs:
        raise DataError(
            f"packing={packing!r}: got inputs {', '.join(inputs)}; expected one named '{name}', "
            "by which the model tells the sequences of a row apart; add it to the buckets' inputs, "
            "or name the one that has the sequences' numbers: packing='segment_ids'"
        )
    made = tuple(dict.fromkeys(n for n in (name, POSITIONS) if n in inputs))
    if len(made) == len(inputs):
        raise DataError(
            f"packing={packing!r}: got no inputs but {', '.join(inputs)}; expected some that "
            "samples have; declare them"
        )
    return made


def _check_spec(name: str, spec: InputSpec, dim: str, made: bool) -> None:
    names = [d for d in spec.dims if d.name is not None]
    good = names.count(DimExpr(dim)) == 1 and names.count(DimExpr(BATCH)) == 1
    if made:
        plain = {torch.int64, torch.int32}
        good = list(spec.dims) == [DimExpr(BATCH), DimExpr(dim)] and spec.dtype in plain
    if not good or len(names) != 2:
        wanted = f"int64[{BATCH}, {dim}]" if made else f"the dims '{BATCH}' and '{dim}' as such"
        raise DataError(
            f"packing=, input '{name}': got {spec}; expected {wanted}, as the sequences of a row "
            "follow each other along one dim; leave packing= out for this model"
        )


def _check_model(packable: Packable, made: tuple[str, ...]) -> None:
    problem = packable.reason
    told = ", ".join(packable.marks)
    if not problem and not set(made) >= set(packable.marks):
        problem = f"its attention tells sequences apart by {told}, which the loader does not make"
    fits = packable.by_positions if packable.marks == (POSITIONS,) else packable.by_numbers
    if not problem and not fits:
        kind = "positions that restart" if packable.marks == (POSITIONS,) else "their numbers"
        problem = f"{told} with {kind} would not keep them apart, or would change them"
    if problem:
        raise DataError(
            f"packing=: got a model that would mix the sequences of a row: {problem}; expected "
            f"attention within the sequences that {' and '.join(made)} tell apart, and nothing "
            "else that joins positions; for models of the transformers library set "
            "config.use_cache=False and give no attention_mask, or leave packing= out"
        )


def _fills(
    inputs: Mapping[str, InputSpec],
    made: tuple[str, ...],
    weight: Weight,
    pad: Mapping[str, int | float] | None,
) -> dict[str, int | float]:
    """Returns the filling of each input: `pad`, labels that do not count, else zeros."""
    counted = CountLabels(weight) if isinstance(weight, str) and weight in inputs else weight
    if isinstance(counted, str):
        names = ", ".join(n for n in inputs if n not in made)
        raise DataError(
            f"packing=: got weight={weight!r}; expected what the loss is a mean over, as a row has "
            f"any number of samples: the input with the labels ({names}), CountLabels, or a "
            "function; pass it"
        )
    found: dict[str, int | float] = {}
    if isinstance(counted, CountLabels):
        found = {name: 0 for name in inputs if name not in made}
        found[counted.name] = counted.ignore_index
    return {**found, **(pad or {})}
