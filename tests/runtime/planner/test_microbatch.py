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


def test_sample_over_memory_is_refused():
    with pytest.raises(PlanError, match="a sample of 500 tokens, which alone"):
        microbatch([10, 500], Padded(), memory_bytes=4000.0)


def test_few_caps_of_512_samples_are_solved():
    lengths = np.random.default_rng(0).lognormal(5.95, 1.258, 512).astype(int) + 1
    found = microbatch(lengths.tolist(), Padded(), 1e6, stages=8)
    assert found.caps_solved <= 32
