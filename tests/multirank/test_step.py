import pytest
import torch
import torch.distributed as dist

from dcpc.errors import DataError, GroupError
from dcpc.runtime.data.loader import DataLoader
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.store import WholeStore
from dcpc.runtime.step.gradients import reduce_gradients
from dcpc.runtime.step.on_group import OnGroup
from dcpc.runtime.step.step import train_step
from tests.cases.fakes import LONG, Ragged, RaggedWithDims, Tiny, compiled_for
from tests.cases.launch import run_ranks

pytestmark = pytest.mark.multirank

PAD = {"input_ids": 0, "labels": -100}
LENGTHS = [4, 2, 16, 7, 5, 3, 16, 12, 4, 4, 3, 7, 9, 6, 6, 7, 1, 2, 15, 8, 4]
# 7 is odd and is split over 2; 16 goes to all of 4 ranks.
SETTINGS = {
    1: {4: (1, 3), 7: (1, 2), 16: (1, 2)},
    2: {4: (1, 3), 7: (2, 2), 16: (1, 1)},
    4: {4: (1, 3), 7: (2, 2), 16: (4, 2)},
}


def expected(data: Ragged, step: Step) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Loss and gradients of the step's whole global batch on one device, padding left out."""
    model = Tiny()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for mb in step.plan.micro_batches:
        for i in mb.sample_ids:
            x = {k: v[None] for k, v in data[i].items()}
            total = total + model.total(**x, long=mb.bucket["seq"] > LONG)
            count += int((x["labels"] != -100).sum())
    (total / count).backward()
    return total.detach() / count, {k: p.grad for k, p in model.named_parameters()}


def epoch(world: int) -> float:
    """Largest error over the steps of an epoch of loss and gradients, relative to the largest."""
    groups = Groups.default(timeout_s=60, device="cpu")
    data = Ragged(LENGTHS)
    loader = DataLoader(
        data, compiled_for(groups, SETTINGS[world]), tokens_per_step=70, pad=PAD, weight="labels"
    )
    model = Tiny()
    worst = 0.0
    for step in loader:
        model.zero_grad()
        result = train_step(model.on(groups), step)
        loss, grads = expected(data, step)
        worst = max(worst, abs(result.loss.item() / loss.item() - 1))
        for name, p in model.named_parameters():
            g = grads[name]
            assert (p.grad is None) == (g is None), name
            if g is not None:
                worst = max(worst, float((p.grad - g).abs().max() / g.abs().max()))
        assert len(result.busy_s) == world
        assert 0 <= result.imbalance < 1
    assert model.unused.grad is None
    return worst


def over_ranks(rank: int, world: int) -> float:
    return epoch(world)


def special_cases(rank: int):
    groups = Groups.default(timeout_s=20)
    model = Tiny()
    compiled = compiled_for(groups, {4: (1, 1), 16: (1, 1)})

    def steps(lengths: list[int], **options) -> list[Step]:
        data = RaggedWithDims(lengths)
        return list(DataLoader(data, compiled, shuffle=False, pad=PAD, **options))

    # One sample: the other rank has nothing to do, and still takes part.
    (step,) = steps([16], tokens_per_step=99, weight="labels")
    train_step(model.on(groups), step)
    first = {k: None if p.grad is None else p.grad.clone() for k, p in model.named_parameters()}
    _, alone = expected(RaggedWithDims([16]), step)
    for k, g in alone.items():
        assert (g is None) == (first[k] is None), k
        assert g is None or torch.allclose(first[k], g, rtol=1e-12, atol=1e-15), k
    # Gradients that are there are kept, not summed over the ranks again.
    train_step(model.on(groups), step)
    assert torch.allclose(model.mix.weight.grad, 2 * first["mix.weight"], rtol=1e-12)
    # All labels of the only sample ignored.
    (step,) = steps([4], tokens_per_step=99, weight=lambda inputs: 0.0)
    with pytest.raises(DataError, match=r"step 0 of epoch 0: got a total weight of 0\.0"):
        train_step(model.on(groups), step)
    # Ranks in different steps, or with different models.
    two = steps([4, 4], tokens_per_step=4)
    with pytest.raises(GroupError, match=r"rank 0: step 0 of epoch 0.*rank 1: step 1 of epoch 0"):
        train_step(model.on(groups), two[rank])
    with pytest.raises(GroupError, match=r"rank 0: reduce_gradients of 1 parameters, 6 el.*rank 1"):
        reduce_gradients([model.long, model.unused][rank : rank + 1], groups)
    return True


