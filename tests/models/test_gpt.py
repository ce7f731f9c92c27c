"""models/gpt.py exports with symbolic batch and length, is causal, and learns."""

import math

import pytest
import torch
from torch.export import Dim

from models.gpt import GPT, GPTConfig, rope_tables, rotate


def tiny(**kwargs):
    torch.manual_seed(0)
    return GPT(GPTConfig(**{"dim": 32, "n_layers": 2, "n_heads": 4, **kwargs}))


def batch(b, s, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (b, s + 1), generator=generator)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def free_dims(exported):
    """Returns the symbols of input_ids after all guards: a specialised dim would be a number."""
    fake = next(n for n in exported.graph.nodes if n.name == "input_ids").meta["val"]
    env = fake.fake_mode.shape_env
    return {
        env.simplify(size.node.expr)
        for size in fake.shape
        if isinstance(size, torch.SymInt) and env.simplify(size.node.expr).is_Symbol
    }


@pytest.mark.parametrize(
    "kwargs", [{}, {"n_kv_heads": 2}, {"n_kv_heads": 1, "tie_embeddings": True}]
)
def test_gpt_exports_with_nothing_specialised(kwargs):
    model = tiny(**kwargs)
    dims = {0: Dim("batch", min=1, max=1024), 1: Dim("seq", min=1, max=8192)}
    exported = torch.export.export(
        model, (), batch(3, 24), dynamic_shapes={"input_ids": dims, "labels": dims}, strict=False
    )
    assert len(free_dims(exported)) == 2
    for b, s in ((1, 1), (2, 37), (5, 24)):
        inputs = batch(b, s)
        torch.testing.assert_close(exported.module()(**inputs), model(**inputs))


def test_gpt_exports_with_automatic_dims():
    dims = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    exported = torch.export.export(
        tiny(), (), batch(3, 24), dynamic_shapes={"input_ids": dims, "labels": dims}, strict=False
    )
    assert all(r.upper > 10**6 for r in exported.range_constraints.values())
    assert len(free_dims(exported)) == 2


def test_gpt_is_causal():
    model = tiny(n_kv_heads=2).double()
    ids = batch(1, 16)["input_ids"]
    changed = ids.clone()
    changed[0, 9] = (ids[0, 9] + 1) % 256
    difference = (model.logits(ids) - model.logits(changed)).abs().amax(-1)[0]
    assert (difference[:9] == 0).all()
    assert (difference[9:] > 0).all()


def test_gpt_grouped_heads_equal_repeated_heads():
    grouped, full = tiny(n_kv_heads=2).double(), tiny().double()
    state = {
        name: p.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
        if name.endswith((".k.weight", ".v.weight"))
        else p
        for name, p in grouped.state_dict().items()
    }
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(**batch(2, 9)), full(**batch(2, 9)), rtol=1e-12, atol=0)


def test_gpt_loss_is_the_mean_over_labels_that_count():
    model, inputs = tiny().double(), batch(2, 8)
    inputs["labels"][0, 3:] = -100
    logp = model.logits(inputs["input_ids"]).log_softmax(-1)
    kept = inputs["labels"] != -100
    expected = -logp[kept].gather(1, inputs["labels"][kept][:, None]).mean()
    torch.testing.assert_close(model(**inputs), expected, rtol=1e-12, atol=0)


def test_gpt_starts_at_the_uniform_loss_and_learns():
    model, inputs = tiny(), batch(4, 16)
    assert model(**inputs).item() == pytest.approx(math.log(258), abs=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model(**inputs).backward()
        optimizer.step()
    assert model(**inputs).item() < 2.0
    assert all(p.grad is not None for p in model.parameters())


def test_rotation_depends_on_distance_alone():
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    cos, sin = rope_tables(torch.zeros(1, 32, 8, dtype=torch.float64), 8, 10000.0)
    q, k = rotate(x.expand(1, 1, 32, 8), cos, sin), rotate(x.flip(-1).expand(1, 1, 32, 8), cos, sin)
    scores = (q @ k.mT)[0, 0]
    torch.testing.assert_close(scores[3, 1], scores[30, 28])
    torch.testing.assert_close(q.norm(dim=-1), x.norm(dim=-1).expand(1, 1, 32))


def test_rope_angles_are_float32_in_a_bfloat16_model():
    cos, _ = rope_tables(torch.zeros(1, 8192, 8, dtype=torch.bfloat16), 8, 10000.0)
    exact, _ = rope_tables(torch.zeros(1, 8192, 8, dtype=torch.float64), 8, 10000.0)
    assert cos.dtype == torch.bfloat16
    torch.testing.assert_close(cos.double(), exact, atol=5e-3, rtol=0)


@pytest.mark.parametrize("kwargs", [{"dim": 36}, {"n_kv_heads": 3}])
def test_gpt_refuses_sizes_that_do_not_divide(kwargs):
    with pytest.raises(ValueError, match="must be a multiple of"):
        tiny(**kwargs)
