"""Kinds of ops whose dims follow from their arguments: views, reductions, generators, indexing.

Each kind takes a `OpCall` and returns its `OpSharding`. Which op is of which kind is one line of
`sharding_rules.yaml`.
"""

from __future__ import annotations

from collections.abc import Callable

from dcpc.passes.sharding.op_kinds import (
    contractions,
    elementwise,
    indexing,
    reductions,
    views,
    windows,
)
from dcpc.passes.sharding.op_kinds.op_call import OpCall, all_whole, arguments
from dcpc.passes.sharding.op_kinds.views import regroup
from dcpc.passes.sharding.rule_types import OpSharding

KINDS: dict[str, Callable[[OpCall], OpSharding]] = {
    "pointwise": elementwise.pointwise,
    "elementwise_loss": elementwise.elementwise_loss,
    "fill": elementwise.fill,
    "along": elementwise.along,
    "resized": elementwise.resized,
    "fixed_dim": elementwise.fixed_dim,
    "beside": elementwise.beside,
    "row_loss": elementwise.row_loss,
    "tiled": elementwise.tiled,
    "glu": elementwise.glu,
    "triangle": elementwise.triangle,
    "norm": elementwise.norm,
    "group_norm": elementwise.group_norm,
    "channel_norm": elementwise.channel_norm,
    "prelu": elementwise.prelu,
    "one_hot": elementwise.one_hot,
    "bucketize": elementwise.bucketize,
    "cross_entropy": elementwise.cross_entropy,
    "similarity": elementwise.similarity,
    "generator": elementwise.generator,
    "reshape": views.reshape,
    "squeeze": views.squeeze,
    "unflatten": views.unflatten,
    "expand": views.expand,
    "permute": views.permute,
    "slice": views.slice_,
    "select": views.select,
    "diagonal": views.diagonal,
    "diag_embed": views.diag_embed,
    "cat": views.cat,
    "stack": views.stack,
    "pad": views.pad,
    "repeat": views.repeat,
    "split": views.split,
    "kron": views.kron,
    "repeat_interleave": views.repeat_interleave,
    "unfold": views.unfold,
    "complex_view": views.complex_view,
    "pixel_shuffle": views.pixel_shuffle,
    "channel_shuffle": views.channel_shuffle,
    "reduction": reductions.reduction,
    "extremum": reductions.extremum,
    "quantile": reductions.quantile,
    "gather": indexing.gather,
    "scatter": indexing.scatter,
    "index": indexing.index,
    "index_put": indexing.index_put,
    "index_select": indexing.index_select,
    "index_add": indexing.index_add,
    "placed": indexing.placed,
    "matmul": contractions.matmul,
    "added_matmul": contractions.added_matmul,
    "einsum": contractions.einsum,
    "tensordot": contractions.tensordot,
    "vecdot": contractions.vecdot,
    "matrices": contractions.matrices,
    "recurrent": contractions.recurrent,
    "embedding": contractions.embedding,
    "attention": contractions.attention,
    "attention_of_rows": contractions.attention_of_rows,
    "convolution": windows.convolution,
    "pooling": windows.pooling,
    "upsample": windows.upsample,
    "grid_sample": windows.grid_sample,
    "im2col": windows.im2col,
    "whole": all_whole,
}

VIEW_KINDS = {
    "reshape",
    "squeeze",
    "unflatten",
    "expand",
    "permute",
    "slice",
    "select",
    "diagonal",
    "unfold",
    "complex_view",
}

__all__ = ["KINDS", "VIEW_KINDS", "OpCall", "arguments", "regroup"]
