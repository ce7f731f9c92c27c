"""The instance of Sky Computing's setting that the benchmark cuts; a stage that runs twice."""

import numpy as np
import pytest

from benchmarks.stages import EACH, SEED, SKY_BOUND, even_cut_s, exact_cut_s, sky_instance
from benchmarks.stages_ranks import measured
from dcpc.passes.stages.bottleneck import fractional_bound


def test_instance_is_as_hard_as_the_reference():
    layers, speeds = sky_instance(SEED)
    assert (len(layers), len(speeds), [*np.unique(speeds)]) == (320, 4 * EACH, [1, 2, 3, 4])
    assert fractional_bound(layers, speeds) == pytest.approx(SKY_BOUND)
    assert even_cut_s(layers, speeds) == pytest.approx(46.9, rel=0.01)
    assert SKY_BOUND < exact_cut_s(layers, speeds) == pytest.approx(17.03, rel=0.01)


@pytest.mark.multirank
@pytest.mark.slow
def test_a_slow_ranks_repeated_stage_has_the_plain_models_gradients():
    assert measured(1)["gradient_error"] < 1e-5
