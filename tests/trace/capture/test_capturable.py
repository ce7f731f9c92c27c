"""Functions that are captured by other formulas compute what torch's own do."""

import ast
import inspect
import itertools
from functools import partial

import pytest
import torch
from torch import nn
from torch._C import DispatchKey
from torch._dispatch.python import enable_python_dispatcher
from torch.nn import functional as F
from torch.nn.functional import l1_loss

from dcpc.trace.capture.capturable import Capturable
from dcpc.trace.formulas import soft_targets
from tests.fuzz.judge import Setting, judge

POINTS = [{"batch": 2, "h": h} for h in (8, 9, 13)]
TRIED = [Setting(1), Setting(2, recompute="all"), Setting(4)]


class Pieces(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.weight, self.cut = nn.Parameter(torch.randn(4, 4)), cut

    def forward(self, x):
        pieces = self.cut(x @ self.weight)
        return sum((i + 1) * p.cumsum(1).square().sum() for i, p in enumerate(pieces))


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x.chunk(2, 1),
        lambda x: torch.chunk(x, 3, dim=-2),
        lambda x: x.tensor_split(2, 1),
        lambda x: torch.tensor_split(x, 3, 1),
        lambda x: [torch.cat(x.mT.chunk(2, -1)[::-1], 2)],
    ],
    ids=["chunk 2", "chunk 3", "tensor_split 2", "tensor_split 3", "exchanged"],
)
def test_pieces_of_a_length_are_torchs(cut):
    found = judge(Pieces(cut).double(), {"x": "float64[batch, h, 4]"}, POINTS, TRIED)
    assert found.kind == "right", found.text


def spaced(start, end):
    """Positions from one number to another, each of a size."""

    def of(x):
        h = x.shape[1]
        at = torch.linspace(start(h), end(h), h, dtype=torch.float64, device=x.device)
        return [x * at[:, None], x.mT @ torch.linspace(0, 1, steps=2 * h)[h:].double()[:, None]]

    return of


@pytest.mark.parametrize(
    "cut",
    [
        spaced(lambda h: 0, lambda h: 1),
        spaced(lambda h: -h, lambda h: h - 1),
        spaced(lambda h: 1 / h, lambda h: h / 3),
        lambda x: [F.pad(x, (0, 0, 2, 1), value=x.shape[1] / 8)],
        lambda x: [F.pad(x, (1, 0, 0, 3), value=x.shape[1])],
        lambda x: [F.pad(x.mT, (1, 2), mode="circular").mT],
        lambda x: [F.scaled_dot_product_attention(x, x, x, scale=3 / x.shape[1])],
    ],
    ids=["constants", "sizes", "quotients", "padded", "padded by a size", "circular", "scale"],
)
def test_numbers_of_a_length_are_torchs(cut):
    found = judge(Pieces(cut).double(), {"x": "float64[batch, h, 4]"}, POINTS, TRIED)
    assert found.kind == "right", found.text


def test_an_epsilon_of_a_length_is_refused_by_what_torch_assumed():
    """torch's norm takes it as a number; its assertion of a quotient is readable."""
    model = Pieces(lambda x: [F.layer_norm(x, (4,), eps=x.shape[1] / 5)])
    found = judge(model.double(), {"x": "float64[batch, h, 4]"}, POINTS, TRIED)
    assert (found.kind, "Eq(IntTrueDiv(h, 5)" in found.text) == ("refused", True)


def test_a_length_with_fewer_chunks_than_asked_for_is_refused():
    """8 in 5 are 4 pieces of 2."""
    found = judge(
        Pieces(lambda x: x.chunk(5, 1)).double(), {"x": "float64[batch, h, 4]"}, POINTS, TRIED
    )
    assert found.kind == "refused", found.text


def test_one_sample_may_write_a_number():
    """Of one sample `squeeze` makes a number, which torch writes by fill_ and not by copy_."""

    class Shifted(Pieces):
        def forward(self, x):
            y = x @ self.weight
            first = y[:, -1:, 0].detach().squeeze()
            z = y.clone()
            z[:, 0, 0] = first
            return z.square().sum()

    points = [{"batch": 2, "h": 5}, {"batch": 1, "h": 6}]
    found = judge(Shifted(None).double(), {"x": "float64[batch, h, 4]"}, points, TRIED)
    assert found.kind == "right", found.text


LABELS = torch.tensor([[0, 2, -1, 1], [1, -1, 3, -1], [3, 1, 0, 2], [-1, 2, 1, 0]])


def labelled(reduction, rows):
    """A margin loss whose rows have no, some or all labels; those behind a -1 do not count."""

    def of(x):
        logits = x.flatten(0, 1)
        at = torch.arange(x.shape[0] * x.shape[1]) % 4
        given = (logits, LABELS[at]) if rows else (logits.sum(0), LABELS[0])
        loss = F.multilabel_margin_loss(*given, reduction=reduction)
        return [(loss if loss.ndim else loss[None])[:, None, None]]

    return of


def weighted(loss, reduction):
    def of(x):
        value = loss(x, x.detach().roll(1, 2), weight=x.square() + 0.1, reduction=reduction)
        return [value if value.ndim else value[None, None, None]]

    return of


@pytest.mark.parametrize(
    "cut",
    [
        labelled("mean", True),
        labelled("none", True),
        labelled("sum", False),
        weighted(F.l1_loss, "mean"),
        weighted(l1_loss, "none"),
        weighted(F.mse_loss, "mean"),
        weighted(F.huber_loss, "sum"),
    ],
    ids=["labels", "labels of rows", "of one row", "l1", "l1 of elements", "mse", "huber"],
)
def test_losses_are_torchs(cut):
    found = judge(Pieces(cut).double(), {"x": "float64[batch, h, 4]"}, POINTS, TRIED)
    assert found.kind == "right", found.text


