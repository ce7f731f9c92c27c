"""Collectives of steps: the same on all ranks of a group, and in no circle over groups.

What is recorded over gloo is what runs over NCCL, but for gathers of rows: those are messages on
the CPU, and one gather here as on a GPU.
"""

import random
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dcpc
from dcpc.runtime.parameters.reduction import Reduction
from tests.cases.call_order import Made, check_alike, circle, recording
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_prepared
from tests.cases.ragged import Ragged, gpt
from tests.cases.ready import Ready

PAD = {"input_ids": 0, "labels": -100}
DEGREES = {5: 2, 9: 4, 16: 1, 24: 4}


def gathers_as_a_gpu(into: Tensor, own: Tensor, pg: dist.ProcessGroup, number: int) -> Any:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return [gather(into, own, group=pg, async_op=True)]


def at_any_time(rank: int) -> Any:
    """Returns what says whether a bucket of gradients has room, as if others came at any time."""
    draw = random.Random(rank)

    def has_room(reduction: Reduction, in_flight: int | None) -> bool:
        before = None if in_flight is None else reduction._next - in_flight
        if before is None or before < 0:
            return True
        if not reduction._finishing and draw.random() < 0.5:
            return False
        reduction._buckets[before].wait()
        return True

    return has_room


BUCKETS = dcpc.Buckets(
    inputs=dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]"),
    sizes=[{"seq": n, "batch": 2} for n in DEGREES],
)


def ready(options: dict[str, Any]) -> Ready:
    warnings.simplefilter("ignore")
    told = {"backend": "eager", "device": SPLITTING, "verify": "off", **options}
    return Ready(gpt(), BUCKETS, 4, **told)


def steps(rank: int, made: Ready) -> tuple[list[Made], int, set[int]]:
    """Returns the calls of an epoch, its steps, and the degrees in them."""
    warnings.simplefilter("ignore")
    with (
        mock.patch("dcpc.codegen.collectives.rows._gather_into", gathers_as_a_gpu),
        mock.patch.object(Reduction, "_has_room", at_any_time(rank)),
        recording() as calls,
    ):
        compiled = made.compile()
        if "pipeline" not in made.options:
            for bucket in BUCKETS:
                own = replace(compiled.plans[bucket], sp=DEGREES[bucket["seq"]])
                compiled.plans[bucket] = own
        loader = dcpc.DataLoader(
            Ragged(), compiled, tokens_per_step=120, pad=PAD, weight="labels", shuffle=False,
            **({} if "pipeline" in made.options else {"mode": "inter"}),
        )  # fmt: skip
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
        degrees, count = set[int](), 0
        for step in loader:
            compiled.train_step(step)
            optimizer.step()
            optimizer.zero_grad()
            degrees |= {mb.sp for mb in step.plan.micro_batches}
            count += 1
    return calls, count, degrees


@pytest.mark.multirank
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"attention": "ring"}, marks=pytest.mark.slow),
        pytest.param({"parameters": "step"}, marks=pytest.mark.slow),
        {"parameters": "rounds", "block": 2, "sp": [1, 2, 4]},
    ],
    ids=str,
)
def test_a_step_of_several_degrees_has_one_order_of_calls(options):
    found = run_prepared(ready, steps, 4, options, timeout_s=300.0)
    every = [calls for calls, _, _ in found]
    assert found[0][1] > 1
    assert len(found[0][2]) > 1
    check_alike(every)
    assert circle(every) == []
    groups = {made.ranks for calls in every for made in calls}
    assert {(0, 1), (2, 3), (0, 1, 2, 3)} <= groups


@pytest.mark.multirank
def test_stages_of_several_ranks_call_alike():
    """Messages of stages pass each other, in groups of their own: they have no order in common."""
    found = run_prepared(ready, steps, 4, {"pipeline": 2, "sp": 2}, timeout_s=300.0)
    every = [calls for calls, _, _ in found]
    check_alike(every)
    assert any(made.kind == "isend" for calls in every for made in calls)
    assert circle([[made for made in calls if not made.messages] for calls in every]) == []


ALL, LEFT, RIGHT = (0, 1), "left", "right"


def of(group: str, kind: str = "all_reduce", numel: int = 1) -> Made:
    return Made(group, ALL, kind, numel)


def test_two_orders_are_a_circle():
    assert circle([[of(LEFT), of(RIGHT)], [of(LEFT), of(RIGHT)]]) == []
    assert len(circle([[of(LEFT), of(RIGHT)], [of(RIGHT), of(LEFT)]])) == 2


def test_messages_that_pass_each_other_are_a_circle():
    def message(group: str, peer: int, sends: bool) -> Made:
        return Made(group, ALL, "isend" if sends else "irecv", 1, ((peer, sends, 1),))

    first = [message(LEFT, 1, False), message(RIGHT, 1, True)]
    assert circle([first, [message(RIGHT, 0, False), message(LEFT, 0, True)]])
    assert circle([first, [message(LEFT, 0, True), message(RIGHT, 0, False)]]) == []


@pytest.mark.parametrize("other", [of(LEFT, "broadcast"), of(LEFT, numel=2), of(RIGHT)])
def test_calls_that_differ_are_found(other):
    check_alike([[of(LEFT)], [of(LEFT)]])
    with pytest.raises(AssertionError, match="differs"):
        check_alike([[of(LEFT)], [other]])
