"""The race behind `torch.compile`: its shapes differ in every dim, and a wrong number is seen."""

import pytest
import torch

from benchmarks.backend import SHAPES, outputs_of, shapes, worst
from tests.zoo.models import NAMED


@pytest.mark.parametrize("name", ["transformers Llama", "transformers T5", "diffusers PixArt"])
def test_no_two_dims_are_equal_so_that_dynamo_takes_none_for_another(name):
    found = shapes(NAMED[name])
    assert len(found) == SHAPES
    for sizes in found:
        lengths = [size for n, size in sizes.items() if n != "batch"]
        assert len({*sizes.values()}) == len(sizes)
        assert not {*lengths} & {2 * size for size in sizes.values()}
    assert len({tuple(sorted(s.items())) for s in found}) == SHAPES


def test_a_wrong_element_is_seen_beside_large_ones():
    want = [torch.tensor([100.0, 1.0]), torch.tensor([1e-2, 1e-3])]
    got = [want[0].clone(), want[1] + torch.tensor([0.0, 1e-3])]
    assert worst(want, want) == 0.0
    # Of a tensor of small numbers a thousandth of the largest ones is the scale.
    assert worst(got, want) == pytest.approx(1e-2)


def test_outputs_are_the_floating_ones_in_order():
    loss, logits = torch.ones(()), torch.ones(2, 3)
    assert outputs_of(loss) == [loss]
    assert [id(x) for x in outputs_of((loss, torch.ones(2).long(), logits))] == [
        id(loss),
        id(logits),
    ]
    assert [id(x) for x in outputs_of({"loss": loss, "n": 3, "logits": logits})] == [
        id(loss), id(logits),
    ]  # fmt: skip
