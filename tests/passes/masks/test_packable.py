"""Which models keep the sequences of a row as they are alone, and why the others do not."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.ir import Packable
from dcpc.passes.masks.packable import packable
from dcpc.passes.sharding.attention_ways import attentions
from dcpc.passes.sharding.sharding import analyse
from dcpc.plan.traced import without_masks
from dcpc.trace import trace
from tests.cases.packed_models import POSITIONS, transformers_model

INPUTS = dict.fromkeys(("ids", "segments", "positions", "labels"), "int64[batch, seq]")
BUCKETS = dcpc.Buckets(inputs=INPUTS, sizes=[{"seq": 12}, {"seq": 41}])


class Small(nn.Module):
    """One attention; what comes before and after it is for the cases."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(16, 8), nn.Embedding(64, 8)
        self.numbers, self.qkv = nn.Embedding(16, 8), nn.Linear(8, 24)
        self.short = nn.Conv1d(8, 8, 3, padding=1)

    def embed(self, ids: Tensor, segments: Tensor, positions: Tensor) -> Tensor:
        return self.table(ids) + self.places(positions)

    def same(self, segments: Tensor, positions: Tensor) -> Tensor | None:
        n = segments.shape[1]
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        return (segments[:, :, None] == segments[:, None, :]) & causal

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = x @ self.table.weight.T
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(self, ids: Tensor, segments: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids, segments, positions)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        mask = self.same(segments, positions)
        mask = mask if mask is None else mask[:, None]
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=mask)[:, 0]
        return self.loss(x, labels)


class Shifted(Small):
    def loss(self, x, labels):
        return super().loss(x[:, :-1], labels[:, 1:])


class OwnLoss(Small):
    """A mean over the labels that count, by hand; labels are indices of classes."""

    def loss(self, x, labels):
        counts = labels[:, 1:] != -100
        classes = F.one_hot(labels.clamp(min=0), 16)[:, 1:]
        logits = (x @ self.table.weight.T).log_softmax(-1)[:, :-1]
        return -((logits * classes).sum(-1) * counts).sum() / counts.sum()


class DividedFirst(Small):
    """Each position's loss is divided by the number of labels, and then added up."""

    def loss(self, x, labels):
        counts = labels != -100
        classes = F.one_hot(labels.clamp(min=0), 16)
        found = ((x @ self.table.weight.T).log_softmax(-1) * classes).sum(-1) * counts
        return -(found / counts.sum()).sum()


class Counted(Small):
    """Sequences are counted in the graph, from positions that restart."""

    def same(self, segments, positions):
        count = (positions == 0).cumsum(1)
        return super().same(count, positions)


class Everything(Small):
    def same(self, segments, positions):
        return None


class RowPositions(Small):
    def embed(self, ids, segments, positions):
        return self.table(ids) + self.places(torch.arange(ids.shape[1]))


class Convolved(Small):
    def embed(self, ids, segments, positions):
        return self.short(self.table(ids).transpose(1, 2)).transpose(1, 2)


class TokensShifted(Small):
    def embed(self, ids, segments, positions):
        x = self.table(ids)
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


class Pooled(Small):
    def loss(self, x, labels):
        return x.mean(1).square().sum(-1).mean() + super().loss(x, labels)


class Scaled(Small):
    def embed(self, ids, segments, positions):
        x = super().embed(ids, segments, positions)
        return x / x.square().mean()


class Numbered(Small):
    """A sequence's number changes its activations: alone it would be the first."""

    def embed(self, ids, segments, positions):
        return self.table(ids) + self.numbers(segments)


class TwoLabels(Small):
    def loss(self, x, labels):
        far = [F.pad(labels, (0, k), value=-100)[:, k:] for k in (1, 2)]
        return super().loss(x, far[0]) + super().loss(x, far[1])


class OwnTargets(Small):
    """Tokens are inputs and, shifted, labels: a label cannot be left out of its own sequence."""

    def forward(self, ids, segments, positions, labels):
        return super().forward(ids, segments, positions, ids.roll(-1, 1))


