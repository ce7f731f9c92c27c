"""Attention of one rank as calls of torch's kernel: the op's own numbers and memory."""

import pytest
import sympy
import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from dcpc.codegen.variant.boxed import boxed_python
from dcpc.codegen.variant.flash_calls import spell_attention
from dcpc.ops.attention import Sight
from examples.allocator import measured_peak_bytes

OPS = torch.ops.dcpc
CAUSAL = Sight(0.4, after=0)
BATCH = 3


def operands(heads, groups, seq, kind, dtype=torch.float64):
    """Queries, keys, values, mask, kept keys, segments; a gradient of the output."""
    made = torch.Generator().manual_seed(seq)

    def tensor(h):
        return torch.randn(BATCH, seq, h, 8, dtype=dtype, generator=made).transpose(1, 2)

    kept = torch.rand(BATCH, seq, generator=made) > 0.3
    kept[:, 0] = True
    mask = {"truth": kept[:, None, None, :].expand(BATCH, 1, seq, seq).contiguous()}
    mask["numbers"] = torch.randn(1, heads, seq, seq, dtype=dtype, generator=made)
    mask["wider"] = torch.randn(BATCH, 1, 1, seq, generator=made)
    mask["apart"] = mask["numbers"].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    mask["wider, apart"] = mask["apart"].float()
    segment = torch.zeros(BATCH, seq, dtype=torch.int64) if kind == "packed" else None
    hiding = mask.get(kind), kept if kind == "kept" else None, segment
    return [tensor(heads), tensor(groups), tensor(groups), *hiding], tensor(heads)


def faked(mode, x, seq):
    """A fake tensor whose batch and lengths have symbols, the same for the same size."""
    kinds = [DimDynamic.DUCK if n in (BATCH, seq) else DimDynamic.STATIC for n in x.shape]
    return mode.from_tensor(x, symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds))


def spelled(call, given, seq, present=None):
    """The graph of a call, and that graph spelled out."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True)
    gm = make_fx(call)(*(faked(mode, x, seq) for x in given))
    for node in gm.graph.find_nodes(op="placeholder"):  # a joint graph's values may learn
        if node.meta["val"].is_floating_point():
            node.meta["val"].requires_grad_()
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    spell_attention(graph, mode, {*env.var_to_range} if present is None else present)
    graph.lint()
    return gm, fx.GraphModule(gm, graph)


def calls_of(gm, name):
    return sum(name in str(n.target) for n in gm.graph.nodes)


def both(sight, kind, heads=4, groups=4, seq=19, dtype=torch.float64, present=None):
    """Forward and backward, each as the op and spelled out, with what they are called with."""
    given, grad = operands(heads, groups, seq, kind, dtype)
    tensors = [x for x in given if x is not None]
    at = [i for i, x in enumerate(given) if x is not None]

    def full(found):
        return [found[at.index(i)] if i in at else None for i in range(6)]

    out, lse = OPS.attention_forward(*given, *sight)
    ways = (
        (lambda *x: OPS.attention_forward(*full(x), *sight), tensors),
        (
            lambda g, o, s, *x: OPS.attention_backward(g, *full(x), o, s, *sight),
            [grad, out, lse, *tensors],
        ),
    )
    return [(*spelled(call, x, seq, present), x) for call, x in ways]


def peak_bytes(gm, given):
    run = boxed_python(gm)
    return measured_peak_bytes(lambda: run([*given]))


CASES = [
    (Sight(0.4), "none", 4, 4),
    (CAUSAL, "none", 4, 2),
    (CAUSAL, "kept", 6, 2),
    (Sight(0.4), "truth", 4, 2),
    (Sight(0.4), "numbers", 4, 2),
    (Sight(0.4), "apart", 4, 2),
]


@pytest.mark.parametrize(("sight", "kind", "heads", "groups"), CASES)
def test_spelled_out_it_has_the_ops_bits_and_takes_no_more_memory(sight, kind, heads, groups):
    for op, calls, given in both(sight, kind, heads, groups):
        assert calls_of(op, "dcpc.attention") == 1
        assert calls_of(calls, "dcpc") == 0
        assert calls_of(calls, "flash_attention_for_cpu") == heads // groups
        for seq in (19, 33):  # of another length too
            other, grad = operands(heads, groups, seq, kind)
            tensors = [x for x in other if x is not None]
            if len(given) > len(tensors):
                tensors = [grad, *OPS.attention_forward(*other, *sight), *tensors]
            pairs = zip(calls(*tensors), op(*tensors), strict=True)
            assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs)
        assert peak_bytes(calls, given) <= peak_bytes(op, given)


@pytest.mark.parametrize("kind", ["wider", "wider, apart"])
def test_a_wider_mask_of_half_precision_stays_wide(kind):
    for op, calls, given in both(Sight(0.4), kind, dtype=torch.bfloat16):
        assert calls_of(calls, "dcpc") == 0
        assert all(torch.equal(a, b) for a, b in zip(calls(*given), op(*given), strict=True))


@pytest.mark.parametrize(
    ("sight", "kind"),
    [
        (Sight(0.4, before=3, after=0), "none"),
        (Sight(0.4, after=0, start=5), "none"),
        (CAUSAL, "packed"),
        (Sight(-0.4, after=0), "none"),
        (Sight(0.4, empty="mean"), "kept"),
    ],
)
def test_what_one_call_does_not_compute_stays_the_op(sight, kind):
    assert all(calls_of(calls, "dcpc.attention") == 1 for _, calls, _ in both(sight, kind))


@pytest.mark.parametrize("rows", [1, 2, BATCH * 2])
def test_a_mask_whose_rows_samples_share_stays_the_ops(rows):
    made = torch.Generator().manual_seed(rows)

    def tensor(*shape):
        return torch.randn(shape, dtype=torch.float64, generator=made)

    q, k, v = (tensor(BATCH * 2, 19, 4, 8).transpose(1, 2) for _ in range(3))
    given = [q, k, v, tensor(rows, 4, 19, 19), None, None]
    out, lse = OPS.attention_forward(*given, *Sight(0.4))
    ways = (
        (lambda *x: OPS.attention_forward(*x, None, None, *Sight(0.4)), given[:4]),
        (
            lambda g, o, s, *x: OPS.attention_backward(g, *x, None, None, o, s, *Sight(0.4)),
            [out, out, lse, *given[:4]],
        ),
    )
    for call, tensors in ways:
        op, calls = spelled(call, tensors, 19)
        assert calls_of(calls, "dcpc.attention") == (rows == 2)
        assert all(map(torch.equal, calls(*tensors), op(*tensors)))


def test_a_size_that_may_be_0_keeps_the_op():
    for present in (set(), {sympy.Symbol("other")}):
        found = both(CAUSAL, "none", present=present)
        assert all(calls_of(calls, "dcpc.attention") == 1 for _, calls, _ in found)
