"""cosmos-framework #161: accumulation that saves communication, in bytes on the wire."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import dcpc
from dcpc.fx.torch_api.torch_collectives import GATHER
from tests.cases.asks import PAD, TEXT, Texts, entry, far, gpt, labels_that_count, plain_step, whole
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_ranks

pytestmark = pytest.mark.multirank

MODES = ("whole", "step", "pull", "rounds")
TIMES = (1, 4)  # micro-batches of a rank in a step
# What a call is given of the tensors that it sends, by place among its arguments.
GIVEN = {
    "all_reduce": 0, "broadcast": 0, "all_gather": 1, GATHER: 1,
    "reduce_scatter": 1, "reduce_scatter_tensor": 1, "all_to_all": 1, "all_to_all_single": 1,
    "isend": 0,  # a gather of rows, on the CPU: once to each other rank
}  # fmt: skip


@contextmanager
def counted() -> Iterator[list[int]]:
    """Counts the bytes that a rank hands to torch.distributed."""
    given: list[int] = []

    def counting(name: str) -> Any:
        call = getattr(dist, name)

        def counts(*args: Any, **kwargs: Any) -> Any:
            tensors = args[GIVEN[name]]
            tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
            size_bytes = sum(x.nbytes for x in tensors)
            given.append(size_bytes)
            return call(*args, **kwargs)

        return patch.object(dist, name, counts)

    with ExitStack() as stack:
        for name in GIVEN:
            stack.enter_context(counting(name))
        yield given


def step_bytes(rank: int) -> dict[tuple[str, int], tuple[float, int]]:
    """Of each mode and number of micro-batches: the largest error, and the bytes of a step."""
    warnings.simplefilter("ignore")
    buckets, found = dcpc.Buckets(TEXT, sizes=[{"seq": 20, "batch": 1}]), {}
    for mode in MODES:
        compiled = dcpc.compile(
            gpt(), buckets, backend="eager", parameters=mode, sp=1, device=SPLITTING, verify="off"
        )
        for times in TIMES:
            data, alone = Texts([20] * 2 * times), gpt()
            loader = dcpc.DataLoader(data, compiled, tokens_per_step=40 * times, pad=PAD,
                                     weight="labels")  # fmt: skip
            (step,) = loader
            loss = plain_step(alone, data, range(len(data)), labels_that_count)
            with counted() as given:
                worst = far(compiled.train_step(step).loss, loss)
                optimizer = torch.optim.SGD(compiled.parameters(), lr=0.0)
                optimizer.step()
            for p, q in zip(compiled.parameters(), alone.parameters(), strict=True):
                worst = max(worst, far(whole(p.grad), q.grad))
                p.grad = None
            found[mode, times] = (worst, sum(given))
    return found


def ddp_bytes(rank: int, times: int) -> int:
    """Bytes of gradients that DistributedDataParallel sums where nobody calls `no_sync`."""
    model, data, sent = DistributedDataParallel(gpt()), Texts([20] * times), []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        sent.append(bucket.buffer().nbytes)
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, hook)
    for i in range(times):
        sample = {n: x[None] for n, x in data[i].items()}
        (model(**sample) / times).backward()
    return sum(sent)


@pytest.mark.slow
def test_gradients_are_summed_once_a_step():
    ranks = run_ranks(step_bytes, 2, timeout_s=120)
    said = entry(__file__)
    for found in ranks:
        assert max(worst for worst, _ in found.values()) < 1e-10
        for mode in ("whole", "step", "pull"):
            assert found[mode, 4][1] == found[mode, 1][1], "whatever is accumulated"
        assert found["rounds", 4][1] > 3.9 * found["rounds", 1][1]
        for mode in MODES:
            one, four = (found[mode, times][1] for times in TIMES)
            assert f'| `"{mode}"` | {one / 1e3:.0f} | {four / 1e3:.0f} |' in said
    one, four = (run_ranks(ddp_bytes, 2, times, timeout_s=60)[0] for times in TIMES)
    assert four == 4 * one
    name = "DistributedDataParallel without `no_sync`"
    assert f"| {name} | {one / 1e3:.0f} | {four / 1e3:.0f} |" in said
