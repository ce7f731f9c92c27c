"""Branches on values: the side that is right for all is captured, or the branch is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dcpc
from dcpc.commands.check import SplitModel
from dcpc.trace import trace
from tests.cases.chosen_rows import BUCKETS, WORDS, inputs


class Model(nn.Module):
    def __init__(self, branch):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix, self.head = (
            nn.Embedding(WORDS, 8),
            nn.Linear(8, 8),
            nn.Linear(8, WORDS),
        )
        self.branch = branch
        self.double()

    def forward(self, ids, mask, labels):
        x = self.branch(self, torch.tanh(self.mix(self.embed(ids))), mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def fast_path(m, x, mask):
    hidden = mask == 0
    if (mask == 1).all():
        hidden = None
    return x if hidden is None else x.masked_fill(hidden[..., None], 0.0)


def only_if_padded(m, x, mask):
    if (mask == 0).any():
        x = x.masked_fill(mask[..., None] == 0, 0.0)
    return x


def early(m, x, mask):
    if not mask.any():
        return x
    return x + m.mix(x) * mask[..., None]


def clamps(m, x, mask):
    if not torch.isfinite(x).all():
        x = x.clamp(-1e300, 1e300)
    return x


def in_turn(m, x, mask):
    for _ in range(2):
        if (mask == 0).any() or torch.equal(mask, mask * 2):
            x = x * (mask[..., None] != 0)
        x = m.mix(x)
    return x


def taken(branch):
    """Returns the answers of which a trace has the sides."""
    return [n.split("were ")[1].split(",")[0] for n in trace(Model(branch), BUCKETS).notes]


def test_the_side_for_all_values_is_captured_and_said():
    (note,) = trace(Model(fast_path), BUCKETS).notes
    said = "`if (mask == 1).all():`: captured as if its value were False"
    assert f"test_value_branches.py:{fast_path.__code__.co_firstlineno + 2}: {said}" in note


@pytest.mark.slow
@pytest.mark.parametrize(
    ("branch", "side"),
    [(only_if_padded, "True"), (early, "True"), (clamps, "False"), (in_turn, "True")],
)
def test_other_fast_paths_are_captured(branch, side):
    assert taken(branch) == [side]


def checked_by_torch(m, x, mask):
    torch._check_tensor_all(mask >= 0)
    return x


def test_a_check_of_torchs_is_no_branch():
    assert not trace(Model(checked_by_torch), BUCKETS).notes


def doubles(m, x, mask):
    if mask.all():
        return x * 2
    return x


def rarely(m, x, mask):
    return x / 2 if (x.abs() > 1e6).any() else x


def from_causes(m, x, mask):
    factor = 3 if mask.all() else 1
    if not mask.all():
        assert factor == 1
    return x * factor


def endless(m, x, mask):
    while not (x.abs() < 0.5).all():
        x = x / 2
    return x


@pytest.mark.parametrize(
    ("branch", "got"),
    [
        (doubles, r"with other numbers \(True goes on at .*x \* 2`; False goes on at .*cross_ent"),
        pytest.param(rarely, "no drawn inputs for which it is True", marks=pytest.mark.slow),
        pytest.param(endless, "expected", marks=pytest.mark.slow),
        pytest.param(from_causes, "two sides with other numbers", marks=pytest.mark.slow),
    ],
)
def test_a_branch_that_changes_numbers_is_refused_by_line(branch, got):
    with pytest.raises(dcpc.TraceError, match=rf"in a tensor at .*branches.py:\d+.*{got}"):
        trace(Model(branch), BUCKETS)


def number(m, x, mask):
    return x / float(x.max())


def test_a_number_of_values_is_said_in_words():
    with pytest.raises(dcpc.TraceError, match=r"or a number \(float.* at .*`return x / float"):
        trace(Model(number), BUCKETS)


@pytest.mark.slow
@pytest.mark.parametrize("branch", [fast_path, early])
def test_gradients_are_the_plain_models_for_values_of_either_side(branch):
    split = SplitModel(Model(branch), BUCKETS, {"batch": 2, "n": 14}, sp=1)
    for sp in (1, 2):
        for number in (None, 0, 1):
            data = inputs(2, 14)
            if number is not None:
                data["mask"] = torch.full_like(data["mask"], number)
            found = split.of("eager", sp).difference({"batch": 2, "n": 14}, data, in_step=True)
            assert found.worst < 1e-10
