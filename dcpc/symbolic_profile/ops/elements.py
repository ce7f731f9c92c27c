"""FLOPs an element of ops that multiply no matrices, and which of them only move data.

One table for the whole profile: a name is in one of its rows, or torch tags it as pointwise or as a
reduction, or it is unpriced. `tests/symbolic_profile/ops/test_aspects.py` holds it against the ops
that have a sharding rule.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dcpc.fx.own_ops import is_own
from dcpc.fx.torch_api.tags import is_pointwise


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Ops that only move data.
COPIES = _names("""
    alias_copy arange block_diag bucketize cat channel_shuffle clone complex constant_pad_nd
    copy diag_embed diagonal_backward diagonal_scatter embedding empty empty_like empty_permuted
    empty_strided expand_copy eye fill flip full full_like gather im2col index index_copy
    index_fill index_put index_select iota isin lift_fresh_copy _local_scalar_dense
    masked_scatter masked_scatter_backward masked_select narrow new_empty new_empty_strided
    new_full new_ones new_zeros nonzero ones ones_like permute_copy pick pixel_shuffle
    pixel_unshuffle put rand rand_like randn randn_like randperm reflection_pad1d
    reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d
    replication_pad2d replication_pad3d roll scalar_tensor searchsorted select_backward
    select_scatter slice_backward slice_scatter split_with_sizes_copy spread stack take _to_copy
    trace tril tril_indices triu triu_indices unfold_copy unique_consecutive unique_dim
    _unsafe_index unsafe_split unsafe_split_with_sizes upsample_nearest1d upsample_nearest2d
    upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d view_copy widen zeros zeros_like
""")
# Ops that read a part of their first operand: they touch as much of it as they return.
LOOKUPS = _names("embedding gather index index_select narrow pick slice_backward")
# FLOPs an element of the largest operand -> ops. Interpolations: products and sums for an element
# of the image. A transform has 5 log2(n): here of 1,024.
_BY_FLOPS: Mapping[int, str] = {
    1: """
        _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
        _adaptive_avg_pool3d_backward adaptive_max_pool2d adaptive_max_pool2d_backward
        adaptive_max_pool3d adaptive_max_pool3d_backward all amax amin any argmax avg_pool2d
        avg_pool2d_backward avg_pool3d avg_pool3d_backward bernoulli bincount col2im cummax cummin
        cumprod cumsum _embedding_bag _embedding_bag_backward embedding_dense_backward
        floor_divide hardshrink_backward hardsigmoid_backward hardtanh_backward histc histogram
        index_add kthvalue leaky_relu_backward max max_pool2d_backward max_pool2d_with_indices
        max_pool2d_with_indices_backward max_pool3d_with_indices max_pool3d_with_indices_backward
        mean median min mode nanmedian nll_loss2d_backward nll_loss2d_forward nll_loss_backward
        nll_loss_forward nll_loss_nd reflection_pad1d_backward reflection_pad2d_backward
        reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward
        replication_pad3d_backward scatter scatter_add segment_reduce softshrink_backward sort sum
        topk unfold_backward _unsafe_masked_index _unsafe_masked_index_put_accumulate
        upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward
        _upsample_nearest_exact1d_backward _upsample_nearest_exact2d_backward
        _upsample_nearest_exact3d_backward
    """,
    2: """
        addr dist index_reduce linalg_vector_norm linspace multi_margin_loss
        multi_margin_loss_backward multilabel_margin_loss_backward native_dropout polar
        scatter_reduce
    """,
    3: """
        bartlett_window elu_backward hamming_window hann_window linalg_cross log_sigmoid_backward
        log_sigmoid_forward logcumsumexp logspace mse_loss mse_loss_backward upsample_linear1d
        upsample_linear1d_backward var var_mean
    """,
    4: """
        glu hardswish hardswish_backward huber_loss huber_loss_backward log_softmax _log_softmax
        _log_softmax_backward_data smooth_l1_loss smooth_l1_loss_backward softmax _softmax
        _softmax_backward_data softplus_backward uniform
    """,
    5: """
        binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits
        cross_entropy_loss cumprod_backward _fused_rms_norm rms_norm _safe_softmax
        soft_margin_loss soft_margin_loss_backward
    """,
    7: """
        group_norm layer_norm native_batch_norm _native_batch_norm_legit
        _native_batch_norm_legit_no_training native_group_norm native_layer_norm
        upsample_bilinear2d _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward
        upsample_bilinear2d_backward
    """,
    8: """
        glu_backward normal
    """,
    10: """
        _fused_rms_norm_backward
    """,
    12: """
        grid_sampler_2d grid_sampler_2d_backward
    """,
    13: """
        ctc_loss_forward
    """,
    14: """
        batch_norm_backward native_batch_norm_backward native_group_norm_backward
        native_layer_norm_backward
    """,
    15: """
        upsample_trilinear3d upsample_trilinear3d_backward
    """,
    24: """
        ctc_loss_backward grid_sampler_3d grid_sampler_3d_backward
    """,
    31: """
        upsample_bicubic2d _upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward
        upsample_bicubic2d_backward
    """,
    50: """
        _fft_c2c _fft_c2r _fft_r2c
    """,
}
ELEMENTS: Mapping[str, int] = {
    name: flops for flops, names in _BY_FLOPS.items() for name in _names(names)
}


def elementwise(op: torch._ops.OpOverload) -> tuple[str, int]:
    """Returns the class of an op that is no product, and its FLOPs an element."""
    name = "" if is_own(op) else op._schema.name.split("::")[1]
    if name in COPIES:
        return "copy", 0
    if name in ELEMENTS:
        return "reduction", ELEMENTS[name]
    if is_pointwise(op):
        return "pointwise", 1
    return "reduction" if torch.Tag.reduction in op.tags else "unpriced", 1
