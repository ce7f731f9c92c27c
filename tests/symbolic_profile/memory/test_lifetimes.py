"""Storages' lifetimes from arrays are those that a walk over the calls finds, event by event."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcpc
from dcpc.api import plan
from dcpc.ir import Fold
from dcpc.plan.folding import FEWEST, fold
from dcpc.symbolic_profile.memory.events import Folding, Recorder
from dcpc.symbolic_profile.memory.lifetimes import Lifetimes, Numbered
from dcpc.symbolic_profile.memory.run import RankRun
from dcpc.symbolic_profile.ops.facts import Facts
from dcpc.symbolic_profile.ops.fused.fusion import Kernel, fuse
from dcpc.symbolic_profile.ops.transients import transient_bytes
from models.gpt import GPT, GPTConfig
from models.stdit import RectifiedFlow, STDiT, STDiTConfig
from tests.cases.clips import CLIPS
from tests.cases.joint_graphs import case
from tests.cases.stepwise import Stepwise


class Odd(nn.Module):
    """Calls with several results, some unread; views of views; a loss that backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.inner(x).chunk(3, dim=-1)
        top, where = (a * b).topk(3, dim=-1)
        left, right = F.dropout(c, 0.1).split([3, 5], dim=-1)
        y = top * left.transpose(0, 1).contiguous().transpose(0, 1) + where
        return (y.square().mean() + right.exp().sum()).sqrt()


def check(run: RankRun, facts: Facts, fold: Fold | None = None, fuses: bool = False) -> None:
    def transient(node):
        return transient_bytes(node, facts, 1)

    again = set(run.forward)
    outputs = [g for g in run.gradients if g is not None]
    if fuses:
        forward = fuse(run.forward, [*run.outputs, *run.saved], facts)
        run = replace(run, forward=forward, backward=fuse(run.backward, outputs, facts))
        assert sum(isinstance(step, Kernel) for step in (*run.forward, *run.backward)) > 4
    numbered, found = Numbered(facts, transient), []
    for arrays in (True, False):
        recorder = Recorder()
        given = (run, numbered, recorder)
        storages = Lifetimes(*given) if arrays else Stepwise(*given, transient)
        storages.forward(Folding.forward(fold, run.forward, {}))
        saved = storages.of(run.saved)
        storages.start_backward()
        storages.backward(Folding.backward(fold, run.backward, again, fuses, {}))
        number: dict[int, int] = {}
        named = [number.setdefault(s, len(number)) for s in recorder.storages]
        r = recorder
        kept = [[(n.name, size) for n, _, size in own] for own in (saved, storages.of(outputs))]
        found.append((r.names, r.steps, r.weights, named, r.done, r.transients, kept))
    assert found[0] == found[1]
    assert len(found[0][0]) > (8 if fuses else 20)


def check_all(model: nn.Module, inputs: dict[str, str], sizes: list[dict[str, int]], sp: int):
    buckets = dcpc.Buckets(inputs, sizes)
    whole = plan(model, buckets, device="h200", memory=1e15, sp=sp, world=sp).runnable.priced
    folded, lift = fold(whole.traced.program, FEWEST), whole.lift
    assert lift.folds == (folded is not None)
    placement = whole.placement({"batch": 1, **sizes[-1]}, sp)
    lowering = lift.small.lowering(lift.down(placement))
    facts = Facts(lowering.joint.names)
    copies = None if folded is None else folded.copies(lowering.joint.owner)
    steps = whole.at(placement).steps
    for k in sorted({0, steps // 2, steps}):
        schedule = lowering.schedule(whole.made_again(placement, k))
        for fuses in (False, True):
            check(RankRun.of(schedule), facts, copies, fuses)
    parts = lowering.partition(whole.made_again(placement, steps // 2))
    for fuses in (False, True):
        check(RankRun.of(parts), Facts(parts.names), fuses=fuses)


def test_deep_gpt_with_dropout():
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = GPT(GPTConfig(vocab_size=64, dim=32, n_layers=6, n_heads=4))

        def forward(self, input_ids, labels):
            return self.gpt(input_ids, labels)

    tokens = dict.fromkeys(("input_ids", "labels"), "int64[batch, seq]")
    check_all(Dropped(), tokens, [{"seq": 64}, {"seq": 1024}], 2)


@pytest.mark.slow
def test_stdit():
    config = STDiTConfig(depth=7, dim=64, heads=4, text_dim=32, text_len=12)
    sizes = [{"frames": 2, "tokens": 16}, {"frames": 8, "tokens": 64}]
    check_all(RectifiedFlow(STDiT(config)), CLIPS, sizes, 2)


def test_several_results_and_a_saved_loss():
    check_all(Odd(), {"x": "float32[batch, seq, 8]"}, [{"seq": 16}, {"seq": 64}], 1)


@pytest.mark.parametrize("model", ["gpt", "llama", "mixed"])
def test_partitions_of_plain_graphs(model):
    partition = case(model).partition
    check(RankRun.of(partition), Facts(partition.names))