def test_torchs_own_l1_loss_is_put_back():
    before = l1_loss.__code__
    with Capturable(), Capturable():
        assert l1_loss.__code__ is not before
    assert l1_loss.__code__ is before


# ------------------------------------------- where torch runs something else while it captures

# Functions whose arguments do not all reach a mode, as such a mode is on during any capture.
DROPPED = {("l1_loss", "weight")}


def test_torchs_functions_tell_a_mode_all_their_arguments():
    """A new one in a later torch needs a formula in `capturable.py`."""
    found = set()
    for function in ast.walk(ast.parse(inspect.getsource(F))):
        if isinstance(function, ast.FunctionDef):
            given = function.args
            names = {a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
            for call in ast.walk(function):
                if getattr(getattr(call, "func", None), "id", "") == "handle_torch_function":
                    parts = [*call.args[2:], *(k.value for k in call.keywords)]
                    told = {n.id for p in parts for n in ast.walk(p) if isinstance(n, ast.Name)}
                    found |= {(function.name, n) for n in names - told}
    assert found == DROPPED


SPECIAL = torch.tensor([-2.0, -0.5, -0.2, 0.0, 0.2, 0.5, 3.0, 1.0], dtype=torch.float64)


def _resized():
    """Calls of interpolations, each of a shape."""
    modes = {
        1: ("linear", "nearest", "nearest-exact"),
        3: ("trilinear", "nearest", "nearest-exact"),
    }
    modes[2] = ("bilinear", "bicubic", "nearest", "nearest-exact")
    for dims, size in itertools.product((1, 2, 3), (7, 2)):
        for mode in modes[dims]:
            smooth = [None] if "nearest" in mode else [True, False]
            for corners in smooth:
                more = {"mode": mode, "align_corners": corners}
                yield partial(F.interpolate, size=[size] * dims, **more), (2, 3, *[4] * dims)
                yield partial(F.interpolate, scale_factor=1.7, **more), (2, 3, *[4] * dims)
    for mode in ("bilinear", "bicubic"):
        yield partial(F.interpolate, size=(3, 2), mode=mode, antialias=True), (2, 3, 5, 7)


def _calls():
    """Calls of all kinds of ops that torch decomposes while it captures, each of a shape."""
    yield from _resized()
    for classes in (torch.tensor([1, 0, 3]), torch.tensor([2, 2, 2])):
        weight = torch.arange(4.0, dtype=torch.float64)
        for p, how in itertools.product((1, 2), ("none", "mean", "sum")):
            more = {"p": p, "margin": 0.7, "weight": weight, "reduction": how}
            yield partial(F.multi_margin_loss, target=classes, **more), (3, 4)
    yield partial(F.hardshrink, lambd=0.2), None
    yield partial(F.softshrink, lambd=0.2), None
    yield partial(F.batch_norm, running_mean=None, running_var=None, training=True), (4, 3, 5)
    for kind in ("RNN", "GRU", "LSTM"):
        torch.manual_seed(0)
        net = getattr(nn, kind)(3, 4, 2, bidirectional=True, batch_first=True).double()
        yield lambda x, net=net: net(x)[0], (2, 5, 3)


# Of the ops that torch decomposes for autograd while it captures, those that `_calls` has, and
# those that dcpc does not let come so far or that are not for the CPU.
COMPARED = "upsample_ _upsample_ hardshrink softshrink multi_margin native_batch_norm rnn_ gru lstm"
ELSEWHERE = {
    "multilabel_margin_loss_forward",
    "dropout",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_upsample_lanczos2d_aa",
}


def test_torchs_decompositions_for_autograd_are_the_kernels():
    """One of them (multilabel_margin_loss) is not: another one in a later torch is told here."""
    for call, shape in _calls():
        x = SPECIAL if shape is None else torch.randn(shape, dtype=torch.float64)
        found = []
        for decomposed in (False, True):
            x = x.detach().requires_grad_()
            with enable_python_dispatcher() if decomposed else torch.enable_grad():
                y = call(x)
            (gradient,) = torch.autograd.grad((y * y.detach().cos()).sum(), x)
            found.append((y.detach(), gradient))
        torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12, msg=str(call))
    names = {
        name
        for name in dir(torch.ops.aten)
        for overload in getattr(getattr(torch.ops.aten, name), "overloads", list)()
        if DispatchKey.Autograd in getattr(getattr(torch.ops.aten, name), overload).py_kernels
    }
    left = {n for n in names - ELSEWHERE if not n.startswith(tuple(COMPARED.split()))}
    assert not left, left


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(7,), (4, 7), (4, 7, 3)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_formula_of_soft_targets_is_torchs_cross_entropy(shape, reduction, smoothing, monkeypatch):
    monkeypatch.setattr(soft_targets, "fixes_soft_targets", lambda: True)
    drawn = torch.Generator().manual_seed(0)
    z, t, w = (torch.rand(s, generator=drawn).double() for s in (shape, shape, 7))
    for weight in (None, w):
        rest = {"weight": weight, "reduction": reduction, "label_smoothing": smoothing}
        found = soft_targets.soft_targets(z, t, **rest)
        torch.testing.assert_close(found, F.cross_entropy(z, t, **rest), rtol=1e-12, atol=1e-12)
    assert soft_targets.soft_targets(z, t, ignore_index=2) is NotImplemented
