"""Parameters that are given other memory between steps train on, in every mode that keeps rows."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import dcpc
from models.gpt import GPT, GPTConfig
from tests.cases.launch import run_ranks

LENGTHS = (9, 16, 30, 22, 12, 8, 20, 31)
PAD = {"input_ids": 0, "labels": -100}


def to_another_device(model: nn.Module) -> None:
    """Copies all parameters: to torch, "cpu:0" is another device than "cpu"."""
    model.to("cpu:0")


def through_a_vector(model: nn.Module) -> None:
    """Writes the mean of some weights, as Stochastic Weight Averaging does."""
    vector_to_parameters(
        0.9 * parameters_to_vector(model.parameters()).detach(), model.parameters()
    )


def narrowed(model: nn.Module) -> None:
    """Rounds the parameters, and leaves them so."""
    model.float()


def losses(
    rank: int, mode: str, change: Callable[[nn.Module], None], before_update: bool
) -> list[float]:
    """Returns the losses of four steps; after the second backward or update, a change is made."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(dim=32, n_layers=1, n_heads=4)).double()
    buckets = dcpc.Buckets(dict.fromkeys(PAD, "int64[batch, seq]"), [{"seq": 16}, {"seq": 32}])
    options = {"backend": "eager", "verify": "off", "device": "cpu"}
    compiled = dcpc.compile(model, buckets, parameters=mode, **options)
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    drawn = torch.Generator().manual_seed(1)
    samples = [
        {name: torch.randint(0, 200, (n,), generator=drawn) for name in PAD} for n in LENGTHS
    ]
    loader = dcpc.DataLoader(samples, compiled, samples_per_step=2, pad=PAD)
    found = []
    for number, step in enumerate(loader):
        found.append(float(compiled.train_step(step).loss))
        if number == 1 and before_update:
            change(model)
        optimizer.step()
        optimizer.zero_grad()
        if number == 1 and not before_update:
            change(model)
    return found


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("mode", "change", "before_update"),
    [
        ("step", to_another_device, False),
        ("step", through_a_vector, True),
        ("pull", to_another_device, True),
    ],
)
def test_steps_reach_parameters_that_were_given_other_memory(mode, change, before_update):
    expected = run_ranks(losses, 2, "whole", change, before_update, timeout_s=100)
    assert len(set(expected[0])) == 4
    for found in run_ranks(losses, 2, mode, change, before_update, timeout_s=100):
        assert found == pytest.approx(expected[0], rel=1e-12)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("mode", "change", "told"),
    [
        ("step", narrowed, r"was given torch.float32\[258, 32\] on cpu.*expected torch.float64"),
        ("pull", through_a_vector, "1 whole parameters were written to"),
    ],
)
def test_values_that_cannot_be_taken_are_refused(mode, change, told):
    with pytest.raises(dcpc.DcpcError, match=told):
        run_ranks(losses, 2, mode, change, True, timeout_s=100)
