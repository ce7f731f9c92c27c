"""Named models at random lengths up to their bucket, as `pad_to="longest"` runs them."""

import copy
import random
import warnings

import pytest
import torch

import dcpc
from dcpc.buckets import BATCH, Bucket
from dcpc.verify.inputs import draw
from tests.cases.exactness import gradient_error, loss_error
from tests.zoo.models import NAMED


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["transformers Llama", "transformers T5", "transformers ViT", "diffusers PixArt"]
)
def test_graphs_of_a_bucket_are_right_at_each_length_that_they_are_said_to_run_at(name):
    warnings.simplefilter("ignore")
    zoo, random_sizes = NAMED[name], random.Random(1)
    every = [*zoo.sizes, zoo.coverage_sizes]
    dims = [dim for dim in zoo.coverage_sizes if dim != BATCH]
    most = {dim: max(sizes[dim] for sizes in every) for dim in dims}
    torch.manual_seed(0)
    model = zoo.make()
    buckets = dcpc.Buckets(zoo.inputs, [most])
    compiled = dcpc.compile(model, buckets, backend="eager")
    dispatch, longest = compiled._core.dispatch, Bucket.of(most)
    program = compiled.planned.by_bucket[longest].traced.program
    least = dispatch.lengths.least(longest)
    assert max(least.values()) <= 3
    ran = 0
    for upto in (0, 1, 2, 4, *(max(most.values()),) * 8):
        highest = {dim: min(most[dim], least[dim] + upto) for dim in dims}
        own = {dim: random_sizes.randint(least[dim], highest[dim]) for dim in dims}
        if not dispatch.lengths.runs_at(longest, own):
            continue
        sizes = {**own, BATCH: random_sizes.choice((1, 2, 3))}
        inputs = draw(program, buckets, sizes, "wide", torch.device("cpu"))
        inputs |= zoo.example(sizes) if zoo.example else {}
        plain = copy.deepcopy(model)
        expected = plain(**inputs)
        expected = expected if isinstance(expected, torch.Tensor) else expected.loss
        expected.backward()
        model.zero_grad()
        loss, *_ = dispatch.run_call(longest, sizes, inputs, dispatch.setting(longest))
        loss.backward()
        gradients = {n: p.grad for n, p in plain.named_parameters()}
        assert loss_error(loss, expected.detach()) < 1e-12, sizes
        assert gradient_error(model, gradients) < 1e-10, sizes
        ran += 1
    assert ran >= 4
    assert compiled.stats().variants <= 2  # no length is traced anew
