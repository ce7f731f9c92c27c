"""Dims of the buckets stay symbols through the trace, whatever their spec says."""

import warnings

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import nn

import dcpc
from dcpc.buckets import Buckets
from dcpc.errors import TraceError
from dcpc.trace import trace
from tests.cases.exactness import compiled_error


class Function(nn.Module):
    """A module of one parameter, so that there is something to train."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.function = function

    def forward(self, **inputs):
        return self.function(self.weight, **inputs)


def program(function, inputs, *sizes):
    return trace(Function(function), Buckets(inputs=inputs, sizes=list(sizes)))


def shapes(p):
    return {p.inputs[n]: str(p.info[n].shape) for n in p.inputs}


def test_named_dims_stay_symbolic_and_keep_their_names():
    p = program(
        lambda w, x: (w * x).flatten().square().mean(), {"x": "float32[batch, seq, 8]"},
        {"seq": 16}, {"seq": 300},
    )  # fmt: skip
    assert shapes(p) == {"x": "(batch, seq, 8)"}
    sizes = {s for t in p.info.values() for s in t.shape}
    assert p.symbols["batch"] * p.symbols["seq"] * 8 in sizes


def test_derived_dims_are_expressions_of_their_name():
    inputs = {
        "x": "float32[batch, seq*2]",
        "y": "float32[batch, seq+1]",
        "z": "float32[batch, seq]",
    }
    p = program(
        lambda w, x, y, z: (w * (x[:, ::2] + y[:, 1:] + z)).mean(), inputs, {"seq": 5}, {"seq": 9}
    )
    assert shapes(p) == {"x": "(batch, 2*seq)", "y": "(batch, seq + 1)", "z": "(batch, seq)"}


def test_halved_dim_is_the_floor():
    inputs = {"x": "float32[batch, seq]", "y": "float32[batch, seq//2]"}
    p = program(
        lambda w, x, y: (w * x).mean() + y.mean() * w, inputs, {"seq": 8}, {"seq": 20}
    )  # fmt: skip
    size = p.info[next(n for n, name in p.inputs.items() if name == "y")].shape[1]
    assert all(size.subs(p.symbols["seq"], n) == n // 2 for n in (8, 9, 20))


def test_three_named_dims_are_told_apart_where_all_buckets_are_square():
    inputs = {"x": "float32[batch, frames, height, width]"}
    sizes = [{"frames": n, "height": n, "width": n} for n in (8, 16)]
    p = program(lambda w, x: (w * x.transpose(1, 3)).square().mean(), inputs, *sizes)
    assert shapes(p) == {"x": "(batch, frames, height, width)"}
    assert any(str(t.shape) == "(batch, width, height, frames)" for t in p.info.values())


def test_equal_bucket_sizes_of_one_dim_still_trace():
    p = program(lambda w, x: (w * x).mean(), {"x": "float32[batch, seq]"}, {"seq": 7})
    assert p.info[next(iter(p.inputs))].shape[1] == p.symbols["seq"]


def test_dim_of_one_in_every_bucket_is_a_constant():
    inputs = {"x": "float32[batch, frames, seq]"}
    p = program(
        lambda w, x: (w * x).mean(), inputs, {"frames": 1, "seq": 7}, {"frames": 1, "seq": 9}
    )
    assert p.info[next(iter(p.inputs))].shape[1] == 1


def test_scalar_and_unused_inputs_and_all_kinds_of_dtype():
    inputs = {"x": "int32[seq]", "keep": "bool[seq]", "factor": "float64[]", "lost": "float16[seq]"}
    p = program(
        lambda w, x, keep, factor, lost: (w * x * keep * factor).sum(),
        inputs,
        {"seq": 4},
        {"seq": 8},
    )
    assert list(p.inputs.values()) == ["x", "keep", "factor", "lost"]
    dtypes = [p.info[n].dtype for n in p.inputs]
    assert dtypes == [torch.int32, torch.bool, torch.float64, torch.float16]
    assert "batch" not in p.symbols


def fixed(w, x):
    assert x.shape[1] == 11
    return (w * x).mean()


def test_dim_fixed_by_the_model_is_an_error_with_its_name():
    with pytest.raises(TraceError, match=r"(?s)seq.*11.*(dim|limit)"):
        program(fixed, {"x": "float32[batch, seq]"}, {"seq": 11}, {"seq": 20})


def test_position_table_smaller_than_a_bucket_is_an_error_with_its_limit():
    table = torch.randn(16)
    with pytest.raises(TraceError, match=r"(?s)seq.*16.*keep every bucket within that limit"):
        program(
            lambda w, x: (w * x + table[: x.shape[1]]).mean(), {"x": "float32[batch, seq]"},
            {"seq": 8}, {"seq": 32},
        )  # fmt: skip


class Growing(nn.Module):
    """A mask that forward replaces where a sequence is longer."""

    def __init__(self, length):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(length, length).tril(), persistent=False)

    def forward(self, x):
        n = x.shape[1]
        if n > self.mask.shape[0]:
            self.mask = torch.ones(n, n).tril()
        return (self.mask[:n, :n] @ self.inner(x)).square().mean()


def test_buffer_that_grows_is_named_and_said_what_to_do_about():
    model = nn.Sequential(Growing(16))
    model.forward = lambda x: model[0](x)
    buckets = Buckets(SEQUENCE, [{"seq": 8}, {"seq": 40}])
    words = r"as long as that limit is buffer 0.mask \[16, 16\]: .* call the model once at the"
    with pytest.raises(TraceError, match=words):
        trace(model, buckets)
    model(torch.randn(1, 40, 8))
    assert "seq" in str(trace(model, buckets).info.values())


def test_position_table_larger_than_every_bucket_is_fine():
    table = torch.randn(16)
    p = program(
        lambda w, x: (w * x + table[: x.shape[1]]).mean(), {"x": "float32[batch, seq]"},
        {"seq": 8}, {"seq": 15},
    )  # fmt: skip
    assert isinstance(p.info[next(iter(p.inputs))].shape[1], sympy.Symbol)


SEQUENCE = {"x": "float32[batch, seq, 8]"}


def test_size_that_forward_makes_a_number_of_is_refused():
    with pytest.raises(TraceError, match=r"as if .*seq.*, 3\); .* at seq 50"):
        program(
            lambda w, x: (w * x * int(x.shape[1] ** 0.5)).mean(), SEQUENCE, {"seq": 9}, {"seq": 50}
        )


def by_batch(w, x):
    return (w * x).mean() * (2 if x.shape[1] > 20 * x.shape[0] else 1)


def by_elements(w, x):
    return (w * x).mean() * (2 if x.shape[0] * x.shape[1] > 100 else 1)


def by_remainder(w, x):
    return (w * x).mean() * (2 if x.shape[1] % 3 > 1 else 1)


@pytest.mark.parametrize(
    ("forward", "seqs", "at"),
    [
        (by_batch, (41, 60), "seq <= 20.batch; .* seq 41, batch 2 .*, the batch among them"),
        (by_elements, (11, 60), "batch.seq <= 100; .*, the batch among them"),
        (by_remainder, (41, 60), "1 < .*seq, 3.*; .* seq 60"),
    ],
    ids=["lengths against the batch", "elements", "a remainder"],
)
@pytest.mark.filterwarnings("ignore:forward was traced as if 0 <")
def test_comparison_of_sizes_that_a_bucket_decides_otherwise_is_refused(forward, seqs, at):
    with pytest.raises(TraceError, match=f"as if {at}"):
        program(forward, SEQUENCE, *({"seq": n} for n in seqs))


class Branching(nn.Module):
    def __init__(self, branch):
        super().__init__()
        self.net, self.branch = nn.Linear(8, 8).double(), branch

    def forward(self, x):
        z = self.net(x)
        return z.mean() if self.branch(x.shape[1], x.shape[0]) else (2 * z.square()).mean()


BRANCHES = {
    "unequal": (lambda n, b: n != 9, "Ne.seq, 9."),
    "equal": (lambda n, b: n == 9, "Ne.seq, 9."),
    "not equal": (lambda n, b: not n == 9, "Ne.seq, 9."),  # noqa: SIM201
    "one of some": (lambda n, b: n in (9, 12), "Ne.seq, (9|12)."),
    "remainder": (lambda n, b: n % 3 != 0, "Mod.seq, 3."),
    "truth of a remainder": (lambda n, b: n % 3, "Mod.seq, 3."),
    "truth of a difference": (lambda n, b: n - 9, "Ne.seq"),
    "quotient": (lambda n, b: n // 4 == 3, "seq"),
    "bits": (lambda n, b: n & (n - 1), "bitwise_and"),
    "root": (lambda n, b: n**0.5 == 3, "FloatPow"),
    "larger of two": (lambda n, b: max(n, 9) == 9, "Max"),
    "either": (lambda n, b: n == 9 or n == 12, "Ne.seq, (9|12)."),
    "by the batch": (lambda n, b: n == 3 * b, "Ne.seq, 3.batch.; .* batch 3 .*the batch among"),
    "remainder by the batch": (lambda n, b: n % b, "Mod.seq, batch., 0.; .*the batch among"),
    "remainder of the batch": (lambda n, b: b % 2, "Mod.batch, 2., 0.; .*the batch among"),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_branch_that_a_bucket_takes_otherwise_is_refused(name):
    branch, assumed = BRANCHES[name]
    sizes = [{"seq": n} for n in (7, 9, 12, 16)]
    with pytest.raises(TraceError, match=f"as if .*{assumed}") as caught:
        trace(Branching(branch), Buckets({"x": "float64[batch, seq, 8]"}, sizes))
    assert "forward calls" in str(caught.value)


@pytest.mark.parametrize("branch", [lambda n, b: b == 1, lambda n, b: b < 2])
@pytest.mark.parametrize("given", [{"batch": 1}, {"batch": 4}, {}])
def test_branch_at_a_batch_of_one_is_refused_whatever_the_planned_batch(branch, given):
    inputs, model = {"x": "float64[batch, seq, 8]"}, Branching(branch)
    with pytest.raises(TraceError, match="at 1 does something else"):
        trace(model, Buckets(inputs, [{"seq": 7, **given}, {"seq": 9, **given}]))


def test_forward_that_cannot_run_at_a_batch_of_one_is_warned_of():
    def refuses(n, b):
        assert b != 1
        return False

    buckets = Buckets({"x": "float64[batch, seq, 8]"}, [{"seq": 7}, {"seq": 9}])
    with pytest.warns(UserWarning, match="batch 1 forward could not be followed"):
        trace(Branching(refuses), buckets)


def padded(z):
    if (more := (4 - z.shape[1] % 4) % 4) > 0:
        z = F.pad(z, (0, 0, 0, more))
    return z.unflatten(1, (-1, 4)).mean(2)


def padded_and_cut(z):
    y = padded(torch.relu_(z * torch.tensor([2.0] * 8, dtype=z.dtype))).repeat_interleave(4, 1)
    return y[:, : z.shape[1]].contiguous() if z.shape[1] % 4 else y


def even(z):
    return z[:, : z.shape[1] // 2 * 2] if z.shape[1] % 2 else z


def resized(z):
    """As video models do with a table of positions: nothing to do at its own length."""
    if z.shape[1] != 9:
        z = F.interpolate(z.transpose(1, 2), size=9, mode="nearest").transpose(1, 2)
    return z * torch.arange(9, dtype=z.dtype)[:, None]


class Padding(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.net, self.form = nn.Linear(8, 8).double(), form

    def forward(self, x):
        return self.form(self.net(x)).square().mean()


@pytest.mark.parametrize("form", [padded, padded_and_cut, even, resized])
def test_padding_by_nothing_is_no_branch(form):
    sizes = [{"seq": n} for n in (7, 8, 9, 12)]
    model, buckets = Padding(form), Buckets({"x": "float64[batch, seq, 8]"}, sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(model, buckets)
    compiled = dcpc.compile(model, buckets, backend="eager")
    for n in (7, 8, 9, 12):
        x = torch.randn(2, n, 8, dtype=torch.float64)
        assert compiled_error(compiled, model, {"x": x}) < 1e-10


def padded_to_more(z):
    if z.shape[1] % 4:
        z = torch.cat([z, z.new_zeros(z.shape[0], 4 - z.shape[1] % 4, 8)], 1)
    return z.unflatten(1, (-1, 4)).mean(2)


def written_where_padded(z):
    y = z * 1
    wide = F.pad(y, (0, 0, 0, 4 - z.shape[1] % 4)) if z.shape[1] % 4 else y
    wide *= 3
    return y


@pytest.mark.parametrize("form", [padded_to_more, written_where_padded])
def test_padding_that_makes_a_difference_is_refused(form):
    sizes = [{"seq": n} for n in (7, 8, 9, 12)]
    with pytest.raises(TraceError, match=r"Ne\(Mod\(seq, 4\), 0\).* seq 8"):
        trace(Padding(form), Buckets({"x": "float64[batch, seq, 8]"}, sizes))


class Unfollowed(nn.Module):
    """What it does at 9 is not known without a number of a tensor."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 8)

    def forward(self, x):
        if x.shape[1] == 9 and not float(self.net.weight.detach().sum()):
            return x.mean()
        return self.net(x).mean()


