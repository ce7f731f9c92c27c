"""Rows chosen by a mask are captured with all places' sizes; loss and gradients are the same."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import dcpc
from dcpc.commands.check import SplitModel
from dcpc.trace import trace
from dcpc.trace.capture.capturable import Capturable
from tests.cases.chosen_rows import BUCKETS, WORDS, inputs
from tests.cases.chosen_rows import RowsOfAMask as Model


def scattered(m, x, mask, labels):
    return m.loss(x.masked_scatter(mask[..., None], m.rows), labels)


def scattered_in_place(m, x, mask, labels):
    y = x * 1
    y.masked_scatter_(mask[..., None].expand_as(y), m.rows)
    y[~mask] = m.token
    y[labels == 3] = 0.5
    y[labels == 4] = m.rows[:6]  # as many as there are
    return m.loss(y, labels)


def elements(m, x, mask, labels):
    return x.masked_scatter(x > 0, m.rows).square().sum()


def scores(m, x, mask, labels):
    y = m.head(x)
    whole = F.cross_entropy(y[mask], labels[mask]) + F.nll_loss(
        y.log_softmax(-1)[mask], labels[mask]
    )
    each = F.cross_entropy(y[mask].view(-1, WORDS), labels[mask].view(-1), reduction="none")
    smooth = F.cross_entropy(y[mask], labels[mask], y.new_ones(WORDS), label_smoothing=0.1)
    return whole + each.sum() + smooth


def losses(m, x, mask, labels):
    y, want = m.mix(x)[mask], x[mask].detach()
    found = F.mse_loss(y, want) + F.l1_loss(y, want, reduction="sum") + F.smooth_l1_loss(y, want)
    is_three = (labels[mask] == 3).to(x.dtype)
    found = found + F.binary_cross_entropy_with_logits(m.head(x)[..., 0][mask], is_three)
    return found + F.kl_div(y.log_softmax(-1), want.softmax(-1), reduction="batchmean")


def row_by_row(m, x, mask, labels):
    y = m.norm(m.mix(x[mask]).relu())
    z = torch.cat([y, 2 * y], -1)[:, 4:12] - y.mean(-1, keepdim=True)
    z = z @ m.mix.weight + F.dropout(z, 0.5, training=False)
    return (
        (z**2).sum() / z.shape[0] + z.flatten(1).mean() + z[..., 0].mean() + z.sum(0).square().sum()
    )


def written_back(m, x, mask, labels):
    y = x * 1
    y[mask] = m.mix(y[mask]).relu()
    return m.loss(y, labels)


def coordinates(m, x, mask, labels):
    i, j = mask.nonzero(as_tuple=True)
    k = torch.nonzero(mask.flatten()).squeeze(-1)
    flat = x.flatten(0, 1)
    y = torch.zeros_like(flat)
    y[k] = m.mix(flat[k]) + flat.index_select(0, k)
    return (
        m.loss(y.view_as(x), labels)
        + F.cross_entropy(m.head(x[i, j]), labels[i, j])
        + x[i, 0].mean()
    )


def not_a_number_elsewhere(m, x, mask, labels):
    y = torch.where(mask[..., None], x.abs() + 0.1, 0.0)
    return y[mask].log().mean()


def shifted(m, x, mask, labels):
    places = mask.flatten().nonzero().squeeze(-1)
    places += 1
    return x.flatten(0, 1)[places - 1].mean() + x.flatten(0, 1)[places.clamp(max=3)].sum()


def scaled_in_place(m, x, mask, labels):
    y = m.head(x)[mask]
    y *= 2
    return F.cross_entropy(y, labels[mask])


FUNCTIONS = [
    *(scattered, scattered_in_place, elements, scores, losses, row_by_row, written_back),
    *(coordinates, not_a_number_elsewhere, shifted, scaled_in_place),
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_loss_and_gradients_are_the_same(function):
    model, data = Model(function), inputs(2, 11)
    want = model(**data)
    with Capturable():
        got = model(**data)
    used = [*model.parameters()]
    pairs = [
        torch.autograd.grad(x, used, allow_unused=True, materialize_grads=True) for x in (want, got)
    ]
    assert abs(got - want) < 1e-12
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(*pairs, strict=True))


def all_of_them(m, x, mask, labels):
    some = (scattered, scores, losses, row_by_row, written_back, coordinates)
    return sum(f(m, x, mask, labels) for f in some)


def test_graphs_of_ranks_are_right_at_all_lengths_and_split_the_samples():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        split = SplitModel(Model(all_of_them), BUCKETS, {"batch": 2, "n": 14}, sp=1)
    for sp, recompute in ((1, "none"), (2, "all")):
        some = split.of("eager", sp)
        for batch, n in ((2, 14), (1, 11)):
            at = {"batch": batch, "n": n}
            assert some.difference(at, inputs(batch, n), recompute, in_step=True).worst < 1e-10


def two_masks(m, x, mask, labels):
    return F.cross_entropy(m.head(x)[mask], labels[mask.clone()])


def joined(m, x, mask, labels):
    y = x[mask]
    return (y @ y.T).logsumexp(-1).mean()


def changed(m, x, mask, labels):
    y = m.head(x)[mask]
    mask[:, 0] = False
    return F.cross_entropy(y, labels[mask])


def cut(m, x, mask, labels):
    return x[mask][:100].sum()


def in_parts(m, x, mask, labels):
    return sum(part.mean() for part in x[mask].split(100))


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (two_masks, "rows that two masks chose"),
        (joined, r"T\(\) of rows that a mask chose"),
        (cut, r"__getitem__\(\) of rows that a mask chose"),
        (in_parts, r"split\(\) of rows that a mask chose"),
    ],
)
def test_other_calls_are_refused_by_line(function, got):
    with pytest.raises(dcpc.TraceError, match=rf"{got} at .*test_chosen_rows.py:\d+.*expected"):
        trace(Model(function), BUCKETS)


def test_a_mask_that_was_written_to_is_another():
    with Capturable(), pytest.raises(dcpc.TraceError, match="two masks"):
        Model(changed)(**{n: x != 0 if n == "mask" else x for n, x in inputs(2, 11).items()})


def test_more_places_than_rows_is_an_error():
    model = Model(scattered)
    data = {**inputs(3, 14), "mask": torch.ones(3, 14, dtype=torch.int64)}
    with Capturable(), pytest.raises(IndexError):
        model(**data)
