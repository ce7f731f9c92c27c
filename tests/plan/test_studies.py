"""One graph for all degrees that split alike: what it predicts is that of the graph that runs."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import dcpc
from dcpc.api import plan
from dcpc.commands.check import SplitModel
from dcpc.plan.prices.priced import Priced
from dcpc.plan.prices.studies import split_constants
from dcpc.symbolic_profile import Ledger, Meter, evaluator
from models.gpt import GPT, GPTConfig

INPUTS = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
LONG = {"seq": 4096}


@cache
def priced(attention: str = "heads") -> Priced:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, dim=64, n_layers=2, n_heads=8))
    buckets = dcpc.Buckets(INPUTS, [{"seq": 32}, LONG])
    planned = plan(
        model, buckets, world=4, memory=1e12, device="h200", backend="eager", attention=attention
    )
    return planned.runnable.priced


@pytest.mark.parametrize("seq", [512, 1001, 4096])
@pytest.mark.parametrize("sp", [2, 4, 8])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_prediction_is_that_of_the_graph_that_runs(sp, seq, share):
    placement = priced().placement({**LONG, "batch": 1}, sp)
    assert split_constants(priced().traced.program, placement), "heads are split"
    check(priced(), {"seq": seq, "batch": 1}, sp, share)


@pytest.mark.parametrize(("attention", "sp"), [("gathered", 4), ("ring", 4), ("hybrid", 8)])
def test_prediction_of_other_lowerings_too(attention, sp):
    mine = priced(attention)
    for other in (2, sp):  # the graph of one degree serves another
        if attention != "hybrid" or other != 2:
            check(mine, {"seq": 1024, "batch": 1}, other, 0.5)


class ByGroups(nn.Module):
    """A norm over positions, which ranks split by its groups: torch has no symbol for them.

    The positions are a dim of two factors: pieces of a dim of one would serve, too.
    """

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.before, self.norm = nn.Linear(24, 48), nn.GroupNorm(groups, 24)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.before(x).unflatten(2, (2, 24)).permute(0, 3, 1, 2).flatten(2)
        x = torch.tanh(self.norm(x)).unflatten(2, (-1, 2)).mean(3)
        return nn.functional.mse_loss(x.transpose(1, 2), y)


@pytest.mark.parametrize(("groups", "degrees"), [(8, (4, 2, 3)), (3, (2, 3))])
def test_prediction_where_an_op_takes_a_piece_as_a_number(groups, degrees):
    rows = "float32[batch, seq, 24]"
    buckets = dcpc.Buckets({"x": rows, "y": rows}, [{"seq": 32}, LONG])
    first = SplitModel(ByGroups(groups), buckets, {**LONG, "batch": 1}, sp=2)
    mine = first.priced
    for sp in degrees:
        chosen = mine.placement({**LONG, "batch": 1}, sp).nodes["group_norm"]
        assert chosen.name == "g", "groups are split"
        check(mine, {"seq": 1001, "batch": 1}, sp, 0.5)


def check(mine: Priced, sizes: dict[str, int], sp: int, share: float) -> None:
    placement = mine.placement({**LONG, "batch": 1}, sp)
    study = mine.at(placement)
    recompute = round(share * study.steps)
    lowering = mine.traced.lowering(placement)
    ledger = Ledger(lowering.joint.names, sp, gpu=mine.traced.device.kernels_of)
    schedule = lowering.schedule(mine.made_again(placement, recompute))
    costs = ledger.costs(schedule)
    own, meter = evaluator(ledger.profile(costs)), Meter(ledger, [*lowering.joint.gm.graph.nodes])
    dims = mine.traced.program.dims(sizes)
    local = {i.name: i.value(dims, sp, 0) for i in lowering.lowered.integers}
    found = study.predict(recompute, sizes)
    # formulas count bytes, a plan for a GPU blocks
    in_bytes = replace(mine.traced.device, gpu=False)
    assert found.peak_bytes == meter.read(costs, local, mine.traced.device).peak_bytes
    assert own.peak_bytes(local) == meter.read(costs, local, in_bytes).peak_bytes
    assert found.saved_bytes == own.saved_bytes(local)
    assert found.flops == own.flops(local)
    assert found.wire_bytes == own.wire_bytes(local)
    assert found.seconds_s == pytest.approx(own.seconds(local, mine.traced.device), rel=1e-9)


def test_what_a_report_supposes_no_call_uses(monkeypatch):
    """Only one rank makes reports: what it asks for must not change how it runs."""
    monkeypatch.setattr("dcpc.plan.prices.placements.PLACEMENT_LOSS", 1e9)  # anything is near
    mine = priced.__wrapped__("auto")
    sizes = {"seq": 2048, "batch": 1}
    supposed = mine.placement(sizes, 4, near=True)
    run = mine.placement(sizes, 4)
    alone = priced.__wrapped__("auto").placement(sizes, 4)
    assert run.nodes == alone.nodes
    assert supposed.cost_s > run.cost_s


def test_graph_is_another_when_a_piece_of_a_constant_is_one_element():
    """It is a number then; of more ranks than elements some have none, and it is none."""
    at = {sp: priced().placement({**LONG, "batch": 1}, sp) for sp in (4, 8)}
    at[16] = replace(at[8], sp=16)
    menus = {sp: priced().at(placement).menu for sp, placement in at.items()}
    assert menus[8] is not menus[4]
    assert menus[16] is not menus[8]


def test_degrees_have_one_graph_when_they_split_alike():
    first, second = (priced().placement({**LONG, "batch": 1}, sp) for sp in (2, 4))
    assert first.nodes == second.nodes, "the case is one of equal splits"
    assert priced().at(first).menu is priced().at(second).menu


def test_profile_has_no_symbol_for_a_piece_that_is_a_number():
    placement = priced().placement({**LONG, "batch": 1}, 4)
    names = {s.name for s in priced().at(placement).profile(0).symbols}
    assert "seq_length" in names
    assert not any(name.startswith("factor") for name in names)
