"""Packed sequences on a GPU, all by one call of the flash attention kernel.

The kernel is torch's flash attention with the ends of the sequences among all rows. Where these
are is read on the host, which waits for the device once a call. Its backward sums the queries'
gradient in float32 over up to `MORE_ROWS` rows more for each sequence: many short sequences are
differentiated a part after the other, so that no more is held than sequence by sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dcpc.ops.attention import cuda
from dcpc.ops.attention.kernels import laid
from dcpc.ops.attention.spec import Attended, Sight, empty_gradient, empty_outputs

# Source: flash-attention, csrc/flash_attn/flash_api.cpp, mha_varlen_bwd (dq_accum).
MORE_ROWS = 128

aten = torch.ops.aten


def ends_of(q: Tensor, k: Tensor, segment: Tensor, sight: Sight) -> list[list[int]] | None:
    """Returns the ends of each sample's sequences, 0 first; None where no call takes them all.

    That is so for another kernel than flash attention, for a piece of the queries, and where the
    positions of a sequence are not consecutive.

    Args:
        q: queries `[b, h, s, d]`.
        k: keys `[b, g, t, d]`.
        segment: integer `[b or 1, t]`: the number of the sequence at each position.
        sight: limits by position.
    """
    length = q.shape[2]
    whole = sight.turn is None and sight.start == 0 and k.shape[2] == segment.shape[1] == length
    if not whole or cuda.kernel_of(q, k, sight) != "flash":
        return None
    changes = segment.cpu().long().diff(dim=1)
    if bool(((changes > 0).any(1) & (changes < 0).any(1)).any()):
        return None
    begins = F.pad(changes != 0, (1, 0), value=True)
    found = [[*of_row.nonzero().flatten().tolist(), length] for of_row in begins]
    return found if len(found) == q.shape[0] else found * q.shape[0]


class _Sequences(NamedTuple):
    """Sequences that one call computes.

    Attributes:
        samples: slice of the batch.
        rows: slice of the rows of these samples, one sample after the other.
        ends: positions among these rows at which the sequences end, 0 first.
    """

    samples: slice
    rows: slice
    ends: list[int]

    @property
    def longest(self) -> int:
        """The length of the longest sequence."""
        return max(stop - start for start, stop in pairwise(self.ends))

    def of(self, x: Tensor) -> Tensor:
        """Returns this part of `[b, h, s, d]` as `[rows, h, d]`, a view."""
        return x[self.samples].transpose(1, 2).flatten(0, 1)[self.rows]


def _runs(ends: Sequence[Sequence[int]], tensors: Sequence[Tensor]) -> Iterator[_Sequences]:
    """Yields one run of all samples if their rows are consecutive in memory, else one for each."""
    length = ends[0][-1]
    if all(x.shape[0] == 1 or x.stride(0) == length * x.stride(2) for x in tensors):
        joined = [i * length + end for i, own in enumerate(ends) for end in own[:-1]]
        yield _Sequences(slice(None), slice(None), [*joined, len(ends) * length])
        return
    for i, own in enumerate(ends):
        yield _Sequences(slice(i, i + 1), slice(None), list(own))


def _parts(run: _Sequences, most_rows: int) -> Iterator[_Sequences]:
    """Yields a run in parts of at most `most_rows` rows, each sequence with MORE_ROWS added."""
    first, held = 0, 0
    for at, (start, stop) in enumerate(pairwise(run.ends)):
        rows = stop - start + MORE_ROWS
        if held and held + rows > most_rows:
            yield _part(run, first, at)
            first, held = at, 0
        held += rows
    yield _part(run, first, len(run.ends) - 1)


def _part(run: _Sequences, first: int, last: int) -> _Sequences:
    begin = run.ends[first]
    ends = [end - begin for end in run.ends[first : last + 1]]
    return _Sequences(run.samples, slice(begin, run.ends[last]), ends)


def forward(
    q: Tensor, k: Tensor, v: Tensor, ends: Sequence[Sequence[int]], sight: Sight
) -> tuple[Tensor, Tensor]:
    """Returns out `[b, h, s, d]` and logsumexp `[b, h, s]`."""
    given = q
    q, k, v = laid("cuda", q), laid("cuda", k), laid("cuda", v)
    first, *others = _runs(ends, (q, k, v))
    if not others:
        return cuda.laid_out(*_call(first, q, k, v, sight), (given, v))
    made = empty_outputs(given, v)
    for run in (first, *others):
        for whole, mine in zip(made, _call(run, q, k, v, sight), strict=True):
            whole[run.samples].copy_(mine)
    return made


def _call(run: _Sequences, q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """Returns out `[b, h, s, d]` and logsumexp `[b, h, s]` of whole samples, views of results."""
    ends = torch.tensor(run.ends, dtype=torch.int32, device=q.device)
    left, right = _window(run, sight)
    out, lse, *_ = aten._flash_attention_forward.default(
        run.of(q), run.of(k), run.of(v), ends, ends, run.longest, run.longest, 0.0, False, False,
        scale=sight.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    length = q.shape[2]
    return (
        out.unflatten(0, (-1, length)).transpose(1, 2),
        lse.unflatten(1, (-1, length)).transpose(0, 1),
    )


def _window(run: _Sequences, sight: Sight) -> tuple[int, int]:
    """Returns the kernel's window; single positions are causal, as else the kernel decodes."""
    return cuda.window(sight, 0) if run.longest > 1 else (-1, 0)


def backward(
    given: Attended, ends: Sequence[Sequence[int]], sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v, laid out (b, s, h, d)."""
    grad, q, k, v, out = (laid("cuda", x) for x in given[:5])
    given = Attended(grad, q, k, v, out, given.lse)
    runs = list(_runs(ends, given[:5]))
    length = q.shape[2]
    if len(runs) == 1 and _is_small(runs[0], q, k, v):
        found = _differentiate(runs[0], given, sight)
        dq, dk, dv = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in found)
        return dq, dk, dv
    dq, dk, dv = (empty_gradient(x) for x in (q, k, v))
    for run in runs:
        for part in _parts(run, len(ends) * length + MORE_ROWS):
            found = _differentiate(part, given, sight)
            for whole, mine in zip((dq, dk, dv), found, strict=True):
                part.of(whole).copy_(mine)
            del found
    return dq, dk, dv


def _is_small(run: _Sequences, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Returns whether a backward's extra memory is below that of the gradients in float32."""
    more = MORE_ROWS * (len(run.ends) - 1) * q.shape[1] * (q.shape[3] + 1)
    return more <= q.numel() + k.numel() + v.numel()


def _differentiate(run: _Sequences, given: Attended, sight: Sight) -> list[Tensor]:
    """Returns the gradients `[rows, h or g, d]` of q, k and v."""
    ends = torch.tensor(run.ends, dtype=torch.int32, device=given.q.device)
    lse = given.lse[run.samples].transpose(0, 1).flatten(1)[:, run.rows].contiguous()
    unused = torch.empty((), dtype=torch.uint64, device=ends.device)  # nothing is dropped
    left, right = _window(run, sight)
    found: list[Tensor] = aten._flash_attention_backward.default(
        *(run.of(x) for x in given[:5]), lse, ends, ends, run.longest, run.longest, 0.0, False,
        unused, unused, scale=sight.scale, window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return found
