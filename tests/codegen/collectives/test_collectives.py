"""Each collective against its definition, and its backward against the linear transpose."""

import pytest
import torch
import torch.distributed as dist

from dcpc.codegen import bind_group
from dcpc.ops.pieces import piece, runs
from tests.cases.launch import run_ranks
from tests.cases.split_dims import DIMS, SIZES

pytestmark = pytest.mark.multirank
ops = torch.ops.dcpc
DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.bool]


def whole(shape, dtype, seed=0):
    x = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed))
    return x > 0 if dtype == torch.bool else x.to(dtype)


def cut(x, dim, origin, rank):
    *split, zigzag = origin
    mine = runs(x.shape[dim], *split, dist.get_world_size(), rank, zigzag)
    return torch.cat([x.narrow(dim, *run) for run in mine], dim)


def taken(x, dim, origin, rank):
    """A rank's piece of what every rank has, and the function that is its transpose."""
    mine = runs(x.shape[dim], *origin[:2], dist.get_world_size(), rank, origin[2])
    if len(mine) == 1:
        return ops.narrow(x, dim, *mine[0]), lambda y: ops.widen(y, dim, mine[0][0], x.shape[dim])
    (first, turn), (second, rest) = mine
    back = lambda y: ops.spread(y, dim, first, turn, second, x.shape[dim])  # noqa: E731
    return ops.pick(x, dim, first, turn, second, turn + rest), back


def is_transpose(function, x, out_shape):
    """<f(x), y> summed over ranks equals <x, f'(y)> summed over ranks, y different on each."""
    x = x.detach().double().requires_grad_()
    out = function(x)
    assert out.shape == torch.Size(out_shape)
    y = torch.randn(out.shape, dtype=torch.float64)
    (g,) = torch.autograd.grad(out, x, y)
    x2 = torch.randn(x.shape, dtype=torch.float64)
    sides = torch.stack([(function(x2) * y).sum(), (x2 * g).sum()])
    dist.all_reduce(sides)
    return torch.allclose(sides[0], sides[1], rtol=1e-12, atol=1e-12)


def transposes(size, origin, k, n, rank):
    x = torch.randn(size, 2)
    mine = cut(x, 0, origin, rank)
    assert is_transpose(lambda t: ops.all_gather(t, 0, size, *origin, "all"), mine, (size, 2))
    assert is_transpose(lambda t: ops.reduce_scatter(t, 0, n, *origin, "all"), x, (n, 2))
    assert is_transpose(lambda t: ops.all_reduce(t, "all"), x, (size, 2))
    assert is_transpose(lambda t: taken(t, 0, origin, rank)[0], x, (n, 2))
    z = torch.randn(n, 2, 7)
    assert is_transpose(
        lambda t: ops.all_to_all(t, 0, size, *origin, 2, k, 7, 0, True, "all"), z, (size, 2, k)
    )


def check(rank, world):
    torch.manual_seed(rank)
    bind_group("all", dist.group.WORLD)
    for size, *origin in DIMS:
        n = sum(length for _, length in runs(size, *origin[:2], world, rank, origin[2]))
        for dtype in DTYPES:
            for dim in (0, 1):
                x = whole((3, size) if dim else (size, 3), dtype)
                mine = cut(x, dim, origin, rank)
                got = ops.all_gather(mine, dim, size, *origin, "all")
                assert torch.equal(got, x), ("all_gather", dtype, size, origin, dim)
                got, undo = taken(x, dim, origin, rank)
                assert torch.equal(got, mine)
                back = undo(mine)
                assert torch.equal(cut(back, dim, origin, rank), mine)
                assert int((back != 0).sum()) == int((mine != 0).sum())
                for other in DIMS:  # both dims uneven, in every combination
                    shape = (size, 2, other[0]) if not dim else (other[0], 2, size)
                    z = whole(shape, dtype, 1)
                    there = 0 if dim else 2
                    here = 2 if dim else 0
                    n2 = cut(z, there, other[1:], rank).shape[there]
                    got = ops.all_to_all(
                        cut(z, here, origin, rank), here, size, *origin,
                        there, n2, *other[1:], "all",
                    )  # fmt: skip
                    assert torch.equal(got, cut(z, there, other[1:], rank)), (size, other, dtype)
                if dtype == torch.bool:
                    continue
                parts = [whole(x.shape, dtype, 10 + r) for r in range(world)]
                total = sum(parts[1:], parts[0].clone())
                got = ops.reduce_scatter(parts[rank], dim, n, *origin, "all")
                assert torch.equal(got, cut(total, dim, origin, rank)), ("reduce_scatter", dtype)
                assert torch.equal(ops.all_reduce(parts[rank], "all"), total)
        transposes(size, origin, piece(7, 7, 0, world, rank)[1], n, rank)
    return True


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_are_their_definitions_and_their_backwards_the_transposes(world):
    assert run_ranks(check, world, world) == [True] * world


def test_pieces_of_channels_last_images_are_laid_out_as_fakes_say():
    image = torch.randn(2, 3, 9, 1).to(memory_format=torch.channels_last)
    assert not image.is_contiguous()
    for op, *rest in ((ops.narrow, 2, 4), (ops.pick, 1, 2, 5, 4)):
        expected = torch.empty(2, 3, 4, 1).stride()
        assert op(image, 2, *rest).stride() == op(image.to("meta"), 2, *rest).stride() == expected


def unbound(rank):
    with pytest.raises(Exception, match="process group 'none', which this process has not made"):
        ops.all_reduce(torch.ones(2), "none")
    return True


def test_group_that_was_not_made_is_named():
    assert unbound(0)


@pytest.mark.parametrize("p", [1, 2, 4, 7])
@pytest.mark.parametrize("dim", SIZES)
def test_pieces_are_in_order_and_cover_the_dim(dim, p):
    pieces = [piece(*dim, p, r) for r in range(p)]
    covered = [i for start, n in pieces for i in range(start, start + n)]
    assert covered == list(range(dim[0]))
    if dim[0] == dim[1]:
        assert max(n for _, n in pieces) - min(n for _, n in pieces) <= 1
