"""Ranks that start from, load or come to different parameters: told, and mended or refused."""

import warnings

import pytest
import torch
from torch import nn

import dcpc
from tests.cases.launch import run_ranks

BUCKETS = dcpc.Buckets(inputs={"x": "float64[batch, n, 4]"}, sizes=[{"n": 4, "batch": 2}])


class Net(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.register_buffer("scale", torch.rand(4, dtype=torch.float64))
        self.table = torch.rand(4, dtype=torch.float64)

    def forward(self, x):
        return (self.b(self.a(x)) * self.scale * self.table).square().mean()


def samples():
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(4, 4, dtype=torch.float64, generator=generator)} for _ in range(8)]


def compiled_of(model):
    compiled = dcpc.compile(model, BUCKETS, backend="eager", sp=1, verify="off")
    return compiled, list(dcpc.DataLoader(samples(), compiled, tokens_per_step=16, shuffle=False))


def error_of(action):
    try:
        action()
    except dcpc.DcpcError as e:
        return f"{type(e).__name__}: {e}"
    return ""


def start_apart(rank, world):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model = Net(seed=rank)
        compiled, (step, *_) = compiled_of(model)
    compiled.train_step(step)
    alone = Net(seed=0)
    taken = [s["x"] for s in samples()][:4]
    alone(torch.stack(taken)).backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    worst = max(float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs)
    equal = torch.equal(model.scale, alone.scale) and torch.equal(model.table, alone.table)
    return worst, equal, [str(w.message) for w in said if "different values" in str(w.message)]


def come_apart(rank, world):
    model = Net(seed=0)
    compiled, (first, second, *_) = compiled_of(model)
    compiled.train_step(first)
    loaded = {n: t + 1 for n, t in model.state_dict().items()}
    compiled.load_state_dict(loaded)
    if rank == 1:
        model.scale[2] += 1e-9
    after_load = error_of(lambda: compiled.train_step(second))
    model.load_state_dict(loaded)
    compiled.train_step(second)
    with torch.no_grad():
        model.b.bias[3] += 1e-9 * rank
    later = [error_of(compiled.reduce_gradients) for _ in range(6)]
    model.load_state_dict(loaded)
    if rank == 1:
        compiled.load_state_dict(loaded)
    return after_load, later, error_of(lambda: compiled.train_step(second))


def freeze(rank, world):
    model, alone = Net(seed=0), Net(seed=0)
    compiled, (step, *_) = compiled_of(model)
    for m in (model, alone):
        m.a.requires_grad_(False)
    compiled.train_step(step)
    alone(torch.stack([s["x"] for s in samples()][:4])).backward()
    worst = float((model.b.weight.grad - alone.b.weight.grad).norm())
    none = model.a.weight.grad is None
    if rank == 1:
        model.b.eval()
        model.scale = model.scale.float()
    return worst, none, error_of(lambda: compiled.train_step(step))


@pytest.mark.multirank
def test_ranks_that_start_apart_get_rank_0s_values_with_a_warning():
    found = run_ranks(start_apart, 2, 2)
    assert all(worst < 1e-10 and equal for worst, equal, _ in found)
    (message,), none = (said for *_, said in found)
    assert "ranks started from different values of a.weight, a.bias, b.weight, ..." in message
    assert none == []


@pytest.mark.multirank
def test_ranks_that_load_or_come_to_different_values_are_refused_by_name():
    for after_load, later, alone in run_ranks(come_apart, 2, 2):
        assert after_load.startswith("GroupError: ranks have different values of scale (1 of 6")
        (error,) = [e for e in later if e]
        assert "ranks disagree" in error
        assert "b.bias" in error
        assert "1 calls of load_state_dict, " in alone
        assert "2 calls of load_state_dict" in alone


@pytest.mark.multirank
def test_parameters_frozen_after_compile_have_no_gradient_and_a_change_of_one_rank_is_told_to_all():
    errors = []
    for worst, none, error in run_ranks(freeze, 2, 2):
        assert worst < 1e-10
        assert none
        errors.append(error)
    assert all("scale: float64[4] on cpu -> float32[4] on cpu" in e for e in errors)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(32, 4)

    def forward(self, ids):
        return self.table(ids).square().mean()


def other_tokens(rank, world):
    buckets = dcpc.Buckets(inputs={"ids": "int64[batch, n]"}, sizes=[{"n": 8}])
    compiled = dcpc.compile(Tokens(), buckets, backend="eager", sp=2, verify="off")
    same = error_of(lambda: compiled(ids=torch.arange(8)[None]))
    return same, error_of(lambda: compiled(ids=torch.arange(8)[None] + rank))


@pytest.mark.multirank
def test_ranks_of_one_group_that_pass_other_tokens_are_refused():
    """As a sampler gives them that deals samples to ranks."""
    for same, other in run_ranks(other_tokens, 2, 2):
        assert not same
        assert "ranks disagree" in other
        assert "(bucket {n: 8} with batch 1, call 2): got rank 0: checksum of input 'ids' " in other
        assert "BucketPlan" not in other, "what all ranks have is left out"
