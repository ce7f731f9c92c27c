"""`train_step(outputs=)` and calls with outputs: what forward returns besides the loss."""

import pytest
import torch

import dcpc
from dcpc.runtime.groups.local_ranks import run_ranks
from tests.cases.outputs import BUCKETS, TEXT, Tagger, step_errors, training


def errors(rank, outputs, own_loss, options):
    """The largest error of steps, and whether all samples came back once a group."""
    compiled, loader = training(own_loss, verify="full", **options)
    found, seen = [], []
    for step in loader:
        found += step_errors(compiled, step, outputs)
        seen += [i for mb in step.micro_batches for i in mb.samples]
    return max(found), seen


@pytest.mark.parametrize("options", [{"recompute": "none"}, {"recompute": "all"}])
def test_outputs_of_steps_are_the_plain_models(options):
    for own_loss in (True, False):
        worst, seen = errors(0, "gathered", own_loss, {"backend": "eager", **options})
        assert worst < 1e-12
        assert sorted(seen) == [*range(12)]


@pytest.mark.multirank
@pytest.mark.parametrize("sp", [1, 2])
def test_outputs_of_steps_are_the_plain_models_on_two_ranks(sp):
    options = {"backend": "eager", "sp": sp}
    found = run_ranks(errors, 2, "gathered", True, options, timeout_s=120.0)
    assert max(worst for worst, _ in found) < 1e-12
    seen = sorted(i for _, mine in found for i in mine)
    assert seen == sorted([*range(12)] * sp)


@pytest.mark.slow
def test_outputs_of_steps_are_the_plain_models_under_inductor():
    assert errors(0, "gathered", True, {"backend": "inductor"})[0] < 1e-12


def test_a_step_draws_the_same_random_numbers_with_outputs_and_without():
    compiled, loader = training(backend="eager", drop=0.5)
    for step in loader:
        compiled.zero_grad()
        loss = compiled.train_step(step).loss
        want = [p.grad.clone() for p in compiled.parameters()]
        compiled.zero_grad()
        assert torch.equal(compiled.train_step(step, outputs=True).loss, loss)
        assert all(torch.equal(p.grad, g) for p, g in zip(compiled.parameters(), want, strict=True))


def test_a_gradient_through_an_output_is_refused():
    compiled = dcpc.compile(Tagger().double(), dcpc.Buckets(TEXT, BUCKETS), backend="eager")
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
    with pytest.raises(dcpc.DispatchError, match="got outputs='all'; expected 'gathered'"):
        compiled(ids=ids, labels=ids, outputs="all")


def test_outputs_count_in_what_a_step_may_need():
    compiled, loader = training(backend="eager")
    step = next(iter(loader))
    settings, plan = compiled._settings_of, step.plan
    compiled.train_step(step, outputs=True)
    (edition,) = compiled._editions._with_outputs.values()
    found = settings(edition)
    first = found.output_bytes(plan.micro_batches[0])
    room = found._room(plan, {})
    most = compiled.memory_bytes
    assert first > 0
    assert min(room.values()) == most - sum(map(found.output_bytes, plan.micro_batches[:-1]))
    budgets = {b: 20_000 for b in compiled.plans}
    with pytest.raises(dcpc.PlanError, match="of outputs of the step's earlier micro-batches"):
        found.choose(plan, budgets)
