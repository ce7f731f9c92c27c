"""A GPU plan fits as torch's allocator lays out blocks, and counts the optimizer's step."""

from dataclasses import replace
from math import inf

import pytest
import torch

import dcpc
from dcpc.api import plan
from dcpc.errors import PlanError
from dcpc.symbolic_profile.seconds.hardware import CPU_CORE, H200
from models.gpt import GPT, GPTConfig

SEQ = 4001


SMALL = GPTConfig(vocab_size=255, dim=96, n_layers=2, n_heads=4)


def planned(memory_bytes: int, device=H200, tie_embeddings=False, **options):
    """A small GPT's plan for one length and a micro-batch of one."""
    with torch.device("meta"):
        model = GPT(replace(SMALL, tie_embeddings=tie_embeddings))
    text = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
    buckets = dcpc.Buckets(text, [{"seq": SEQ, "batch": 1}])
    return plan(model, buckets, memory=memory_bytes, device=device, backend="eager", **options)


def used(found, limit_bytes=inf):
    (bucket,) = found.plans
    row = found.plans[bucket]
    priced, sizes = found.by_bucket[bucket].priced, {"seq": SEQ, "batch": 1}
    placement = priced.placement(sizes, 1, near=True)
    stays = found.request.residents
    return row, priced.at(placement).usage(row.menu_step, sizes, stays, limit_bytes)


def needed(found) -> int:
    ((row,),) = found.tables.values()
    return row.needed_bytes


@pytest.mark.slow
def test_segments_fit_where_blocks_alone_would():
    ample = planned(10**9)
    row, usage = used(ample)
    assert row.menu_step == 0
    assert usage.requested_bytes < usage.allocated_bytes < usage.reserved_bytes
    # All that stays, and inputs, in whole blocks: the plan's bytes are those of the allocator, but
    # for blocks that are up to 1 MiB larger than what was asked for.
    assert 0 <= usage.allocated_bytes - needed(ample) <= 0.2 * usage.allocated_bytes
    assert (usage.reserved_bytes - 1) > needed(ample)
    # With less, segments without a block are given back, up to where that is not enough.
    limits = (usage.reserved_bytes - n * 2**20 for n in range(1, 20))
    most = next(n for n in limits if used(ample, n)[1].reserved_bytes > n)
    assert most > needed(ample)
    enough = planned(most + 2**20)
    row, usage = used(enough, most + 2**20)
    assert row.menu_step == 0
    assert usage.given_back > 0
    again, usage_again = used(planned(most), most)
    assert again.menu_step > 0
    assert usage_again.reserved_bytes <= most
    with pytest.raises(PlanError, match=r"needs .* on a rank"):
        planned(12 * 2**20)


def test_a_budget_of_few_segments_is_met():
    """What is needed is 0.73 of it, but two segments that are hardly used are a third."""
    most = 60 * 2**20
    found = planned(most)
    row, usage = used(found, most)
    assert row.menu_step > 0
    (plan,) = found.plans.values()
    assert "recompute just enough for 62.9 MB with the GPU's segments" in plan.reason
    assert usage.reserved_bytes <= most


def test_tied_parameters_are_one():
    found = planned(10**9, tie_embeddings=True)
    (bucket,) = found.plans
    own = GPT(replace(SMALL, tie_embeddings=True))
    expected = sum(p.nbytes for p in own.parameters())
    assert found.profile(bucket).parameter_bytes == expected


def test_a_cpu_counts_bytes_and_a_gpu_blocks():
    gpu = planned(10**9)
    cpu = planned(10**9, replace(H200, gpu=False))
    assert cpu.request.resident_bytes == sum(cpu.request.residents)
    assert gpu.request.resident_bytes > cpu.request.resident_bytes
    assert gpu.request.resident_bytes % 512 == 0
    assert CPU_CORE.block_bytes == 1


@pytest.mark.slow
def test_a_step_of_the_optimizer_is_counted_where_it_needs_more_than_backward():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Embedding(50_000, 16), _Loss())
    buckets = dcpc.Buckets({"input": "int64[batch, seq]"}, [{"seq": 16, "batch": 1}])

    def row(optimizer, device):
        found = plan(
            model, buckets, memory=10**9, device=device, backend="eager", optimizer=optimizer
        )
        return needed(found), found.request

    table_bytes = 4 * 50_000 * 16
    for optimizer, device, tensors in (
        (torch.optim.SGD, CPU_CORE, 0),
        (torch.optim.Adam, CPU_CORE, 2),
        (torch.optim.Adam, H200, 1),
        (torch.optim.Adagrad, H200, 2),
    ):
        needed_bytes, request = row(optimizer, device)
        assert request.step_bytes == tensors * table_bytes
        beyond = needed_bytes - request.resident_bytes
        assert max(tensors, 1) * table_bytes <= beyond < (max(tensors, 1) + 0.1) * table_bytes


class _Loss(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()
