"""A trace whose fake tensors are told is the one that torch makes, but for the names of nodes."""

from contextlib import nullcontext

import pytest
import torch
from torch import fx, nn
from torch._subclasses import FakeTensorMode

from dcpc.buckets import Buckets
from dcpc.fakes import telling
from dcpc.trace import capture, trace
from models.stdit import RectifiedFlow, STDiT, STDiTConfig
from tests.multirank import language_models
from tests.multirank.small_models import CASES
from tests.multirank.test_small_models import TELLING, sizes

CLIPS = {
    "latents": "float32[batch, 4, frames, tokens*2, 2]",
    "noise": "float32[batch, 4, frames, tokens*2, 2]",
    "timestep": "float32[batch]",
    "text": "float32[batch, 6, 20]",
    "text_mask": "bool[batch, 6]",
    "fps": "float32[batch]",
    "pixel_height": "float32[batch]",
    "pixel_width": "float32[batch]",
}


def graph_of(program):
    """All that a graph says, but for names of calls, and for which tensor it reads a size of."""
    nodes = [n for n in program.gm.graph.nodes if n.name not in program.scalars]
    nodes.sort(key=lambda n: (n.op != "placeholder", n.name if n.op == "placeholder" else ""))
    said = {node: f"#{i}" for i, node in enumerate(nodes)}
    said |= {n: str(program.scalars[n.name]) for n in program.gm.graph.nodes if n not in said}
    return [
        (
            node.op,
            "" if node.op == "output" else str(node.target),
            *map(str, fx.map_arg((_args(node), dict(node.kwargs)), said.get)),
            str(program.info.get(node.name)),
        )
        for node in nodes
    ]


def _args(node):
    """A node's arguments; of a reshape not the shape, in which torch may write -1."""
    return node.args[:1] if node.target is torch.ops.aten.reshape.default else node.args


def assert_alike(model, buckets, monkeypatch, autocast=None):
    calls = FakeTensorMode.dispatch
    told = graph_of(trace(model, buckets, autocast))
    assert FakeTensorMode.dispatch is calls
    monkeypatch.setattr(capture, "telling", nullcontext)
    monkeypatch.setattr(capture, "functional", lambda exported: exported.run_decompositions({}))
    assert told == graph_of(trace(model, buckets, autocast))


@pytest.mark.parametrize(
    "name", [n if n in TELLING else pytest.param(n, marks=pytest.mark.slow) for n in CASES]
)
def test_small_models(name, monkeypatch):
    case = CASES[name]
    assert_alike(case.model(), Buckets(case.inputs, sizes(name)), monkeypatch)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("name", language_models.NAMES)
def test_language_models(name, autocast, monkeypatch):
    buckets = Buckets(language_models.inputs(name), [{"seq": 8}, {"seq": 17}])
    assert_alike(language_models.make(name), buckets, monkeypatch, autocast)


def test_video(monkeypatch):
    model = RectifiedFlow(STDiT(STDiTConfig(depth=1, dim=48, heads=4, text_dim=20, text_len=6)))
    buckets = Buckets(CLIPS, [{"frames": f, "tokens": t} for f in (2, 16) for t in (16, 256)])
    assert_alike(model, buckets, monkeypatch)


class Constants(nn.Module):
    """Asks numbers of constants, which a told result would not have."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        steps = int((torch.tensor([2.0]) * 1.5).round().item())
        part = float(torch.tensor([1])[0:1].neg())
        return (self.linear(x) * steps + part).mean()


def test_numbers_of_constants_are_kept(monkeypatch):
    assert_alike(Constants(), Buckets({"x": "float32[batch, seq, 4]"}, [{"seq": 8}]), monkeypatch)


def test_modes_are_as_they_were_where_a_block_fails():
    calls = FakeTensorMode.dispatch
    with telling():
        assert FakeTensorMode.dispatch is not calls
    with pytest.raises(ZeroDivisionError), telling(), telling():
        raise ZeroDivisionError
    assert FakeTensorMode.dispatch is calls
