"""Graphs made functional call by call: what torch makes of them, and the plain model's numbers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dcpc.buckets import Buckets
from dcpc.errors import TraceError
from dcpc.trace import trace
from tests.cases.values import values

BUCKETS = Buckets({"x": "float64[batch, seq, 4]"}, [{"seq": 8}, {"seq": 17}])
OWN, TORCHS = {}, {}  # forward -> its name; made by the copy, and left to torch


def own(forward):
    OWN[forward.__name__] = forward
    return forward


def torchs(forward):
    TORCHS[forward.__name__] = forward
    return forward


@own
def added(h, x):
    h += x
    return h.mul_(2).add_(1)


@own
def added_in_lower_precision(h, x):
    y = h.float()
    y += x
    return y * h


@own
def written_through_a_slice(h, x):
    out = h.new_zeros(h.shape)
    out[:, 1:] = h[:, :-1].clone()
    out[:, 0] = 3.0
    return out.masked_fill_(out > 2, -1.0) + x


@own
def doubled_through_two_views(h, x):
    y = h * x
    y[:, 2:, 1:3].mul_(2)
    return y + h


@own
def written_through_a_transpose(h, x):
    y = h * 2
    y.transpose(1, 2)[:, 1] = x[..., 0]
    return y


@own
def a_view_read_before_the_write(h, x):
    y = h * 2
    first = y[:, 0].clone() + y[:, 1]
    y[:, 0] = 1.0
    return y + first[:, None]


@own
def written_twice_with_views_made_between(h, x):
    y = h * 2
    y[:, 0] = 1.0
    y.add_(x)
    y[:, 1] += y[:, 0]
    return y * y


@own
def the_result_of_a_write(h, x):
    y = (h * 2).mul_(3)
    z = y.add_(x)
    return z * y


@own
def put_by_index(h, x):
    y = h * 2
    y[:, torch.arange(2)] = x[:, :2]
    return y


@own
def without_gradients(h, x):
    with torch.no_grad():
        scale = h.abs()
        scale += 1
    return h / scale


@own
def constants(h, x):
    return h * torch.tensor(2.0) + torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=h.dtype)


@own
def composites(h, x):
    a, b = h.chunk(2, -1)
    y = torch.cat([b, a], -1).to(h.dtype).contiguous().flatten(1).unflatten(1, (-1, 4))
    return y.view_as(h).expand_as(x).type_as(x).reshape(-1, 4).reshape(h.shape).swapaxes(1, 2).mT


@own
def parts_of_a_length(h, x):
    return (
        h[:, : h.shape[1] // 2].flatten(1).mean(1)[:, None, None] * h.unfold(1, 2, 1).sum(-1)[:, :1]
    )


@torchs
def a_view_read_after_the_write(h, x):
    y = h * 2
    first = y[:, 0]
    y.add_(1)
    return y * first[:, None]


@torchs
def a_view_written_after_its_memory(h, x):
    y = h * 2
    first = y[:, 0]
    y.add_(1)
    first.mul_(3)
    return y


@torchs
def a_part_of_pieces_written(h, x):
    y = x * 2
    y.unbind(2)[0].mul_(2)
    return y * h


@own
def gradients_within_a_block_without(h, x):
    with torch.no_grad():
        scale = h.abs()
        with torch.enable_grad():
            both = h * scale
    return both + h / scale


def written_in_a_block(h, x):
    y = h * 2
    with torch.no_grad():
        y[:, 0].add_(1)
    return y * x


def written_through_detach(h, x):
    y = h * 2
    y.detach()[:, 0].add_(1)
    return y * x


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4).double()
        self.function = function

    def forward(self, x):
        y = self.function(self.linear(x), x)
        return (y * torch.arange(1, y.shape[-1] + 1)).square().mean()


def assert_plain_numbers(program, model):
    for batch, seq in ((2, 8), (3, 17), (2, 5)):
        x = torch.randn(batch, seq, 4, dtype=torch.float64)
        wanted = model(x)
        (found,) = program.gm(*values(program, model, {"x": x}))
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
        parameters = [*model.parameters()]
        plain = torch.autograd.grad(wanted, parameters)
        torch.testing.assert_close(
            torch.autograd.grad(found, parameters), plain, rtol=1e-12, atol=1e-14
        )


def assert_nothing_writes(program):
    targets = [n.target for n in program.gm.graph.nodes if n.op == "call_function"]
    assert not any(getattr(t, "_schema", None) and t._schema.is_mutable for t in targets)


@pytest.mark.parametrize("name", OWN | TORCHS)
def test_numbers_are_the_plain_models(name):
    model = Net((OWN | TORCHS)[name])
    program = trace(model, BUCKETS)
    assert_nothing_writes(program)
    assert_plain_numbers(program, model)


@pytest.mark.parametrize("name", OWN | TORCHS)
def test_who_makes_it(name, monkeypatch):
    left = []
    real = torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(
        torch.export.ExportedProgram,
        "run_decompositions",
        lambda self, table: left.append(self) or real(self, table),
    )
    trace(Net((OWN | TORCHS)[name]), BUCKETS)
    assert bool(left) == (name in TORCHS)


@pytest.mark.parametrize("forward", [written_in_a_block, written_through_detach])
def test_a_write_past_autograd_is_refused(forward):
    with pytest.raises(TraceError, match=r"writes to a tensor with a gradient .*add_.Tensor"):
        trace(Net(forward), BUCKETS)


def test_what_has_no_gradient_is_written_in_a_block():
    def forward(h, x):
        scale = x.new_full((h.sum(0).shape[0], 1), 2.0) * x  # a size of h has no gradient
        with torch.no_grad():
            scale[:, 0].add_(1)
        scale.detach().mul_(2)
        return h * scale

    model = Net(forward)
    assert_plain_numbers(trace(model, BUCKETS), model)


VIEWS = (
    lambda t: t[:, 1:],
    lambda t: t[..., :2],
    lambda t: t.transpose(0, 1),
    lambda t: t[0],
    lambda t: t[..., 1],
    lambda t: t.unsqueeze(0),
    lambda t: t.flatten(),
    lambda t: t.detach(),
    lambda t: t.chunk(2, -1)[0],
)
WRITES = (
    lambda t, x: t.add_(1),
    lambda t, x: t.mul_(2).sub_(0.5),
    lambda t, x: t.copy_(t.flip(0) * 3),
    lambda t, x: t.fill_(0.25),
    lambda t, x: t.masked_fill_(t > 0.5, -1.0),
    lambda t, x: t.add_(x.mean()),
)
READS = (lambda t: t.sum(), lambda t: (t * t).mean(), lambda t: t.clone().max())


@settings(deadline=None, max_examples=12)
@given(
    st.lists(
        st.tuples(st.sampled_from("vwr"), st.integers(0, 50), st.integers(0, 50)),
        min_size=3,
        max_size=9,
    )
)
def test_any_order_of_views_writes_and_reads(steps):
    """What has no gradient may be written to in any order."""

    def forward(h, x):
        tensors, sums = [x * 2, x + 1], [h]
        for kind, which, index in steps:
            tensor = tensors[index % len(tensors)]
            if kind == "v" and tensor.ndim > 2:
                tensors.append(VIEWS[which % len(VIEWS)](tensor))
            elif kind == "w":
                tensors.append(WRITES[which % len(WRITES)](tensor, x))
            else:
                sums.append(READS[which % len(READS)](tensor) * (len(sums) + 1))
        return sum(sums, start=h) + sum(t.sum() for t in tensors[:2])

    model = Net(forward)
    program = trace(model, BUCKETS)
    assert_nothing_writes(program)
    assert_plain_numbers(program, model)
