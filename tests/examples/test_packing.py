"""Packing at fixed SP gives the numbers of the samples one by one, on one rank and on two."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from dcpc.codegen import bind_group
from examples.packing import Pack, Share, loss_sum
from models.gpt import GPT, GPTConfig
from tests.cases.launch import run_ranks

LENGTHS = (7, 1, 12, 5)


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=32, dim=24, n_layers=2, n_heads=3)).double()


def pack() -> Pack:
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(32, (2, sum(LENGTHS)), generator=generator)
    labels[3] = -100
    return Pack(ids, labels, LENGTHS)


def errors(rank: int, world: int = 2) -> list[float]:
    """Largest relative error of loss and gradients against the samples one by one."""
    packed, alone, whole = gpt(), gpt(), pack()
    if world > 1:
        bind_group(f"sp{world}", dist.group.WORLD)
    loss = loss_sum(packed, Share(whole, world, rank, f"sp{world}"))
    loss.backward()
    total = loss.detach().clone()
    if world > 1:
        dist.all_reduce(total)
        for p in packed.parameters():
            dist.all_reduce(p.grad)
    expected = torch.zeros((), dtype=torch.float64)
    for ids, labels in zip(
        whole.input_ids.split(LENGTHS), whole.labels.split(LENGTHS), strict=True
    ):
        each = F.cross_entropy(alone.logits(ids[None])[0], labels, reduction="sum")
        each.backward()
        expected += each.detach()
    pairs = [(total, expected)]
    pairs += [
        (a.grad, b.grad) for a, b in zip(packed.parameters(), alone.parameters(), strict=True)
    ]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def test_a_pack_on_one_rank_has_the_numbers_of_its_documents():
    assert max(errors(0, 1)) < 1e-10


@pytest.mark.multirank
def test_a_pack_over_two_ranks_has_the_numbers_of_its_documents():
    for found in run_ranks(errors, 2):
        assert max(found) < 1e-10
