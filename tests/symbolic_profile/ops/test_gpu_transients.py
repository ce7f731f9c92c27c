"""What attention needs on a GPU, against the sizes that flash-attn's source allocates."""

from functools import cache

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import dcpc
from dcpc.api import plan
from dcpc.symbolic_profile import find
from dcpc.symbolic_profile.ops.facts import Facts, op_name
from dcpc.symbolic_profile.ops.transients import transient_bytes
from models.gpt import GPT, GPTConfig

TEXT = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
H200 = find("h200")
aten = torch.ops.aten
ROWS, PAIRS = torch.ones(64, 32, dtype=torch.bfloat16), torch.ones(4, 8, 32, dtype=torch.bfloat16)
HEADS, WIDTH = 4, 72  # a width that is rounded up to 96


@cache
def planned(dtype=torch.bfloat16, kv_heads=HEADS, device=H200):
    with torch.device("meta"):
        config = GPTConfig(
            vocab_size=64, dim=HEADS * WIDTH, n_layers=1, n_heads=HEADS, n_kv_heads=kv_heads
        )
        model = GPT(config).to(dtype)
    buckets = dcpc.Buckets(TEXT, [{"seq": n} for n in (16, 512)])
    return plan(model, buckets, device=device, memory=1e12, recompute="none", backend="eager")


def attention_bytes(found, seq, batch):
    """(forward, backward)"""
    runnable = found.runnable
    parts = runnable.partition(runnable.priced.placement({"seq": seq, "batch": batch}, 1), 0)
    facts = Facts(parts.names)
    sizes = {s: {"seq": seq, "batch": batch}[s.name] for s in facts.symbols}
    nodes = [n for gm in (parts.forward, parts.backward) for n in gm.graph.nodes]
    return [
        int(transient_bytes(n, facts, 1, gpu=(9, 0)).subs(sizes))
        for op in ("dcpc::attention_forward", "dcpc::attention_backward")
        for n in nodes
        if op_name(n) == op
    ]


@pytest.mark.parametrize(("seq", "rounded"), [(100, 128), (256, 256)])
def test_backward_has_a_wide_gradient_of_rounded_queries(seq, rounded):
    _, backward = attention_bytes(planned(), seq, 3)
    assert backward == 3 * HEADS * rounded * (96 + 1) * 4


def test_grouped_heads_have_their_own_gradients():
    _, backward = attention_bytes(planned(kv_heads=2), 128, 1)
    assert backward == HEADS * 128 * (96 + 1) * 4 + 2 * HEADS * 128 * WIDTH * 2


def test_float32_has_the_efficient_kernel():
    """Of each row its logsumexp as the kernel rounds it up, and a sum in backward."""
    forward, backward = attention_bytes(planned(torch.float32), 100, 2)
    rounded = 2 * HEADS * 128 * 4
    assert forward in (rounded, rounded + 2 * HEADS * 100 * WIDTH * 4)  # a copy of the output
    assert backward == 2 * rounded


def test_float32_of_shared_keys_is_computed_one_query_of_a_group_at_a_time():
    forward, backward = attention_bytes(planned(torch.float32, kv_heads=2), 128, 1)
    rounded, output = HEADS * 128 * 4, HEADS * 128 * WIDTH * 4
    assert forward == (rounded + output) // 2
    assert backward == rounded + output // 2 + 2 * 2 * 128 * WIDTH * 4


def test_float64_is_computed_in_blocks():
    forward, backward = attention_bytes(planned(torch.float64), 256, 1)
    scores = HEADS * 128 * 256 * 8
    assert forward > scores
    assert backward > 2 * scores


def test_a_plan_for_a_gpu_has_the_gpus_peak():
    peaks = []
    for seq in (16, 128):  # as many tokens, but short rows are rounded up most
        sizes = {"seq": seq, "batch": 1024 // seq}
        priced = planned().runnable.priced
        peaks.append(priced.at(priced.placement(sizes, 1)).predict(0, sizes).peak_bytes)
    assert peaks[0] > 1.1 * peaks[1]


@pytest.mark.parametrize(
    ("function", "tensors", "expected"),
    [
        (lambda x: aten.gather(x, 1, x.long()), [ROWS], 0),
        (lambda x: aten.scatter_add(x, 1, x.long(), x), [ROWS], 0),
        (lambda x: aten.mse_loss(x, x), [ROWS], 64 * 32 * 2),
        (lambda x: aten.binary_cross_entropy(x, x), [ROWS], 0),
        (lambda x, y: aten.bmm(x, y), [PAIRS[..., ::2], PAIRS[..., :16].mT], 4 * 8 * 16 * 2),
    ],
)
def test_kernels_that_do_not_widen(function, tensors, expected):
    traced = make_fx(function, tracing_mode="fake")(*tensors)
    *_, node, _ = traced.graph.nodes
    assert int(transient_bytes(node, Facts({}), 1, gpu=(9, 0))) == expected
