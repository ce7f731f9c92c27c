"""Collectives of real groups are timed, and all ranks get the same calibration."""

from dataclasses import asdict

import pytest
import torch

import dcpc
from dcpc.commands.calibrate import calibrate
from dcpc.symbolic_profile import find
from dcpc.symbolic_profile.seconds.hardware import calibrated
from models.gpt import GPT, GPTConfig
from tests.cases.launch import run_ranks

LENGTHS = dcpc.Buckets(dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]"), [{"seq": 16}])


def on_rank(rank):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=16, dim=32, n_layers=1, n_heads=2))
    found = calibrate(model, LENGTHS, backend="eager", budget_s=2.0)
    compiled = dcpc.compile(model, LENGTHS, backend="eager", sp=2, calibration=found)
    return asdict(found), found.fits, compiled.predict({"seq": 16}, batch=1)


@pytest.mark.multirank
def test_ranks_agree_and_collectives_are_in_the_prediction():
    (one, fits, prediction), (two, _, _) = run_ranks(on_rank, 2, timeout_s=240.0)
    one.pop("seconds_s")
    two.pop("seconds_s")
    assert one == two
    assert one["key"]["world"] == 2
    ops = {c["op"].partition("::")[2] for c in one["fits"]["collectives"]}
    assert ops == {"all_to_all", "all_gather", "reduce_scatter", "all_reduce"}
    assert all(c["ranks"] == 2 and c["s_per_byte"] > 0 for c in one["fits"]["collectives"])
    sent = fits.collective("dcpc::all_to_all", 2)
    assert calibrated(find("cpu"), fits).link(2).bytes_per_s == pytest.approx(1 / sent.s_per_byte)
    assert prediction.seconds_s > min(c.alpha_s for c in fits.collectives)