class WrongCount(Small):
    """Sequences would be told apart by their even positions."""

    def same(self, segments, positions):
        return super().same((positions % 2 == 0).cumsum(1), positions)


class OfTokens(Small):
    def same(self, segments, positions):
        return super().same(self.ends, positions)

    def embed(self, ids, segments, positions):
        self.ends = (ids == 1).cumsum(1)
        return super().embed(ids, segments, positions)


class OfLength(Small):
    """Activations are scaled by the length of the row, which is not the sequence's."""

    def embed(self, ids, segments, positions):
        return super().embed(ids, segments, positions) * ids.shape[1] ** -0.5


class ShareOfLength(Small):
    def embed(self, ids, segments, positions):
        return self.table(ids) + (positions / ids.shape[1])[..., None]


class TimesCount(Small):
    """Activations times how many tokens of the batch are not 0."""

    def embed(self, ids, segments, positions):
        return self.table(ids) * (ids != 0).sum()


class AfterToken(Small):
    """Tokens after the first 7 of a row are others; so are those of the sequences that follow."""

    def embed(self, ids, segments, positions):
        return self.table((ids + 8 * ((ids == 7).cumsum(1) > 0)) % 16)


class AfterNeighbour(Small):
    """A token after a 7 is another one, also where it begins a sequence."""

    def embed(self, ids, segments, positions):
        before = F.pad(ids, (1, 0))[:, :-1]
        return self.table((ids + 8 * (before == 7)) % 16)


class BesideMedian(Small):
    """Tokens are counted from the median of the row: of equal ones no single change moves it."""

    def embed(self, ids, segments, positions):
        return self.table((ids - ids.median(1, keepdim=True).values) % 16)


class AboveNeighbour(Small):
    """Numbers after a large one are others, of which a row of ones has none."""

    def embed(self, ids, segments, positions):
        before = F.pad(ids, (1, 0))[:, :-1]
        return self.table((ids + F.relu(before - 5)) % 16)


class FirstRow(Small):
    """All rows of a micro-batch take the sequences of the first one."""

    def same(self, segments, positions):
        return super().same(segments[:1], positions)


class ManySegments(Small):
    """Every sixth sequence has the same number."""

    def same(self, segments, positions):
        return super().same(segments % 6, positions)


class ByHand(Small):
    """Attention spelled out."""

    def changed(self, scores: Tensor) -> Tensor:
        return scores

    def forward(self, ids, segments, positions, labels):
        x = self.embed(ids, segments, positions)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        scores = self.changed(q @ k.transpose(-1, -2) / 8**0.5)
        same = self.same(segments, positions)[:, None]
        return self.loss(x + (scores.masked_fill(~same, -torch.inf).softmax(-1) @ v)[:, 0], labels)


class Capped(ByHand):
    def changed(self, scores):
        return 5 * torch.tanh(scores / 5)


class Biased(ByHand):
    """A bias by distance, which is that of the row."""

    def changed(self, scores):
        at = torch.arange(scores.shape[-1])
        return scores - 0.5 * (at[:, None] - at[None]).abs()


class BiasedMask(Small):
    """The same, as a mask of numbers."""

    def same(self, segments, positions):
        at = torch.arange(segments.shape[1])
        bias = -0.5 * (at[:, None] - at[None]).abs()
        return bias.masked_fill(~super().same(segments, positions), -torch.inf)


class OfBuffer(Small):
    """Causal by a buffer, of which only its values say so."""

    def __init__(self):
        super().__init__()
        self.register_buffer("causal", torch.ones(64, 64, dtype=torch.bool).tril())

    def same(self, segments, positions):
        n = segments.shape[1]
        return (segments[:, :, None] == segments[:, None]) & self.causal[:n, :n]


class ByDistances(Small):
    """A key is seen where it is as far back in the row as by positions."""

    def same(self, segments, positions):
        at = torch.arange(segments.shape[1])
        back = at[:, None] - at[None]
        return (positions[:, :, None] - positions[:, None] == back) & (back >= 0)


class Angles(Small):
    def embed(self, ids, segments, positions):
        powers = torch.arange(8, device=ids.device)
        return self.table(ids) + (positions[..., None] * powers).cos()


