"""CTC losses: one op, whose saved values have sizes made of dims, whichever way they are called."""

import warnings
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcpc
from dcpc.commands.check import SplitModel
from dcpc.ops.ctc import ctc_loss
from dcpc.trace import trace
from dcpc.trace.capture.capturable import Capturable
from tests.cases.ctc import CLASSES, INPUTS, LOSSES, Encoder, batch

BUCKETS = dcpc.Buckets(inputs=INPUTS, sizes=[{"n": 9, "s": 3}, {"n": 16, "s": 4}])
POINTS = (
    {"batch": 2, "n": 16, "s": 4},
    {"batch": 1, "n": 9, "s": 3},
    {"batch": 3, "n": 13, "s": 3},
)
ENDLESS = ("module zero_infinity", "selected", "each")  # losses of samples that fit no alignment


@lru_cache(1)
def split(name, batch=2):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as of an op without a rule
        return SplitModel(Encoder(LOSSES[name][0]), BUCKETS, POINTS[batch == 1], sp=1)


def errors(model, name, sps, backend="eager", points=POINTS):
    found = {}
    for sp in sps:
        some = model.of(backend, sp)
        for at in points:
            for recompute in ("none", "all"):
                data = batch(at, LOSSES[name][1], name not in ENDLESS)
                error = some.difference(at, data, recompute, in_step=True)
                found[f"sp {sp} {at} {recompute}"] = error.worst
    return {k: e for k, e in found.items() if not e < 1e-10}


def test_samples_are_split_and_what_is_kept_has_the_sizes_of_its_dims():
    model = split("selected").of("eager", 2)
    (name,) = (n.name for n in model.program.gm.graph.nodes if "ctc_loss" in str(n.target))
    assert str(model.placement.nodes[name].output) == "shard(0)"
    graph = model.traced.lowering(model.placement).joint.gm.graph
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.dcpc.ctc_loss_forward.default)
    scores, targets = (n.meta["val"] for n in node.args[:2])
    t, n, _ = scores.shape
    assert node.meta["val"][1].shape == (n, t, 2 * targets.shape[1] + 1)


