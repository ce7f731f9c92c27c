"""A loss of packed rows that is not the mean of their sequences' losses is refused."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F

import dcpc
from dcpc.api import compiling
from dcpc.errors import DataError
from tests.cases.packed_models import NUMBERS, POSITIONS, Documents, Sequences, transformers_model
from tests.cases.ready import Keeper


class Losses(Documents):
    """A loss of each kind, of logits [batch, seq, vocabulary] and labels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, input_ids, segment_ids, position_ids, labels):
        logits = self.logits(input_ids, segment_ids, position_ids)
        each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        count = (labels != -100).sum()
        if self.kind == "mean over padding":
            return each.mean()
        if self.kind == "a power of the mean":
            return (each.sum() / count).square()
        if self.kind == "more that is not weighed":
            return each.sum() / count + 0.1 * logits.logsumexp(-1).square().mean()
        if self.kind == "counts what it drops":
            logits, shifted = logits[:, :-1].transpose(1, 2), labels[:, 1:]
            return F.cross_entropy(logits, shifted, reduction="sum") / count
        if self.kind == "of one micro-batch":
            return (each.sum() + (logits - logits.mean(0)).square().sum()) / count
        return (each * (1 + each.detach())).sum() / count


losses = cache(Losses)  # the same module for all tests: it is planned once


@pytest.fixture(scope="module", autouse=True)
def _plans_are_made_once():
    with Keeper().around(compiling):
        yield


def said(model, inputs, packing, verify="auto", weight="labels", pad=None, **options):
    buckets = dcpc.Buckets(inputs=inputs, sizes=[{"seq": 12}, {"seq": 41}])
    compiled = dcpc.compile(model, buckets, backend="eager", memory=1e9, verify=verify)
    try:
        dcpc.DataLoader(
            Sequences([3, 5]), compiled, tokens_per_step=64, packing=packing, weight=weight,
            pad=pad, **options
        )  # fmt: skip
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "kind",
    ["mean over padding", "a power of the mean", "more that is not weighed", "counts what it drops",
     "of one micro-batch"],
)  # fmt: skip
def test_a_loss_that_hangs_on_who_shares_a_row_is_refused(kind):
    text = said(losses(kind), NUMBERS, "segment_ids")
    assert "of two drawn packed rows at {" in text
    assert "is trained as it is with loss_depends_on='row'" in text
    for options in ({"verify": "off"}, {"loss_depends_on": ["row"]}):
        assert said(losses(kind), NUMBERS, "segment_ids", **options) == ""


def test_a_mean_over_labels_is_not():
    assert said(losses("focal"), NUMBERS, "segment_ids") == ""
    assert said(transformers_model("llama"), POSITIONS, True) == ""


def test_a_weight_that_is_not_what_the_loss_divides_by_is_refused():
    def tokens(inputs):
        return float(torch.ones_like(inputs["labels"]).sum())

    pad = {"input_ids": 0, "labels": -100}
    text = said(losses("focal"), NUMBERS, "segment_ids", weight=tokens, pad=pad)
    assert "a weight of 24 of two drawn packed rows at {seq: 12" in text
