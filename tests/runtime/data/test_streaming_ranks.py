"""A stream over ranks: read once, handed out, gone on with by another number of ranks."""

from itertools import islice
from typing import Any

import pytest
import torch

from dcpc.errors import DataError, DcpcError
from dcpc.runtime.data.loader import DataLoader
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.step.execution import StepState
from dcpc.runtime.step.step import train_step
from tests.cases.fakes import Tiny, compiled_for
from tests.cases.launch import run_ranks
from tests.cases.streams import PAD, ByNumber, Plain, Stateful, sample, small

pytestmark = pytest.mark.multirank
COUNT, STOP = 110, 5
# 7 is odd and is split over 2 ranks.
SETTINGS = {4: (1, 3), 7: (2, 2), 16: (1, 2)}


def loader_of(dataset: Any, world: int, **options: Any) -> DataLoader:
    groups = Groups.default(timeout_s=60, device="cpu") if world > 1 else Groups()
    settings = SETTINGS if world > 1 else {n: (1, m) for n, (_, m) in SETTINGS.items()}
    options = {"tokens_per_step": 90, "window": 12, "weight": "labels", "pad": PAD, **options}
    return DataLoader(dataset, compiled_for(groups, settings), **options)


def run(loader: DataLoader, stop: int | None = None, again: int = -1) -> tuple[Any, ...]:
    """Trains; returns each step's loss and gradients, the samples run, and the last state."""
    model, found, ran, state = Tiny(), [], [], {}
    for n, step in enumerate(islice(loader, stop)):
        model.zero_grad()
        if n == again:
            step = step.again()
        loss = train_step(model.on(loader.compiled.groups), step).loss
        gradients = {k: p.grad.clone() for k, p in model.named_parameters() if p.grad is not None}
        found.append((loss, gradients))
        ran += [i for mb in step.micro_batches for i in mb.samples]
        state = loader.state_dict()
    return found, ran, state


def keys_left(loader: DataLoader) -> int:
    groups = loader.compiled.groups
    groups.control(groups.world).barrier().wait()
    return groups.control(groups.world).get_group_store().num_keys()


def on_rank(rank: int, world: int, state: Any) -> tuple[Any, ...]:
    """The whole epoch beside the samples by number; then part of it, or the rest."""
    dataset = Stateful(COUNT, make=small)
    whole = run(loader_of(dataset, world), again=2)
    read = len(dataset.yielded)
    numbered = run(loader_of(ByNumber(COUNT, small), world, shuffle=False))
    for (loss, gradients), (other, others) in zip(whole[0], numbered[0], strict=True):
        assert torch.equal(loss, other)
        assert all(torch.equal(g, others[k]) for k, g in gradients.items())
    # Rank 0 is ahead: what it gave and nobody took is to be deleted.
    loader = loader_of(Stateful(COUNT, make=small), world, lookahead=0 if rank else 2)
    if state:
        loader.load_state_dict(state)
    before = keys_left(loader)
    _, ran, reached = run(loader, None if state else STOP)
    del loader._handing, _
    return read, whole[1], ran, reached, keys_left(loader) - before


def test_each_sample_is_read_once_and_trained_once_through_a_change_of_ranks():
    two = run_ranks(on_rank, 2, 2, None)
    assert [r[0] for r in two] == [COUNT, 1], "rank 1 reads the first sample to compare it"
    assert {*two[0][1], *two[1][1]} == {*range(COUNT)}
    first = two[0][3]
    assert two[1][3] == first, "the same state on every rank"
    assert all(left == 0 for *_, left in two), "no sample stays in the store"
    one = loader_of(Stateful(COUNT, make=small), 1)
    one.load_state_dict(first)
    _, alone, state = run(one, 1)
    three = run_ranks(on_rank, 3, 3, state)
    begun = {i for r in two for i in r[2]}
    rest = {i for r in three for i in r[2]}
    assert not begun & {*alone}
    assert not rest & {*begun, *alone}
    assert {*begun, *alone, *rest} == {*range(COUNT)}
    for parts in ([r[2] for r in two], [alone], [r[2] for r in three]):
        short = [i for part in parts for i in part if not 4 < len(sample(i)["labels"]) <= 7]
        assert len(short) == len({*short}), "none is trained twice, but by the ranks of a group"


class Shorter(Plain):
    def __iter__(self):
        yield from (self.make(i + 1) for i in range(self.count))


def wrong(rank: int) -> list[str]:
    def said(dataset: Any) -> str:
        loader = loader_of(dataset, 2)
        try:
            for step in loader:
                state = StepState(problem=step.problem)
                train_step(Tiny().on(loader.compiled.groups), step, state=state)
        except DcpcError as e:
            return f"{type(e).__name__}: {e}"
        return ""

    return [
        said(Shorter(20, small) if rank else Plain(20, small)),
        said(Plain(0)),
    ]


def test_ranks_whose_streams_differ_are_told():
    for differs, empty in run_ranks(wrong, 2):
        assert "got a stream whose first sample is input_ids (2,)" in differs
        assert "as on rank 0; give every rank" in differs
        assert "got a stream without a sample in epoch 0" in empty


def test_what_is_not_here_is_named():
    loader = loader_of(Plain(COUNT), 1)
    list(loader)
    with pytest.raises(DataError, match="sample 200000 of the stream: got no such sample here"):
        loader._maker.samples.load(200_000)
