"""Modules a user might bring, split over ranks wherever they can be: the plain model's numbers."""

import warnings
from collections.abc import Sequence

import pytest

import dcpc
from tests.cases.exactness import (
    SPLITTING,
    SplitJob,
    SplitModel,
    compiled_error,
    split_errors,
    wrong,
)
from tests.cases.launch import run_prepared
from tests.cases.ready import Ready
from tests.cases.small_models import CASES, TELLING, sizes

pytestmark = pytest.mark.multirank


def split_jobs(names: Sequence[str], sp: int) -> list[SplitJob]:
    warnings.simplefilter("ignore")  # replicated ops say so
    found = []
    for name in names:
        case, points = CASES[name], sizes(name)
        buckets = dcpc.Buckets(inputs=case.inputs, sizes=points)
        split = SplitModel(case.model(), buckets, {**points[1], "batch": 1}, "eager", sp)
        assert split.split_values >= 3, name
        found.append(SplitJob.ready(name, split, [(p, case.data(p)) for p in points]))
    return found


def compiled_models(
    names: Sequence[str], world: int, recompute: str, backend: str
) -> list[tuple[str, Ready]]:
    warnings.simplefilter("ignore")
    found = []
    for name in names:
        case = CASES[name]
        buckets = dcpc.Buckets(inputs=case.inputs, sizes=sizes(name))
        options = {"sp": world, "recompute": recompute, "backend": backend, "device": SPLITTING}
        found.append((name, Ready(case.model(), buckets, world, verify="off", **options)))
    return found


def errors(rank: int, models: list[tuple[str, Ready]]) -> dict[str, float]:
    warnings.simplefilter("ignore")
    found = {}
    for name, ready in models:
        compiled, points = ready.compile(), sizes(name)
        alone = [{**p, "batch": 1} for p in points if p.get("batch", 1) > 1]
        # Inductor compiles batch 1 anew: tests/multirank/test_exactness.py has it.
        for point in (*points, *(alone if ready.options["backend"] == "eager" else ())):
            data = CASES[name].data(point)
            found[f"{name} {point}"] = compiled_error(compiled, ready.model, data)
    return found


def test_small_models_split_over_two_ranks_equal_the_plain_ones():
    found = run_prepared(split_jobs, split_errors, 2, TELLING, 2, timeout_s=280)
    assert not wrong(found, 1e-10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_small_models_split_equal_the_plain_ones():
    found = run_prepared(split_jobs, split_errors, 4, sorted(CASES), 4, timeout_s=1100)
    assert not wrong(found, 1e-10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_small_models_through_compile_equal_the_plain_ones():
    given = sorted(CASES), 4, "all", "eager"
    assert not wrong(run_prepared(compiled_models, errors, 4, *given, timeout_s=1100), 1e-10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_small_models_by_inductor_equal_the_plain_ones():
    names = ["Alibi", "CausalMean", "PartialSums", "SpaceTime", "Scalars"]
    given = names, 2, "none", "inductor"
    assert not wrong(run_prepared(compiled_models, errors, 2, *given, timeout_s=1100), 1e-8)
