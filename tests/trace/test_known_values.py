"""Tensors that forward makes of numbers alone have values in a trace; no others have."""

import pytest
import torch
from torch import nn

import dcpc
from dcpc.errors import TraceError
from dcpc.trace import trace

BUCKETS = dcpc.Buckets(inputs={"x": "float32[batch, seq, 4]"}, sizes=[{"seq": 8}, {"seq": 24}])
X = torch.randn(2, 11, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes

    def forward(self, x):
        parts = self.sizes(x)
        each = enumerate(x[:, : sum(parts)].split(parts, 1))
        return sum((i + 1) * part.square().mean() for i, part in each)


def grid(x):
    of_images = torch.tensor([[1, 2, 2], [2, 1, 1]])
    ends = nn.functional.pad(of_images.prod(-1).cumsum(0), (1, 0))
    return (ends[1:] - ends[:-1]).tolist()


def windows(x):
    index = nn.functional.pad(torch.arange(6).reshape(2, 3), (0, 1), value=-100)
    seen = index[index != -100]
    counts = torch.unique_consecutive(torch.repeat_interleave(seen % 3, torch.tensor([1, 2] * 3)))
    return [len(seen) - 4, int(counts.max()), counts.shape[0] - 5]


def changed_list(x):
    sizes = [1, 2]
    held = torch.tensor(sizes)
    sizes[0] = 5
    return held.tolist()


def checked(x):
    held = torch.tensor([2, 3])
    return [1, 1] if (held == 3).all() else held.tolist()


@pytest.mark.parametrize("sizes", [grid, windows, changed_list, checked])
def test_values_are_those_of_the_plain_model(sizes):
    model = Net(sizes)
    program = trace(model, BUCKETS)
    given = {**program.constants, **dict.fromkeys(program.inputs, X)}
    taken = [given[n.name] for n in program.gm.graph.find_nodes(op="placeholder")]
    torch.testing.assert_close(program.gm(*taken)[0], model(X))


def of_an_input(x):
    return torch.stack([x[0, 0].argmax(), torch.tensor(2)]).tolist()


def written(x):
    held = torch.tensor([1, 2])
    held[0] = x[0, 0].argmax()
    return held.tolist()


def written_by_a_view(x):
    held = torch.tensor([1, 2])
    held.view(2)[0].add_(x[0, 0].argmax())
    return held.tolist()


def drawn(x):
    return (torch.randint_like(torch.tensor([1, 2]), 3) + 1).tolist()


@pytest.mark.parametrize("sizes", [of_an_input, written, written_by_a_view, drawn])
def test_values_that_depend_on_more_are_refused(sizes):
    with pytest.raises(TraceError, match=r"made of the values in a tensor|a size|draws random"):
        trace(Net(sizes), BUCKETS)
