"""The first calls in groups that block as NCCL's do: none of them waits for ever."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dcpc.codegen.collectives.collectives import bind_group
from dcpc.codegen.collectives.ring import RingCall
from dcpc.errors import GroupError
from dcpc.ops.attention import Sight
from dcpc.ops.ring_route import RowSplit
from dcpc.plan.options import MOST_COMMUNICATORS
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.pipeline.executor import PipelineBatch, run_schedule
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.layout import PipelineLayout
from dcpc.runtime.pipeline.schedule import one_f_one_b
from tests.cases.blocking import run_blocking
from tests.fuzz.pipelines import drawn_schedule

LAZY_OR_EAGER = pytest.mark.parametrize("eager", [False, True])


class Doubling:
    """A stage that doubles what it receives; the last one's loss is its sum."""

    parameters = ()

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count

    def at(self, sizes):
        return self

    def forward(self, inputs, received, seed=0):
        x = received[0] if received else inputs["x"]
        return ((2 * x,) if self.index < self.count - 1 else (x.sum(),)), x

    def backward(self, saved, grads):
        (g,) = grads
        return (g.expand(2).clone() if self.index == self.count - 1 else 2 * g,)

    def received(self, sizes):
        return (((2,), torch.float64),) if self.index else ()

    def sent(self, sizes):
        last = self.index == self.count - 1
        return (((), torch.float64),) if last else (((2,), torch.float64),)


def alone_with_control(rank: int, world: int) -> Groups:
    """Returns the groups of all ranks, a gloo group to agree in among them."""
    control = dist.new_group(list(range(world)), backend="gloo")
    assert isinstance(control, dist.ProcessGroup)
    every, data = tuple(range(world)), {world: dist.group.WORLD}
    return Groups(world, rank, global_ranks=every, _data=data, _control={world: control})


def a_step(rank: int, stages: int, count: int, seed: int | None = None) -> float:
    grid = PipelineGrid.make(alone_with_control(rank, stages), stages, ())
    batches = [PipelineBatch({"x": torch.full((2,), i + 1.0).double()}, {}, 0.5)
               for i in range(count)]  # fmt: skip
    schedule = one_f_one_b(range(count), ((0,) * count,) * stages)
    if seed is not None:
        schedule = drawn_schedule(seed, stages, count, split=False)
    loss = run_schedule([Doubling(grid.stage, stages)], batches, schedule, grid)
    return -1.0 if loss is None else float(loss)


@LAZY_OR_EAGER
@pytest.mark.parametrize(("stages", "count"), [(2, 1), (3, 1), (2, 3), (3, 4)])
def test_a_pipelines_first_step_ends(stages, count, eager):
    found, _ = run_blocking(a_step, stages, stages, count, eager=eager)
    whole = sum(0.5 * 2 * (i + 1) * 2 ** (stages - 1) for i in range(count))
    assert found == [-1.0] * (stages - 1) + [whole]


@LAZY_OR_EAGER
@pytest.mark.parametrize("seed", range(6))
def test_a_drawn_schedule_ends(seed, eager):
    found, _ = run_blocking(a_step, 3, 3, 4, seed, eager=eager)
    assert found[2] == sum(0.5 * 2 * (i + 1) * 4 for i in range(4))


def ring_of_two_rows(rank: int) -> Tensor:
    """Three ranks have two rows: the last one has nothing to send, and nothing comes to it."""
    groups = Groups.default(device="cpu")
    pg = groups.of(3)
    assert pg is not None
    bind_group(f"ring {rank}", pg)
    rows = RowSplit(2, 2, 0, False)
    mine = 1 if rank < 2 else 0
    q, k, v = (torch.ones(1, 1, mine, 4, dtype=torch.float64) * (rank + 1) for _ in range(3))
    how = RingCall.of(Sight(0.5, None, 0), rows, rows, 1, f"ring {rank}")
    out: Tensor = torch.ops.dcpc.ring_attention(q, k, v, None, None, None, **how._asdict())
    groups.watch.leave()
    return out


@LAZY_OR_EAGER
def test_a_ring_with_nothing_to_send_on_one_rank_may_be_a_groups_first_call(eager):
    (first, second, third), _ = run_blocking(ring_of_two_rows, 3, eager=eager)
    assert torch.equal(first, torch.ones(1, 1, 1, 4, dtype=torch.float64))
    assert 1 < float(second.mean()) < 2
    assert third.numel() == 0


def mixed(rank: int, ranges: list[tuple[int, int]]) -> float:
    """Uses the groups of a step's ranges, then that of gradients."""
    groups = Groups.default(device="cpu")
    groups.prepare(ranges)
    x = torch.ones(1)
    for first, degree in ranges:
        ranks = range(first, first + degree)
        if rank in ranks:
            dist.all_reduce(x, group=groups.over(ranks))
    dist.all_reduce(x, group=groups.of_gradients())
    groups.watch.leave()
    return float(x)


@LAZY_OR_EAGER
def test_communicators_are_those_of_the_degrees_in_use(eager):
    ranges = [(0, 8), (0, 2), (2, 2), (6, 2), (0, 2)]
    found, room = run_blocking(mixed, 8, ranges, eager=eager)
    assert len({*found}) == 1
    # All ranks, those of gradients, pairs: not of the degree 4, which no step has.
    assert [room.communicators_of(rank) for rank in range(8)] == [3] * 8


def apart(rank: int) -> str:
    groups = Groups.default(device="cpu")
    with pytest.raises(GroupError) as error:
        groups.prepare([(1, 2)])
    groups.watch.leave()
    return str(error.value)


def test_ranges_that_are_no_blocks_are_refused_where_groups_take_memory():
    found, _ = run_blocking(apart, 4)
    assert all("ranks 1 to 2: got a world of 4 ranks; expected an aligned block" in s
               for s in found)  # fmt: skip


def in_stages(rank: int, stages: int, sp: int) -> None:
    groups = alone_with_control(rank, dist.get_world_size())
    PipelineGrid.make(groups, PipelineLayout.of(stages, sp), ("tied", f"of {rank // sp % stages}"))


@LAZY_OR_EAGER
def test_a_pipeline_of_stages_in_groups_has_few_communicators(eager):
    _, room = run_blocking(in_stages, 16, 4, 2, eager=eager)
    # Wires each way to one neighbour or two; sums of tied parameters and of a stage's; a stage's
    # ranks; and, where they are made with their groups, all ranks.
    every = [room.communicators_of(rank) for rank in range(16)]
    assert every[:8] == every[8:] == [n + eager for n in (5, 5, 7, 7, 7, 7, 5, 5)]
    assert max(every) <= MOST_COMMUNICATORS
