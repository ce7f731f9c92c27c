"""Masks of attention: what is recognised, what is not and why, and that the numbers stay."""

import dataclasses
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import dcpc
from dcpc.codegen.lower.mask_check import MaskCase, Values
from dcpc.codegen.lower.masks import apply_masks
from dcpc.ir import MaskDecision, Program
from dcpc.passes.masks.masks import recognise_masks
from dcpc.passes.sharding.sharding import analyse
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import Traced, without_masks
from dcpc.symbolic_profile import find
from dcpc.trace import trace
from tests.cases.exactness import SplitModel, gradient_error, loss_error, plain, wrong
from tests.cases.launch import run_ranks

INPUTS = {"x": "float64[batch, seq, 8]", "keep": "bool[batch, seq]", "ids": "int64[batch, seq]"}
BUCKETS = dcpc.Buckets(inputs=INPUTS, sizes=[{"seq": 12}, {"seq": 41}])
KEEP = ("get", "args_1", (), 0, 1)
IDS = ("get", "args_2", (), 0, 1)
LOW = torch.finfo(torch.float64).min


def causal(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return c <= r


def triangle(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    n = keep.shape[1]
    return torch.ones(n, n, dtype=torch.bool).tril()


def triangle_of_numbers(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    n = keep.shape[1]
    return torch.full((n, n), float("-inf"), dtype=torch.float64).triu(1)


def window(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return ((r - c).abs() < 4) & ~(c > r)


def both_sides(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return torch.abs(r - c) <= 3


def padding(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return keep[:, None, None, :].expand(-1, 1, keep.shape[1], -1)


def padding_of_ids(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return (c <= r) & (ids != 0)[:, None, None, :] & keep[:, None, None]


def lowest(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    seen = (c <= r) & keep[:, None, None]
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, LOW)


def low_and_causal(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return torch.where(c <= r, 0.0, -1e9).double().expand(keep.shape[0], 1, -1, -1)


def same_document(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return (c <= r) & (ids[:, None, :, None] == ids[:, None, None, :])


def documents_and_padding(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    same = ids[:, None, :, None] - ids[:, None, None, :] == 0
    return same & (ids != 0)[:, None, :, None]


def documents_and_kept_keys(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return keep[:, None, None] & ~(ids[:, None, :, None] != ids[:, None, None, :]) & (c >= r - 4)


def documents_of_numbers(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    seen = same_document(r, c, keep, ids)
    return torch.where(seen, torch.zeros((), dtype=torch.float64), LOW)


def ends(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    """Sequences end at a token; they are found by counting these in the graph."""
    count = (ids == 1).cumsum(-1)
    return (c <= r) & (count[:, None, :, None] == count[:, None, None])


def restarts(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    """As transformers' masking_utils: counts where positions do not go on, and compares these."""
    steps = torch.diff(ids, prepend=ids[:, :1] - 1, dim=-1)
    count = (steps != 1).cumsum(-1)
    row = torch.arange(ids.shape[0])[:, None, None, None]
    i, j = r[None, None], c[None, None]
    close = (ids[row, j] <= ids[row, i]) & (ids[row, j] > ids[row, i] - 3)
    return close & (count[row, i] == count[row, j])


def hit(
    before: int | None,
    after: int | None,
    keep: object = None,
    empty: str = "",
    segment: object = None,
) -> object:
    return MaskDecision(before, after, keep, empty, segment)


HITS = {
    causal: hit(None, 0),
    triangle: hit(None, 0),
    triangle_of_numbers: hit(None, 0),
    window: hit(3, 0),
    both_sides: hit(3, 3),
    padding: hit(None, None, KEEP),
    padding_of_ids: hit(None, 0, ("and", ("ne", ("get", "args_2", (), 0, 1), 0), KEEP)),
    lowest: hit(None, 0, KEEP, "mean"),
    same_document: hit(None, 0, segment=IDS),
    documents_and_padding: hit(None, None, ("ne", IDS, 0), segment=IDS),
    documents_and_kept_keys: hit(4, None, KEEP, segment=IDS),
    documents_of_numbers: hit(None, 0, segment=IDS),
    ends: hit(None, 0, segment=("get", "cumsum", (), 0, 1)),
    restarts: hit(2, 0, segment=("get", "cumsum", (), 0, 1)),
}


def far(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return (c <= r) & (c > r - 41)


def prefix(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return (c <= r) | keep[:, None, None]


def documents_or_near(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return (c == r) | (ids[:, None, :, None] == ids[:, None, None, :])


def other_documents(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return (c == r) | (ids[:, None, :, None] != ids[:, None, None, :])


def documents_of_others(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return (c <= r) & (ids[:, None, :, None] == ids.flip(1)[:, None, None, :])


def positions_of_other_counts(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    """Not all positions of one count go up by 1, so their distances are not those in the row."""
    count = (ids == 1).cumsum(-1)
    near = ids[:, None, None, :] <= ids[:, None, :, None]
    return near & (count[:, None, :, None] == count[:, None, None])


def distances(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return -(r - c).abs().double()


def padding_queries(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return keep[:, None, :, None] & (c <= r)


def numbers_of_the_user(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return (1.0 - ids[:, None, None, :].double()).expand(-1, -1, keep.shape[1], -1) * -1e9


def not_low_enough(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    seen = (c <= r) & keep[:, None, None]
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -1e9)


def sum_of_two(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    future = torch.zeros(1, dtype=torch.float64).masked_fill(c > r, LOW)
    return future + torch.zeros(1, dtype=torch.float64).masked_fill(~keep[:, None, None], LOW)


def by_a_length(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return c <= r + keep.shape[1] // 2 - 3


MISSES = {
    prefix: "holds either by position",
    documents_or_near: "holds either by position",
    other_documents: "holds either by position",
    documents_of_others: r"reads node args_2 \(args_2\) at .*query",
    positions_of_other_counts: r"reads node args_2 \(args_2\) at .*query",
    distances: "adds numbers to scores: those of node neg",
    padding_queries: "reads node args_1",
    numbers_of_the_user: "adds numbers to scores: those of node args_2",
    low_and_causal: "adds -1e.09 to scores, which may differ by as much",
    not_low_enough: "adds -1e.09 to scores, which may differ by as much",
    sum_of_two: "may see no key, and then -inf and -1.79769e.308 make the difference",
    lowest: "torch's fused attention makes of -1.79769e.308 alone depends on its kernel",
    by_a_length: "depends on a length",
}


class Masked(nn.Module):
    """One attention with a mask made of positions, padding and token ids."""

    def __init__(self, mask: object, spelled: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.spelled = mask, spelled
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.shape[1])
        mask = self.mask(at[:, None], at[None, :], keep, ids)
        if self.spelled:
            scores = q @ k.transpose(-1, -2) / 2
            boolean = mask.dtype == torch.bool
            scores = scores.masked_fill(~mask, LOW) if boolean else scores + mask
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


def program(mask: object, spelled: bool = False) -> Program:
    return trace(Masked(mask, spelled), BUCKETS)


def data(seq: int) -> dict[str, Tensor]:
    """The first sample is padded on its left, where a causal query sees no key at all."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(3, seq, 8, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 3, (3, seq), generator=generator)
    keep = torch.ones(3, seq, dtype=torch.bool)
    keep[0, : seq // 3] = False
    keep[1, seq - 2 :] = False
    return {"x": x, "keep": keep, "ids": ids}


SPELLED = (triangle_of_numbers, window, lowest, documents_of_numbers)
FUSED = [m for m in HITS if m not in (lowest, documents_of_numbers)]
SETTINGS = [(m, False) for m in FUSED] + [(m, True) for m in SPELLED]


@pytest.mark.parametrize(("mask", "spelled"), SETTINGS, ids=lambda m: getattr(m, "__name__", m))
def test_mask_is_recognised_and_gone_and_numbers_stay(mask, spelled):
    model = Masked(mask, spelled)
    before = trace(model, BUCKETS)
    text = str(before.gm.graph)
    plan = recognise_masks(before)
    assert list(plan.decisions.values()) == [HITS[mask]]
    assert not plan.notes
    after = apply_masks(before, plan)
    assert str(before.gm.graph) == text
    left = [after.info[n.name].shape for n in after.gm.graph.nodes if n.name in after.info]
    assert not [shape for shape in left if shape.count(before.symbols["seq"]) > 1]
    check_numbers(model, after)


def check_numbers(model: nn.Module, program: Program) -> None:
    own = {p: model.get_parameter(n) for p, n in program.parameters.items()}
    runnable = Runnable(Traced(program, analyse(program), find("cpu"), "eager", lambda: own))
    inputs, sizes = data(41), {"batch": 3, "seq": 41}
    variant, integers = runnable.variant(runnable.priced.placement(sizes, 1), 0, sizes, 0)
    loss, gradients = plain(model, inputs)
    named = {**own, **{p: inputs[n] for p, n in program.inputs.items()}, **program.constants}
    got = variant([named[p] for p in variant.placeholders], integers)
    got.backward()
    assert loss_error(got, loss) < 1e-12
    assert gradient_error(model, gradients) < 1e-10


@pytest.mark.parametrize("mask", MISSES, ids=lambda m: m.__name__)
def test_mask_that_says_something_else_stays_and_says_why(mask):
    before = program(mask, spelled=mask is not_low_enough)
    plan = recognise_masks(before)
    assert not plan.decisions
    (note,) = plan.notes
    assert "stays a tensor" in note
    assert "test_masks.py:" in note
    assert re.search(MISSES[mask], note), note
    assert apply_masks(before, plan).notes == (note,)


class SharedRows(Masked):
    """Three samples of each sample, which share the mask of that one."""

    def forward(self, x: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        q, k, v = (torch.stack([t, t * 0.5, t * 2], 1) for t in (q, k, v))
        at = torch.arange(x.shape[1])
        seen = self.mask(at[:, None], at[None, :], keep, ids)
        mask = seen.expand(x.shape[0], 1, -1, -1)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum(1)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.parametrize("mask", [causal, window, padding, padding_of_ids, same_document])
def test_mask_that_samples_share_is_one_of_positions_or_stays(mask):
    model = SharedRows(mask)
    before = trace(model, BUCKETS)
    plan = recognise_masks(before)
    if mask in (causal, window):
        assert list(plan.decisions.values()) == [HITS[mask]]
    else:
        assert not plan.decisions
        assert "it hides keys by sample, and several samples share a row of it" in plan.notes[0]
    check_numbers(model, apply_masks(before, plan))


def circulant(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return torch.arange(keep.shape[1])[r - c] < 5


def ends_of_the_row(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    at = torch.arange(keep.shape[1])
    return (c <= r) & (c <= at[-3]) & (c <= at[-2:].select(0, -1)) | (c == r)


def rounded(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return c.to(torch.bfloat16) <= r.to(torch.bfloat16)


def rounded_when_made(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    at = torch.arange(keep.shape[1], dtype=torch.bfloat16)
    return at[None] <= at[:, None]


def wrapped(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return c.to(torch.uint8) <= r.to(torch.uint8)


def wrapped_with_a_sign(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return (c.to(torch.int8) <= r.to(torch.int8)) | (c == r)


def cut_to_integers(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return (c + 0.5).long() <= r - 0.5


def truth_and_two(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return ((c <= r) != 2) & (keep[:, None, None] != 2) & (c <= r + 1)


def truths_in_order(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return ((c <= r) > 0) & ((c <= r) >= (c < r))


def by_half_a_length(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    n = keep.shape[1]
    return torch.ones(n, n, dtype=torch.bool).tril(n // 2) & (r - c < n / 2)


def lowest_number_of_a_byte(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return -(c <= r).to(torch.uint8) == 255


def documents_rounded(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    same = (ids + 256).to(torch.bfloat16)
    return (c <= r) & (same[:, None, :, None] == same[:, None, None])


def numbers_of_a_byte(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return (c <= r) & ((ids.to(torch.int8).long() + 127)[:, None, None] > 127)


def no_number(r: Tensor, c: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
    return (c <= r) & ~(c * float("nan") > r)


ODD = [
    *(circulant, ends_of_the_row, rounded, rounded_when_made, wrapped, wrapped_with_a_sign),
    *(cut_to_integers, truth_and_two, truths_in_order, by_half_a_length, documents_rounded),
    *(lowest_number_of_a_byte, numbers_of_a_byte, no_number),
]


def check_graph(model: nn.Module, program: Program, seq: int) -> None:
    """Loss and gradients of a graph at some length are the model's."""
    inputs, own = data(seq), dict(model.named_parameters())
    named = {p: own[n] for p, n in program.parameters.items()} | dict(program.constants)
    named |= {p: inputs[n] for p, n in program.inputs.items()}
    loss, gradients = plain(model, inputs)
    got = fx.Interpreter(program.gm).run(*named.values())[0]
    got.backward()
    assert loss_error(got, loss) < 1e-10
    assert gradient_error(model, gradients) < 1e-10


@pytest.mark.parametrize("mask", ODD, ids=lambda m: m.__name__)
def test_mask_of_odd_positions_keeps_its_numbers(mask):
    """Without the check of masks: what is read off these is right, or nothing is."""
    model = Masked(mask)
    before = trace(model, BUCKETS)
    after = apply_masks(before, recognise_masks(before))
    for seq in (12, 300):
        check_graph(model, after, seq)


PLANTED = {
    "one key more": (causal, {"after": 1}),
    "one key fewer": (window, {"before": 2}),
    "padding forgotten": (padding_of_ids, {"keep": None}),
    "other padding": (padding, {"keep": ("not", KEEP)}),
    "sequences forgotten": (same_document, {"segment": None}),
    "other sequences": (ends, {"segment": IDS}),
    "one key more than a long window": (far, {"before": 39}),
    "not a number instead of the mean": (lowest, {"empty": ""}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_mask_that_is_recognised_wrongly_stays_and_says_where(name, monkeypatch):
    mask, wrong = PLANTED[name]
    model = Masked(mask, spelled=mask is lowest)
    before = trace(model, BUCKETS)
    plan = recognise_masks(before)
    assert without_masks(before).notes == ()
    found = {n: dataclasses.replace(d, **wrong) for n, d in plan.decisions.items()}
    planted = dataclasses.replace(plan, decisions=found)
    monkeypatch.setattr("dcpc.plan.traced.recognise_masks", lambda program: planted)
    after = without_masks(before)
    (note,) = after.notes
    assert re.search(r"stays a tensor: what was read off it .* at batch 2, seq \d+, .*taken", note)
    assert "test_masks.py:" in note
    check_graph(model, after, 41)


def test_mask_that_cannot_be_evaluated_stays(monkeypatch):
    def of(*_: object) -> Tensor:
        raise ValueError("no such size")

    before = program(causal)
    monkeypatch.setattr(Values, "of", of)
    (note,) = without_masks(before).notes
    assert "could not be evaluated: ValueError: no such size" in note


class Blocks(nn.Module):
    """Attentions that each make a mask of their own, the last one another mask."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Masked(m) for m in (causal, causal, causal, far))

    def forward(self, x: Tensor, keep: Tensor, ids: Tensor) -> Tensor:
        return torch.stack([block(x, keep, ids) for block in self.blocks]).sum()


def test_equal_masks_of_repeated_blocks_are_checked_once(monkeypatch):
    before = trace(Blocks(), BUCKETS)
    assert len(recognise_masks(before).decisions) == 4
    checked, differs = [], MaskCase.differs
    monkeypatch.setattr(MaskCase, "differs", lambda *a: checked.append(a) or differs(*a))
    assert without_masks(before).notes == ()
    assert len(checked) == 2


def errors_over_ranks(rank: int) -> dict[str, float]:
    warnings.simplefilter("ignore")
    found = {}
    for mask in (window, padding_of_ids, lowest, documents_and_padding, restarts):
        model = Masked(mask, spelled=mask is lowest)
        split = SplitModel(model, BUCKETS, {"batch": 1, "seq": 41}, "eager")
        points = [({"batch": 3, "seq": n}, data(n)) for n in (12, 41)]
        found |= split.errors(mask.__name__, points)
    return found


@pytest.mark.slow
@pytest.mark.multirank
def test_numbers_stay_over_two_ranks():
    assert not wrong(run_ranks(errors_over_ranks, 2, timeout_s=200), 1e-10)
