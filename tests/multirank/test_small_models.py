"""Modules a user might bring, split over ranks wherever they can be: the plain model's numbers."""

import warnings
from collections.abc import Sequence

import pytest

import dcpc
from tests.multirank.exactness import SPLITTING, Split, compiled_error, wrong
from tests.multirank.launch import run_ranks
from tests.multirank.small_models import CASES

pytestmark = pytest.mark.multirank

# (batch, length): p divides it, it does not, it is shorter than 4 ranks.
POINTS = ((2, 8), (3, 17), (1, 3))
# Lengths of a second named dim beside a first one of 8, 17 and 3.
SECOND = {"words": (5, 4, 7), "picks": (3, 6, 2), "frames": (4, 3, 5)}


# What the tests run by default: one case for each way to be wrong. The slow ones run all.
TELLING = (
    *("Alibi", "CrossAttention", "Detached", "Frozen", "Gathered", "GridPositions", "InPlace"),
    *("GroupsOfChannels", "LinearAttention", "MaskedMean", "NoBatch", "Norms", "PartialSums"),
    *("PositionTable", "Preferences", "Scalars", "Shifted", "SixHeads", "SpaceTime", "Squeezed"),
)


def sizes(name: str) -> list[dict[str, int]]:
    """The buckets of a case, batch given."""
    declared = " ".join(CASES[name].inputs.values())
    points = []
    for i, (batch, length) in enumerate(POINTS):
        point = {d: length for d in ("seq", "patches") if d in declared}
        point |= {d: lengths[i] for d, lengths in SECOND.items() if d in declared}
        points.append(point | ({"batch": batch} if "batch" in declared else {}))
    return points


def split_errors(rank: int, names: Sequence[str]) -> dict[str, float]:
    warnings.simplefilter("ignore")  # replicated ops say so
    found = {}
    for name in names:
        case, points = CASES[name], sizes(name)
        buckets = dcpc.Buckets(inputs=case.inputs, sizes=points)
        split = Split(case.model(), buckets, {**points[1], "batch": 1}, "eager")
        assert split.split_values >= 3, name
        found |= split.errors(name, [(p, case.data(p)) for p in points])
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
    assert not wrong(run_ranks(split_errors, 2, TELLING, timeout_s=280), 1e-10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 4])
def test_all_small_models_split_equal_the_plain_ones(world):
    assert not wrong(run_ranks(split_errors, world, sorted(CASES), timeout_s=1100), 1e-10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_small_models_through_compile_equal_the_plain_ones(world, recompute):
    names = sorted(CASES)
    found = run_ranks(errors, world, names, world, recompute, "eager", timeout_s=1100)
    assert not wrong(found, 1e-10)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_small_models_by_inductor_equal_the_plain_ones():
    names = ["Alibi", "CausalMean", "Shifted", "PartialSums", "SpaceTime", "Frozen", "Scalars"]
    assert not wrong(run_ranks(errors, 2, names, 2, "none", "inductor", timeout_s=1100), 1e-8)
