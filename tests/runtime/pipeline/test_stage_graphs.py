"""A model cut into stages, run one after the other, against the plain model; float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dcpc.compiled.pipeline import chain_of, run_in_turn, shared_parameters, stages_of
from dcpc.errors import DispatchError, PlanError
from dcpc.plan.runnable import Runnable
from tests.cases.stages import (
    CASES,
    TOKENS,
    PipelineCase,
    captured,
    cut_model,
    evenly,
    plain_gradients,
)

EXACT = 1e-10


def check_stages(case, counts):
    model, traced, chain = captured(case)
    data = [case.data(sizes, i) for i, sizes in enumerate(case.runs)]
    weights = [0.3 + 0.2 * i for i in range(len(data))]
    losses, wanted = plain_gradients(model, data, weights)
    for count in counts:
        stages = stages_of(traced, model, chain, evenly(chain, count))
        for apart in (False, True):
            for inputs, weight, loss in zip(data, weights, losses, strict=True):
                got = run_in_turn(stages, inputs, weight, apart=apart)
                assert (got - loss).abs() <= EXACT * loss.abs()
            found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            assert found.keys() == wanted.keys()
            for name, grad in wanted.items():
                assert (found[name] - grad).abs().max() <= EXACT * grad.abs().max(), name
            assert all(stage.runnable.compiled_count == 1 for stage in stages), "one for all shapes"
            model.zero_grad()


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("gpt_tied", (2, 4)),
        ("t5", (4,)),
        *[
            pytest.param(name, (2, 4), marks=pytest.mark.slow)
            for name in ("gpt", "llama", "gpt2", "t5", "stdit")
        ],
    ],
)
def test_stages_give_the_plain_models_loss_and_gradients(name, counts):
    check_stages(CASES[name], counts)


class Draws(nn.Module):
    """Skips a value over several blocks, draws, and has an integer value that depends on one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, input_ids, labels):
        x = skip = self.first(input_ids)
        for block in self.blocks:
            x = x + F.dropout(torch.tanh(block(x)), 0.3)
        largest = x.argmax(-1)
        x = x + skip * (largest % 2)[..., None]
        return F.cross_entropy(self.last(x).flatten(0, 1), labels.flatten())


def draws():
    torch.manual_seed(0)
    return Draws().double()


DRAWN = PipelineCase(draws, TOKENS, ({"seq": 8}, {"seq": 24}), (), CASES["gpt"].data)


def test_stages_draw_what_the_whole_model_draws():
    model, traced, chain = captured(DRAWN)
    inputs = DRAWN.data({"batch": 2, "seq": 11}, 0)
    whole = Runnable(traced)
    sizes = {"batch": 2, "seq": 11}
    variant, integers = whole.variant(whole.priced.placement(sizes, 1), 0, sizes, 0)
    named = {**traced.tensors(), **{p: inputs[n] for p, n in traced.program.inputs.items()}}
    loss = variant.outputs([named[p] for p in variant.placeholders], integers, 7)[0]
    loss.backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    stages = stages_of(traced, model, chain, range(len(chain.borders)))
    assert any(set(s.part.received) - set(s.part.read) for s in stages), "something is handed on"
    assert (run_in_turn(stages, inputs, 1.0, seed=7) - loss).abs() <= EXACT
    assert run_in_turn(stages, inputs, 0.0, seed=8) != loss
    for name, grad in wanted.items():
        found = dict(model.named_parameters())[name].grad
        assert (found - grad).abs().max() <= EXACT * grad.abs().max(), name


def test_shapes_are_known_in_advance_and_shared_parameters_are_named():
    _, stages = cut_model(CASES["gpt_tied"], 4)
    assert shared_parameters(stages) == {"embedding.weight": (0, 3)}
    inputs = CASES["gpt_tied"].data({"batch": 3, "seq": 21}, 0)
    sent = ()
    for stage in stages:
        assert [(tuple(x.shape), x.dtype) for x in sent] == [
            *stage.received({"batch": 3, "seq": 21})
        ]
        sent, _ = stage.forward(inputs, sent)
        assert [(tuple(x.shape), x.dtype) for x in sent] == [*stage.sent({"batch": 3, "seq": 21})]
        assert stage.predict({"batch": 3, "seq": 21}).seconds_s > 0


def test_the_whole_program_is_left_as_it_was():
    model, traced, chain = captured(DRAWN)
    before = [n.format_node() for n in traced.program.gm.graph.nodes]
    stages_of(traced, model, chain, [0, 1, len(chain.borders) - 1])
    assert [n.format_node() for n in traced.program.gm.graph.nodes] == before


def test_a_stage_asks_for_the_inputs_it_needs():
    model, traced, chain = captured(DRAWN)
    first, *_, last = stages_of(traced, model, chain, evenly(chain, 2))
    inputs = DRAWN.data({"batch": 2, "seq": 11}, 0)
    with pytest.raises(DispatchError, match="expected input_ids too"):
        first.forward({"labels": inputs["labels"]}, ())
    sent, _ = first.forward(inputs, ())
    with pytest.raises(DispatchError, match="got 0 values; expected"):
        last.forward(inputs, ())
    with pytest.raises(DispatchError, match="expected labels too"):
        last.forward({"input_ids": inputs["input_ids"]}, sent)


def test_a_model_with_an_input_that_learns_is_refused():
    inputs = {"x": "float64[batch, seq] requires_grad"}
    lengths = ({"seq": 8}, {"seq": 24})
    case = PipelineCase(lambda: Scaled().double(), inputs, lengths, (), CASES["gpt"].data)
    _, traced, _ = captured(case)
    with pytest.raises(PlanError, match="an input that learns"):
        chain_of(traced.program, traced.program.dims({"batch": 2, "seq": 24}))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return (self.scale * x).sum()