def test_a_model_on_another_device_is_looked_into_on_the_cpu():
    program = without_masks(trace(Angles(), BUCKETS))
    rules = analyse(program).rules
    named = [n for n in program.gm.graph.nodes if n.kwargs.get("device") is not None]
    assert named
    for node in named:
        node.update_kwarg("device", torch.device("meta"))  # as "cuda" stands in a GPU's graph
    assert packable(program, rules).reason == ""


def looked_at(model: nn.Module) -> Packable:
    torch.manual_seed(0)
    program = without_masks(trace(model, BUCKETS))
    return packable(program, analyse(program).rules)


SAME = {"ids": 0, "segments": 0, "positions": 0, "labels": 0}
HITS = {
    Small: Packable(("segments",), SAME, by_numbers=True),
    Shifted: Packable(("segments",), {**SAME, "labels": 1}, by_numbers=True),
    OwnLoss: Packable(("segments",), {**SAME, "labels": 1}, by_numbers=True),
    ByHand: Packable(("segments",), SAME, by_numbers=True),
    DividedFirst: Packable(("segments",), SAME, by_numbers=True),
    Counted: Packable(("positions",), SAME, by_positions=True),
}


@pytest.mark.parametrize("model", HITS)
def test_model_that_keeps_sequences_apart_is_known(model):
    assert looked_at(model()) == HITS[model]


MISSES = {
    Everything: r"node attention_default \(.*test_packable.py:\d+\) sees all of a row",
    RowPositions: r"node arange \(.*test_packable.py.*\) counts positions in the row",
    Convolved: "joins positions|has no rule",
    TokensShifted: "joins positions|moves positions",
    Pooled: "joins positions",
    Scaled: "changes each position by a number that is made of all",
    Numbered: "neither positions that restart in each sequence nor its number, given as segments",
    TwoLabels: "reads 'labels' at its own place and 2 places on",
    OwnTargets: "what it reads of 'ids' at other places|reads 'ids' at its own place",
    WrongCount: "neither positions that restart",
    OfLength: r"node mul.* changes each position by a number that is of the whole row",
    ShareOfLength: r"node div.* changes each position by a number that is of the whole row",
    TimesCount: r"node mul.* changes each position by a number that is of the whole row",
    AfterToken: r"node cumsum.* joins positions",
    AfterNeighbour: "what it reads of 'ids' at other places",
    BesideMedian: "what it reads of 'ids' at other places",
    AboveNeighbour: "what it reads of 'ids' at other places",
    FirstRow: "neither positions that restart",
    ManySegments: "neither positions that restart in each sequence nor its number",
    Capped: r"node softmax.* \(.*test_packable.py.*\) is a softmax over pairs .* or tanh",
    Biased: r"node softmax.* is a softmax over pairs of positions that is no attention",
    BiasedMask: r"keeps sequences apart: it adds numbers to scores: .*truth values",
    OfBuffer: r"keeps sequences apart: .*causal.* not a slice of a buffer",
    ByDistances: r"keeps sequences apart: .* `segment\[:, :, None\] == ",
    OfTokens: "neither positions that restart in each sequence nor its number, given as ids",
}


@pytest.mark.parametrize("model", MISSES)
def test_model_that_would_mix_them_says_where(model):
    found = looked_at(model())
    assert re.search(MISSES[model], found.reason), found
    assert (found.by_positions, found.by_numbers) == (False, False)


def test_positions_that_the_model_counts_itself_are_one_sequence():
    """With use_cache=False a library looks for sequences also where no positions are given."""
    inputs = {n: POSITIONS[n] for n in ("input_ids", "labels")}
    sizes = [{"seq": 16}, {"seq": 64}]
    program = without_masks(trace(transformers_model("llama"), dcpc.Buckets(inputs, sizes)))
    for node in attentions(program):
        assert len([a for a in node.args if a is not None]) == 3, "a mask or segments are left"
        assert node.kwargs["after"] == 0
    assert not [n for n in program.gm.graph.nodes if "diff" in n.name]
    assert not program.notes
