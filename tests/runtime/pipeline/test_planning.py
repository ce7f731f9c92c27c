"""Steps of pipelines planned from lengths: every sample once, in memory, no slower than 1F1B."""

from dataclasses import dataclass
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from dcpc.errors import PlanError
from dcpc.runtime.pipeline import apart
from dcpc.runtime.pipeline.apart import split_apart
from dcpc.runtime.pipeline.replicas import plan_replicas, work_of
from dcpc.runtime.pipeline.schedule import (
    Hop,
    StageCost,
    check,
    fitted,
    lower_bound,
    one_f_one_b,
    replay,
)


@dataclass(frozen=True)
class LinearPipeline:
    """Stages alike: seconds and bytes by tokens; the second setting holds a quarter."""

    stages: int = 3
    settings: int = 2
    size: float = 4000.0

    @property
    def memory_bytes(self):
        return (self.size,) * self.stages

    def figures(self, setting, count, longest):
        tokens = count * longest
        forward_s = 0.01 + 1e-4 * tokens + 1e-7 * tokens * longest
        held = tokens * (1.0, 0.25)[setting]
        return forward_s, forward_s * (2 + setting), held, held + 0.2 * tokens

    def options(self, stage, count, longest):
        return tuple(
            StageCost(f, b, held_bytes=held, forward_bytes=most, backward_bytes=most)
            for f, b, held, most in (self.figures(k, count, longest) for k in range(2))
        )

    def hop(self, stage, count, longest):
        return Hop(1e-5 * count, 1e-5 * count, 0.01 * count, 0.01 * count)

    def padded(self, setting, flight):
        return _Padded(self, setting, flight)


@dataclass(frozen=True)
class _Padded:
    cost: LinearPipeline
    setting: int
    flight: int

    def seconds(self, count, longest):
        forward_s, backward_s, *_ = self.cost.figures(self.setting, count, longest)
        return forward_s + backward_s

    def peak_bytes(self, count, longest):
        *_, held, most = self.cost.figures(self.setting, count, longest)
        return ((self.flight - 1) * held + most + 0.1 * count) / self.cost.size


def lengths_of(count, seed=0):
    drawn = np.random.default_rng(seed)
    return np.clip(np.exp(drawn.normal(4.0, 1.0, count)), 4, 1500).astype(int).tolist()


def test_plan_has_every_sample_once_fits_and_is_no_slower_than_1f1b():
    lengths, cost = lengths_of(60), LinearPipeline()
    plan = plan_replicas(lengths, cost, 1, limit=2_000)[0]
    assert sorted(i for batch in plan.batches for i in batch) == list(range(60))
    check(plan.found.schedule, len(plan.batches))
    assert max(plan.found.replay.peak_bytes) <= cost.size
    order = range(len(plan.batches))
    plain = replay(plan.work, one_f_one_b(order, fitted(plan.work, order, (3, 2, 1))))
    assert plan.found.bound.seconds_s <= plan.found.replay.makespan_s <= plain.makespan_s


@pytest.mark.parametrize(("count", "replicas"), [(60, 2), (3, 3), (9, 4)])
def test_replicas_share_the_samples(count, replicas):
    lengths, cost = lengths_of(count), LinearPipeline()
    plans = plan_replicas(lengths, cost, replicas, limit=500)
    assert len(plans) == replicas
    found = sorted(i for plan in plans for batch in plan.batches for i in batch)
    assert found == list(range(count))
    for plan in plans:
        check(plan.found.schedule, len(plan.batches))
        assert plan.work == work_of(lengths, plan.batches, cost)
        assert lower_bound(plan.work) == plan.found.bound


def test_too_few_samples_and_a_too_long_one_are_refused():
    with pytest.raises(PlanError, match="got 1 samples for 2 replicas"):
        plan_replicas([5], LinearPipeline(), 2)
    with pytest.raises(PlanError, match="a sample of 90000 tokens, which alone needs"):
        plan_replicas([5, 90_000], LinearPipeline(), 1)


def test_a_sample_that_fits_alone_is_planned_though_three_do_not_fit_at_once():
    plan = plan_replicas([3000, 3000, 40], LinearPipeline(), 1, limit=500)[0]
    assert max(plan.found.replay.peak_bytes) <= 4000.0
    assert sum(map(sum, plan.found.schedule.settings)) > 0, "some are recomputed"


def test_no_group_is_split_the_same_way_twice(monkeypatch):
    asked, split = [], apart.microbatch

    def counted(lengths, cost, memory_bytes, stages, replicas):
        asked.append((tuple(lengths), cost, stages))
        return split(lengths, cost, memory_bytes, stages, replicas)

    monkeypatch.setattr(apart, "microbatch", counted)
    lengths = lengths_of(20)
    plan_replicas(lengths, LinearPipeline(), 2, limit=0, apart={n: (n > 50, 8) for n in lengths})
    assert len(asked) == len(set(asked)) > 0


def splits_of(count):
    """All ways to cut so many sorted samples into micro-batches, as ends."""
    inner = (ends for n in range(count) for ends in combinations(range(1, count), n))
    return [(*ends, count) for ends in inner]


@pytest.mark.parametrize("weight", [2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_samples_of_a_group_share_micro_batches_nearly_as_well_as_can_be(weight, seed):
    drawn = np.random.default_rng(seed)
    lengths = drawn.integers(1, 40, 9).tolist()
    groups = {n: (n // 20, 3) for n in lengths}
    padded = _Padded(LinearPipeline(size=400.0), 0, 1)

    def value(batches):
        each = [float(padded.seconds(len(b), max(lengths[i] for i in b))) for b in batches]
        return (weight - 1) * max(each) + sum(each) / 2

    (found,) = split_apart(lengths, padded, [weight], 2, groups)
    assert sorted(i for batch in found for i in batch) == [*range(len(lengths))]
    ways = []
    for number in {home for home, _ in groups.values()}:
        own = sorted(
            (i for i, n in enumerate(lengths) if n // 20 == number), key=lengths.__getitem__
        )
        cut = ([own[a:b] for a, b in pairwise((0, *ends))] for ends in splits_of(len(own)))
        fits = [c for c in cut if max(map(len, c)) <= 3 and all(
            padded.peak_bytes(len(b), lengths[b[-1]]) <= 1 for b in c)]  # fmt: skip
        ways.append(fits)
    for batch in found:
        assert len({groups[lengths[i]] for i in batch}) == 1
        assert len(batch) <= 3
        assert padded.peak_bytes(len(batch), max(lengths[i] for i in batch)) <= 1
    best = min(value([b for part in parts for b in part]) for parts in product(*ways))
    assert best <= value(found) * (1 + 1e-12)
    assert value(found) <= 1.02 * best
