"""Regions that Dynamo keeps as graphs of their own, such as `torch.utils.checkpoint`'s."""

import copy

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from dcpc.dynamo import backend
from dcpc.dynamo.regions import without_regions

EXACT = {"backend": "eager", "fallback": "error"}


class Block(nn.Module):
    """A norm whose epsilon, and a dropout whose probability, are numbers of the region."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.drop = nn.LayerNorm(8, eps=1e-3), nn.Linear(8, 8), nn.Dropout(0.1)

    def inner(self, x: Tensor, scale: float) -> tuple[Tensor, int]:
        return torch.tanh(self.mix(x)) * scale, x.shape[1]

    def forward(self, x: Tensor, kept: Tensor, reentrant: bool) -> Tensor:
        mixed, length = checkpoint(self.inner, self.norm(x), 0.3, use_reentrant=reentrant)
        return kept + self.drop(mixed) / length


class Checkpointed(nn.Module):
    """A region within a region."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = Block(), reentrant

    def forward(self, x: Tensor) -> Tensor:
        args = self.block, x, x.sin(), self.reentrant
        return checkpoint(*args, use_reentrant=self.reentrant).square().mean()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(("reentrant", "dynamic"), [(False, True), (True, None)])
def test_checkpoints_are_compiled_with_the_plain_numbers(reentrant, dynamic):
    own = Checkpointed(reentrant).double()
    own.eval()
    plain = copy.deepcopy(own)
    compiled = torch.compile(own, backend=backend, dynamic=dynamic, options=EXACT)
    for length in (5, 9):
        x = torch.randn(2, length, 8, dtype=torch.float64, requires_grad=True)
        for model in (compiled, plain):
            model.zero_grad()
            model(x).backward()
        for got, want in zip(own.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, rtol=0, atol=1e-14)
    assert counters["stats"]["unique_graphs"] == (1 if dynamic else 2)


def test_dropout_in_a_checkpoint_is_that_of_the_seed():
    own = Checkpointed(False).double()
    compiled = torch.compile(own, backend=backend, dynamic=True, options=EXACT)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    found = []
    for seed in (3, 4, 3):
        torch.manual_seed(seed)
        found.append(torch.autograd.grad(compiled(x), [*own.parameters()])[0])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], found[1])


def test_the_captured_graph_itself_keeps_its_regions():
    seen = []

    def looking(gm, examples):
        before = str(gm.graph)
        seen.append((without_regions(gm), gm))
        assert str(gm.graph) == before
        return gm.forward

    own = Checkpointed(False).double().eval()
    torch.compile(own, backend=looking, dynamic=True)(torch.randn(2, 5, 8, dtype=torch.float64))
    ((without, gm),) = seen
    assert "tag_activation_checkpoint" in str(gm.graph)
    assert "tag_activation_checkpoint" not in str(without.graph)
    assert without_regions(without) is without
