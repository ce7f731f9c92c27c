"""Experts on sorted tokens: one call of the graph, split by tokens, exact and priced."""

import warnings

import pytest
import torch
import transformers

import dcpc
from dcpc.commands.check import SplitModel
from dcpc.ops.routed import as_tried, routed_flops
from dcpc.passes.sharding.sharding import analyse
from dcpc.trace import trace
from tests.cases.experts import VOCABULARY, Dense, Text, Titan
from tests.zoo.experts import EXPERTS
from tests.zoo.models import common

IDS = {"input_ids": "int64[batch, seq]", "labels": "int64[batch, seq]"}
BUCKETS = dcpc.Buckets(inputs=IDS, sizes=[{"seq": 12}, {"seq": 40}])
POINTS = ({"batch": 2, "seq": 13}, {"batch": 1, "seq": 12})


def text(kind=Titan, layers=1):
    torch.manual_seed(0)
    return Text(kind, layers).double()


def data(batch, seq):
    g = torch.Generator().manual_seed(seq)
    return {n: torch.randint(0, VOCABULARY, (batch, seq), generator=g) for n in IDS}


def errors(model, sps, recomputes=("none", "all")):
    """Relative errors over ranks that run in this process."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        split = SplitModel(model, BUCKETS, POINTS[0], sp=1)
        for sp in sps:
            some = split.of("eager", sp)
            for at in POINTS:
                for recompute in recomputes:
                    error = some.difference(at, data(**at), recompute, in_step=True).worst
                    found[f"sp {sp} {at} recompute {recompute}"] = error
    return {k: e for k, e in found.items() if not e < 1e-10}


def routed(model):
    return [n for n in trace(model, BUCKETS).gm.graph.nodes if routed_flops(n.target)]


def test_gradients_are_the_models_own_where_each_rank_sorts_its_tokens():
    assert not errors(text(), (2,), ("none",))


def test_equal_scores_choose_the_experts_that_torch_chooses():
    model = text()
    with torch.no_grad():
        model.experts[0].router.weight[1:] = model.experts[0].router.weight[:1]
    assert not errors(model, (2,), ("none",))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Titan, Dense])
def test_gradients_are_the_models_own_at_all_degrees(kind):
    assert not errors(text(kind, 2), (1, 2, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3", "gpt-oss"])
def test_gradients_are_those_of_the_loop_over_experts(name):
    model = EXPERTS[name].make()
    named = {n for n, p in model.named_parameters() if p.requires_grad}
    assert any("gate" in n or "router" in n for n in named), "gradients of the router are compared"
    assert any("experts" in n for n in named)
    assert not errors(model, (1, 2, 4))


def test_region_is_one_call_of_rows_and_no_tokens_are_gathered():
    program = trace(text(layers=2), BUCKETS)
    sharding = analyse(program)
    names = [n.name for n in program.gm.graph.nodes if routed_flops(n.target)]
    ((line, nodes),) = [x for lines in sharding.derived.values() for x in lines.items()]
    assert nodes == names
    assert len(names) == 2
    assert all(any(a.name == "a" for a in sharding.alternatives[n]) for n in names), line
    counts = [n for n in program.gm.graph.nodes if "histc" in str(n.target)]
    assert len(counts) == 2, "the loss reads the count of all tokens"


def test_region_of_bfloat16_is_tried_in_float64_and_at_smaller_sizes():
    (node,) = routed(text().to(torch.bfloat16))
    small = as_tried(node.target, 4, True)
    sizes = [tuple(x if x <= 16 else x // 4 for x in n.meta["val"].shape[1:]) for n in node.args]
    rows = [4 if n.op == "placeholder" else 6 for n in node.args]
    given = [
        torch.zeros(r, *s).to(n.meta["val"].dtype)
        for n, r, s in zip(node.args, rows, sizes, strict=True)
    ]
    found = small(*(x.double() if x.is_floating_point() else x for x in given))
    assert (found.shape, found.dtype) == ((6, 8), torch.float64)
    assert as_tried(torch.ops.aten.mm.default, 4, True) is torch.ops.aten.mm.default


def test_loop_over_experts_is_refused_with_the_setting_that_compiles():
    config = transformers.MixtralConfig(
        **common(num_key_value_heads=2, num_local_experts=4, num_hidden_layers=1)
    )
    model = transformers.MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    with pytest.raises(dcpc.errors.TraceError, match=r'mlp.experts loops .*_implementation\("grou'):
        trace(model, BUCKETS)
    model.set_experts_implementation("grouped_mm")
    assert len(routed(model)) == 1


def test_sort_without_products_is_left_alone():
    class Sorted(torch.nn.Module):
        def forward(self, x):
            order = x[:, 0].argsort()
            return x[order].cumsum(0)[order.argsort()].square().mean()

    found = trace(Sorted(), dcpc.Buckets(inputs={"x": "float32[n, 4]"}, sizes=[{"n": 9}]))
    assert not any(routed_flops(n.target) for n in found.gm.graph.nodes)
