"""One step over a mixed batch, through the loader, against the global loss on one device."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import dcpc
from tests.cases.exactness import SPLITTING, gradient_error
from tests.cases.launch import run_prepared
from tests.cases.ragged import Ragged, gpt
from tests.cases.ready import Ready

# seq -> degree: several degrees in one step; 5 and 9 are not divided by it, 3 is below 4 ranks.
DEGREES = {3: 1, 5: 2, 9: 4, 16: 1, 24: 4}


BUCKETS = dcpc.Buckets(
    inputs=dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]"),
    sizes=[{"seq": n, "batch": 2} for n in DEGREES],
)


def ready(world: int) -> Ready:
    warnings.simplefilter("ignore")
    return Ready(gpt(), BUCKETS, world, backend="eager", device=SPLITTING, verify="off")


def step_errors(rank: int, made: Ready) -> list[tuple[float, float, set[int]]]:
    warnings.simplefilter("ignore")
    model, alone, data = made.model, gpt(), Ragged()
    compiled = made.compile()
    world = compiled.groups.world
    for bucket in BUCKETS:
        degree = min(DEGREES[bucket["seq"]], world)
        compiled.plans[bucket] = replace(compiled.plans[bucket], sp=degree)
    pad = {"input_ids": 0, "labels": -100}
    loader = dcpc.DataLoader(
        data, compiled, tokens_per_step=120, pad=pad, weight="labels", shuffle=False, mode="inter"
    )
    found = []
    for step in loader:
        model.zero_grad()
        result = compiled.train_step(step)
        alone.zero_grad()
        total, count = torch.zeros((), dtype=torch.float64), 0
        for i in sorted({i for mb in step.plan.micro_batches for i in mb.sample_ids}):
            x = data[i]
            logits = alone.logits(x["input_ids"][None])[0]
            total = total + F.cross_entropy(logits, x["labels"], reduction="sum")
            count += int((x["labels"] != -100).sum())
        (total / count).backward()
        gradients = {n: p.grad for n, p in alone.named_parameters()}
        loss = float(total.detach()) / count
        found.append(
            (
                abs(float(result.loss) - loss) / loss,
                gradient_error(model, gradients),
                {mb.sp for mb in step.plan.micro_batches},
            )
        )
    return found


def check(found: list[tuple[float, float, set[int]]], mixed: int) -> None:
    assert len(found) > 1
    for loss, gradient, _ in found:
        assert loss < 1e-10
        assert gradient < 1e-10
    assert max(len(degrees) for _, _, degrees in found) >= mixed


@pytest.mark.slow
@pytest.mark.multirank
def test_step_with_mixed_degrees_has_the_gradient_of_the_global_loss():
    for found in run_prepared(ready, step_errors, 4, 4, timeout_s=280):
        check(found, mixed=3)


def test_the_same_script_alone():
    check(step_errors(0, ready(1)), mixed=1)
