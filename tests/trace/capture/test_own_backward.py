"""What forward says of its own gradient: kept, or refused by name."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dcpc
from dcpc.trace import trace

BUCKETS = dcpc.Buckets(inputs={"x": "float64[batch, n, 4]"}, sizes=[{"n": 6}])


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


kept_apply = Rounded.apply  # the usual way to name a function


LIBRARY = torch.library.Library("dcpc_test_own_backward", "DEF")
LIBRARY.define("thrice(Tensor x) -> Tensor")
LIBRARY.impl("thrice", lambda x: x * 3, "CPU")
LIBRARY.impl("thrice", torch.empty_like, "Meta")


class Thrice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.dcpc_test_own_backward.thrice(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 5


LIBRARY.impl("thrice", Thrice.apply, "Autograd")


@torch.library.custom_op("dcpc_test_own_backward::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, gradient: gradient * 7)


class Between(nn.Module):
    """Two linears with a function of the first one's output between them."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.function = function

    def forward(self, x):
        return (self.b(self.function(self, self.a(x))) ** 2).mean()


def without_grad(m, x):
    with torch.no_grad():
        y = kept_apply(x * 3)
    return x + y


def gradient_of_cube(m, x, create):
    return x + torch.autograd.grad((x**3).sum(), x, create_graph=create)[0]


def packed(m, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return x**2


def hooked(m, x):
    y = x * 1
    y.register_hook(lambda g: g * 2)
    return y


def errors(model):
    """Relative errors of the compiled loss and gradients against the plain model's."""
    compiled = dcpc.compile(model, BUCKETS, backend="eager", verify="off")
    found = []
    for run in (model, compiled):
        model.zero_grad()
        x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        loss = run(x=x)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    return [float((a - b).norm() / a.norm()) for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize(
    "function",
    [
        without_grad,
        lambda m, x: kept_apply(x),
        lambda m, x: checkpoint(kept_apply, x, use_reentrant=False),
        lambda m, x: x + (x.round() - x).detach(),
        lambda m, x: x + checkpoint(lambda y: torch.tanh(m.b(y)), x, use_reentrant=True),
        lambda m, x: x + checkpoint(lambda y: torch.tanh(m.b(y)), x, use_reentrant=False),
        lambda m, x: gradient_of_cube(m, x, create=False),
        lambda m, x: gradient_of_cube(m, x, create=True),
        lambda m, x: twice(x),
        lambda m, x: torch.ops.dcpc_test_own_backward.thrice(x),
        lambda m, x: torch.func.vmap(lambda y: torch.sin(y) * y)(x),
        lambda m, x: torch.func.jvp(lambda y: y.sin() * y, (x,), (torch.ones_like(x),))[1],
    ],
    ids=[
        "no_grad",
        "function",
        "checkpointed",
        "detach",
        "reentrant",
        "checkpoint",
        "grad",
        "grad_graph",
        "op",
        "kernel",
        "vmap",
        "jvp",
    ],
)
def test_gradient_is_the_plain_models_where_forward_says_something_of_it(function):
    assert max(errors(Between(function))) < 1e-10


@pytest.mark.parametrize(
    ("function", "pattern"),
    [
        (hooked, r"calls register_hook on a tensor at .*y.register_hook"),
        (lambda m, x: (x.grad_fn.register_hook(print), x)[1], r"reads grad_fn"),
        (packed, r"enters saved_tensors_hooks"),
        (lambda m, x: (x.sum().backward(), x)[1], r"runs backward\(\) at "),
    ],
    ids=["hook", "node", "packed", "backward"],
)
def test_gradient_that_no_graph_says_is_refused(function, pattern):
    with pytest.raises(dcpc.TraceError, match=pattern):
        trace(Between(function), BUCKETS)


def test_full_backward_hook_is_refused():
    model = Between(lambda m, x: x)
    model.b.register_full_backward_hook(lambda module, gi, go: (gi[0] * 2,))
    with pytest.raises(dcpc.TraceError, match=r"full backward hooks on b; expected none"):
        trace(model, BUCKETS)


def test_trace_within_no_grad_knows_what_has_a_gradient():
    with torch.no_grad():
        applied = trace(Between(lambda m, x: kept_apply(x)), BUCKETS)
        program = trace(Between(without_grad), BUCKETS)
    assert any("Rounded" in str(n.target) for n in applied.gm.graph.nodes)
    assert any(n.target is torch.ops.aten.detach.default for n in program.gm.graph.nodes)


def test_second_order_gradient_of_a_compiled_loss_is_refused():
    model = Between(lambda m, x: x)
    compiled = dcpc.compile(model, BUCKETS, backend="eager", verify="off")
    for run in (
        lambda loss: loss.backward(create_graph=True),
        lambda loss: torch.autograd.grad(loss, model.a.weight, create_graph=True),
    ):
        with pytest.raises(dcpc.CodegenError, match=r"create_graph=True; expected False.*model"):
            run(compiled(x=torch.ones(2, 6, 4, dtype=torch.float64)))
