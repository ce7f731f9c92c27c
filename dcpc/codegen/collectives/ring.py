"""`dcpc::ring_attention`: queries, keys, values and output all split along the sequence.

Keys and values go round the ring in one buffer, the next step's while this one computes, so two are
alive; attention to each is merged by the logsumexp. Backward sends them round again, and their
gradients a step behind; these go home from the last rank that has added to them.

Source of the idea: Li et al., "Sequence Parallelism: Long Sequence Training from System
Perspective" (ring self-attention), with online softmax.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dcpc.codegen.collectives.collectives import group_named
from dcpc.codegen.collectives.ring_passing import RingPlace, pass_backward, pass_forward
from dcpc.errors import CodegenError
from dcpc.ops.attention import Backward, Forward, Operands, Sight, empty_gradient, empty_outputs
from dcpc.ops.attention.calls import (
    Hiding,
    backward_schema,
    define_output,
    empty_backward,
    forward_schema,
    of_backward,
    save_call,
)
from dcpc.ops.ring_route import Route, RowSplit, route


class RingCall(NamedTuple):
    """The arguments of the ring's ops after their tensors, in this order.

    Attributes:
        scale: factor of the scores.
        before: number of keys before its own position that a query sees; None: all.
        after: number of keys after its own position that a query sees; None: all.
        empty: result of a query that sees no key, see `dcpc.attention`.
        query_size: length of the outer factor of all queries.
        query_parent: length that is split evenly, see `pieces.py`.
        query_shift: position of the first query in the parent.
        key_size: length of the outer factor of all keys.
        key_parent: `query_parent` for the keys.
        key_shift: `query_shift` for the keys.
        query_zigzag: whether a rank has two chunks of the queries, one from either end.
        key_zigzag: the same for the keys.
        query_rows: number of queries in each of the query_size elements (inner factors of the dim).
        key_rows: the same for the keys.
        across: number of consecutive ranks at one ring position, each with a part of the heads.
        group: name of the process group.
    """

    scale: float
    before: int | None
    after: int | None
    empty: str
    query_size: int
    query_parent: int
    query_shift: int
    key_size: int
    key_parent: int
    key_shift: int
    query_zigzag: bool
    key_zigzag: bool
    query_rows: int
    key_rows: int
    across: int
    group: str

    @classmethod
    def of(
        cls, sight: Sight, queries: RowSplit, keys: RowSplit, across: int, group: str
    ) -> RingCall:
        """Returns the call of an attention whose queries and keys are split as given."""
        return cls(
            sight.scale, sight.before, sight.after, sight.empty,
            queries.size, queries.parent, queries.shift, keys.size, keys.parent, keys.shift,
            queries.zigzag, keys.zigzag, queries.rows, keys.rows, across, group,
        )  # fmt: skip

    @property
    def sight(self) -> Sight:
        """The visibility of keys by position. The runs of queries give their positions."""
        return Sight(self.scale, self.before, self.after, empty=self.empty)

    @property
    def queries(self) -> RowSplit:
        """The split of the queries."""
        where = self.query_size, self.query_parent, self.query_shift
        return RowSplit(*where, self.query_zigzag, self.query_rows)

    @property
    def keys(self) -> RowSplit:
        """The split of the keys."""
        where = self.key_size, self.key_parent, self.key_shift
        return RowSplit(*where, self.key_zigzag, self.key_rows)

    def nothing(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether no rank has anything to compute."""
        sizes = (*q.shape[:2], *k.shape[:2], q.shape[3], v.shape[3])
        return 0 in sizes or not self.key_size

    def placed(
        self, q: Tensor, k: Tensor, hiding: Hiding, p: int, rank: int
    ) -> tuple[Route, Operands]:
        """Returns the route of the keys, and the operands of one rank's attention to all keys.

        Args:
            q: queries of the rank `[b, h, s, d]`.
            k: keys of the rank `[b, g, t, d]`.
            hiding: tensors mask, keep and segment, each or None.
            p: number of ranks in the group.
            rank: index of the rank.
        """
        (mask, keep, segment), queries, keys, sight = hiding, self.queries, self.keys, self.sight
        misses = sight.misses(queries.size * queries.rows, keys.size * keys.rows)
        hides = mask is not None or keep is not None or misses
        everywhere = sight.empty in ("mean", "fixed") and hides
        way = route(queries, keys, p, self.across, sight.before, sight.after, everywhere)
        position = rank // self.across
        mine = way.queries[position]
        expected = sum(run.length for run in mine), way.rows(position)
        got = q.shape[2], k.shape[2]
        assert got == expected, f"rows of queries and keys here: got {got}, expected {expected}"
        size = keys.size * keys.rows
        return way, Operands(mask, keep, segment, sight, mine, size, everywhere)

    def here(self, q: Tensor, k: Tensor, v: Tensor, hiding: Hiding) -> tuple[RingPlace, Operands]:
        """Returns this rank's place in the ring, and the operands of its attention."""
        pg = group_named(self.group)
        way, given = self.placed(q, k, hiding, pg.size(), pg.rank())
        return RingPlace(way, self.group, k, v), given


