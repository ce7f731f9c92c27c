"""Backward hands over gradients as soon as they are final: all of them, once, in good time."""

import copy
from dataclasses import replace

import pytest
import torch

import dcpc
from dcpc.codegen import delivering
from dcpc.runtime.parameters.reduction import Reduction
from models.gpt import GPT, GPTConfig

X = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module", params=[False, True], ids=["own embedding", "tied embedding"])
def compiled(request):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=64, dim=32, n_layers=2, n_heads=4, tie_embeddings=request.param)
    buckets = dcpc.Buckets(
        inputs=dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]"),
        sizes=[{"seq": 12, "batch": 2}],
    )
    return dcpc.compile(GPT(config).double(), buckets, backend="eager", verify="off")


def expected(compiled):
    compiled.zero_grad()
    compiled(X, X).backward()
    found = {n: p.grad for n, p in compiled.named_parameters()}
    compiled.zero_grad()
    return found


def delivered(compiled):
    """Gradients handed over, by name, in their order."""
    names = {id(p): n for n, p in compiled.named_parameters()}
    found = {}

    def deliver(p, gradient):
        assert names[id(p)] not in found
        found[names[id(p)]] = gradient.clone()

    with delivering(deliver):
        loss = compiled(X, X)
    assert not found
    loss.backward()
    return found


def check(compiled, want, found, kept=frozenset()):
    """Each gradient was handed over, or is autograd's: `kept`, and what is read under two names."""
    names = [n for n, _ in compiled.model.named_parameters(remove_duplicate=False)]
    tied = len(names) > len(want)
    kept = kept | ({"embedding.weight"} if tied else set())
    assert found.keys() == want.keys() - kept
    for name, p in compiled.named_parameters():
        assert (p.grad is None) == (name not in kept), name
        assert torch.equal(p.grad if name in kept else found[name], want[name]), name


def test_all_gradients_are_handed_over_and_autograd_adds_none(compiled):
    want = expected(compiled)
    found = delivered(compiled)
    check(compiled, want, found)
    # The last layers' come first, and the embedding's last.
    order = [n for n in found if n.endswith("ffn.down.weight")]
    assert order == sorted(order, reverse=True)
    assert len(order) == 2
    expected(compiled)  # outside of the context autograd has them again


def test_a_backend_without_parts_hands_over_at_its_end(compiled, monkeypatch):
    """Inductor's backward is one call."""
    want = expected(compiled)
    made = compiled._core.dispatch.variants
    whole = {k: (replace(v, run_handing_over=None), i) for k, (v, i) in made.items()}
    monkeypatch.setattr(compiled._core.dispatch, "variants", whole)
    found = delivered(compiled)
    check(compiled, want, found)
    assert list(found) == [n for n in reversed(want) if n in found]


def test_hooks_of_the_user_are_called(compiled):
    want = expected(compiled)
    name, hooked = list(compiled.named_parameters())[-1]
    handle = hooked.register_hook(lambda gradient: 2 * gradient)
    found = delivered(compiled)
    handle.remove()
    check(compiled, {**want, name: 2 * want[name]}, found, {name})
    compiled.zero_grad()


def test_autograd_goes_through_parameters_only_where_it_adds_up(compiled):
    tied = len(list(compiled.model.named_parameters(remove_duplicate=False)))
    every = len(list(compiled.parameters()))
    with delivering(lambda p, gradient: None):
        seen = compiled(X, X).grad_fn.next_functions
    assert len(seen) == (1 if tied == every else tied + 2)  # two inputs, if any


def test_hooks_of_the_user_are_called_in_every_micro_batch(compiled):
    data = [{"input_ids": x, "labels": x} for x in X.repeat(3, 1)]
    (step,) = dcpc.DataLoader(
        data, compiled, samples_per_step=6, shuffle=False, pad={"input_ids": 0, "labels": -100}
    )
    calls, p = [], list(compiled.parameters())[-1]
    compiled.zero_grad()
    compiled.train_step(step)
    want = p.grad.clone()
    for register in (p.register_hook, p.register_post_accumulate_grad_hook):
        handle = register(lambda x: calls.append(x))
        compiled.zero_grad()
        compiled.train_step(step)
        handle.remove()
        assert len(calls) == len(step.micro_batches) > 1
        assert torch.equal(p.grad, want)
        calls.clear()
    compiled.zero_grad()


def test_a_gradient_of_two_parameters_is_kept_by_one(compiled):
    p, q = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
    taken, both = Reduction([p, q], compiled.groups), torch.ones(3)
    for each, gradient in ((p, both), (q, both), (p, torch.ones(3))):
        taken.add(each, gradient)
    assert (p.grad.tolist(), q.grad.tolist()) == ([2.0] * 3, [1.0] * 3)
    turned = torch.nn.Parameter(torch.zeros(3, 2).t())
    taken.add(turned, torch.ones(2, 3))
    assert turned.grad.stride() == turned.stride()


class Twins(torch.nn.Module):
    """Two parameters of equal gradients, and one whose gradient lies otherwise than it does."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.randn(4)) for _ in range(2))
        self.turned = torch.nn.Parameter(torch.randn(4, 4).t())

    def forward(self, x):
        return ((x + self.a + self.b) @ self.turned).square().mean()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_gradients_of_three_micro_batches_lie_as_their_parameters(backend):
    torch.manual_seed(0)
    model = Twins().double()
    plain, data = copy.deepcopy(model), [{"x": x} for x in torch.randn(3, 5, 4).double()]
    buckets = dcpc.Buckets({"x": "float64[batch, seq, 4]"}, [{"seq": 5, "batch": 1}])
    compiled = dcpc.compile(model, buckets, backend=backend, verify="off")
    (step,) = dcpc.DataLoader(data, compiled, samples_per_step=3)
    assert len(step.micro_batches) == 3
    compiled.train_step(step)
    plain(torch.stack([each["x"] for each in data])).backward()
    for p, q in zip(compiled.parameters(), plain.parameters(), strict=True):
        assert p.grad.stride() == p.stride()
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-14)
