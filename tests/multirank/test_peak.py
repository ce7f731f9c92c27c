"""Memory of several micro-batches and the sum of gradients: within the predicted peak."""

import warnings

import pytest
import torch

import dcpc
from examples.allocator import measured_peak_bytes
from models.gpt import GPT, GPTConfig
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_ranks

SEQ = 1024
# Numbers on which ranks agree, and a scalar or two.
SLACK_BYTES = 4096


class Tokens:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(256, (SEQ,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def peaks(rank: int) -> tuple[int, list[int], dict[int, list[int]]]:
    """Predicted peak of a variant; what four of it and steps of four took beyond it."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    buckets = dcpc.Buckets(
        inputs=dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]"),
        sizes=[{"seq": SEQ, "batch": 1}],
    )
    model = GPT(GPTConfig(vocab_size=256, dim=64, n_layers=2, n_heads=4))
    compiled = dcpc.compile(model, buckets, backend="eager", device=SPLITTING, sp=2, verify="off")
    predicted = compiled.predict({"seq": SEQ})
    x = {k: v[None] for k, v in Tokens()[0].items()}
    compiled(**x).backward()

    def four() -> None:
        for _ in range(4):
            compiled(**x).backward()

    calls = [measured_peak_bytes(four) - predicted.peak_bytes for _ in range(3)]
    # A step also makes the gradient, which is resident in the plan, and reads its inputs.
    room = predicted.peak_bytes + predicted.input_bytes + sum(p.nbytes for p in model.parameters())
    loader = dcpc.DataLoader(Tokens(), compiled, tokens_per_step=4 * SEQ, mode="inter")
    steps: dict[int, list[int]] = {}
    for comm_bucket_bytes in (100_000, 25_000_000):
        compiled.comm_bucket_bytes = comm_bucket_bytes
        for step in loader:
            compiled.zero_grad()
            peak_bytes = measured_peak_bytes(lambda step=step: compiled.train_step(step))
            steps.setdefault(comm_bucket_bytes, []).append(peak_bytes - room)
    assert compiled.stats().early_bytes > 0
    return predicted.peak_bytes, calls, steps


@pytest.mark.slow
@pytest.mark.multirank
def test_micro_batches_in_a_row_peak_where_one_does():
    """Gloo's threads hold none of the memory, so it does not matter when they let go."""
    for predicted, calls, steps in run_ranks(peaks, 2, timeout_s=200):
        assert predicted > 5_000_000
        assert max(map(abs, calls)) < SLACK_BYTES
        for beyond in steps.values():
            assert len(beyond) == 2
            assert max(beyond) < SLACK_BYTES
