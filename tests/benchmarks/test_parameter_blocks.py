"""Steps in rounds of blocks, which run free of each other: against the plain model, and counted."""

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import dcpc
from dcpc.codegen import wire_log
from dcpc.errors import GroupError, PlanError
from dcpc.runtime.planner.plans import rounds_of
from models.gpt import GPT, GPTConfig
from tests.cases.launch import run_ranks
from tests.exact.parameters import Case, on_rank
from tests.exact.parameters_steps import TEXT, Work, rest_bytes, step_of

VOCABULARY, LENGTHS = 24, (4, 12)
BUCKETS = dcpc.Buckets(TEXT, [{"seq": n} for n in LENGTHS])
SGD = torch.optim.SGD


def compiled_in(block: int | None, **options: Any) -> dcpc.CompiledModel:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = GPT(GPTConfig(VOCABULARY, 16, 2, n_heads=4)).double()
    options = {"backend": "eager", "verify": "off", "optimizer": SGD} | options
    return dcpc.compile(model, BUCKETS, parameters="rounds", block=block, **options)


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "recompute"),
    [("odd", ("none", "all")), pytest.param("Llama", ("auto",), marks=pytest.mark.slow)],
)
def test_blocks_of_mixed_degrees_and_unequal_rounds_are_the_plain_model(name, recompute):
    case = Case(name, "rounds", block=2, recompute=recompute)
    for found in run_ranks(on_rank, 4, [case], 4, timeout_s=240):
        assert len(found) == 3 * len(recompute)  # a block has none of one of these steps
        assert max(error for _, error, _ in found) < 1e-10


def counted(rank: int) -> dict[str, Any]:
    """What a rank sends, holds and refuses."""
    compiled = compiled_in(2, sp=1, recompute="all")
    request = compiled.planned.request
    short, long = LENGTHS
    every = [Work(long, 1, (0,), 1.0), Work(short, 2, (0,), 1.0), Work(long, 1, (3,), 1.0)]
    step = step_of(compiled, every, VOCABULARY)
    wire_log.clear()
    result = compiled.train_step(step)
    count = len(rounds_of(step.plan, rank, 2))
    (each,) = {float(compiled.profile(b).wire_bytes) for b in compiled.buckets}
    kept = next(iter(compiled.parameters()))
    found = {
        "rounds": count,
        "wire": (wire_log.total_bytes(), count * each),
        "reduced": (result.reduced_bytes, (count + 1) * request.gradient_bytes),
        "rest": (rest_bytes(compiled, SGD([kept]), gradients=True), request.resident_bytes),
        "whole": sum(p.nbytes for p in compiled.module.parameters()),
        "placed": (kept.placements, kept.device_mesh.mesh.tolist()),
    }
    ids = torch.arange(long)[None]
    with torch.no_grad():  # ranks of block 0 alone call, each with a length of its own
        if rank < 2:
            found["called"] = float(
                compiled(input_ids=ids[:, : LENGTHS[rank]], labels=ids[:, : LENGTHS[rank]])
            )
    with pytest.raises(PlanError, match=r"got ranks 1 to 2; expected ranks within one block of 2"):
        compiled.train_step(step_of(compiled, [Work(long, 2, (1, 2))], VOCABULARY))
    with pytest.raises(GroupError, match=r"block 4.*block 2|block 2.*block 4"):
        compiled_in(2 if rank else 4)
    return found


@pytest.mark.slow
@pytest.mark.multirank
def test_a_block_sends_its_own_rounds_and_meets_the_others_once_a_step():
    ranks = run_ranks(counted, 4, timeout_s=120)
    assert [found["rounds"] for found in ranks] == [2, 2, 1, 1]
    for found in ranks:
        assert found["wire"][0] == found["wire"][1] > 0
        assert found["reduced"][0] == found["reduced"][1]
        # Half of parameters and gradients, within a row a parameter.
        assert found["rest"][0] == found["rest"][1] == pytest.approx(found["whole"], rel=0.02)
        assert found["placed"] == ((Replicate(), Shard(0)), [[0, 1], [2, 3]])
    assert len({found["called"] for found in ranks[:2]}) == 2