def test_branch_that_cannot_be_followed_is_warned_of():
    sizes = [{"seq": n} for n in (7, 9)]
    with pytest.warns(UserWarning, match=r"Ne\(seq, 9\).*could not be followed"):
        trace(Unfollowed(), Buckets(SEQUENCE, sizes))


def pairs(w, x):
    """Rows padded to pairs and cut again, as a video model does with odd heights."""
    rows = x.shape[1]
    pairs = (rows + 1) // 2
    both = F.pad(x, (0, pairs * 2 - rows)).unflatten(1, (pairs, 2))
    return (w * both.flip(2)).flatten(1)[:, :rows].square().mean()


@pytest.mark.parametrize("sizes", [(10, 12), (8, 9), (6, 7), (4, 4), (3, 4)])
def test_few_sizes_that_are_padded_to_pairs_trace(sizes):
    """torch has a range of one value for the pairs of 10 to 12, and of 8 and 9 none is prime.

    Of 3 and 4 the odd number is refused, as half of 2 is 1, which torch fixes; 4 is not.
    """
    buckets = Buckets(inputs={"x": "float64[batch, rows]"}, sizes=[{"rows": n} for n in {*sizes}])
    model = Function(pairs).double()
    compiled = dcpc.compile(model, buckets, backend="eager")
    for n in sizes:
        x = torch.arange(2.0 * n, dtype=torch.float64).view(2, n)
        assert compiled_error(compiled, model, {"x": x}) < 1e-12


