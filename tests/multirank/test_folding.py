"""A split Evoformer equals the plain one, and sends no more than Dynamic Axial Parallelism."""

import warnings

import pytest

import dcpc
from tests.cases import folding_models as folding
from tests.cases.exactness import SplitModel, wrong
from tests.cases.launch import run_ranks


def split_model(point: int, sp: int | None = None) -> SplitModel:
    sizes = [{n: s for n, s in p.items() if n != "batch"} for p in folding.POINTS]
    buckets = dcpc.Buckets(inputs=folding.INPUTS, sizes=sizes)
    return SplitModel(folding.model(), buckets, folding.POINTS[point], "eager", sp=sp)


def test_evoformer_over_ranks_in_one_process_equals_the_plain_one():
    split = split_model(0, 2)
    for point, recompute in zip(folding.POINTS, ("none", "all", "none"), strict=True):
        found = split.difference(point, folding.data(point), recompute, in_step=True)
        assert found.worst < 1e-10, found


def split_errors(rank: int) -> dict[str, float]:
    warnings.simplefilter("ignore")
    split = split_model(0)
    points = [(p, folding.data(p)) for p in folding.POINTS[:2]]
    return split.errors("evoformer", points, ("none", "all"))


@pytest.mark.slow
@pytest.mark.multirank
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 4])
def test_evoformer_over_gloo_ranks_equals_the_plain_one(world):
    assert not wrong(run_ranks(split_errors, world, timeout_s=500), 1e-10)
