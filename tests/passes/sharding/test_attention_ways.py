"""Ways to split attention: which there are, what they cost, and why some cannot be."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.api import plan
from dcpc.commands.check import SPLITTING, SplitModel
from dcpc.errors import PlanError
from dcpc.ops.ring_route import RowSplit as Rows
from dcpc.ops.ring_route import route, sent_bytes
from dcpc.passes.placement.lowering_costs import LoweringCosts
from dcpc.passes.placement.objective import Objective
from dcpc.passes.sharding.attention_ways import (
    LOWERINGS,
    attentions,
    lowering_of,
    restricted,
    why_not,
)
from dcpc.passes.sharding.sharding import analyse
from dcpc.symbolic_profile import find
from dcpc.trace import trace
from models.gpt import GPT, GPTConfig
from tests.cases import folding_models as folding
from tests.cases import language_models

LENGTHS = [{"seq": 64}, {"seq": 1 << 17}]
AT = {"batch": 1, "seq": 1 << 14}


def split_of(model: nn.Module, inputs: dict[str, str], sizes=LENGTHS, at=AT, sp=4) -> SplitModel:
    return SplitModel(model, dcpc.Buckets(inputs=inputs, sizes=sizes), at, sp=sp)


@pytest.fixture(scope="module")
def gpt() -> SplitModel:
    model = GPT(GPTConfig(vocab_size=64, dim=128, n_layers=2, n_heads=8, n_kv_heads=2))
    return split_of(model, language_models.inputs("gpt"))


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_one_lowering_is_all_that_is_left(gpt, lowering):
    split = gpt.of("eager", 4, lowering)
    nodes = attentions(split.program)
    assert {lowering_of(split.placement.nodes[n.name]) for n in nodes} == {lowering}
    assert gpt.sharding.alternatives != split.sharding.alternatives
    causal_queries = lowering != "heads"
    assert bool(split.placement.zigzag) == causal_queries


def test_unknown_lowering_is_named(gpt):
    with pytest.raises(PlanError, match="got attention='spiral'; expected one of auto, heads"):
        restricted(gpt.program, gpt.sharding, "spiral")


def test_windows_and_full_attention_are_in_order():
    sizes = [{"seq": 64}, {"seq": 512}]  # all its positions
    at = {"batch": 1, "seq": 256}
    bert = split_of(language_models.model("bert", 2), language_models.inputs("bert"), sizes, at)
    assert not bert.of("eager", 4, "ring").placement.zigzag


class LearnedBias(nn.Module):
    """One head, and a bias of its scores that learns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 48)
        self.bias = nn.Parameter(torch.zeros(1, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x).unsqueeze(1).chunk(3, -1)
        length = x.shape[1]
        bias = self.bias.expand(1, 1, length, length)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias).square().mean()


def test_what_an_attention_cannot_have_is_explained():
    split = split_of(LearnedBias(), {"x": "float32[batch, seq, 16]"})
    (node,) = attentions(split.program)
    reasons = why_not(split.program, split.sharding, node, 4)
    assert "has a gradient" in reasons["ring"]
    assert "has a gradient" in reasons["hybrid"]
    assert reasons["heads"] == "it has 1 head"
    assert "gathered" not in reasons


def test_short_lengths_gather_and_long_ones_go_round(gpt):
    """On a GPU a ring hides what it sends behind its work, once there is enough of that."""
    costs, seconds = LoweringCosts(gpt.program, gpt.sharding), Objective(find("h200"))
    assert costs.groups == (tuple(n.name for n in attentions(gpt.program)),)
    name = costs.groups[0][0]
    found = costs.crossovers(name, AT, "seq", (64, 1 << 17), 4, seconds)
    assert found[0][0] == 64
    assert found[0][1].lowering != "ring"
    length, way = found[-1]
    assert way.lowering == "ring"
    before, after = (costs.at({**AT, "seq": n}, 4, seconds)[name] for n in (length - 1, length))
    assert after[0].lowering == "ring"
    assert before[0].lowering != "ring"
    assert [w.seconds for w in after] == sorted(w.seconds for w in after)
    assert {w.lowering for w in after} == set(LOWERINGS)


