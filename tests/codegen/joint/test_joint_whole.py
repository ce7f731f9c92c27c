"""A joint graph of pieces is the one that `make_fx` traces whole, but for names and integers."""

import pytest
from torch import fx

from dcpc.commands.check import SplitModel
from tests.cases.joint_whole import said, whole
from tests.zoo.models import NAMED

QUICK = (("transformers GPT-2", 2),)


@pytest.mark.parametrize(
    ("name", "sp"),
    [
        *QUICK,
        *(pytest.param(n, 2, marks=pytest.mark.slow) for n in NAMED if (n, 2) not in QUICK),
    ],
)
def test_graph_of_pieces_is_that_of_the_whole(name, sp):
    model = NAMED[name]
    split = SplitModel(model.make(), model.buckets, model.sizes[0], sp=sp)
    lowering = split.traced.lowering(split.placement)
    tracer = split.traced.tracer("eager")
    assert tracer.library.pieces, "the graph is of pieces"
    assert said(lowering.joint) == said(whole(tracer, lowering.lowered))


def test_another_graph_says_otherwise():
    model = NAMED["transformers GPT-2"]
    split = SplitModel(model.make(), model.buckets, model.sizes[0], sp=2)
    joint = split.traced.lowering(split.placement).joint
    before = said(joint)
    calls = [n for n in joint.gm.graph.nodes if str(n.target) == "aten.mul.Tensor"]
    first = next(n for n in calls if all(isinstance(a, fx.Node) for a in n.args))
    first.args = (first.args[0], first.args[0])
    assert said(joint) != before
