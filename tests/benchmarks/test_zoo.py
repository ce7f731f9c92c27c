"""The zoo's named models: traced once, split over 2 and 4 ranks, equal to the plain ones."""

import pytest

from benchmarks.zoo import verdicts
from benchmarks.zoo_models import NAMED

pytestmark = pytest.mark.multirank

# What no other unmarked test has: an interpolated position table, two streams of tokens.
TELLING = ("transformers ViT", "diffusers SD3")


def problems(names, sp, ways=None):
    found = verdicts("named", list(names), sp, 2, 1100.0, ways=ways)
    for name in names:
        free = set(found[name].symbolic)
        assert free == {"batch", *NAMED[name].sizes[0]}, name
    return {n: list(v.problems()) for n, v in found.items() if not v.accepted}


def test_telling_models_of_the_zoo_are_accepted_on_two_ranks():
    assert not problems(TELLING, 2, {})


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sp", [2, 4])
@pytest.mark.parametrize("name", NAMED)
def test_named_model_is_accepted(name, sp):
    assert not problems([name], sp)