def test_lengths_that_forward_divides_are_told_how_to_be_declared():
    def halves(w, x):
        return (w * x).unflatten(1, (-1, 2)).mean(2).square().mean()

    sizes = {"seq": 16}, {"seq": 32}
    with pytest.raises(TraceError, match=r"seq \(multiples of 16, captured at 17\).*seq\*2"):
        program(halves, {"x": "float32[batch, seq, 8]"}, *sizes)
    p = program(halves, {"x": "float32[batch, seq*2, 8]"}, *sizes)
    assert list(shapes(p).values()) == ["(batch, 2*seq, 8)"]


def compiled_at(function, inputs, sizes):
    """Returns the sizes of the trace of a model that dcpc compiles with the plain numbers."""
    model = Function(function).double()
    buckets = Buckets(inputs=inputs, sizes=sizes)
    compiled = dcpc.compile(model, buckets, backend="eager", verify="full")
    for bucket in buckets:
        shapes = {n: s.shape({**bucket.sizes, "batch": 2}) for n, s in buckets.inputs.items()}
        given = {n: torch.randn(shape, dtype=torch.float64) for n, shape in shapes.items()}
        assert compiled_error(compiled, model, given) < 1e-12
    return compiled.planned.traces[0].traced.program.hints


def at_eleven(w, x):
    return (w * (x * 2 if x.shape[1] == 11 else x.sin())).mean()


