"""From a program to graphs that run: lowering, partition, variants; alone."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dcpc.buckets import Buckets
from dcpc.codegen import RUN
from dcpc.errors import CodegenError
from dcpc.plan.folding import Lift
from dcpc.plan.prices.priced import Priced
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import traced
from dcpc.symbolic_profile import detect
from models.gpt import GPT, GPTConfig
from tests.cases.exactness import SPLITTING, SplitModel, gradient_error, loss_error, plain

INPUTS = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
LAYERS = 3


class Alone:
    """A GPT traced once; its variants run here."""

    def __init__(self, backend="eager"):
        torch.manual_seed(0)
        config = GPTConfig(vocab_size=64, dim=32, n_layers=LAYERS, n_heads=4)
        self.model = GPT(config).double()
        buckets = Buckets(inputs=INPUTS, sizes=[{"seq": 4}, {"seq": 64}])
        self.traced = traced(self.model, buckets, detect(), backend)
        self.program, self.held = self.traced.program, self.traced.tensors
        self.runnable = Runnable(self.traced)
        self.priced = self.runnable.priced
        self.placement = self.priced.placement({"batch": 2, "seq": 16}, 1)

    def call(self, batch, seq, recompute=0):
        """Variant, its result, and the inputs."""
        sizes = {"batch": batch, "seq": seq}
        variant, integers = self.runnable.variant(self.placement, recompute, sizes, 0)
        x = data(batch, seq)
        named = {**self.held(), **{p: x[n] for p, n in self.program.inputs.items()}}
        return variant, variant([named[p] for p in variant.placeholders], integers), x


def data(batch, seq):
    ids, labels = torch.randint(0, 64, (2, batch, seq), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": labels}


@pytest.fixture(scope="module")
def alone():
    return Alone()


@pytest.mark.parametrize("recompute", [0, 2, 5, 7])
def test_numbers_are_eagers_whatever_is_recomputed(alone, recompute):
    for batch, seq in ((2, 16), (1, 37), (3, 1), (1, 1)):
        loss, gradients = plain(alone.model, data(batch, seq))
        _, got, _ = alone.call(batch, seq, recompute)
        got.backward()
        assert loss_error(got, loss) < 1e-12
        assert gradient_error(alone.model, gradients) < 1e-10
        alone.model.zero_grad()


def test_one_variant_serves_every_length(alone):
    first = alone.call(2, 16)[0]
    assert alone.call(5, 64)[0] is first
    assert alone.call(2, 16, recompute=1)[0] is not first


def test_program_is_unchanged_by_lowering(alone):
    before = alone.program.gm.code
    alone.traced.lowering(alone.priced.placement({"batch": 2, "seq": 48}, 2))
    assert alone.program.gm.code == before
    assert not any("dcpc" in n.meta for n in alone.program.gm.graph.nodes)


def test_lowering_alone_has_no_collective_and_over_ranks_has(alone):
    def collectives(placement):
        graph = alone.traced.lowering(placement).lowered.gm.graph
        return [n for n in graph.nodes if str(n.target).startswith("dcpc.all")]

    split = replace(alone.traced, device=SPLITTING)
    placement = Priced(Lift(split)).placement({"batch": 1, "seq": 64}, 2)
    assert not collectives(alone.placement)
    assert collectives(placement)
    integers = split.lowering(placement).lowered.integers
    assert {"batch", "seq", "seq_length", "seq_start"} <= {i.name for i in integers}


def test_more_recompute_saves_less(alone):
    last = alone.priced.at(alone.placement).steps
    counts = [last * i // 12 for i in range(13)]
    sizes = {"batch": 2, "seq": 64}
    saved = [alone.priced.at(alone.placement).predict(k, sizes).saved_bytes for k in counts]
    assert saved == sorted(saved, reverse=True)
    assert len(set(saved)) >= 2 * LAYERS
    assert saved[-1] < saved[0] / 5


def test_forward_and_backward_take_what_the_other_gives(alone):
    parts = alone.runnable.partition(alone.placement, 1)
    output = next(n for n in parts.forward.graph.nodes if n.op == "output")
    assert len(output.args[0]) == 1 + len(parts.saved)
    takes = [n.name for n in parts.backward.graph.nodes if n.op == "placeholder"]
    assert takes[:-1] == [*parts.saved, *parts.backward_primals]


def test_each_backward_of_a_graph_that_is_retained_has_the_plain_gradient(alone):
    x = data(2, 16)
    _, gradients = plain(alone.model, x)
    _, loss, _ = alone.call(2, 16, 3)
    found = []
    for retained in (True, True, False):
        alone.model.zero_grad()
        loss.backward(retain_graph=retained)
        assert gradient_error(alone.model, gradients) < 1e-12
        found.append(loss.grad_fn.call.kept is None)
    assert found == [False, False, True]
    alone.model.zero_grad()


def test_a_second_backward_is_an_error_where_the_first_kept_nothing(alone):
    _, loss, _ = alone.call(2, 16)
    loss.backward()
    with pytest.raises(CodegenError, match="expected retain_graph=True in each but the last"):
        loss.backward()
    alone.model.zero_grad()


@pytest.mark.parametrize("recompute", [0, 7])
def test_what_was_written_to_between_forward_and_backward_is_an_error(recompute):
    alone = Alone()
    _, loss, x = alone.call(2, 16, recompute)
    x["input_ids"].copy_(x["input_ids"].roll(1, 1))
    with pytest.raises(CodegenError, match="modified by an inplace operation since forward"):
        loss.backward()
    _, loss, _ = alone.call(2, 16, recompute)
    with torch.no_grad():
        alone.model.head.weight.mul_(2.0)
    with pytest.raises(CodegenError, match="head_weight, modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("recompute", [0, 7])
def test_other_memory_of_a_parameter_does_not_change_an_earlier_loss(recompute):
    alone = Alone()
    x = data(2, 16)
    _, gradients = plain(alone.model, x)
    _, loss, _ = alone.call(2, 16, recompute)
    for p in alone.model.parameters():
        p.data = p.data * 2.0
    loss.backward()
    assert gradient_error(alone.model, gradients) < 1e-12


def test_without_gradient_nothing_is_kept(alone):
    with torch.no_grad():
        _, loss, x = alone.call(2, 16)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, alone.model(**x))


@pytest.mark.slow
def test_inductor_has_eagers_numbers_and_a_broken_guard_compiles_another():
    alone = Alone("inductor")
    for batch, seq in ((2, 16), (1, 37), (1, 1), (40, 3)):
        loss, gradients = plain(alone.model, data(batch, seq))
        variant, got, _ = alone.call(batch, seq, 1)
        got.backward()
        assert loss_error(got, loss) < 1e-8
        assert gradient_error(alone.model, gradients) < 1e-8
        symbols = alone.program.symbols
        sizes = {symbols["batch"]: batch, symbols["seq"]: seq}
        assert not variant.integer_values(sizes, 0)[1]


class Rows(nn.Module):
    """A linear layer, and something of its rows."""

    def __init__(self, function):
        super().__init__()
        self.inner, self.function = nn.Linear(8, 8), function

    def forward(self, x):
        return self.function(torch.tanh(self.inner(x))).square().mean()


@pytest.mark.parametrize(
    "function",
    [
        lambda h: F.batch_norm(h.transpose(1, 2), None, None, training=True),
        lambda h: F.instance_norm(h.transpose(1, 2)),
        lambda h: (1 + h).cumprod(1),
        lambda h: h.relu().cumprod(1, dtype=torch.float64),
        lambda h: F.max_pool1d(h.transpose(1, 2), 3, 2, 1, ceil_mode=True),
        lambda h: nn.MaxPool1d(4)(h.transpose(1, 2)),
        lambda h: F.pad(h[:, None], (2, 1, 3, 0), mode="circular"),
        lambda h: F.pad(h, (0, 0, -2, 3)),
    ],
    ids=[
        "batch norm of a transposed value", "instance norm", "products", "products with zeros",
        "maxima", "maxima by a module", "circular padding", "padding and cropping",
    ],
)  # fmt: skip
def test_one_graph_is_right_at_every_length(function):
    """Fake strides of a batch norm are not the kernel's; others were captured for one length."""
    torch.manual_seed(0)
    buckets = Buckets({"x": "float64[batch, seq, 8]"}, [{"seq": 9}, {"seq": 40}])
    split = SplitModel(Rows(function).double(), buckets, {"batch": 2, "seq": 9}, sp=1)
    for seq in (9, 21, 40):
        sizes = {"batch": 2, "seq": seq}
        x = torch.randn(2, seq, 8, generator=torch.Generator().manual_seed(seq)).double()
        assert split.difference(sizes, {"x": x}).worst < 1e-10
    assert split.runnable.compiled_count == 1


def test_group_norm_takes_what_a_kernel_laid_otherwise_than_its_fake():
    x = torch.randn(2, 5, 3, 4, dtype=torch.float64).permute(0, 3, 1, 2)[:, :, :, 1:]
    aten = torch.ops.aten
    ops = aten.native_group_norm.default, aten.native_group_norm_backward.default
    rest = None, None, 2, 4, 10, 2
    out, mean, scale = RUN[ops[0]](x, *rest, 1e-5)
    expected = torch.nn.functional.group_norm(x, 2)
    assert torch.allclose(out, expected, rtol=1e-12)
    given = mean, scale, None, 2, 4, 10, 2, [True, False, False]
    gradients = [RUN[ops[1]](g, y, *given)[0] for g, y in ((x, x), (x.contiguous(),) * 2)]
    assert torch.equal(*gradients)
