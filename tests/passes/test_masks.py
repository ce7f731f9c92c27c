"""Masks of attention: what is recognised, what is not and why, and that the numbers stay."""

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dcpc
from dcpc.codegen.masks import apply_masks
from dcpc.ir import MaskDecision, Program
from dcpc.passes.masks import recognise_masks
from dcpc.passes.sharding import analyse
from dcpc.symbolic_profile import find
from dcpc.trace import trace
from dcpc.variants import Variants
from tests.multirank.exactness import Split, gradient_error, loss_error, plain, wrong
from tests.multirank.launch import run_ranks

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
    variants = Variants(program, analyse(program), find("cpu"), "eager", lambda: own)
    inputs, sizes = data(41), {"batch": 3, "seq": 41}
    variant, integers = variants.variant(variants.placement(sizes, 1), 0, sizes, 0)
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


def errors_over_ranks(rank: int) -> dict[str, float]:
    warnings.simplefilter("ignore")
    found = {}
    for mask in (window, padding_of_ids, lowest, documents_and_padding, restarts):
        model = Masked(mask, spelled=mask is lowest)
        split = Split(model, BUCKETS, {"batch": 1, "seq": 41}, "eager")
        points = [({"batch": 3, "seq": n}, data(n)) for n in (12, 41)]
        found |= split.errors(mask.__name__, points)
    return found


@pytest.mark.slow
@pytest.mark.multirank
def test_numbers_stay_over_two_ranks():
    assert not wrong(run_ranks(errors_over_ranks, 2, timeout_s=200), 1e-10)
