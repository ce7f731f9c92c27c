"""Random ops: alike where a value is whole, again when recomputed, refused where unknown."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.ops.random import mix
from tests.cases.launch import run_ranks

BUCKETS = dcpc.Buckets(inputs={"x": "float64[batch, seq, 8]"}, sizes=[{"seq": 12}])


class Dropped(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.inner = nn.Linear(8, 8)
        self.outer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = x + F.dropout(self.inner(x).relu(), self.p, self.training)
        q = h.unsqueeze(1)
        p = self.p if self.training else 0.0
        h = h + F.scaled_dot_product_attention(q, q, q, dropout_p=p, is_causal=True).squeeze(1)
        return self.outer(h).square().mean()


class Noisy(nn.Module):
    def __init__(self, draw: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.float64))
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        noise = {
            "rand": lambda: torch.rand(x.shape, dtype=x.dtype),
            "randn_like": lambda: torch.randn_like(x),
            "bernoulli": lambda: torch.bernoulli(torch.full_like(x, 0.25)),
            "randperm": lambda: torch.randperm(8).double(),
            "bernoulli of a number": lambda: torch.bernoulli(x, 0.25),
            "written": lambda: x.new_empty(x.shape).bernoulli_(0.25),
            "path": lambda: x.new_empty(*x.shape[:2], 1).bernoulli_(0.5),  # its default
            "rows": lambda: F.dropout1d(torch.ones_like(x), 0.3),
            "alpha": lambda: F.alpha_dropout(torch.ones_like(x), 0.3, training=True),
        }[self.draw]()
        return (noise * self.scale).mean()


class Sloped(nn.Module):
    def __init__(self, **options: float) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8).double()
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(self.inner(x), training=self.training, **self.options).square().mean()


@pytest.mark.parametrize("options", [{}, {"lower": 0.2}, {"lower": 0.1, "upper": 0.7}])
def test_slopes_are_drawn_in_training_alone(options: dict[str, float]) -> None:
    model = Sloped(**options)
    with pytest.raises(dcpc.TraceError, match="rrelu"):
        dcpc.compile(model, BUCKETS, backend="eager")
    model.eval()
    x = torch.linspace(-1, 1, 2 * 12 * 8, dtype=torch.float64).view(2, 12, 8)
    found = gradient(dcpc.compile(model, BUCKETS, backend="eager"))
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    assert found[0] == model(x).item()
    torch.testing.assert_close(found[1], list(expected), rtol=0, atol=1e-15)


def compiled_with(model: nn.Module, recompute: str, **options: object) -> dcpc.CompiledModel:
    torch.manual_seed(0)
    return dcpc.compile(
        model.double(), BUCKETS, backend="eager", recompute=recompute, verify="off", **options
    )


def gradient(compiled: dcpc.CompiledModel) -> tuple[float, list[Tensor]]:
    x = torch.linspace(-1, 1, 2 * 12 * 8, dtype=torch.float64).view(2, 12, 8)
    loss = compiled(x=x)
    found = torch.autograd.grad(loss, list(compiled.parameters()))
    return loss.item(), list(found)


def test_recomputed_dropout_draws_the_same_numbers() -> None:
    model = Dropped(0.3)
    kept, again = (gradient(compiled_with(model, r)) for r in ("none", "all"))
    assert kept[0] == again[0]
    assert all(torch.equal(a, b) for a, b in zip(kept[1], again[1], strict=True))


def test_every_call_draws_new_numbers_and_a_seed_repeats_them() -> None:
    model = Dropped(0.3)
    compiled = compiled_with(model, "none")
    first, second = gradient(compiled)[0], gradient(compiled)[0]
    assert first != second
    assert gradient(compiled_with(model, "none"))[0] == first


def test_no_dropout_equals_plain_model() -> None:
    model = Dropped(0.0)
    loss, _ = gradient(compiled_with(model, "none"))
    x = torch.linspace(-1, 1, 2 * 12 * 8, dtype=torch.float64).view(2, 12, 8)
    assert loss == pytest.approx(model(x).item(), rel=1e-14)


def test_dropout_has_the_plain_model_s_distribution() -> None:
    model = Dropped(0.5).double()
    compiled = compiled_with(model, "none")
    x = torch.linspace(-1, 1, 2 * 12 * 8, dtype=torch.float64).view(2, 12, 8)
    with torch.no_grad():
        ours = torch.stack([compiled(x=x) for _ in range(400)])
        plain = torch.stack([model(x) for _ in range(400)])
    error = (plain.var() / 400 + ours.var() / 400).sqrt()
    assert abs(ours.mean() - plain.mean()) < 5 * error
    assert 0.7 < ours.std() / plain.std() < 1.4


MEANS = {
    "rand": 0.5, "randn_like": 0.0, "bernoulli": 0.25, "bernoulli of a number": 0.25,
    "written": 0.25, "path": 0.5, "rows": 1.0, "alpha": 0.603,
}  # fmt: skip


@pytest.mark.parametrize(("draw", "mean"), MEANS.items())
def test_draws_have_their_mean(draw: str, mean: float) -> None:
    compiled = compiled_with(Noisy(draw), "none")
    x = torch.zeros(64, 12, 8, dtype=torch.float64)
    with torch.no_grad():
        losses = torch.stack([compiled(x=x) for _ in range(20)])
    assert losses.mean().item() == pytest.approx(mean, abs=0.02)


def test_random_op_that_cannot_be_split_is_refused_by_name() -> None:
    with pytest.raises(dcpc.TraceError, match=r"aten.randperm.*expected dropout.*pass them as"):
        compiled_with(Noisy("randperm"), "none")


def test_nothing_is_dropped_in_eval_after_compiling_in_train() -> None:
    model, never = Dropped(0.3), Dropped(0.0)
    never.load_state_dict(model.state_dict())
    compiled, without = compiled_with(model, "none"), compiled_with(never, "none")
    assert gradient(compiled)[0] != gradient(without)[0]
    compiled.eval()
    found, wanted = gradient(compiled), gradient(without)
    assert found[0] == wanted[0]
    assert all(torch.equal(a, b) for a, b in zip(found[1], wanted[1], strict=True))


def test_mix_spreads_neighbouring_numbers() -> None:
    found = {mix(0, index, salt) for index in range(50) for salt in range(50)}
    assert len(found) == 2500
    assert all(0 <= number < 1 << 63 for number in found)


def losses_of_rank(rank: int) -> list[float]:
    torch.manual_seed(rank)  # the compiled model uses rank 0's
    model = Dropped(0.3).double()
    for p in model.parameters():
        torch.nn.init.constant_(p, 0.25)
    compiled = dcpc.compile(model, BUCKETS, backend="eager", sp=2, verify="off")
    x = torch.linspace(-1, 1, 12 * 8, dtype=torch.float64).view(1, 12, 8)
    return [compiled(x=x).item() for _ in range(3)]


@pytest.mark.multirank
def test_ranks_of_a_group_draw_alike() -> None:
    first, second = run_ranks(losses_of_rank, 2)
    assert first == second
    assert len(set(first)) == 3
