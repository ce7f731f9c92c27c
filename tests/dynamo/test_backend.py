"""torch.compile(backend="dcpc"): numbers of the plain model, one capture, and what is refused."""

import copy
import warnings

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention as attention

import dcpc
from dcpc.codegen.variant import inductor
from dcpc.dynamo import backend
from dcpc.dynamo.arguments import arguments_of
from dcpc.dynamo.numbers import is_number

EXACT = {"backend": "eager", "fallback": "error"}


class Net(nn.Module):
    """Returns tensors, a size, a list and None."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(11, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(p)
        self.scale = 0.7
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> dict[str, object]:
        hidden = torch.tanh(self.drop(self.mix(self.embed(x))) + self.shift) * self.scale
        logits = hidden @ self.embed.weight.T
        return {"logits": logits, "top": [logits.argmax(-1), None], "size": 2 * x.shape[1]}


def errors(compiled, plain, own, x) -> float:
    got, want = compiled(x), plain(x)
    weights = torch.randn_like(want["logits"])
    pairs = [(got["logits"], want["logits"])]
    mine = torch.autograd.grad((got["logits"] * weights).sum(), [*own.parameters()])
    theirs = torch.autograd.grad((want["logits"] * weights).sum(), [*plain.parameters()])
    assert got["size"] == want["size"]
    assert got["top"][1] is None
    assert torch.equal(got["top"][0], want["top"][0])
    return max(float((a - b).abs().max()) for a, b in (*pairs, *zip(mine, theirs, strict=True)))


class Chosen(nn.Module):
    """Its boolean indexing breaks the graph: one part has integers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.loss = nn.Linear(4, 6), nn.CTCLoss()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores, mask = self.line(x).log_softmax(-1).transpose(0, 1), labels >= 0
        steps = torch.full((x.shape[0],), x.shape[1])
        return self.loss(scores, labels[mask], steps, mask.sum(-1))


def test_a_part_of_integers_alone_runs_as_it_is():
    own = Chosen().double()
    compiled = torch.compile(own, backend=backend, dynamic=True, options={"backend": "eager"})
    x, labels = torch.randn(2, 9, 4).double(), torch.tensor([[1, 2, -1], [3, -1, -1]])
    assert torch.allclose(compiled(x, labels), own(x, labels), rtol=1e-12)


@pytest.mark.parametrize("runs", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_every_length_has_the_plain_numbers_from_one_capture(runs):
    own = Net().double()
    plain = copy.deepcopy(own)
    options = {**EXACT, "backend": runs}
    compiled = torch.compile(own, backend=backend, dynamic=True, options=options)
    for batch, seq in ((2, 5), (3, 9), (2, 33), (4, 2), (7, 64)):
        assert errors(compiled, plain, own, torch.randint(0, 11, (batch, seq))) < 1e-13
    assert counters["stats"]["unique_graphs"] == 1


def assert_plain_numbers(compiled, plain, own, *given: Tensor) -> None:
    """Holds a loss and the gradient of every parameter against the plain model's."""
    got, want = compiled(*given), plain(*given)
    mine = torch.autograd.grad(got, [*own.parameters()])
    theirs = torch.autograd.grad(want, [*plain.parameters()])
    assert abs(float(((got - want) / want).detach())) < 1e-13
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 * float(b.abs().max()))


