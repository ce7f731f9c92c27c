"""What is compared with the model itself, what is said of it, and what it leaves alone."""

import copy
import random
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcpc
from dcpc import api
from dcpc.commands.check.split import SPLITTING
from dcpc.errors import PlanError, VerifyError
from dcpc.trace import trace
from dcpc.verify import Verifier, verifier
from dcpc.verify.compare import Given
from dcpc.verify.inputs import draw
from tests.cases.small_models import CASES

aten = torch.ops.aten
BUCKETS = dcpc.Buckets(inputs={"x": "float32[batch, seq, 4]"}, sizes=[{"seq": 6}])
TOKENS = {"ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
WORDS = dcpc.Buckets(inputs=TOKENS, sizes=[{"seq": 9}])


class Waves(nn.Module):
    def __init__(self, drop=0.0):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(drop)
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        y = self.norm(self.linear(x.to(self.shift.dtype)) + self.shift)
        return self.drop(y).sin().mean() + 3


class Labelled(nn.Module):
    """Refuses labels of -7, with which its graph compares them."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 12)

    def forward(self, ids, labels):
        logits = self.head(self.embed(ids)).flatten(0, 1)
        return F.cross_entropy(logits, labels.flatten()) + (labels == -7).sum()


class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)

    def forward(self, ids, labels):
        return self.embed(ids * 3 + 50).square().mean() + labels.double().mean()


def compiled(model, buckets=BUCKETS, **options):
    return dcpc.compile(model, buckets, backend="eager", **options)


def exchanged(old, new):
    """Has a trace call another op."""

    def wrong(*args):
        program = trace(*args)
        for node in program.gm.graph.find_nodes(op="call_function", target=old):
            node.target = new
        program.gm.recompile()
        return program

    return mock.patch("dcpc.plan.traced.trace", wrong)


def test_a_wrong_trace_is_refused_with_got_expected_and_the_node():
    said = r"computes at \{seq: \d, batch: \d\}: .*(got .*expected|difference .*element) [\d.e-]+"
    with exchanged(aten.sin.default, aten.cos.default):
        with pytest.raises(VerifyError, match=said) as error:
            compiled(Waves())
        assert "node '" in str(error.value) or "loss: got" in str(error.value)
        compiled(Waves(), verify="off")


def test_a_wrong_gradient_names_what_reads_the_parameter():
    with exchanged(aten.sin.default, aten.sigmoid.default), pytest.raises(VerifyError) as error:
        compiled(Waves())
    assert "gradient of " in str(error.value)
    assert "read by node '" in str(error.value)


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_the_report_says_what_was_compared_and_where(drop, monkeypatch):
    monkeypatch.setattr(verifier, "SHARE", 1e3)  # of seconds, which a loaded machine decides
    report = compiled(Waves(drop)).report()
    assert "verified against the model itself (verify='auto'" in report
    assert re.search(r"the trace: loss and every gradient at \{seq: [35], batch: \d\} to ", report)
    assert "sp 1, " in report
    assert "NOT compared" not in report


@pytest.mark.parametrize("how", ["bfloat16", "autocast"])
def test_lower_precision_is_compared_when_a_model_is_trained_in_it(how):
    model = Waves().bfloat16() if how == "bfloat16" else Waves()
    report = compiled(model, autocast=torch.bfloat16 if how == "autocast" else None).report()
    assert "the trace: loss and every gradient" in report
    assert "NOT compared" not in report


def test_nothing_is_compared_when_verification_is_off():
    with mock.patch.object(Given, "__init__", side_effect=AssertionError("compared")):
        model = compiled(Waves(), verify="off")
        model(x=torch.randn(2, 6, 4)).backward()
    assert "not verified: verify='off'" in model.report()


def test_an_unknown_mode_is_refused_before_anything_is_traced():
    with pytest.raises(PlanError, match="got verify='some'; expected one of auto, full, off"):
        compiled(Waves(), verify="some")


def test_a_model_and_random_numbers_are_as_before_when_it_is_verified():
    model = Waves(0.3)
    model(torch.randn(1, 6, 4)).backward()
    state = {n: t.clone() for n, t in model.state_dict().items()}
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    random = torch.get_rng_state()
    compiled(model, verify="auto")
    with_auto = torch.get_rng_state()
    torch.set_rng_state(random)
    compiled(model, verify="off")
    assert torch.equal(with_auto, torch.get_rng_state())
    assert all(torch.equal(t, state[n]) for n, t in model.state_dict().items())
    assert all(torch.equal(p.grad, gradients[n]) for n, p in model.named_parameters())
    assert model.training


def test_a_model_that_refuses_the_drawn_inputs_is_said_not_to_be_compared():
    report = compiled(Picky(), WORDS).report()
    assert "the trace: NOT compared with the model: the model itself says IndexError" in report


def test_labels_that_a_loss_ignores_are_drawn_when_others_are_refused():
    model = compiled(Labelled(), WORDS, verify="off")
    program, sizes = model.planned.program, {"seq": 9, "batch": 3}
    wide, ignored, narrow = (
        draw(program, WORDS, sizes, kind, torch.device("cpu"))["labels"]
        for kind in ("wide", "ignored", "narrow")
    )
    assert {-100, -7} <= {*wide.flatten().tolist()}
    assert -100 in ignored
    assert -7 not in ignored
    assert {*narrow.flatten().tolist()} == {0, 1}
    assert "NOT compared" not in compiled(Labelled(), WORDS).report()


def test_drawn_inputs_keep_to_the_vocabulary():
    model = compiled(Labelled(), WORDS, verify="off")
    found = draw(model.planned.program, WORDS, {"seq": 40, "batch": 8}, "wide", torch.device("cpu"))
    ids, labels = found["ids"], found["labels"]
    assert 0 <= ids.min() < 3
    assert 16 < ids.max() < 20
    assert 9 < labels.max() < 12
    assert {*labels[labels < 0].tolist()} == {-100, -7}
    assert ids.shape == labels.shape == (8, 40)


def test_a_graph_that_fails_where_the_model_runs_is_refused():
    said = r"RuntimeError at \{seq: \d, batch: \d\}, where the model itself runs: sizes"
    fails = mock.patch.object(Given, "of_program", side_effect=RuntimeError("sizes"))
    with fails, pytest.raises(VerifyError, match=said):
        compiled(Waves())


def test_a_loss_over_dims_that_torch_folds_runs_on_a_rank_without_samples():
    """`cross_entropy` of [batch, classes, seq] is a view with a -1, which no tensor of 0 has."""
    model = CASES["KDimensional"].model()
    sizes = [{"seq": 8, "batch": 2}, {"seq": 3, "batch": 1}]
    words = dcpc.Buckets(inputs=CASES["KDimensional"].inputs, sizes=sizes)
    options = {"recompute": "none", "backend": "eager", "device": SPLITTING}
    planned = api.plan(model, words, world=2, sp=2, **options)
    verifier = Verifier(model, words, planned, "auto")
    verifier.start(100.0)
    assert any("sp 2" in line for line in verifier.lines)


class Moods(Waves):
    """Multiplies by a number of Python's own random."""

    def forward(self, x):
        return super().forward(x) * random.random()


def test_a_model_that_differs_from_itself_is_told_so_and_is_no_defect():
    with pytest.raises(VerifyError, match=r"differs from itself .* pass them as an input") as told:
        compiled(Moods())
    assert "defect" not in str(told.value)


class Writes(nn.Module):
    """Writes to its inputs, in ways that give other numbers the second time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, scale):
        x[:, 0] *= 2.0
        x += 1
        scale.mul_(3.0)
        return self.linear(x).sin().mean() * scale


def test_a_forward_that_writes_to_its_inputs_is_compared_and_leaves_them():
    inputs = {"x": "float64[batch, seq, 4]", "scale": "float64[]"}
    model = Writes().double()
    with pytest.warns(UserWarning, match=r"writes to its input '(x|scale)' \(.*test_verifier"):
        found = compiled(copy.deepcopy(model), dcpc.Buckets(inputs, [{"seq": 6}]), memory=1e9)
    given = {"x": torch.randn(2, 6, 4).double(), "scale": torch.tensor(0.5).double()}
    kept = {name: value.clone() for name, value in given.items()}
    loss = found(**given)
    loss.backward()
    torch.testing.assert_close(given, kept, rtol=0, atol=0)
    expected = model(**kept)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(found.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-12, atol=1e-15)
