"""Differences that the plain model's own rounding makes are no errors; smaller faults still are."""

import pytest
import torch
from torch import nn

import dcpc
from dcpc.errors import VerifyError
from dcpc.verify.compare import Given
from dcpc.verify.reference import LossAndGradients, Nudged, rounding_of

EPS = torch.finfo(torch.float64).eps


class Full(nn.Module):
    """Attention whose softmax is full: gradients of queries and keys are rounding beside others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(8, 8, dtype=torch.float64) for _ in range(3))

    def forward(self, x, labels):
        attended = (self.q(x) @ self.k(x).mT * 300).softmax(-1) @ self.v(x)
        return (attended - labels).square().mean()


def compiled():
    inputs = dict.fromkeys(("x", "labels"), "float64[batch, seq, 8]")
    buckets = dcpc.Buckets(inputs, [{"seq": 24}])
    return dcpc.compile(Full(), buckets, memory=1e9, verify="full", backend="eager")


def test_a_full_softmax_is_right_as_far_as_the_model_itself_rounds():
    made = compiled()
    x, labels = torch.randn(2, 2, 24, 8, dtype=torch.float64)
    made(x=x, labels=labels).backward()  # a call is compared, too
    assert "the trace: loss and every gradient at" in made.report()


@pytest.mark.parametrize("name", ["v.weight", "k.weight"])
def test_a_fault_beside_it_is_found(monkeypatch, name):
    right = Given.of_program

    def wrong(given, watch=None):
        found = right(given, watch)
        found.gradients[name][0, 0] *= 1 + 1e-6
        return found

    monkeypatch.setattr(Given, "of_program", wrong)
    with pytest.raises(VerifyError, match=f"gradient of {name}"):
        compiled()


def rounded(make, **leaves):
    """Returns the rounding of a loss and of its gradients, in float64."""

    def run(nudged: Nudged | None) -> LossAndGradients:
        given = {n: x.clone().requires_grad_() for n, x in leaves.items()}
        if nudged is None:
            loss = make(**given)
            found = torch.autograd.grad(loss, list(given.values()))
        else:
            with nudged:
                loss = make(**given)
                found = torch.autograd.grad(loss, list(given.values()))
        return LossAndGradients(loss.detach(), dict(zip(given, found, strict=True)))

    return rounding_of(run, torch.float64)


def test_rounding_is_that_of_the_largest_numbers_that_were_summed():
    x = torch.linspace(1, 2, 8, dtype=torch.float64)
    found = rounded(lambda x: (x * 1e6).sum() - (x * 1e6 - x).sum(), x=x)
    assert 1e5 * EPS < found["loss"] < 1e8 * EPS
    assert 1e5 * EPS < found["x"] < 1e8 * EPS, "1e6 - (1e6 - 1)"


def test_a_decision_that_flips_is_no_rounding():
    x = torch.ones(2, dtype=torch.float64)
    found = rounded(lambda x: (x * 3).max(0).values * 1.0, x=x)
    assert "x" not in found
    assert found["loss"] < 100 * EPS


def test_weights_of_a_softmax_may_be_made_of_large_scores_again():
    x = torch.linspace(0, 1, 8, dtype=torch.float64)
    small, large = (rounded(lambda x: x.softmax(0)[0], x=x + k) for k in (0.0, 1e3))
    assert 100 * small["loss"] < large["loss"] < 1e6 * EPS


def test_masks_and_zeros_stay_as_they_are():
    x = torch.ones(4, dtype=torch.float64)

    def of_mask(x):
        mask = torch.ones(4, dtype=torch.float64) * 0.5
        return (x * (mask == 0.5) * 2).sum()

    assert rounded(of_mask, x=x)["x"] < 100 * EPS