# ------------------------------------------------------------------------------------- the op


@torch.library.custom_op(
    "dcpc::ring_attention_forward", mutates_args=(), schema=forward_schema(RingCall)
)
def ring_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    keep: Tensor | None,
    segment: Tensor | None,
    *packed: Any,
) -> tuple[Tensor, Tensor]:
    """Returns this rank's out `[b, h, s, e]` and its logsumexp in float32 or better.

    The logsumexp is `[b, h, s]`. With an additive mask it is `[2, b, h, s]`: the largest score, and
    the logarithm of the sum of exp(score - largest).

    Args:
        query: queries of this rank `[b, h, s, d]`.
        key: keys of this rank `[b, g, t, d]`.
        value: values of this rank `[b, g, t, e]`.
        mask: attention mask of this rank's queries and all keys, `[m, h or 1, s or 1, key_size or
            1]`.
        keep: boolean `[b or 1, key_size]`: the keys that any query may see.
        segment: integer `[b or 1, key_size]`: the number of the sequence at each position.
        packed: fields of a `RingCall`.
    """
    call = RingCall(*packed)
    if call.nothing(query, key, value):
        out, lse = empty_results(query, value, mask)
        return out.zero_(), lse.zero_()
    ring, given = call.here(query, key, value, (mask, keep, segment))
    state = Forward(given, query, value)
    pass_forward(ring, state)
    ring.log()
    return state.finish()


@ring_attention_forward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    return empty_results(query, value, mask)


def empty_results(q: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns empty tensors for out and its logsumexp, for queries `[b, h, s, d]`."""
    out, lse = empty_outputs(q, v)
    if mask is not None and mask.dtype != torch.bool:
        lse = lse.new_empty((2, *lse.shape))
    return out, lse


@torch.library.custom_op(
    "dcpc::ring_attention_backward", mutates_args=(), schema=backward_schema(RingCall)
)
def ring_attention_backward(*given: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of this rank's queries, keys and values, laid out (b, s, h, d)."""
    attended, hiding, rest = of_backward(given)
    grad, q, k, v, out, lse = attended
    call = RingCall(*rest)
    if call.nothing(q, k, v):
        return attended.zeros()
    ring, operands = call.here(q, k, v, hiding)
    state = Backward(operands, grad, q, out, lse)
    mine = pass_backward(ring, state)
    ring.log()
    dk, dv = empty_gradient(k), empty_gradient(v)
    return state.finish(), dk.copy_(mine.k), dv.copy_(mine.v)


ring_attention_backward.register_fake(empty_backward)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    if ctx.needs_input_grad[3]:
        raise CodegenError(
            "ring attention: its mask needs a gradient, which no lowering to a ring gives; split "
            "this attention by heads or by queries"
        )
    found = torch.ops.dcpc.ring_attention_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return (*found, *(None,) * (3 + len(ctx.rest)))


ring_attention_forward.register_autograd(_backward, setup_context=save_call)
define_output("ring_attention", RingCall)
