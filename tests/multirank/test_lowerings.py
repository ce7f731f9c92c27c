"""Unmodified models with every way to split attention forced: the plain model's numbers."""

import warnings
from collections.abc import Sequence

import pytest

import dcpc
from dcpc.passes.sharding.attention_ways import LOWERINGS, attentions, lowering_of
from tests.cases import language_models
from tests.cases.exactness import SplitJob, SplitModel, split_errors, wrong
from tests.cases.launch import run_prepared
from tests.cases.small_models import CASES, sizes

pytestmark = pytest.mark.multirank

LENGTHS = (1, 2, 3, 5, 16, 37)


def language_jobs(
    names: Sequence[str], sp: int, lengths: Sequence[int], recomputes: Sequence[str]
) -> list[SplitJob]:
    warnings.simplefilter("ignore")
    jobs = []
    for name in names:
        sizes = [{"batch": 1, "seq": n} for n in lengths if n > 1] + [{"batch": 2, "seq": 21}]
        buckets = dcpc.Buckets(inputs=language_models.inputs(name), sizes=sizes)
        free = SplitModel(language_models.model(name), buckets, {"batch": 1, "seq": 64})
        for lowering in LOWERINGS:
            split = free.of("eager", sp, lowering)
            got = {lowering_of(split.placement.nodes[n.name]) for n in attentions(split.program)}
            if lowering == "hybrid" and sp == 2:
                continue  # two axes need at least four ranks
            assert got == {lowering}, (name, lowering, got)
            assert bool(split.placement.zigzag) == (name != "bert" and lowering != "heads")
            points = [(s, language_models.data(name, s)) for s in sizes]
            jobs.append(SplitJob.ready(f"{name} {lowering}", split, points, recomputes))
    return jobs


@pytest.mark.slow
def test_grouped_heads_on_more_ranks_than_key_heads_by_every_lowering():
    given = ("gpt_grouped",), 4, (3, 37), ("none",)
    assert wrong(run_prepared(language_jobs, split_errors, 4, *given, timeout_s=300), 1e-10) == {}


@pytest.mark.slow
@pytest.mark.parametrize("sp", [2, 4])
def test_all_language_models_by_every_lowering(sp):
    given = language_models.NAMES, sp, LENGTHS, ("none", "all")
    found = run_prepared(language_jobs, split_errors, sp, *given, timeout_s=1500)
    assert wrong(found, 1e-10) == {}


def small_jobs(names: Sequence[str], sp: int) -> list[SplitJob]:
    warnings.simplefilter("ignore")
    jobs = []
    for name in names:
        case, points = CASES[name], sizes(name)
        buckets = dcpc.Buckets(inputs=case.inputs, sizes=points)
        at = {**points[1], "batch": 1}
        free = SplitModel(case.model(), buckets, at)
        kinds = {
            lowering_of(a)
            for n in attentions(free.program)
            for a in free.sharding.alternatives[n.name]
        }
        for lowering in sorted(kinds & set(LOWERINGS)):
            split = free.of("eager", sp, lowering)
            data = [(p, case.data(p)) for p in points]
            jobs.append(SplitJob.ready(f"{name} {lowering}", split, data))
    return jobs


def test_attention_of_two_lengths_and_of_any_layout_by_every_lowering():
    names = ("CrossAttention", "LyingAttention")
    found = run_prepared(small_jobs, split_errors, 2, names, 2, timeout_s=300)
    assert wrong(found, 1e-10) == {}


@pytest.mark.slow
@pytest.mark.parametrize("sp", [3, 4])
def test_all_small_models_by_every_lowering(sp):
    names = tuple(CASES)
    found = run_prepared(small_jobs, split_errors, sp, names, sp, timeout_s=1500)
    assert wrong(found, 1e-10) == {}
