"""Ranks run in one process have what ranks have that talk to each other, and the plain model's."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import dcpc
from dcpc.codegen import bind_group, run_in_step
from dcpc.codegen.collectives.lockstep_collectives import COLLECTIVES
from dcpc.errors import CodegenError
from dcpc.ops.pieces import piece, runs
from tests.cases.exactness import SplitModel
from tests.cases.launch import run_ranks
from tests.cases.ring_cases import GROUP, check, drawn
from tests.cases.small_models import CASES, sizes
from tests.cases.split_dims import DIMS

ops = torch.ops.dcpc
BY_NAME = {str(op): meet for op, meet in COLLECTIVES.items()}


class Recorded(TorchDispatchMode):
    """Notes the calls of collectives: op, arguments by name, result."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in COLLECTIVES:
            declared = func._schema.arguments
            given = {a.name: a.default_value for a in declared if a.has_default_value()}
            given |= dict(zip((a.name for a in declared), args, strict=False))
            self.calls.append((str(func), given | (kwargs or {}), result))
        return result


def moved(origin, zigzag, rank, p):
    """Calls each collective of a dim of 7 and one that is split as given, forward and backward."""
    size, *rest = origin
    x = torch.randn(size, 7, 2, generator=torch.Generator().manual_seed(rank)).double()
    lengths = [sum(n for _, n in runs(size, *rest, p, rank, zigzag)), 7 // p + (rank < 7 % p)]
    mine = x[: lengths[0]].clone().requires_grad_()
    whole = ops.all_gather(mine, 0, size, *rest, zigzag, "all")
    part = ops.reduce_scatter(whole * x, 0, lengths[0], *rest, zigzag, "all")
    turned = ops.all_to_all(mine, 0, size, *rest, zigzag, 1, lengths[1], 7, 0, False, "all")
    total = part.square().sum() + (turned * (1 + rank)).sum()
    if not zigzag:
        rows = piece(5, 5, 0, p, rank)[1] + 2
        total = total + (ops.halo(mine, 0, size, *rest, 5, 5, 0, 1, 3, 1, rows, "all") ** 2).sum()
    image = torch.randn(2, 3, lengths[0], 1).double().to(memory_format=torch.channels_last)
    total = total + ops.all_gather(image, 2, size, *rest, zigzag, "all").sum()
    ops.all_reduce(total, "all").backward()


def recorded(rank, cases):
    bind_group("all", dist.group.WORLD)
    bind_group(GROUP, dist.group.WORLD)
    with Recorded() as notes:
        for *origin, zigzag in DIMS:
            moved(origin, zigzag, rank, dist.get_world_size())
        for case in cases:
            check(case, dist.get_world_size(), rank)
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, notes.calls)


@torch.no_grad()
@pytest.mark.multirank
@pytest.mark.parametrize("world", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3)), 4])
def test_collectives_of_all_operands_are_what_gloo_makes(world):
    found = run_ranks(recorded, world, drawn(world, 30))
    unused = {"dcpc.swap.default"} if world == 3 else set()  # 3 ranks have no two with one piece
    assert {name for name, *_ in found[0]} == set(BY_NAME) - unused
    for together in zip(*found, strict=True):
        names, given, expected = zip(*together, strict=True)
        assert len(set(names)) == 1
        limit = 1e-12 if "all_reduce" in names[0] else 0.0  # gloo adds up in another order
        for got, want in zip(BY_NAME[names[0]](given), expected, strict=True):
            for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
                torch.testing.assert_close(a, b, rtol=limit, atol=limit, equal_nan=True)
                assert a.stride() == b.stride(), names[0]


def made(name, sp, attention="auto"):
    case, points = CASES[name], sizes(name)
    buckets = dcpc.Buckets(inputs=case.inputs, sizes=points)
    return SplitModel(case.model(), buckets, {**points[1], "batch": 1}, "eager", sp, attention)


@pytest.mark.parametrize("name", ["Frozen", "MaskedMean", "SixHeads"])
def test_ranks_in_one_process_have_the_plain_models_numbers(name):
    split = made(name, 1)
    for sp, way in ((1, "auto"), (2, "ring"), (3, "auto"), (4, "hybrid")):
        other = split.of("eager", sp, way)
        assert sp == 1 or other.split_values >= 3
        for point in sizes(name):
            for recompute in ("none", "all"):
                data = CASES[name].data(point)
                assert other.difference(point, data, recompute, in_step=True).worst < 1e-10


def collectives(parts):
    return [n for n in parts.forward.graph.nodes if n.target in COLLECTIVES]


def test_ranks_at_different_collectives_are_an_error():
    split = made("MaskedMean", 2)
    sizes_now = sizes("MaskedMean")[0]
    variant, _ = split.runnable.variant(split.placement, 0, sizes_now, 1)
    *_, last = collectives(variant.partition)
    last.replace_all_uses_with(last.args[0])
    other = made("MaskedMean", 2)
    pairs = [s.runnable.variant(s.placement, 0, sizes_now, r) for r, s in enumerate((other, split))]
    integers = [dict(zip((i.name for i in v.integers), n, strict=True)) for v, n in pairs]
    inputs = CASES["MaskedMean"].data(sizes_now)
    named = split.held() | {p: inputs[n] for p, n in split.program.inputs.items()}
    last.graph.erase_node(last)
    with pytest.raises(CodegenError, match="ranks of one group do not meet"):
        run_in_step([v.partition for v, _ in pairs], integers, named)


def test_a_number_of_groups_is_no_group_of_ranks():
    split, point = made("GroupsOfChannels", 2), sizes("GroupsOfChannels")[0]
    data = CASES["GroupsOfChannels"].data(point)
    assert split.difference(point, data, in_step=True).worst < 1e-10


def test_a_collective_without_a_definition_is_an_error(monkeypatch):
    split, point = made("MaskedMean", 2), sizes("MaskedMean")[0]
    for op in list(COLLECTIVES):
        monkeypatch.delitem(COLLECTIVES, op)
    with pytest.raises(CodegenError, match="which ranks call together"):
        split.difference(point, CASES["MaskedMean"].data(point), in_step=True)
