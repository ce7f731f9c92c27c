"""Micro-batches padded to their longest sample train as the plain model does, in every mode."""

import copy
import warnings

import pytest
import torch

import dcpc
from dcpc.errors import GroupError
from tests.cases.exactness import SPLITTING, compiled_error, gradient_error, loss_error
from tests.cases.launch import run_prepared, run_ranks
from tests.cases.packed_models import NUMBERS, Documents, Sequences, alone
from tests.cases.ragged import LENGTHS, Ragged, gpt
from tests.cases.ready import Ready
from tests.cases.steps import compared

pytestmark = pytest.mark.multirank

TEXT = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
SIZES = [{"seq": 12}, {"seq": 24}]
PAD = {"input_ids": 0, "labels": -100}
CASES = {
    "auto": ({}, {}),
    "rounds": ({"parameters": "rounds"}, {}),
}
BY_HAND = ("split, all made again",)
SLOW = {
    "split, all made again": ({"sp": 2, "recompute": "all"}, {}),
    "own setting, step": ({"sp": 2, "parameters": "step"}, {"mode": "inter"}),
    "unpad": ({"unpad": True}, {"pad_to_multiple_of": 4}),
    "inductor": ({"backend": "inductor", "sp": 2}, {}),
    "pull": ({"parameters": "pull"}, {}),
    "longer buckets": ({}, {"pad_to_longer": True}),
}


def ready(names):
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        options, loading = {**CASES, **SLOW}[name]
        options = {"backend": "eager", "device": SPLITTING, "verify": "off", **options}
        found[name] = Ready(gpt(), dcpc.Buckets(TEXT, SIZES), 2, **options), loading
    return found


def trained(rank, cases):
    """Largest error of any step, lengths that ran, and shares of padding, by case."""
    warnings.simplefilter("ignore")
    found = {}
    for name, (made, loading) in cases.items():
        compiled, data = made.compile(), Ragged()
        loader = dcpc.DataLoader(
            data,
            compiled,
            tokens_per_step=90,
            pad=PAD,
            weight="labels",
            pad_to="longest",
            **loading,
        )
        error, ran = 0.0, set()
        for step in loader:
            error = max(error, compared(compiled, step, data, plain=gpt()))
            for mb in step.micro_batches:
                ran.add(mb.inputs["input_ids"].shape[1])
                planned = step.plan.micro_batches[mb.number]
                assert planned.shape["seq"] == mb.inputs["input_ids"].shape[1]
                assert planned.shape["seq"] <= planned.bucket["seq"]
        if name in BY_HAND:
            error = max(error, by_hand(compiled, made.options["sp"]))
        found[name] = error, ran, loader.stats().padding_share
        compiled.close()
    return found


def by_hand(compiled, sp):
    """Largest error of calls at lengths that no bucket has, and of a loop over a loader's step."""
    model, error = compiled.model, 0.0

    def data(batch, seq):
        drawn = torch.Generator().manual_seed(seq)
        ids, labels = torch.randint(64, (2, batch, seq), generator=drawn)
        return {"input_ids": ids, "labels": labels}

    for batch, seq in ((1, 2), (2, 3), (1, 7), (2, 17), (1, 24)):
        error = max(error, compiled_error(compiled, model, data(batch, seq)))
    rank = compiled.groups.rank
    if sp > 1:  # one bucket, two lengths
        with pytest.raises(GroupError, match=r"{seq: 5}, within {seq: 12}, with batch 1"):
            compiled(**data(1, 5 + rank))
    return error


def check(results):
    for found in results:
        assert {name: error for name, (error, *_) in found.items() if not error < 1e-10} == {}
        for name, (_, ran, _) in found.items():
            between = ran - {size["seq"] for size in SIZES}
            assert between, f"{name}: only lengths of buckets ran: {ran}"
            assert min(ran) < 12, f"{name}: none is shorter than the smallest bucket: {ran}"
            assert ran <= {*LENGTHS, 12, 24, *range(4, 25, 4)}


def test_steps_are_the_plain_models_in_every_mode():
    check(run_prepared(ready, trained, 2, list(CASES)))


def packed(rank):
    """Largest error of steps of packed rows, and how many rows are padded to less than a bucket."""
    warnings.simplefilter("ignore")
    model = Documents()
    plain = copy.deepcopy(model)
    data = Sequences([3, 9, 5, 30, 12, 2, 7, 36, 1, 19, 8, 8])
    buckets = dcpc.Buckets(NUMBERS, [{"seq": 12}, {"seq": 41}])
    compiled = dcpc.compile(model, buckets, backend="eager", device=SPLITTING, verify="off")
    options = {"tokens_per_step": 60, "packing": "segment_ids", "weight": "labels"}
    error, shorter = 0.0, 0
    for step in dcpc.DataLoader(data, compiled, pad_to="longest", **options):
        compiled.zero_grad(), plain.zero_grad()
        result = compiled.train_step(step)
        expected = alone(plain, data, [i for row in step.rows for i in row], list(NUMBERS))
        expected.backward()
        gradients = {n: p.grad for n, p in plain.named_parameters()}
        error = max(error, loss_error(result.loss, expected.detach()))
        error = max(error, gradient_error(model, gradients))
        shorter += sum(bool(mb.dims) for mb in step.plan.micro_batches)
    return error, shorter


@pytest.mark.slow
def test_packed_rows_are_padded_to_the_longest_row():
    for error, shorter in run_ranks(packed, 2):
        assert error < 1e-10
        assert shorter


@pytest.mark.slow
def test_steps_are_the_plain_models_in_rarer_modes():
    check(run_prepared(ready, trained, 2, list(SLOW)))
