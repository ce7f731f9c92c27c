"""DynaPipe's split: equal to brute force over all caps and all cuts."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcpc.errors import PlanError
from dcpc.runtime.planner.splits.microbatch import microbatch


@dataclass(frozen=True)
class Padded:
    fixed_s: float = 0.01
    token_s: float = 1e-4
    square_s: float = 1e-8
    power: float = 1.0
    token_bytes: float = 10.0

    def seconds(self, count, longest):
        one_s = self.token_s * longest + self.square_s * longest * longest
        return self.fixed_s + np.asarray(count, dtype=float) ** self.power * one_s

    def peak_bytes(self, count, longest):
        return self.token_bytes * count * longest


def brute_force(lengths, cost, memory_bytes, stages, replicas):
    lengths = sorted(lengths)
    n = len(lengths)
    best = float("inf")
    for mask in range(2 ** (n - 1)):
        cuts = [0, *(i + 1 for i in range(n - 1) if mask >> i & 1), n]
        pairs = [(b - a, lengths[b - 1]) for a, b in pairwise(cuts)]
        if all(cost.peak_bytes(k, top) <= memory_bytes for k, top in pairs):
            seconds = [float(cost.seconds(k, top)) for k, top in pairs]
            best = min(best, (stages - 1) * max(seconds) + sum(seconds) / replicas)
    return best


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=9),
    power=st.sampled_from([0.7, 1.0, 1.2, -0.3]),
    fixed_s=st.sampled_from([0.0, 0.003, 0.05]),
    stages=st.integers(1, 8),
    replicas=st.integers(1, 4),
    samples=st.integers(1, 9),
)
def test_split_equals_brute_force(lengths, power, fixed_s, stages, replicas, samples):
    cost = Padded(fixed_s=fixed_s, power=power)
    memory_bytes = samples * max(lengths) * cost.token_bytes
    found = microbatch(lengths, cost, memory_bytes, stages, replicas)
    want = brute_force(lengths, cost, memory_bytes, stages, replicas)
    assert found.objective_s == pytest.approx(want, rel=1e-9)
    assert sorted(i for batch in found.batches for i in batch) == list(range(len(lengths)))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 3000), min_size=2, max_size=60),
    stages=st.integers(2, 16),
    samples=st.integers(1, 30),
)
def test_queue_equals_trying_all(lengths, stages, samples):
    cost = Padded()
    memory_bytes = samples * max(lengths) * cost.token_bytes
    quick = microbatch(lengths, cost, memory_bytes, stages)

    class Hidden(Padded):  # the same costs, but memory is no longer monotone
        def peak_bytes(self, count, longest):
            held = super().peak_bytes(count, longest)
            return np.where(np.asarray(count) == 1, memory_bytes, held)

    slow = microbatch(lengths, Hidden(), memory_bytes, stages)
    assert quick.method == "queue"
    assert quick.objective_s == pytest.approx(slow.objective_s, rel=1e-12)


@pytest.mark.parametrize(("power", "method"), [(1.0, "queue"), (0.5, "window"), (-1.0, "all")])
def test_method_follows_the_shape_of_the_cost(power, method):
    assert microbatch([3, 5, 5, 9, 12, 14], Padded(power=power), stages=3).method == method


def test_sample_over_memory_is_refused():
    with pytest.raises(PlanError, match="a sample of 500 tokens, which alone"):
        microbatch([10, 500], Padded(), memory_bytes=4000.0)


def test_512_samples_are_cut_by_the_queue():
    """And few of the caps are solved for, of which there are more than samples."""
    lengths = np.random.default_rng(0).lognormal(5.95, 1.258, 512).astype(int) + 1
    found = microbatch(lengths.tolist(), Padded(), 1e6, stages=8)
    assert found.method == "queue"
    assert found.caps_solved <= 32
