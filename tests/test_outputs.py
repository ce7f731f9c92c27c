"""Programs of several outputs, and inputs that learn: values and gradients on 1 and 2 ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.trace.loss import AllOutputs, one_number

INPUTS = {"x": "int64[batch, seq]", "z": "float64[batch, seq, 16] requires_grad"}


class Several(nn.Module):
    """Attention over tokens; returns logits, a mean, and two tensors of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Embedding(11, 16), nn.Linear(16, 16), nn.Linear(16, 11)

    def forward(self, x: Tensor, z: Tensor) -> AllOutputs:
        h = torch.tanh(self.mix(self.embed(x) + z))[:, None]
        h = F.scaled_dot_product_attention(h, h, h, is_causal=True)[:, 0]
        logits = self.out(h)
        return AllOutputs((logits, h.mean(1), x + 1, logits.argmax(-1), logits))


def outputs_and_gradients(rank: int, world: int, recompute: str) -> list[float]:
    """Differences from the plain model: of each output, then of each gradient."""
    torch.manual_seed(0)
    model = Several().double()
    buckets = dcpc.Buckets(INPUTS, [{"seq": 8}, {"seq": 16}])
    compiled = dcpc.compile(
        model, buckets, backend="eager", sp=world, recompute=recompute, verify="full"
    )
    runnable = compiled.planned.traces[0]
    placement = compiled.planned.placement(next(iter(buckets)))
    menu = compiled.plans[next(iter(buckets))].menu_step
    variant, integers = runnable.variant(placement, menu, {"batch": 3, "seq": 9}, rank)
    torch.manual_seed(1)
    x = torch.randint(0, 11, (3, 9))
    z = torch.randn(3, 9, 16, dtype=torch.float64, requires_grad=True)
    traced = runnable.traced
    tensors = {
        **traced.tensors(),
        **{p: {"x": x, "z": z}[n] for p, n in traced.program.inputs.items()},
    }
    found = variant.outputs([tensors[p] for p in variant.placeholders], integers)
    plain = model(x, z)
    leaves = [*model.parameters(), z]
    got = [*torch.autograd.grad(one_number(found), leaves)]
    want = torch.autograd.grad(one_number(plain), leaves)
    for share in got[:-1] if world > 1 else ():  # of parameters; an input's is whole
        dist.all_reduce(share)
    assert [x.requires_grad for x in found] == [True, True, False, False, True]
    pairs = [*zip(found, plain, strict=True), *zip(got, want, strict=True)]
    return [float((a - b).abs().max()) for a, b in pairs]


@pytest.mark.parametrize("recompute", ["none", "all"])
def test_every_output_and_gradient_on_one_rank(recompute):
    assert max(outputs_and_gradients(0, 1, recompute)) < 1e-12


@pytest.mark.multirank
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_every_output_and_gradient_on_two_ranks(recompute):
    for found in run_ranks(outputs_and_gradients, 2, 2, recompute, timeout_s=120.0):
        assert max(found) < 1e-12


class Judge(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, z: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(z))).mean()


def through_an_input(rank: int, world: int) -> float:
    """A generator learns through a compiled judge: the largest difference of a gradient."""
    torch.manual_seed(0)
    maker, judge = nn.Linear(3, 4).double(), Judge().double()
    buckets = dcpc.Buckets({"z": "float64[batch, seq, 4] requires_grad"}, [{"seq": 6}])
    compiled = dcpc.compile(judge, buckets, backend="eager", sp=world, verify="off")
    noise = torch.randn(2, 6, 3, dtype=torch.float64)
    got = torch.autograd.grad(compiled(z=maker(noise)), [*maker.parameters()])
    want = torch.autograd.grad(judge(maker(noise)), [*maker.parameters()])
    assert abs(float(compiled(z=maker(noise).detach())) - float(judge(maker(noise)))) < 1e-14
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))


def test_a_generator_learns_through_an_input():
    assert through_an_input(0, 1) < 1e-14


@pytest.mark.multirank
def test_a_generator_has_the_whole_gradient_on_each_rank():
    assert max(run_ranks(through_an_input, 2, 2, timeout_s=120.0)) < 1e-14


def test_an_input_that_is_not_declared_to_learn_says_how():
    buckets = dcpc.Buckets({"z": "float64[batch, seq, 4]"}, [{"seq": 6}])
    compiled = dcpc.compile(Judge().double(), buckets, backend="eager", verify="off")
    z = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(dcpc.DispatchError, match=r"z: 'float64\[batch, seq, 4\] requires_grad'"):
        compiled(z=z)


def test_integers_do_not_learn():
    with pytest.raises(dcpc.BucketError, match="floating dtype"):
        dcpc.Buckets({"x": "int64[batch, seq] requires_grad"}, [{"seq": 6}])


def test_dims_with_names_of_torchs_own_are_refused():
    buckets = dcpc.Buckets({"z": "float64[batch, s7, 4]"}, [{"s7": 6}])
    with pytest.raises(dcpc.TraceError, match="dim_s7"):
        dcpc.compile(Judge().double(), buckets, backend="eager", verify="off")
