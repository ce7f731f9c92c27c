"""Buckets for given lengths: none cost less in one dim, few do in several."""

from collections import Counter
from itertools import combinations
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dcpc
from dcpc.buckets.choosing import best_shapes, padded_cost

TEXT = {"ids": "int64[batch, seq]"}
CLIPS = {"pixels": "float32[batch, frames, height, width]"}
COSTS = {"tokens": lambda s: float(prod(s)), "attention": lambda s: prod(s) * (50.0 + prod(s))}


def least(counts, candidates, count, cost):
    """Least cost of at most so many of the candidates that hold all shapes, by trying all."""
    found = []
    for n in range(1, count + 1):
        for chosen in combinations(candidates, n):
            held = (any(all(map(int.__le__, s, b)) for b in chosen) for s in counts)
            if all(held):
                found.append(padded_cost(counts, chosen, cost))
    return min(found)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=30),
    st.integers(1, 4),
    st.sampled_from(sorted(COSTS)),
)
def test_no_choice_of_one_dim_costs_less(lengths, count, name):
    counts, cost = Counter((n,) for n in lengths), COSTS[name]
    chosen = best_shapes(counts, [1], count, None, cost)
    assert len(chosen.shapes) <= count
    total = padded_cost(counts, chosen.shapes, cost)
    assert total == pytest.approx(least(counts, sorted(counts), count, cost))
    own = sum(n * cost(shape) for shape, n in counts.items())
    assert chosen.padding == pytest.approx(1 - own / total)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.lists(st.tuples(st.integers(2, 9), st.sampled_from([2, 4, 8])), min_size=2, max_size=8))
def test_few_choices_of_two_dims_cost_less(shapes):
    counts, cost = Counter(shapes), COSTS["tokens"]
    grid = [(a, b) for a in {a for a, _ in shapes} for b in {b for _, b in shapes}]
    total = padded_cost(counts, best_shapes(counts, [1, 1], 3, None).shapes, cost)
    assert total <= 1.15 * least(counts, sorted(grid), 3, cost)  # 1.006 in the mean


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(*[st.integers(1, 60)] * 3), min_size=1, max_size=300),
    st.integers(8, 20),
)
def test_every_sample_has_a_bucket_and_images_have_their_own(shapes, count):
    dims = ("frames", "height", "width")
    rows = [dict(zip(dims, shape, strict=True)) for shape in shapes]
    buckets = dcpc.Buckets.from_lengths(CLIPS, rows, count=count)
    assert len(buckets) <= count
    for row in rows:
        ones = {name for name, n in row.items() if n == 1}
        alike = [b for b in buckets if {n for n in dims if b[n] == 1} == ones]
        assert any(all(b[name] >= n for name, n in row.items()) for b in alike)


def test_the_fewest_buckets_keep_a_share_of_padding():
    lengths = [int(64 * 1.03**i) for i in range(150)]
    asked = [0.3, 0.1, 0.03]
    found = [dcpc.Buckets.from_lengths(TEXT, lengths, padding=p) for p in asked]
    for buckets, padding in zip(found, asked, strict=True):
        sizes = [b["seq"] for b in buckets]
        padded = sum(min(s for s in sizes if s >= n) for n in lengths)
        assert 1 - sum(lengths) / padded <= padding
        fewer = dcpc.Buckets.from_lengths(TEXT, lengths, count=len(sizes) - 1)
        padded = sum(min(b["seq"] for b in fewer if b["seq"] >= n) for n in lengths)
        assert 1 - sum(lengths) / padded > padding
    assert dcpc.Buckets.from_lengths(TEXT, lengths) == found[-1]


def test_sizes_are_multiples_and_cost_is_the_callers():
    lengths = [100] * 50 + [300] * 50 + [1000]
    by_tokens = dcpc.Buckets.from_lengths(TEXT, lengths, count=2, multiple_of=64)
    assert [b["seq"] for b in by_tokens] == [320, 1024]
    # Where a sample costs its launches alone, one of 100 tokens may as well be padded to 300.
    launches = dcpc.Buckets.from_lengths(TEXT, lengths, padding=0.5, seconds=lambda s: 1.0)
    assert [b["seq"] for b in launches] == [1000]
    steep = dcpc.Buckets.from_lengths(TEXT, lengths, count=2, seconds=lambda s: s["seq"] ** 4)
    assert [b["seq"] for b in steep] == [300, 1000]


def test_a_length_of_1_is_no_trace_of_its_own():
    assert [b["seq"] for b in dcpc.Buckets.from_lengths(TEXT, [1, 1, 30], count=2)] == [2, 30]
    assert [b["seq"] for b in dcpc.Buckets.from_lengths(TEXT, [1, 1])] == [1]


class Clips:
    def __len__(self):
        return 3

    def dims(self, i):
        return {"frames": (1, 17, 33)[i], "height": 8, "width": 8}


def test_lengths_come_in_many_forms():
    wanted = dcpc.Buckets(TEXT, [{"seq": 3}, {"seq": 9}])
    for lengths in ([3, 9], np.array([9, 3]), torch.tensor([3, 9, 9]), [{"seq": 3}, {"seq": 9}]):
        assert dcpc.Buckets.from_lengths(TEXT, lengths) == wanted
    frames = [b["frames"] for b in dcpc.Buckets.from_lengths(CLIPS, Clips(), count=2)]
    assert frames == [1, 33]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([], {}, "got 0 samples; expected one entry a sample"),
        ([5, 0], {}, "got 0 for sample 1"),
        ([5, 2.5], {}, "got 2.5 for sample 1"),
        ("512", {}, "got 'str'"),
        (
            [{"len": 5}],
            {},
            "got {'len': 5} for sample 0; expected one entry a sample, {'seq'",
        ),
        ([5], {"count": 0}, "got count=0; expected an integer from 1 on"),
        ([5], {"padding": 3}, "got padding=3; expected a share above 0 and below 1"),
        ([5], {"multiple_of": 0}, "got multiple_of=0; expected an integer from 1"),
        ([5], {"multiple_of": {"sq": 8}}, "or one by name of seq"),
    ],
)
def test_wrong_arguments_are_refused_by_name(lengths, options, message):
    with pytest.raises(dcpc.BucketError) as error:
        dcpc.Buckets.from_lengths(TEXT, lengths, **options)
    assert message in str(error.value)


def test_too_few_buckets_for_images_and_clips_are_refused():
    with pytest.raises(dcpc.BucketError, match="got count=1; expected more: samples differ in"):
        dcpc.Buckets.from_lengths(CLIPS, Clips(), count=1)
    with pytest.raises(dcpc.BucketError, match="got inputs without a named dim"):
        dcpc.Buckets.from_lengths({"x": "float32[batch, 8]"}, [5])
