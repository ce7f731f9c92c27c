"""What kernels of single ops take for themselves, against the allocator's events."""

import pytest
import torch
import torch.nn.functional as F

from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.transients import transient_bytes
from tests.cases.joint_graphs import measure_call

aten = torch.ops.aten
# An op turns a Python scalar into tensors of 8 + 4 bytes; rows of weights of a resized line.
SMALL_BYTES = 8192
X = torch.rand(20, 300, 64)
XT = torch.rand(20, 64, 300).transpose(1, 2)
ROW, ROWS, ALL = torch.rand(64), torch.rand(6000, 64), torch.rand(6000 * 64)
IDS, PLACES = torch.randint(0, 300, (20, 300, 64)), torch.randint(0, 300, (300,))
FEW = torch.rand(20, 40, 64)
WAVES = torch.complex(X, X)
IMAGE, LAST = torch.rand(4, 16, 30, 20), torch.rand(4, 30, 20, 16).permute(0, 3, 1, 2)
LARGE, VIDEO = torch.rand(4, 16, 60, 50), torch.rand(4, 8, 10, 12, 14)
PIXELS = torch.randint(0, 16, (4, 30, 20))
LOSSES = (
    *(aten.mse_loss, aten.huber_loss, aten.smooth_l1_loss),
    *(aten.binary_cross_entropy, aten.soft_margin_loss),
)
SHUFFLES = (
    lambda x: aten.pixel_shuffle(x, 2),
    lambda x: aten.pixel_unshuffle(x, 2),
    lambda x: aten.channel_shuffle(x, 4),
)
BAG, BAGS = torch.randint(0, 32, (4000,)), torch.arange(1000) * 4


def reduced(loss, reduction):
    return lambda x, y: loss(x.sigmoid(), y.sigmoid(), reduction=reduction)


def norm_backward(g, x, w, m):
    return aten.native_batch_norm_backward(
        g, x, w, None, None, m, w, True, 1e-5, [True, True, True]
    )


def pool_backward(g, x):
    _, where = aten.max_pool2d_with_indices(x, [3, 3], [1, 1], [1, 1])
    return aten.max_pool2d_with_indices_backward(g, x, [3, 3], [1, 1], [1, 1], [1, 1], False, where)


def bilinear(x, w, y):
    return aten._trilinear(x, w, y, [1, 3], [0], [1, 2], [2, 3])


