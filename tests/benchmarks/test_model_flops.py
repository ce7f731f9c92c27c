"""FLOPs of whole models: STDiT's closed form at the video buckets, and torch's counter."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import dcpc
from benchmarks.video import FRAMES, SIZES
from dcpc.codegen.variant import boxed
from dcpc.commands.check import SplitModel
from dcpc.ops.attention import DIRECT
from dcpc.symbolic_profile import evaluator
from models.stdit import RectifiedFlow, STDiT, STDiTConfig, input_specs
from tests.cases.memory_models import SUBJECTS

ops = torch.ops.dcpc


def kept_pairs(queries, keys, before, after, start) -> int:
    """Counted one by one."""
    distance = torch.arange(keys) - torch.arange(start, start + queries)[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if after is not None:
        seen &= distance <= after
    if before is not None:
        seen &= distance >= -before
    return int(seen.sum())


def attention_flops(
    q, k, v, mask, keep, segment, scale, before, after, start, turn, second, empty, **_
) -> int:
    pairs = kept_pairs(q[2], k[2], before, after, start)
    return 2 * q[0] * q[1] * pairs * (q[3] + v[3])


def backward_flops(
    g, q, k, v, mask, keep, segment, out, lse, scale, before, after, start, turn, second, empty, **_
) -> int:
    """Two products of forward's kind and three more: the scores are computed again."""
    pairs = kept_pairs(q[2], k[2], before, after, start)
    return 2 * q[0] * q[1] * pairs * (3 * q[3] + 2 * v[3])


ATTENTION = {
    ops.attention_forward: attention_flops,
    ops.attention_backward: backward_flops,
    ops.attention_mask_backward: backward_flops,
}


def _attention_as_an_op(monkeypatch):
    """Has attention run as the op that the counter knows, in place of its function."""
    for op in DIRECT:
        monkeypatch.delitem(boxed.RUN, op)


@pytest.mark.parametrize("name", ["GPT", pytest.param("T5", marks=pytest.mark.slow)])
def test_flops_of_a_variant_are_those_of_torchs_counter(name, monkeypatch):
    _attention_as_an_op(monkeypatch)
    subject = SUBJECTS[name]
    split = SplitModel(
        subject.make(2), dcpc.Buckets(subject.inputs, list(subject.sizes)), subject.placed_for, sp=1
    )
    at = evaluator(split.study.profile(0))
    for sizes in subject.sizes[2:]:
        variant, integers = split.runnable.variant(split.placement, 0, sizes, 0)
        given = subject.example(sizes)
        named = {**split.held(), **{p: given[n] for p, n in split.program.inputs.items()}}
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            variant([named[p] for p in variant.placeholders], integers).backward()
        local = split.study.local_sizes(sizes)
        assert at.flops(local) == counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_blocks_of_stdit_have_the_flops_of_the_closed_form_at_all_video_buckets():
    """XL/2's width at depths 1 and 2: a layer more is a layer's FLOPs more; 28 take minutes."""
    found, configs = [], [STDiTConfig(depth=depth) for depth in (1, 2)]
    shapes = [
        {"frames": frames, "height": height // 8, "width": width // 8}
        for height, width in SIZES
        for frames in FRAMES
    ]
    assert len(shapes) == 25
    for config in configs:
        with torch.device("meta"):
            model = RectifiedFlow(STDiT(config))
        # Of one trace: images too, for which a trace of their own leaves out temporal attention.
        traced = [
            {"frames": 2, "height": 18, "width": 32},
            {"frames": 9, "height": 90, "width": 160},
        ]
        split = SplitModel(
            model, dcpc.Buckets(input_specs(config), traced), {"batch": 1, **traced[1]}, sp=1
        )
        at = evaluator(split.study.profile(0))
        local = [split.study.local_sizes({"batch": 1, **s}) for s in shapes]
        found.append([at.forward_flops(dims) for dims in local])
    for s, first, second in zip(shapes, *found, strict=True):
        tokens = ((s["height"] + 1) // 2) * ((s["width"] + 1) // 2)
        block = configs[0].flops(s["frames"], tokens, configs[0].text_len)
        assert second - first == block


class Window(nn.Module):
    """Each query sees itself, a number of keys before it, and one after it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = x.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        at = torch.arange(x.shape[1])
        distance = at[None, :] - at[:, None]
        seen = (distance <= 1) & (distance >= -20)
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen).square().mean()


def test_a_window_is_cut_off_at_both_ends_of_the_row(monkeypatch):
    _attention_as_an_op(monkeypatch)
    sizes = [{"batch": 1, "seq": 64}, {"batch": 2, "seq": 17}, {"batch": 1, "seq": 2}]
    model = nn.Sequential(nn.Linear(5, 48), Window())
    split = SplitModel(
        model, dcpc.Buckets({"input": "float32[batch, seq, 5]"}, sizes), sizes[0], sp=1
    )
    at = evaluator(split.study.profile(0))
    for point in sizes:
        variant, integers = split.runnable.variant(split.placement, 0, point, 0)
        given = {"input": torch.randn(point["batch"], point["seq"], 5)}
        named = {**split.held(), **{p: given[n] for p, n in split.program.inputs.items()}}
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            variant([named[p] for p in variant.placeholders], integers).backward()
        local = split.study.local_sizes(point)
        assert at.flops(local) == counter.get_total_flops()
