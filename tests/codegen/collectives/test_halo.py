"""Rows of neighbours against windows cut from the whole, their transpose, and gloo's messages."""

import pytest
import torch
import torch.distributed as dist

from dcpc.codegen import bind_group
from dcpc.codegen.collectives.collectives import wire_log
from dcpc.codegen.collectives.halo import HaloCall
from dcpc.codegen.collectives.lockstep_collectives import COLLECTIVES
from dcpc.ops.pieces import piece
from tests.cases.launch import run_ranks

ops = torch.ops.dcpc
# Rows in whole, then stride, reach, and zeros in front and behind.
WINDOWS = [
    (9, 1, 3, 1, 1), (7, 1, 5, 2, 2), (8, 2, 3, 1, 1), (9, 2, 5, 4, 0), (6, 1, 3, 2, 0),
    (5, 1, 1, 1, 1), (4, 1, 1, 0, 0), (9, 2, 2, 0, 0), (3, 1, 7, 3, 3),
]  # fmt: skip


def calls(window, p):
    """Each rank's piece of a whole, and the arguments of its call; padded rows of the whole."""
    size, stride, reach, before, after = window
    made = (size + before + after - reach) // stride + 1
    x = torch.randn(2, size, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    found = []
    for rank in range(p):
        count = piece(made, made, 0, p, rank)[1]
        rows = (count - 1) * stride + reach if count else max(0, reach - stride)
        call = HaloCall(1, size, size, 0, made, made, 0, stride, reach, before, rows, "all")
        found.append((x.narrow(1, *piece(size, size, 0, p, rank)), call))
    return found, torch.nn.functional.pad(x, (0, 0, before, after)), made


def lockstep(op, given):
    return COLLECTIVES[op]([{"x": x, **call._asdict()} for x, call in given])


@pytest.mark.parametrize("p", [2, 3, 4, 6])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_rank_has_the_rows_of_its_windows_and_gradients_go_back(window, p):
    given, padded, made = calls(window, p)
    found = lockstep(ops.halo.default, given)
    for rank, rows in enumerate(found):
        start, count = piece(made, made, 0, p, rank)
        if count:
            begin = start * window[1]
            assert torch.equal(rows, padded[:, begin : begin + rows.shape[1]])
        else:
            assert not rows.any()
    y = [torch.randn_like(rows) for rows in found]
    back = [call._replace(rows=x.shape[1]) for x, call in given]
    sums = lockstep(ops.halo_sum.default, list(zip(y, back, strict=True)))
    left = sum((a * b).sum() for a, b in zip(found, y, strict=True))
    right = sum((x * s).sum() for (x, _), s in zip(given, sums, strict=True))
    assert torch.allclose(left, right, rtol=1e-12)


def by_messages(rank):
    bind_group("all", dist.group.WORLD)
    p, wrong, sent = dist.get_world_size(), [], {}
    for window in WINDOWS:
        given, _, _ = calls(window, p)
        x, call = given[rank]
        x = x.clone().requires_grad_()
        wire_log.clear()
        found = ops.halo(x, *call)
        sent[window] = wire_log.total_bytes()
        every = lockstep(ops.halo.default, given)
        y = [torch.full_like(rows, 1.0 + r) for r, rows in enumerate(every)]
        (g,) = torch.autograd.grad(found, x, y[rank])
        back = [(y[r], c._replace(rows=z.shape[1])) for r, (z, c) in enumerate(given)]
        same = torch.equal(found, every[rank])
        if not same or not torch.equal(g, lockstep(ops.halo_sum.default, back)[rank]):
            wrong.append(window)
    return wrong, sent


@pytest.mark.multirank
def test_messages_give_what_lockstep_gives_and_rows_of_neighbours_alone_are_sent():
    ranks = run_ranks(by_messages, 3, timeout_s=120)
    assert [wrong for wrong, _ in ranks] == [[], [], []]
    row = 2 * 3 * 8
    assert [sent[9, 1, 3, 1, 1] for _, sent in ranks] == [row, 2 * row, row]
    assert [sent[4, 1, 1, 0, 0] for _, sent in ranks] == [0, 0, 0]
