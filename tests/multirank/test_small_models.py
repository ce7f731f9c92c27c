"""Modules a user might bring, split over ranks wherever they can be: the plain model's numbers."""

import warnings
from collections.abc import Mapping, Sequence
from itertools import product

import pytest

import dcpc
from tests.cases.exactness import SPLITTING, SplitModel, compiled_error, wrong
from tests.cases.launch import run_prepared, run_ranks
from tests.cases.small_models import CASES, TELLING, sizes

pytestmark = pytest.mark.multirank


def split_models(names: Sequence[str], world: int) -> dict[str, SplitModel]:
    warnings.simplefilter("ignore")  # replicated ops say so
    found = {}
    for name in names:
        case, points = CASES[name], sizes(name)
        buckets = dcpc.Buckets(inputs=case.inputs, sizes=points)
        split = SplitModel(case.model(), buckets, {**points[1], "batch": 1}, "eager", sp=world)
        assert split.split_values >= 3, name
        for point, recompute in product(points, ("none", "all")):
            split.ready(point, recompute)
        found[name] = split
    return found


def split_errors(rank: int, models: Mapping[str, SplitModel]) -> dict[str, float]:
    found = {}
    for name, split in models.items():
        found |= split.errors(name, [(p, CASES[name].data(p)) for p in sizes(name)])
    return found


def errors(rank: int, names: list[str], sp: int, recompute: str, backend: str) -> dict[str, float]:
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        case, points = CASES[name], sizes(name)
        model = case.model()
        compiled = dcpc.compile(
            model,
            dcpc.Buckets(inputs=case.inputs, sizes=points),
            sp=sp,
            recompute=recompute,
            backend=backend,
            device=SPLITTING,
        )
        alone = [{**p, "batch": 1} for p in points if p.get("batch", 1) > 1]
        for point in (*points, *alone):
            found[f"{name} {point}"] = compiled_error(compiled, model, case.data(point))
    return found


def test_small_models_split_over_two_ranks_equal_the_plain_ones():
    assert not wrong(run_prepared(split_models, split_errors, 2, TELLING, 2, timeout_s=280), 1e-10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_small_models_split_equal_the_plain_ones():
    given = sorted(CASES), 4
    found = run_prepared(split_models, split_errors, 4, *given, timeout_s=1100)
    assert not wrong(found, 1e-10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("world", "recompute"), [(2, "none"), (4, "all")])
def test_small_models_through_compile_equal_the_plain_ones(world, recompute):
    names = sorted(CASES)
    found = run_ranks(errors, world, names, world, recompute, "eager", timeout_s=1100)
    assert not wrong(found, 1e-10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_small_models_by_inductor_equal_the_plain_ones():
    names = ["Alibi", "CausalMean", "Shifted", "PartialSums", "SpaceTime", "Frozen", "Scalars"]
    assert not wrong(run_ranks(errors, 2, names, 2, "none", "inductor", timeout_s=1100), 1e-8)