def test_a_ring_that_cannot_hide_pays_for_what_it_sends(gpt):
    costs, device = LoweringCosts(gpt.program, gpt.sharding), find("h200")
    name = costs.groups[0][0]

    def ring(overlaps: bool) -> float:
        ways = costs.at(AT, 4, Objective(replace(device, overlaps=overlaps)))[name]
        return next(w.seconds for w in ways if w.lowering == "ring")

    keys_bytes = 2 * AT["seq"] // 4 * 2 * 16 * 4  # keys and values of 2 heads, float32
    sent = (3 + 3 + 4) * keys_bytes  # forward, again in backward, gradients and home
    assert ring(False) - ring(True) == pytest.approx(sent / device.inside.bytes_per_s)


def test_short_buckets_have_no_collective_and_the_report_explains_the_long_ones(gpt):
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, dim=96, n_layers=2, n_heads=6))
    buckets = dcpc.Buckets(inputs=language_models.inputs("gpt"), sizes=LENGTHS)
    found = plan(model, buckets, world=4, device="h200", backend="eager", memory=600e6)
    short, long = found.plans.values()
    assert short.sp == 1
    assert "dcpc." not in found.source(short.bucket).replace("dcpc.attention", "")
    assert long.sp == 4
    text = found.report(full=True)
    assert "attention of {seq: 131072}, sp 4: 2 by " in text
    assert "ways to split" in text
    goes_round = "sp 4: 2 by ring" in text or "sp 4: 2 by hybrid" in text
    assert goes_round == ("ring_attention_forward" in found.source(long.bucket))


def test_a_chosen_way_is_the_fastest_or_the_report_says_why_not():
    """The README's first report once chose heads, two lines above "cheapest first: gathered"."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=64, dim=96, n_layers=2, n_heads=6))
    sizes = [{"seq": n} for n in (4096, 16384, 65536)]
    buckets = dcpc.Buckets(inputs=language_models.inputs("gpt"), sizes=sizes)
    planned = plan(model, buckets, world=4, sp=4, backend="eager", device="h200")
    lines = planned.report(full=True).splitlines()
    chosen = [line.split(": 2 by ")[1].split(" (")[0] for line in lines if ": 2 by " in line]
    shown = [i for i, line in enumerate(lines) if line.startswith("  {seq: ") and " ms, " in line]
    assert len(chosen) == len(shown) == len(sizes)
    for way, i in zip(chosen, shown, strict=True):
        fastest = lines[i].split("sp 4: ")[1].split(" ms")[0].rsplit(" ", 1)[0]
        assert way == fastest or lines[i + 1].startswith(f"    {way} is chosen: "), lines[i]
    assert any(line.startswith("a placement weighs the seconds of this report") for line in lines)


def test_the_wire_of_a_ring_is_that_of_its_route():

    model = GPT(GPTConfig(vocab_size=64, dim=128, n_layers=1, n_heads=8, n_kv_heads=2))
    split = split_of(model, language_models.inputs("gpt")).of("eager", 4, "ring")
    sizes = {"batch": 1, "seq": 64}
    local = split.study.local_sizes(sizes)
    work = split.study.profile(0).work
    rings = [w for w in work if "ring_attention" in w.op]
    symbols = split.study.profile(0).symbols
    values = {s: local[s.name] for s in symbols if s.name in local}
    found = {w.forward: int(w.wire_bytes.subs(values)) for w in rings}
    rows = Rows(64, 64, 0, True)
    row_bytes = 2 * 2 * 16 * 4
    forward, backward = sent_bytes(route(rows, rows, 4), 0, row_bytes, row_bytes)
    assert found == {True: forward, False: backward}
    assert SPLITTING.overlaps


def test_samples_that_share_a_mask_are_split_as_a_batch():
    """Rows of an alignment share a bias: split are samples of the batch, or rows of each."""
    points = [{"sequences": 5, "residues": 7}, {"sequences": 6, "residues": 9}]
    program = trace(folding.model(), dcpc.Buckets(inputs=folding.INPUTS, sizes=points))
    sharding = analyse(program)
    node, *_ = attentions(program)
    ways = {a.name: a for a in sharding.alternatives[node.name]}
    assert {"b", "c", "h", "q"} <= ways.keys()
    assert {lowering_of(ways[n]) for n in "bc"} == {"batch"}
    bias = 3  # an operand; whole where rows of one sample are on other ranks
    assert ways["b"].operands[bias].sharded
    assert not ways["c"].operands[bias].sharded
    assert "has a gradient" in why_not(program, sharding, node, 2)["ring"]
