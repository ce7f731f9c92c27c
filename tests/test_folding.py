"""A deep model planned as three copies of its block costs what all of them cost, to the byte."""

import dataclasses

import pytest
import torch

import dcpc
from dcpc.api import plan
from dcpc.folding import fold
from dcpc.variants import Variants
from models.gpt import GPT, GPTConfig
from models.stdit import RectifiedFlow, STDiT, STDiTConfig

TOKENS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
SIZES = {"seq": 1024, "batch": 2}
CLIPS = {
    "latents": "float32[batch, 4, frames, tokens*2, 2]",
    "noise": "float32[batch, 4, frames, tokens*2, 2]",
    "timestep": "float32[batch]",
    "text": "float32[batch, 12, 32]",
    "text_mask": "bool[batch, 12]",
    "fps": "float32[batch]",
    "pixel_height": "float32[batch]",
    "pixel_width": "float32[batch]",
}


def gpt(layers: int) -> Variants:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, dim=32, n_layers=layers, n_heads=4))
    buckets = dcpc.Buckets(inputs=TOKENS, sizes=[{"seq": 64}, {"seq": 1024}])
    return plan(model, buckets, device="h200", memory=1e12, sp=1, backend="eager").variants


def whole(variants: Variants) -> Variants:
    """The same variants, planned block by block."""
    given = (variants.device, variants.backend, variants.tensors, variants.reference)
    return Variants(variants.program, variants.sharding, *given, fewest=1 << 20)


def numbers(prediction) -> tuple:
    found = dataclasses.asdict(prediction)
    return round(found.pop("seconds_s"), 14), *found.values()


@pytest.fixture(scope="module")
def deep() -> Variants:
    return gpt(8)


@pytest.mark.parametrize("sp", [1, 2, 3])
def test_it_costs_what_all_blocks_cost(deep, sp):
    each = whole(deep)
    assert deep.planner is not deep
    assert each.planner is each
    ours, theirs = deep.placement(SIZES, sp), each.placement(SIZES, sp)
    assert ours.nodes == theirs.nodes
    every = deep.steps(ours)
    menu = each.menu(theirs)  # its last plans are those in which all blocks choose alike
    numbered = range(menu.count + len(menu.prices) + 1)
    steps = [frozenset(each.made_again(theirs, k)) for k in numbered]
    for k in {0, 1, every // 2, every}:
        same = steps.index(frozenset(deep.made_again(ours, k)))
        assert numbers(deep.predict(ours, k, SIZES)) == numbers(each.predict(theirs, same, SIZES))
        a, b = deep.profile(ours, k), each.profile(theirs, same)
        assert a.gradient_bytes == b.gradient_bytes
        assert a.parameter_bytes == b.parameter_bytes
        assert a.saved_bytes == b.saved_bytes
        assert a.flops == b.flops


def test_three_copies_stand_for_any_number(deep):
    """The costs of a shallow trace say those of a deep model."""
    shallow = gpt(3)
    folded = fold(shallow.program, fewest=3)
    folded = dataclasses.replace(folded, others=(5,))
    given = (shallow.device, shallow.backend, shallow.tensors, shallow.reference)
    stands = Variants(shallow.program, shallow.sharding, *given, folded)
    a, b = stands.placement(SIZES, 2), deep.placement(SIZES, 2)
    for k in (0, deep.steps(b)):
        assert numbers(stands.predict(a, k, SIZES)) == numbers(deep.predict(b, k, SIZES))


def test_what_is_not_repeated_enough_is_not_folded():
    assert fold(gpt(3).program) is None


@pytest.mark.slow
def test_video_blocks():
    config = STDiTConfig(depth=7, dim=64, heads=4, text_dim=32, text_len=12)
    with torch.device("meta"):
        model = RectifiedFlow(STDiT(config))
    sizes = [{"frames": f, "tokens": t} for f in (2, 16) for t in (16, 256)]
    given = {"device": "h200", "memory": 1e12, "sp": 1, "backend": "eager"}
    variants = plan(model, dcpc.Buckets(CLIPS, sizes), **given).variants
    each = whole(variants)
    assert variants.planner is not variants
    at = {"frames": 16, "tokens": 256, "batch": 1}
    for sp in (1, 4):
        ours, theirs = variants.placement(at, sp), each.placement(at, sp)
        if ours.nodes != theirs.nodes:
            continue  # a tie that falls otherwise
        expected = each.predict(theirs, each.steps(theirs), at)
        assert numbers(variants.predict(ours, variants.steps(ours), at)) == numbers(expected)
