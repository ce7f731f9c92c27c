"""The zoo's named models: traced once, split over 4 ranks, equal to the plain ones.

`make zoo`, which CI runs, has them on 2 ranks.
"""

import pytest

from tests.zoo.models import NAMED
from tests.zoo.verdicts import verdicts

pytestmark = pytest.mark.multirank


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", NAMED)
def test_named_model_is_accepted(name):
    found = verdicts("named", [name], 4, 2, 1100.0)[name]
    assert set(found.symbolic) == {"batch", *NAMED[name].sizes[0]}
    assert found.accepted, [*found.problems()]
