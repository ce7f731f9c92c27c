"""Every op that a traced program can have has a rule or a stated reason for having none."""

import torch

from dcpc.passes.sharding.rules import rule_table

aten = torch.ops.aten

# Composite ops that torch.export keeps whole under `run_decompositions({})`, and spellings of core
# ops that reach a program as they are.
COMPOSITES = """
    linear bilinear einsum matmul inner tensordot kron outer ger linalg_matmul linalg_vecdot addr
    layer_norm group_norm rms_norm instance_norm batch_norm cosine_similarity pairwise_distance
    cosine_embedding_loss cross_entropy_loss nll_loss_nd kl_div l1_loss mse_loss smooth_l1_loss
    huber_loss binary_cross_entropy binary_cross_entropy_with_logits soft_margin_loss
    poisson_nll_loss hinge_embedding_loss margin_ranking_loss triplet_margin_loss multi_margin_loss
    scaled_dot_product_attention conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d pad constant_pad_nd _pad_circular upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d
    upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa grid_sampler
    pixel_shuffle pixel_unshuffle channel_shuffle unfold im2col col2im roll flip fliplr flipud
    cumsum cumprod logcumsumexp cummax cummin softmax log_softmax
    scatter scatter_add scatter_reduce index index_put index_select index_add index_copy gather
    take_along_dim repeat repeat_interleave tile baddbmm addbmm addmm bucketize searchsorted
    one_hot view_as_complex view_as_real polar complex where masked_fill var std var_mean std_mean
    logsumexp norm linalg_norm linalg_vector_norm linalg_matrix_norm cdist triu tril topk sort
    argsort msort max min kthvalue mode median nanmedian aminmax quantile nanquantile frexp
    native_layer_norm native_group_norm native_batch_norm _fused_rms_norm split split_with_sizes
    chunk tensor_split unbind meshgrid cat concat concatenate hstack vstack dstack column_stack
    stack clip absolute arctan2 greater_equal less_equal not_equal isin type_as lstm gru rnn_tanh
    lstm_cell gru_cell fft_fft fft_ifft fft_rfft fft_irfft fft_fft2 fft_fftn fft_fftshift stft
    linalg_inv linalg_solve linalg_cholesky linalg_det linalg_qr linalg_svd linalg_eigh diff
    nan_to_num nansum nanmean prod count_nonzero cov trace diagonal diag_embed embedding
    embedding_bag glu prelu special_expit isclose logit mish
"""


def core_ops() -> set[str]:
    """Names of all ops that have an overload with torch's `core` tag."""
    found = set()
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        op = getattr(getattr(aten, name, None), overload or "default", None)
        if full.startswith("aten::") and op is not None and torch.Tag.core in op.tags:
            found.add(f"aten.{name}")
    return found


def test_every_core_op_has_a_line_or_a_reason():
    ops = core_ops()
    assert len(ops) > 150, "torch has another way to tell the core ops"
    assert not ops - rule_table().keys()


def test_every_composite_op_has_a_line_or_a_reason():
    names = COMPOSITES.split()
    assert not [name for name in names if not hasattr(aten, name)], "torch has none of these"
    assert not {f"aten.{name}" for name in names} - rule_table().keys()


def test_reasons_are_words():
    for op, line in rule_table().items():
        assert not line.reason or len(line.reason.split()) > 4, f"{op}: '{line.reason}' says little"
