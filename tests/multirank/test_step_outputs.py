"""`train_step(outputs=)` and calls with outputs: what forward returns besides the loss."""

import pytest
import torch

import dcpc
from dcpc.runtime.step.on_group import OnGroup
from tests.cases.exactness import SPLITTING
from tests.cases.launch import run_prepared
from tests.cases.outputs import (
    BUCKETS,
    TEXT,
    Tagger,
    output_errors,
    plain_of,
    ready,
    step_errors,
    training,
)
from tests.fuzz.memory_limit import MemoryLimit


def errors(outputs, made):
    """The largest error of steps and an evaluation; the samples, and where pieces of logits lie."""
    compiled, loader = training(made)
    found, seen, places = [], [], {}
    for step in loader:
        worst, result = step_errors(compiled, step, outputs)
        found += worst
        seen += [i for mb in step.micro_batches for i in mb.samples]
        for one in result.outputs if outputs == "sharded" else ():
            piece = one.outputs.logits
            where = [] if piece.dim is None else piece.positions.tolist()
            places[step.index, one.micro_batch.number] = (piece.dim, where, piece.length)
    ids, labels = torch.randint(0, 13, (2, 1, 9), generator=torch.Generator().manual_seed(9))
    batch = {"ids": ids, "labels": labels}
    if made.options.get("parameters") != "rounds":
        loss, got = compiled.evaluate(batch, between="compile", outputs=outputs)
        found += output_errors(got, loss, plain_of(compiled).eval(), batch)
    return max(found), seen, places


def prepare(cases):
    return [(outputs, ready(own_loss, 2, **options)) for outputs, own_loss, options in cases]


def all_errors(rank, cases):
    return [errors(*case) for case in cases]


@pytest.mark.parametrize(("recompute", "own_loss"), [("none", True), ("all", False)])
def test_outputs_of_steps_are_the_plain_models(recompute, own_loss):
    options = {"backend": "eager", "recompute": recompute, "verify": "full"}
    worst, seen, _ = errors("gathered", ready(own_loss, **options))
    assert worst < 1e-12
    assert sorted(seen) == [*range(12)]


SPLIT = {"backend": "eager", "sp": 2, "device": SPLITTING}
CASES = [
    ("gathered", True, {"backend": "eager", "sp": 1, "parameters": "rounds"}),
    ("gathered", True, {**SPLIT, "alone": True}),
    ("sharded", True, SPLIT),  # three samples and odd lengths on two ranks
    ("sharded", False, {**SPLIT, "alone": True, "attention": "heads", "recompute": "all"}),
    ("sharded", True, {**SPLIT, "alone": True, "attention": "ring"}),  # a part from either end
]


@pytest.mark.multirank
@pytest.mark.parametrize(
    "cases", [CASES[::4], pytest.param(CASES[1:4], marks=pytest.mark.slow)], ids=["quick", "rest"]
)
def test_outputs_of_steps_are_the_plain_models_on_two_ranks(cases):
    one, other = run_prepared(prepare, all_errors, 2, cases, timeout_s=200.0)
    for (outputs, _, options), (worst, seen, mine), (also, more, theirs) in zip(
        cases, one, other, strict=True
    ):
        assert max(worst, also) < 1e-12
        assert sorted(seen + more) == sorted([*range(12)] * options["sp"])
        assert (outputs == "sharded") == bool(mine)
        if mine:  # one sample has the pieces of its length, several are dealt out
            assert {dim for dim, *_ in mine.values()} == ({1} if "alone" in options else {0, 1})
        for place, (dim, positions, length) in mine.items():
            assert theirs[place][0] == dim
            assert sorted(positions + theirs[place][1]) == [*range(length)]


@pytest.mark.slow
def test_outputs_of_steps_are_the_plain_models_under_inductor():
    assert errors("gathered", ready(backend="inductor", recompute="all"))[0] < 1e-12


def test_a_step_draws_the_same_random_numbers_with_outputs_and_without():
    compiled, loader = training(ready(backend="eager", drop=0.5))
    for step in loader:
        compiled.zero_grad()
        loss = compiled.train_step(step).loss
        want = [p.grad.clone() for p in compiled.parameters()]
        compiled.zero_grad()
        assert torch.equal(compiled.train_step(step, outputs=True).loss, loss)
        assert all(torch.equal(p.grad, g) for p, g in zip(compiled.parameters(), want, strict=True))


def test_a_gradient_through_an_output_is_refused():
    compiled = dcpc.compile(
        Tagger().double(), dcpc.Buckets(TEXT, BUCKETS), backend="eager", verify="off"
    )
    ids = torch.randint(0, 13, (2, 7))
    loss, found = compiled(ids=ids, labels=ids, outputs=True)
    assert found.loss is loss
    assert not found.more["best"].requires_grad
    with pytest.raises(dcpc.DispatchError, match="that is not the loss; expected backward through"):
        (loss + found.logits.mean()).backward()
    loss, _ = compiled(ids=ids, labels=ids, outputs=True)
    compiled.zero_grad()
    loss.backward()
    want = [p.grad.clone() for p in compiled.parameters()]
    compiled.zero_grad()
    compiled(ids=ids, labels=ids).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(compiled.parameters(), want, strict=True))
    with pytest.raises(dcpc.DispatchError, match="got outputs='all'; expected one of gathered"):
        compiled(ids=ids, labels=ids, outputs="all")


def test_outputs_count_in_what_a_step_may_need():
    compiled, loader = training(ready(backend="eager", recompute="none"))
    plan = (step := next(iter(loader))).plan
    measured, predicted = [], []
    for outputs in (False, True):
        compiled.train_step(step, outputs=outputs)  # traces what runs below
        compiled.zero_grad()
        limit = MemoryLimit()
        with limit.around(OnGroup, "run_turns"):
            compiled.train_step(step, outputs=outputs)
        measured.append(limit.most_bytes)
        editions = compiled._core.editions
        edition = [editions.first, *editions._with_outputs.values()][-1]
        settings = compiled._execution.settings_of(edition)
        kept = [settings.output_bytes(mb) for mb in plan.micro_batches]
        peaks = []
        for number, mb in enumerate(plan.micro_batches):
            bucket, own = ({**b.sizes, "batch": mb.batch} for b in (mb.bucket, mb.shape))
            setting = edition.dispatch.setting_of(mb)
            study = edition.planned.by_bucket[mb.bucket].priced.at(
                edition.dispatch.placement(mb.bucket, bucket, setting)
            )
            before = sum(kept[:number])
            peaks.append(before + study.predict(setting.menu_step, own).peak_bytes)
        predicted.append(max(peaks))
    assert measured[1] - measured[0] == predicted[1] - predicted[0] > 0
    with pytest.raises(dcpc.PlanError, match="of outputs of the step's earlier micro-batches"):
        settings.choose(plan, {b: 20_000 for b in compiled.plans})