class Attends(nn.Module):
    """Attention with a bias that learns, with fewer key heads, hidden keys, and a window."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.bias = nn.Linear(16, 48), nn.Embedding(31, 4)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        apart = place[:, None] - place
        bias = self.bias(apart.clamp(-15, 15) + 15).permute(2, 0, 1)[None]
        sights = (
            {"attn_mask": bias},
            {"is_causal": True, "enable_gqa": True},
            {"attn_mask": real[:, None, None, :]},
            {"attn_mask": (apart >= 0) & (apart < 8)},
            {"attn_mask": bias.masked_fill(~real[:, None, None, :], -1e9)},
        )
        for sight in sights:
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
            heads = 2 if "enable_gqa" in sight else 4
            mixed = attention(q, k[:, :heads], v[:, :heads], **sight)
            x = x + mixed.transpose(1, 2).flatten(2)
        return x.square().mean()


@pytest.mark.parametrize("runs", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_every_attention_has_the_plain_numbers(runs):
    own = Attends().double()
    plain = copy.deepcopy(own)
    options = {**EXACT, "backend": runs}
    compiled = torch.compile(own, backend=backend, dynamic=True, options=options)
    for batch, seq in ((2, 13), (3, 40), (5, 150)):
        x = torch.randn(batch, seq, 16, dtype=torch.float64)
        real = torch.rand(batch, seq) > 0.3
        real[:, 0] = True
        assert_plain_numbers(compiled, plain, own, x, real)


class Convolves(nn.Module):
    """Convolutions, whose results Inductor would lay out with channels last, and saves."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix = nn.Conv2d(4, 8, 3, padding=1), nn.Linear(4, 4)
        self.wider = nn.ConvTranspose2d(8, 4, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.wider(nn.functional.gelu(self.first(x)))
        return self.mix(x.transpose(1, 3)).square().sum()


@pytest.mark.parametrize("runs", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_convolutions_and_parameters_of_any_layout_have_the_plain_numbers(runs):
    own = Convolves().double()
    plain = copy.deepcopy(own)
    options = {**EXACT, "backend": runs}
    compiled = torch.compile(own, backend=backend, dynamic=True, options=options)
    for layout in ("contiguous", "channels last", "transposed"):
        if layout == "channels last":
            own.to(memory_format=torch.channels_last)
        elif layout == "transposed":
            own.mix.weight.data = own.mix.weight.data.T.contiguous().T
        for batch, size in ((2, 6), (3, 10)):
            x = torch.randn(batch, 4, size, 8, dtype=torch.float64)
            for given in (x, x.to(memory_format=torch.channels_last)):
                assert_plain_numbers(compiled, plain, own, given)


@pytest.mark.slow
def test_sums_of_few_and_of_many_are_compiled_once(monkeypatch):
    compiles = []
    compile_graph = inductor.compile_graph
    monkeypatch.setattr(
        inductor, "compile_graph", lambda *given: compiles.append(0) or compile_graph(*given)
    )
    own = nn.Linear(8, 8)
    compiled = torch.compile(
        own, backend=backend, dynamic=True, options={**EXACT, "backend": "inductor"}
    )
    exact = copy.deepcopy(own).double()
    for batch, seq in ((2, 5), (3, 1365), (5, 2000), (4, 3)):
        x = torch.rand(batch, seq, 8)
        got = torch.autograd.grad(compiled(x).sigmoid().sum(), [*own.parameters()])
        want = torch.autograd.grad(exact(x.double()).sigmoid().sum(), [*exact.parameters()])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=0, atol=1e-5 * float(b.abs().max()))
    assert len(compiles) == 2  # forward and backward


def test_without_gradients_only_forward_is_planned():
    own = Net().double()
    compiled = torch.compile(own, backend=backend, dynamic=True, options=EXACT)
    x = torch.randint(0, 11, (2, 5))
    with torch.no_grad():
        got = compiled(x)
        assert torch.equal(got["logits"], own(x)["logits"])
    assert not got["logits"].requires_grad


class Halves(nn.Module):
    """A graph break: the second half's input has a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return self.second(hidden).square().mean()


def test_gradients_flow_through_a_graph_break():
    own = Halves().double()
    plain = copy.deepcopy(own)
    compiled = torch.compile(own, backend=backend, dynamic=True, options=EXACT)
    for size in (3, 5):
        x = torch.randn(size, 4, 6, dtype=torch.float64)
        got = torch.autograd.grad(compiled(x), [*own.parameters()])
        want = torch.autograd.grad(plain(x), [*plain.parameters()])
        assert max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True)) < 1e-15


def test_an_input_that_requires_grad_gets_one():
    own = nn.Linear(6, 3).double()
    compiled = torch.compile(own, backend=backend, dynamic=True, options=EXACT)
    x = torch.randn(4, 5, 6, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(compiled(x).sin().sum(), [x])
    (want,) = torch.autograd.grad(own(x).sin().sum(), [x])
    assert torch.allclose(got, want, rtol=0, atol=1e-15)


def test_equal_dims_of_the_first_call_may_differ_later():
    own = Net().double()
    plain = copy.deepcopy(own)
    compiled = torch.compile(own, backend=backend, dynamic=True, options=EXACT)
    for batch, seq in ((5, 5), (5, 9), (9, 9)):
        assert errors(compiled, plain, own, torch.randint(0, 11, (batch, seq))) < 1e-13


def test_a_number_that_changes_has_a_trace_of_its_own():
    own = Net().double()
    compiled = torch.compile(own, backend=backend, dynamic=True, options=EXACT)
    x = torch.randint(0, 11, (2, 5))
    for scale in (0.7, 0.3, 0.7):
        own.scale = scale
        assert torch.equal(compiled(x)["logits"], own(x)["logits"])


def test_numbers_of_a_module_are_guards_and_no_arguments_made_in_each_call():
    found = []

    def spy(gm, examples):
        run = backend(gm, examples, options=EXACT)
        found.append([n.name for n in gm.graph.find_nodes(op="placeholder") if is_number(n)])
        return run

    own, x = Net().double(), torch.randint(0, 11, (2, 5))
    torch.compile(own, backend=spy, dynamic=True)(x)
    assert found == [[]]


def test_dropout_draws_anew_in_each_call_and_alike_after_the_same_seed():
    own = Net(p=0.5)
    compiled = torch.compile(own, backend=backend, dynamic=True, options=EXACT)
    x = torch.randint(0, 11, (2, 5))
    compiled(x)
    torch.manual_seed(3)
    first, second = compiled(x)["logits"], compiled(x)["logits"]
    torch.manual_seed(3)
    again = compiled(x)["logits"]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    own.eval()
    assert torch.equal(compiled(x)["logits"], own(x)["logits"])


def test_a_graph_is_retained_for_a_second_backward_or_refuses_it():
    own = Net(p=0.5).double()
    compiled = torch.compile(own, backend=backend, dynamic=True, options=EXACT)
    logits = compiled(torch.randint(0, 11, (2, 5)))["logits"]
    learning = [*own.parameters()]
    first, second = (
        torch.autograd.grad(logits[:, i].sum(), learning, retain_graph=True) for i in range(2)
    )
    both = torch.autograd.grad(logits[:, :2].sum(), learning)
    for a, b, c in zip(first, second, both, strict=True):
        torch.testing.assert_close(a + b, c, rtol=0, atol=1e-14)
    with pytest.raises((RuntimeError, dcpc.CodegenError), match="retain"):
        logits.sum().backward()


class Counts(nn.Module):
    """Changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x))


