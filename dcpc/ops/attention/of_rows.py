"""`dcpc::attention_of_rows`: attention of the valid rows of a padded batch, with the batch's mask.

q `[1, h, n, d]`, k `[1, g, n, d]` and v `[1, g, n, e]` are the n valid rows of b samples, those of
a sample after each other. `mask` `[b or 1, h or 1, s or 1, s]` is that of all s positions of each
sample; `rows` `[n]` says which row each is, sample * s + position. A row sees rows of its own
sample alone, and each sees one. Nothing of n by n is made: each sample reads its part of the mask.
It is called as `dcpc::attention` is, with `rows` as its segment and no limits of positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpc.ops.attention import blocks, whole
from dcpc.ops.attention.calls import (
    backward_by,
    backward_schema,
    define_output,
    empty_backward,
    empty_mask_backward,
    forward_schema,
    of_backward,
    save_call,
)
from dcpc.ops.attention.kernels import check_sizes
from dcpc.ops.attention.spec import Attended, Sight, accumulated, empty_gradient, empty_outputs

Index = slice | Tensor


class _SampleRows(NamedTuple):
    """The valid rows of one sample.

    Attributes:
        number: index of the sample.
        rows: slice of these rows among all valid rows.
        positions: positions of these rows in the sample.
    """

    number: int
    rows: slice
    positions: Index

    def part(self, mask: Tensor) -> Tensor:
        """Returns this sample's part of a mask, `[1, h or 1, rows or 1, rows]`."""
        found = mask[self.number : self.number + 1] if mask.shape[0] > 1 else mask
        if found.shape[2] > 1:
            found = found[:, :, self.positions]
        return found[:, :, :, self.positions]

    def add_part(self, dmask: Tensor, found: Tensor) -> None:
        """Adds the gradient of `part` to the gradient of the mask."""
        into = dmask[self.number : self.number + 1] if dmask.shape[0] > 1 else dmask
        at = self.positions
        if isinstance(at, slice):
            into = into[:, :, at] if into.shape[2] > 1 else into
            into[:, :, :, at].add_(found)
            return
        queries = at[:, None] if into.shape[2] > 1 else at.new_zeros(1, 1)
        into[:, :, queries, at] += found


def _samples(rows: Tensor, length: int) -> Iterator[_SampleRows]:
    """Yields each sample of this length that has valid rows."""
    names, counts = torch.unique_consecutive(
        rows.div(length, rounding_mode="floor"), return_counts=True
    )
    first = 0
    for number, count in zip(names.tolist(), counts.tolist(), strict=True):
        mine = slice(first, first + count)
        at = rows[mine] - number * length
        low, high = int(at[0]), int(at[-1])
        run = high - low + 1 == count
        yield _SampleRows(number, mine, slice(low, high + 1) if run else at)
        first += count


@torch.library.custom_op(
    "dcpc::attention_of_rows_forward", mutates_args=(), schema=forward_schema(Sight)
)
def attention_of_rows_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    segment: Tensor | None,
    *sight: Any,
) -> tuple[Tensor, Tensor]:
    """Returns out `[1, h, n, e]` and logsumexp `[1, h, n]` in float32 or better."""
    check_sizes(query, key, value)
    assert mask is not None, "a mask says what rows see"
    assert segment is not None, "rows are of samples"
    out, lse = empty_outputs(query, value)
    for sample in _samples(segment, mask.shape[3]):
        q, k, v = (x[:, :, sample.rows] for x in (query, key, value))
        found = whole.forward(q, k, v, sample.part(mask), None, None, Sight(*sight))
        out[:, :, sample.rows].copy_(found[0])
        lse[:, :, sample.rows].copy_(found[1])
        del found
    return out, lse


@attention_of_rows_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return empty_outputs(query, value)


@torch.library.custom_op(
    "dcpc::attention_of_rows_backward", mutates_args=(), schema=backward_schema(Sight)
)
def attention_of_rows_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v."""
    attended, (mask, _, rows), rest = of_backward(given)
    assert mask is not None, "a mask says what rows see"
    assert rows is not None, "rows are of samples"
    found = tuple(map(empty_gradient, (attended.q, attended.k, attended.v)))
    for sample in _samples(rows, mask.shape[3]):
        mine, part = _of_sample(attended, sample.rows), sample.part(mask)
        _write(found, whole.backward(mine, part, None, None, Sight(*rest)), sample.rows)
    return found[0], found[1], found[2]


attention_of_rows_backward.register_fake(empty_backward)


@torch.library.custom_op(
    "dcpc::attention_of_rows_mask_backward",
    mutates_args=(),
    schema=backward_schema(Sight, of_mask=True),
)
def attention_of_rows_mask_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k, v and the mask."""
    attended, (mask, _, rows), rest = of_backward(given)
    assert mask is not None, "a mask that has a gradient"
    assert rows is not None, "rows are of samples"
    found = tuple(map(empty_gradient, (attended.q, attended.k, attended.v)))
    dmask = mask.new_zeros(mask.shape, dtype=accumulated(mask.dtype))
    for sample in _samples(rows, mask.shape[3]):
        mine = _of_sample(attended, sample.rows)
        part = sample.part(mask)
        *gradients, more = blocks.backward(mine, part, None, Sight(*rest), mask_gradient=True)
        _write(found, gradients, sample.rows)
        assert more is not None
        sample.add_part(dmask, more)
        del gradients, more
    return found[0], found[1], found[2], dmask.to(mask.dtype)


attention_of_rows_mask_backward.register_fake(empty_mask_backward)


def _of_sample(attended: Attended, rows: slice) -> Attended:
    """Returns the tensors of some rows that attend to themselves."""
    mine = attended.rows(rows)
    return mine._replace(k=attended.k[:, :, rows], v=attended.v[:, :, rows])


def _write(into: Any, found: Any, rows: slice) -> None:
    for whole_gradient, part in zip(into, found, strict=True):
        whole_gradient[:, :, rows].copy_(part)


attention_of_rows_forward.register_autograd(
    backward_by("attention_of_rows"), setup_context=save_call
)
define_output("attention_of_rows", Sight)
ROWS_OP = torch.ops.dcpc.attention_of_rows.default