@pytest.mark.parametrize(
    "name",
    ["selected", *(pytest.param(n, marks=pytest.mark.slow) for n in LOSSES if n != "selected")],
)
def test_loss_and_gradients_are_the_plain_models(name):
    assert not errors(split(name), name, (1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDLESS[:2])
def test_a_batch_of_one_is_right_where_it_is_planned_for_and_by_inductor(name):
    model = split(name, 1)
    assert not errors(model, name, (2, 4))
    assert not errors(model, name, (1, 2), "inductor", POINTS[:2])


WAYS = ("padded", "concatenated", "selected", "tuples", "lists", "one", "one of tuples")


def called(way, scores, targets, steps, counts, **rest):
    """A loss, of targets and lengths that are given in a way."""
    mask = torch.arange(targets.shape[1]) < counts[:, None]
    if way == "concatenated":
        targets = targets[mask].clone()
    if way == "selected":
        targets = targets.masked_select(mask)
    if way in ("tuples", "lists"):
        kind = tuple if way == "tuples" else list
        steps, counts = kind(steps.tolist()), kind(counts.tolist())
    if way == "one":
        scores, targets, steps, counts = scores[:, 0], targets[0, : counts[0]], steps[0], counts[0]
    if way == "one of tuples":
        number = int(counts[0])
        scores, targets, steps, counts = scores[:, 0], targets[0, :number], (5,), (number,)
    return F.ctc_loss(scores, targets, steps, counts, **rest)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("hidden", [False, True], ids=["", "-inf"])
def test_formula_is_torchs(way, reduction, zero_infinity, hidden):
    g = torch.Generator().manual_seed(1)
    scores = torch.randn(9, 4, CLASSES, dtype=torch.float64, generator=g).log_softmax(-1)
    if hidden:
        scores[2, 1] = scores[:, 3, 2] = -torch.inf
    targets = torch.tensor([[0, 1, 0, -100], [4, 4, 1, 0], [1, 1, 1, 1], [1, 2, 1, -100]])
    steps, counts = torch.tensor([9, 7, 4, 8]), torch.tensor([2, 4, 4, 0])
    found = []
    for mode in (Capturable, torch.enable_grad):
        x = scores.clone().requires_grad_()
        with mode():
            loss = called(
                way, x, targets, steps, counts,
                blank=3, reduction=reduction, zero_infinity=zero_infinity,
            )  # fmt: skip
        weights = torch.arange(1.0, 1 + loss.numel(), dtype=torch.float64).reshape(loss.shape)
        found.append((loss.detach(), *torch.autograd.grad((loss * weights).sum(), x)))
    assert found[0][0].isinf().any() == (not zero_infinity and "one" not in way)
    for mine, torchs in zip(*found, strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-14, atol=0, equal_nan=True)


def test_targets_that_are_no_class_are_named_where_torch_reads_other_memory():
    scores, one = torch.zeros(4, 1, 3), torch.tensor([1])
    with pytest.raises(dcpc.DataError, match="got the target 3; expected 0 to 2"):
        ctc_loss(scores, torch.tensor([[3, 1]]), one, one, 0, False)
    ctc_loss(scores, torch.tensor([[1, -100]]), one, one, 0, False)  # padding


def test_a_selection_that_no_loss_takes_is_refused():
    class Chosen(nn.Linear):
        def forward(self, x):
            return self.weight.sum() * x[x >= 0].median()

    buckets = dcpc.Buckets(inputs={"x": "float64[batch, n]"}, sizes=[{"n": 9}])
    with pytest.raises(dcpc.TraceError, match=r"median.. of rows that a mask chose"):
        trace(Chosen(2, 2), buckets)


class Speech(nn.Module):
    """An encoder of padded samples, whose loss is a mean of a reduction's kind."""

    def __init__(self, loss):
        super().__init__()
        self.encoder = Encoder(loss)

    def forward(self, x, mask, labels):
        return self.encoder(x, labels, mask.sum(-1), (labels >= 0).sum(-1))


def of_labels(scores, targets, steps, counts):
    return F.ctc_loss(scores, targets, steps, counts, reduction="sum") / counts.sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "weight"),
    [(nn.CTCLoss(), "samples"), (of_labels, "labels"), (nn.CTCLoss(0, "sum"), "")],
)
def test_a_step_is_the_mean_over_samples_of_unequal_lengths(loss, weight):
    g = torch.Generator().manual_seed(3)
    lengths = [(5, 2), (16, 4), (9, 1), (12, 4), (7, 3)]
    data = [
        {
            "x": torch.randn(n, 6, dtype=torch.float64, generator=g),
            "mask": torch.ones(n, dtype=torch.int64),
            "labels": torch.randint(1, CLASSES, (s,), generator=g),
        }
        for n, s in lengths
    ]
    inputs = {"x": INPUTS["x"], "mask": "int64[batch, n]", "labels": "int64[batch, s]"}
    model = Speech(loss)
    buckets = dcpc.Buckets(inputs=inputs, sizes=[{"n": 8, "s": 4}, {"n": 16, "s": 4}])
    compiled = dcpc.compile(model, buckets, memory="1GB", backend="eager")

    def loader(weight):
        pad = {"x": 0, "mask": 0, "labels": -100}
        return dcpc.DataLoader(data, compiled, samples_per_step=5, pad=pad, weight=weight)

    if not weight:  # a sum
        with pytest.raises(dcpc.DataError, match="make a sum a mean"):
            loader("samples")
        return
    (step,) = loader(weight)
    assert len(step.micro_batches) > 1
    found = compiled.train_step(step).loss
    mine = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    shares = [len(d["labels"]) if weight == "labels" else 1 for d in data]
    each = [model(**{k: v[None] for k, v in d.items()}) for d in data]
    mean = sum(e * w for e, w in zip(each, shares, strict=True)) / sum(shares)
    mean.backward()
    assert found == pytest.approx(float(mean.detach()), rel=1e-12)
    largest = max(float(p.grad.abs().max()) for p in model.parameters())
    for n, p in model.named_parameters():
        torch.testing.assert_close(mine[n], p.grad, rtol=1e-11, atol=1e-12 * largest)