def test_what_is_refused_falls_back_with_the_reason_and_the_same_numbers():
    own = Counts().double()
    plain = copy.deepcopy(own)
    options = {"backend": "eager", "fallback": "eager"}
    compiled = torch.compile(own, backend=backend, dynamic=True, options=options)
    x = torch.randn(4, 6, dtype=torch.float64)
    with pytest.warns(UserWarning, match="compiled by 'eager'"):
        got = compiled(x)
    assert torch.equal(got, plain(x))
    assert torch.equal(own.norm.running_mean, plain.norm.running_mean)


def test_what_is_refused_is_an_error_where_that_is_asked_for():
    compiled = torch.compile(Counts(), backend=backend, dynamic=True, options=EXACT)
    with pytest.raises(Exception, match="writes to its input"):
        compiled(torch.randn(4, 6))


def test_options_that_are_not_there_are_refused():
    with pytest.raises(dcpc.PlanError, match="recomput"):
        backend(torch.fx.symbolic_trace(nn.Linear(2, 2)), [], options={"recomput": "all"})
    with pytest.raises(dcpc.PlanError, match="fallback"):
        backend(torch.fx.symbolic_trace(nn.Linear(2, 2)), [], options={"fallback": "jit"})


class Tanhs(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(32, 32), nn.Tanh())


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def test_recompute_is_planned_for_the_users_buckets():
    """A long call recomputes and saves less than a short one, by the memory that was given."""
    own = Deep()
    seen: list[int] = []

    def noting(gm, examples, **kwargs):
        run = backend(gm, examples, **kwargs)
        seen.append(1)
        return run

    sizes = [{"batch": 2, "seq": 64}, {"batch": 2, "seq": 4096}]
    buckets = dcpc.Buckets({"x": "float32[batch, seq, 32]"}, sizes)
    options = {**EXACT, "buckets": buckets, "memory": 12e6}
    compiled = torch.compile(own, backend=noting, dynamic=True, options=options)
    saved = []
    for seq in (64, 4096):
        kept: list[int] = []
        x = torch.randn(2, seq, 32)
        loss = compiled(x)
        kept.append(sum(t.numel() for t in loss.grad_fn.call.kept if isinstance(t, Tensor)))
        saved.append(sum(kept) / seq)
        loss.backward()
    assert seen == [1]
    assert saved[1] < 0.9 * saved[0], "a long call saves less a token"


