"""A split STDiT sends at most half of what Ulysses sends (`tests.cases.video_placement`)."""

import warnings

import pytest
import torch.distributed as dist

import dcpc
from dcpc.codegen.collectives.collectives import wire_log
from dcpc.passes.placement.placement import place
from tests.cases import video_models as video
from tests.cases.exactness import SplitModel
from tests.cases.launch import run_ranks
from tests.cases.placement_oracle import on_machine
from tests.cases.video_placement import changes, switches, ulysses

pytestmark = pytest.mark.multirank

# Links so slow that what is sent decides, and work that must be split all the same.
SLOW_LINK = on_machine(1e7, 1e9, 1e8, 1e-9, 1e-9)


def bytes_sent(rank: int) -> dict[str, float]:
    warnings.simplefilter("ignore")
    sizes = {"batch": 1, "frames": 8, "height": 16, "width": 16}
    bucket = {n: s for n, s in sizes.items() if n != "batch"}
    buckets = dcpc.Buckets(inputs=video.INPUTS, sizes=[bucket])
    split = SplitModel(video.model(), buckets, sizes, "eager")
    program, sharding, sp = split.program, split.sharding, dist.get_world_size()
    found: dict[str, float] = {}
    for name, rules in (("dcpc", sharding), ("ulysses", ulysses(program, sharding))):
        split.placement = place(program, rules, sizes, sp, SLOW_LINK)
        wire_log.clear()
        errors = split.errors(name, [(sizes, video.data(sizes))], ("none",))
        found[f"{name} counted"] = wire_log.total_bytes()
        found[f"{name} error"] = max(errors.values())
        found[f"{name} predicted"] = split.study.predict(0, sizes).wire_bytes
        found[f"{name} switches"] = len(switches(program, split.placement, sizes))
        found[f"{name} cross"] = sum("cross" in n for n, _ in changes(program, split.placement))
    return found


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", [2, 4])
def test_two_switches_a_block_pair_send_less_than_half_of_ulysses(world):
    ranks = run_ranks(bytes_sent, world, timeout_s=1700)
    for found in ranks:
        assert found["dcpc error"] < 1e-10
        assert found["ulysses error"] < 1e-10
        assert found["dcpc switches"] <= 2
        assert found["dcpc cross"] == 0
        for name in ("dcpc", "ulysses"):  # pieces are even, so every rank sends as much
            assert found[f"{name} counted"] == found[f"{name} predicted"]
        assert 0 < found["dcpc counted"] <= found["ulysses counted"] / 2