def shorter(w, x, y):
    """Needs two rows of x for each of y, as each bucket has: no example of primes does."""
    return (w * x[:, : 2 * y.shape[1] : 2] * y).mean()


@pytest.mark.parametrize(
    ("function", "inputs", "sizes"),
    [
        (at_eleven, {"x": "float64[batch, n]"}, [{"n": 8}, {"n": 32}]),
        (
            shorter,
            {"x": "float64[batch, n]", "y": "float64[batch, m]"},
            [{"n": 8, "m": 3}, {"n": 64, "m": 30}],
        ),
    ],
)
def test_what_one_example_assumes_by_chance_is_traced_again_at_others(function, inputs, sizes):
    compiled_at(function, inputs, sizes)


def test_what_every_example_refuses_is_the_error_of_the_first():
    inputs, sizes = {"x": "float64[batch, n]"}, [{"n": 8}, {"n": 11}, {"n": 32}]
    with pytest.raises(TraceError, match="torch suggests"):
        program(at_eleven, inputs, *sizes)


def test_a_trace_that_is_not_refused_is_the_only_one(monkeypatch):
    calls = []
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *a, **k: calls.append(1) or export(*a, **k))
    program(lambda w, x: (w * x).mean(), {"x": "float64[batch, n]"}, {"n": 8}, {"n": 32})
    assert len(calls) == 1
    with pytest.raises(TraceError):  # nor is one that no sizes make right
        program(
            lambda w, x: (w * torch.unique(x)).mean(),
            {"x": "float64[batch, n]"},
            {"n": 8},
            {"n": 32},
        )
    assert len(calls) == 2