def test_arguments_name_their_dims_and_what_they_are_multiples_of():
    found = []

    def looking(gm, examples):
        found.append(arguments_of(gm, examples, True))
        return gm.forward

    def halves(x: Tensor) -> Tensor:
        return x + x.reshape(x.shape[0] // 2, 2, -1).sum(1).repeat(2, 1)

    x = torch.randn(6, 5)
    torch.compile(halves, backend=looking, dynamic=True)(x)
    (arguments,) = found
    assert arguments.multiples[str(arguments.specs["input_2"].dims[0].name)] == 2
    positions = sorted(arguments.given_names)
    given = [x if arguments.given_names[i] == "x" else x.shape[0] for i in positions]
    assert sorted(arguments.lengths(given).values()) == [3, 5]
    odd = [x[:5] if arguments.given_names[i] == "x" else 5 for i in positions]
    with pytest.raises(dcpc.TraceError, match="multiple of 2"):
        arguments.lengths(odd)


@pytest.mark.parametrize("write", [True, False])
def test_a_write_to_an_input_is_refused(write):
    def adds(x: Tensor, y: Tensor) -> Tensor:
        return (y.add_(1) if write else y + 1) * x

    options = {"backend": "eager", "fallback": "eager"}
    compiled = torch.compile(adds, backend=backend, dynamic=True, options=options)
    x, y = torch.randn(4, 6), torch.zeros(4, 6)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert torch.equal(compiled(x, y), x)
    assert float(y.sum()) == 24 * write
    assert any("writes to its input" in str(w.message) for w in said) == write


def test_no_warning_is_left_over():
    own = Net().double()
    compiled = torch.compile(own, backend=backend, dynamic=True, options=EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        compiled(torch.randint(0, 11, (2, 5)))


def test_results_lie_in_memory_as_the_plain_ones():
    """A caller may take a view that only their strides allow; graphs of dcpc have no copies."""
    weight = torch.randn(8, 8, dtype=torch.float64)

    def turned(x):
        y = x @ weight
        return y.transpose(0, 1).contiguous(), y.mT, y.mT.sin(), x.mT.contiguous()

    compiled = torch.compile(turned, backend="dcpc", dynamic=True, options=EXACT)
    for n in (5, 9):
        x = torch.randn(2, 8, n, dtype=torch.float64).mT  # an argument that is not contiguous
        for got, want in zip(compiled(x), turned(x), strict=True):
            assert got.stride() == want.stride()
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_strides_of_arguments_that_are_not_contiguous_are_refused():
    def strided(x):
        return x * x.stride(0)

    compiled = torch.compile(strided, backend="dcpc", dynamic=True, options=EXACT)
    with pytest.raises(Exception, match="expected contiguous ones where a graph reads strides"):
        compiled(torch.randn(2, 10, 8)[:, ::2])