class Drawing(RaggedWithDims):
    """Its samples' values are drawn from the process's random numbers."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(i)
        return {**sample, "labels": torch.randint(5, sample["labels"].shape)}


def drawn_apart(rank: int):
    """Rank 0 has drawn once more than its peer."""
    groups, model = Groups.default(timeout_s=20), Tiny()
    compiled = compiled_for(groups, {4: (1, 1), 16: (2, 1)})
    for lengths, differs in (([4, 4], False), ([4, 16], True)):
        torch.manual_seed(rank)
        (step,) = DataLoader(
            Drawing(lengths), compiled, tokens_per_step=99, shuffle=False, pad=PAD, weight="labels"
        )
        if differs:
            with pytest.raises(DataError, match=r"samples \[1\]: ranks 0,1 take them together"):
                train_step(model.on(groups), step)
        else:
            train_step(model.on(groups), step)
    return True


def many_dtypes(rank: int):
    """Several dtypes, a parameter larger than a comm bucket, tied ones, scalars."""
    groups = Groups.default(timeout_s=60)
    shapes = [(3_300_000,), (5,), (), (1200, 3000), (7, 2)]
    dtypes = [torch.float64, torch.float32, torch.float64, torch.float32, torch.bfloat16]
    params = [
        torch.nn.Parameter(torch.zeros(s, dtype=t)) for s, t in zip(shapes, dtypes, strict=True)
    ]
    frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    for i, p in enumerate(params):
        if (i + rank) % 3:
            p.grad = torch.full_like(p, 10**rank * (i + 1))
    # A gradient that is not contiguous.
    if params[3].grad is not None:
        params[3].grad = params[3].grad.t().contiguous().t()
    reduce_gradients([*params, params[0], frozen], groups)
    return [float(p.grad.double().mean()) for p in params], frozen.grad is None


@pytest.mark.parametrize("world", [2, 4])
def test_gradient_of_ragged_steps_with_mixed_degrees_equals_one_device(world):
    assert max(run_ranks(over_ranks, world, world)) < 1e-12


def test_gradient_alone_equals_one_device():
    assert not dist.is_initialized()
    assert epoch(1) < 1e-12


def test_ranks_that_drew_a_shared_sample_apart_are_an_error():
    assert run_ranks(drawn_apart, 2) == [True, True]


def test_a_step_that_fails_leaves_gradients_as_they_were():
    groups, model = Groups.default(timeout_s=60, device="cpu"), Tiny()
    compiled = compiled_for(groups, {4: (1, 1)})
    (step,) = DataLoader(Ragged([4, 4, 4]), compiled, tokens_per_step=99, pad=PAD, weight="labels")
    before = [torch.full_like(p, 2.0) for p in model.parameters()]
    for p, grad in zip(model.parameters(), before, strict=True):
        p.grad = grad.clone()
    calls = []

    def failing(mb, inputs):
        calls.append(mb)
        if len(calls) == 2:
            raise RuntimeError("injected")
        return model.call(groups, mb, inputs)

    with pytest.raises(RuntimeError, match="injected"):
        train_step(OnGroup(failing, WholeStore(model.parameters(), groups)), step)
    assert len(calls) == 2
    for p, grad in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.grad, grad)


def test_idle_ranks_earlier_gradients_and_disagreement():
    assert run_ranks(special_cases, 2) == [True, True]


def test_gradients_of_any_dtype_and_size_are_summed_once():
    expected_sums = [float(sum(10**r * (i + 1) for r in range(2) if (i + r) % 3)) for i in range(5)]
    assert run_ranks(many_dtypes, 2) == [(expected_sums, True)] * 2