def bags_backward(w, i, o, mode):
    out, bag, size, where = aten._embedding_bag(w, i, o, False, mode)
    return aten._embedding_bag_backward(out, i, o, bag, size, where, 32, False, mode, False, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        (lambda x, y: aten.binary_cross_entropy_with_logits(x, y, None, None, 0), [X, X]),
        (lambda x, y: aten.binary_cross_entropy_with_logits(x, y, None, None, 0), [XT, X]),
        (lambda x, y, w: aten.binary_cross_entropy_with_logits(x, y, w, w, 0), [X, X, ROW]),
        (lambda x, y: aten.binary_cross_entropy_with_logits(x, y, None, y, 0), [X, X]),
        (lambda x, y: aten.binary_cross_entropy_with_logits(x, y, None, None, 1), [X, X]),
        (lambda g, x, y: aten.soft_margin_loss_backward(g, x, y, 0), [X, X, X]),
        (lambda g, x: aten.gelu_backward(g, x), [X, XT]),
        (lambda g, x: aten.gelu_backward(g, x), [XT, XT]),
        (lambda g, x: aten.gelu_backward(g.expand(20, 300, 64), x), [X[:, :1].contiguous(), X]),
        (norm_backward, [ROWS, ROWS, ROW, ROW]),
        (norm_backward, [LARGE, LARGE, ROW[:16], ROW[:16]]),
        (norm_backward, [LAST, LAST, ROW[:16], ROW[:16]]),
        (norm_backward, [LAST, IMAGE, ROW[:16], ROW[:16]]),
        (lambda x, i: aten.scatter_reduce(x, 1, i, x, "mean"), [X, IDS]),
        (lambda x, i: aten.scatter_reduce(x, 1, i, x, "amax"), [X, IDS]),
        (lambda x, i, y: aten.index_reduce(x, 1, i, y, "mean"), [X, PLACES[:40], FEW]),
        (lambda x, i, y: aten.index_reduce(y, 1, i % 40, x, "mean"), [X, PLACES, FEW]),
        (lambda x: aten.kthvalue(x, 4, 1), [X]),
        (lambda x: aten.median(x, 1), [X]),
        (lambda x: aten.median(x, 2), [X]),
        (lambda x: aten.nanmedian(x, 2), [XT]),
        (lambda x: aten.median(x), [X]),
        (lambda x: aten.sort(x), [ALL]),
        (lambda x: aten.sort(x, 1), [X]),
        (lambda g: aten.unfold_backward(g, [6000 * 64], 0, 8, 8), [ALL.view(-1, 8)]),
        (lambda g: aten.unfold_backward(g, [6000 * 64 + 7], 0, 8, 1), [torch.rand(6000 * 64, 8)]),
        (lambda x: aten.linalg_vector_norm(x, 2, [1], dtype=torch.float64), [X]),
        (lambda x, y: aten._euclidean_dist(x, y), [X, FEW]),
        (lambda x, y: aten._euclidean_dist(x, y), [FEW, X]),
        (lambda x, y: aten._cdist_forward(x, y[:, :20], 1.0, None), [X, FEW]),
        (lambda x: aten._fft_r2c(x, [1], 0, True), [X]),
        (lambda x: aten._fft_r2c(x, [2], 0, True), [X]),
        (lambda x: aten._fft_r2c(x, [0], 0, True), [ROWS]),
        (lambda x: aten._fft_c2c(x, [1], 0, True), [WAVES]),
        (lambda x: aten._fft_c2c(x, [1, 2], 0, True), [WAVES]),
        (lambda x: aten._fft_c2r(x, [1], 0, 598), [WAVES]),
        (lambda x: aten._fft_c2r(x, [2], 0, 126), [WAVES]),
        (lambda x: aten._fft_c2r(x, [1, 2], 0, 126), [WAVES]),
        (bilinear, [ROWS, torch.rand(8, 64, 64), ROWS]),
        (lambda x, i, o: aten._embedding_bag(x, i, o, False, 2), [torch.rand(32, 8), BAG, BAGS]),
        (lambda x, i, o: bags_backward(x, i, o, 2), [torch.rand(32, 64), BAG, BAGS]),
        (lambda x: aten.reflection_pad1d(x, [1, 2]), [XT]),
        (lambda x: aten.replication_pad1d(x, [1, 2]), [X]),
        (lambda g, x: aten.reflection_pad2d_backward(g, x, [0, 0, 0, 0]), [LAST, IMAGE]),
        (lambda g, x: aten.avg_pool2d_backward(g, x, [3, 3], [1, 1], [1, 1], False, True, None),
         [LAST, IMAGE]),
        (lambda g, x: aten.avg_pool2d_backward(g, x, [3, 3], [1, 1], [1, 1], False, True, None),
         [LAST, LAST]),
        (lambda g, x: aten.replication_pad2d_backward(g, x, [0, 0, 0, 0]), [IMAGE, LAST]),
        (lambda x: aten.roll(x, [3], [1]), [X]),
        (lambda x: aten.roll(x, [-3, -4], [1, 2]), [X]),
        (lambda x: aten.roll(x, [1, 2, 3], [0, 1, 2]), [X]),
        (pool_backward, [IMAGE, IMAGE]),
        (pool_backward, [LAST, IMAGE]),
        (pool_backward, [LAST, LAST]),
        (pool_backward, [IMAGE, LAST]),
        (lambda g, x: aten._adaptive_avg_pool2d_backward(g, x), [IMAGE, LARGE]),
        (lambda g, x: aten._adaptive_avg_pool2d_backward(g, x),
         [IMAGE, LARGE.to(memory_format=torch.channels_last)]),
        (lambda g, x: aten._adaptive_avg_pool2d_backward(g, x), [LAST, LARGE]),
        (lambda g, x: aten._adaptive_avg_pool2d_backward(g, x.mT.unsqueeze(2)),
         [torch.rand(20, 64, 1, 7), X]),
        (lambda x: aten.im2col(x, [3, 3], [1, 1], [1, 1], [1, 1]), [IMAGE]),
        (lambda x: aten.im2col(x, [3, 3], [1, 1], [1, 1], [1, 1]), [LAST]),
        (lambda x: aten.upsample_nearest2d(x, [60, 40]), [IMAGE]),
        (lambda x: aten.upsample_bilinear2d(x, [60, 68], False), [IMAGE]),
        (lambda x: aten.upsample_bilinear2d(x, [60, 69], False), [IMAGE]),
        (lambda x: aten.upsample_nearest2d(x, [120, 100]), [LARGE]),
        (lambda x: aten.upsample_nearest2d(x, [60, 40]), [LAST]),
        (lambda x: aten._upsample_bilinear2d_aa(x, [60, 40], False), [IMAGE]),
        (lambda x: aten.avg_pool3d(x, [3, 3, 3]), [VIDEO.transpose(1, 2)]),
        (lambda x: aten.log_sigmoid_forward(x), [XT]),
        *((reduced(loss, r), [X, X]) for loss in LOSSES for r in (0, 1, 2)),
        (lambda x, i: aten.nll_loss2d_forward(x, i, None, 1, -100), [IMAGE, PIXELS]),
        (lambda x, i: aten.nll_loss2d_forward(x, i, None, 1, -100), [LAST, PIXELS]),
        (lambda x, i, g: aten.nll_loss2d_backward(g, x, i, None, 1, -100, g),
         [IMAGE, PIXELS.mT.contiguous().mT, torch.ones(())]),
        *((f, [x]) for f in SHUFFLES for x in (IMAGE, LAST)),
    ],
)  # fmt: skip
def test_transient_of_a_kernel(function, tensors, dtype):
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64

    def cast(x):
        return x.to(wide) if x.is_complex() else x.to(dtype) if x.is_floating_point() else x

    facts = Facts({})
    for m in measure_call(function, *map(cast, tensors)):
        table_bytes = int(transient_bytes(m.node, facts, torch.get_num_threads()).doit())
        assert abs(m.transient_bytes - table_bytes) <= SMALL_BYTES, m.node.format_node()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        *((reduced(loss, r), [X, X]) for loss in LOSSES for r in (1, 2)),
        (lambda x, y: aten.binary_cross_entropy_with_logits(x, y), [X, X]),
        (lambda x, i: aten.gather(x, 1, i), [FEW, IDS % 40]),
        (lambda x, i: aten.gather(x, 1, i), [X, IDS[:, :40]]),
        (lambda x, i: aten.gather(x, 0, i.expand(300, 64)), [ROWS, PLACES.view(-1, 1)]),
        (lambda x, i, y: aten.scatter_add(x, 1, i, y), [FEW, IDS % 40, X]),
        (lambda x, i, y: aten.scatter_add(x, 1, i, y), [X, IDS[:, :40], FEW]),
        (lambda x, i, y: aten.scatter(x, 1, i, y), [X, IDS[:, :40], FEW]),
        (lambda x, i: aten.scatter(x, 1, i, 0.5), [X, IDS[:, :40]]),
        (lambda x, i, y: aten.scatter_reduce(x, 1, i, y, "amax"), [FEW, IDS % 40, X]),
        (lambda x, i, y: aten.scatter_reduce(x, 1, i, y, "mean"), [FEW, IDS % 40, X]),
        (lambda x, i, y: aten.scatter_reduce(x, 1, i, y, "mean"), [X, IDS[:, :40], FEW]),
    ],
)  # fmt: skip
def test_transient_of_a_kernel_in_half_precision(function, tensors, dtype):
    facts = Facts({})
    for m in measure_call(
        function, *(x.to(dtype) if x.is_floating_point() else x for x in tensors)
    ):
        table_bytes = int(transient_bytes(m.node, facts, torch.get_num_threads()).doit())
        assert abs(m.transient_bytes - table_bytes) <= SMALL_BYTES, m.node.format_node()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradient_of_masked_scatter_is_within_its_bound(dtype):
    facts, mask = Facts({}), X > 0.5
    for m in measure_call(
        lambda g, k: aten.masked_scatter_backward(g, k, [20, 300, 64]), X.to(dtype), mask
    ):
        table_bytes = int(transient_bytes(m.node, facts, torch.get_num_threads()).doit())
        assert m.transient_bytes <= table_bytes + SMALL_BYTES


@pytest.mark.parametrize(
    ("function", "tensors"),
    [
        *((reduced(loss, r), [X, X]) for loss in LOSSES for r in (0, 1, 2)),
        (lambda x: F.fold(x, (30, 20), 3, padding=1), [torch.rand(4, 144, 600)]),
        (lambda w, i, o: aten._embedding_bag(w, i, o, False, 1), [ROWS[:32], BAG, BAGS]),
        (lambda w, i, o: aten._embedding_bag(w, i, o, False, 0), [ROWS[:32], BAG, BAGS]),
    ],
)  # fmt: skip
def test_memory_of_a_result_that_was_cut(function, tensors):
    facts = Facts({})
    for m in measure_call(function, *tensors):
        told_bytes = sum(int(t.storage_bytes) for t in facts.fresh(m.node))
        assert m.allocated_bytes == told_bytes, m.node.format_node()
