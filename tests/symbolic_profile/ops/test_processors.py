"""What kernels take on other processors than this one, as far as settings have it play them."""

import json
import os
import subprocess
import sys

from tests.cases.kernel_bytes import SCALARS_BYTES, Bytes, convolutions, risky

# Both: torch's own loops are AVX2's, and oneDNN has no instructions for half precision.
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


def test_kernels_take_at_most_what_is_predicted_where_the_processor_has_avx2_alone():
    here = risky()
    command = [sys.executable, "-m", "tests.cases.kernel_bytes"]
    ran = subprocess.run(command, env=os.environ | AVX2, capture_output=True, check=True, text=True)
    there = [Bytes(*each) for each in json.loads(ran.stdout)]
    for each in here + there:
        assert each.measured <= each.predicted + SCALARS_BYTES, each
    # What a plan for a GPU says depends on no processor; what one for this CPU says does.
    assert [b.on_gpu for b in here] == [b.on_gpu for b in there]
    halves = [b for b in there if "float32" not in b.name]
    assert all(abs(b.predicted - b.measured) <= SCALARS_BYTES for b in halves)


def test_any_convolution_is_within_its_bound():
    for calls in convolutions(seed=5, count=30):
        for each in calls:
            assert each.measured <= each.predicted + SCALARS_BYTES, each
