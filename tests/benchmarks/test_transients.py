"""Probes of transients: what a polynomial of small sizes tells, and what it cannot."""

import pytest
import torch

from benchmarks.transients_cases import CASES, calls
from benchmarks.transients_probe import COLLECTIVES, ProbeError, Probes, by_probes
from dcpc.symbolic_profile import profile as profiling
from dcpc.symbolic_profile.ops.transients import TRANSIENTS, transient_bytes

NAMED = dict(CASES)
POINT = {"n": 2, "m": 902}


def told(size):
    return int(size.subs({s: POINT[s.name] for s in size.free_symbols}).doit())


@pytest.mark.parametrize("case", ["layer norm", "softmax", "kthvalue", "scatter mean"])
def test_probe_tells_what_the_table_does(case):
    for call in calls((case, NAMED[case]), torch.float32):
        table = transient_bytes(call.node, call.facts, torch.get_num_threads())
        assert abs(told(Probes().fit(call)) - told(table)) <= 64


def test_blocks_of_attention_are_no_polynomial_of_short_sequences():
    call, _ = calls(("flash", NAMED["flash"]), torch.float32)
    table = transient_bytes(call.node, call.facts, torch.get_num_threads())
    assert told(Probes().fit(call)) > 3 * told(table)


def test_a_polynomial_that_one_more_size_refutes_is_refused():
    call, _ = calls(("conv 1d", NAMED["conv 1d"]), torch.float32)  # two kernels, by the size
    probes = Probes()
    with pytest.raises(ProbeError, match="no polynomial"):
        probes.fit(call)
    table = transient_bytes(call.node, call.facts, 1)
    assert probes.transient(call.node, call.facts, 1) == table
    assert probes.refused == {"no polynomial": 1}


def test_profiles_ask_probes_in_the_block_alone():
    with by_probes() as probes:
        assert profiling.transient_bytes == probes.transient
    assert profiling.transient_bytes is transient_bytes


def test_every_collective_has_a_table():
    assert set(TRANSIENTS) >= COLLECTIVES
