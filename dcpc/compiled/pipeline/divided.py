"""A stage's backward in two parts: their runs, and the seconds and bytes of each.

The first part makes the gradients of what the stage received, for which the stage before waits; the
second one those of parameters. What forward saved or the first part made, and the second one reads,
lives from one to the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx

from dcpc.buckets import Sizes
from dcpc.codegen import DividedRun, LoweredPair, Variant, divided
from dcpc.compiled.pipeline.programs import StageProgram
from dcpc.ir import Placement, Schedule
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import PlacementId
from dcpc.symbolic_profile import Costs, Device, Ledger, Meter


@dataclass(frozen=True, slots=True)
class PartCosts:
    """Seconds and bytes of the parts of a backward at given sizes, on a device of speed 1.

    Attributes:
        weight_s: seconds of the second part.
        input_bytes: most bytes alive during the first part, without inputs and sent values.
        weight_bytes: bytes alive from the first part to the second, with inputs that it reads.
        work_bytes: most bytes alive during the second part, with such inputs.
        shared_bytes: part of `weight_bytes` that are gradients of received values.
    """

    weight_s: float
    input_bytes: int
    weight_bytes: int
    work_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class _BackwardParts:
    """The two parts of a schedule's backward.

    Attributes:
        whole: costs of the schedule in which the second part comes last.
        second: costs of the second part alone, counted from what it is given on.
        late: calls of the second part.
        kept: earlier values that the second part reads, each memory once.
        shared: values of `kept` that are gradients of received values.
    """

    whole: Costs
    second: Costs
    late: tuple[fx.Node, ...]
    kept: tuple[fx.Node, ...]
    shared: tuple[fx.Node, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _UnfoldedGraph:
    """A placement's graph, with all of its blocks: a fold has no second part.

    Attributes:
        lowering: lowered graph.
        meter: meter of its costs at any sizes.
        ledger: ledger of its nodes.
        parts: steps of recompute -> both parts; None: the backward has one part.
    """

    lowering: LoweredPair
    meter: Meter
    ledger: Ledger
    parts: dict[int, _BackwardParts | None]


class _Alive(NamedTuple):
    """Bytes of one rank during both parts, as in `PartCosts`."""

    first: int
    second: int
    kept: int
    shared: int


def _alive(meter: Meter, parts: _BackwardParts, dims: Mapping[str, int], device: Device) -> _Alive:
    kept, shared = (int(meter.sizes(nodes, dims).sum()) for nodes in (parts.kept, parts.shared))
    live = meter.live_bytes(parts.whole, dims, device)
    names = parts.whole.timeline.names
    turn, late = names.index("backward"), {n.name for n in parts.late}
    first = [size for i, size in enumerate(live) if i == turn or (
        i > turn and names[i] not in late)]  # fmt: skip
    returned = meter.read(parts.whole, dims, device).returned_bytes
    more = meter.live_bytes(parts.second, dims, device)
    return _Alive(int(max(first)) - returned, kept + max(0, int(more.max())), kept, shared)


class StageParts:
    """The parts of a stage's backward, whatever is recomputed."""

    def __init__(self, runnable: Runnable, part: StageProgram) -> None:
        self._runnable, self._part = runnable, part
        self._runs: dict[int, tuple[Variant, DividedRun | None]] = {}
        self._priced: dict[PlacementId, _UnfoldedGraph] = {}

    def run(self, variant: Variant) -> DividedRun | None:
        """Returns both parts of a variant's backward; None: it has one."""
        if id(variant) not in self._runs:
            self._runs[id(variant)] = variant, DividedRun.of(variant, self._part.read)
        return self._runs[id(variant)][1]

    def costs(self, placement: Placement, menu_step: int, sizes: Sizes) -> PartCosts | None:
        """Returns the costs of both parts; None: there is one, or Inductor runs it as a whole."""
        traced = self._runnable.traced
        if traced.backend != "eager" or not traced.program.begins:
            return None
        priced = self._graph(placement)
        if menu_step not in priced.parts:
            priced.parts[menu_step] = self._divided(priced, placement, menu_step)
        parts = priced.parts[menu_step]
        if parts is None:
            return None
        own, sp = traced.program.dims(sizes), placement.sp
        ranks = priced.lowering.lowered.sizes_of_ranks(own, sp, priced.meter.names)
        seconds = priced.meter.seconds(parts.late, ranks[0], traced.device, forward=False)
        found = [_alive(priced.meter, parts, dims, traced.device) for dims in ranks]
        return PartCosts(
            weight_s=float(seconds.sum()),
            input_bytes=max(alive.first for alive in found),
            weight_bytes=found[0].kept,
            work_bytes=max(alive.second for alive in found),
            shared_bytes=found[0].shared,
        )

    def _graph(self, placement: Placement) -> _UnfoldedGraph:
        traced = self._runnable.traced
        key = traced.id_of(placement)
        if key not in self._priced:
            lowering = traced.lowering(placement)
            ledger = Ledger(lowering.joint.names, placement.sp, gpu=traced.device.kernels_of)
            meter = Meter(ledger, [*lowering.joint.gm.graph.nodes])
            self._priced[key] = _UnfoldedGraph(lowering, meter, ledger, {})
        return self._priced[key]

    def _divided(
        self, priced: _UnfoldedGraph, placement: Placement, menu_step: int
    ) -> _BackwardParts | None:
        again = self._runnable.priced.made_again(placement, menu_step)
        schedule: Schedule = priced.lowering.schedule(again)
        read = self._part.read
        first = [n for n, name in enumerate(priced.lowering.joint.trainable) if name in read]
        early, late, kept = divided(schedule.backward, schedule.gradients, first)
        if not early or not late:
            return None
        program = self._runnable.traced.program
        fixed = {*program.parameters, *program.buffers, *program.constants}
        after = {*late, *kept}
        second = replace(
            schedule,
            primals=tuple(n for n in schedule.primals if n.name in fixed),
            forward=(),
            outputs=(),
            begins=(),
            saved=tuple(n for n in kept if n.name not in fixed),
            backward_primals=tuple(n for n in kept if n.name in fixed),
            tangents=(),
            backward=tuple(late),
            gradients=tuple(g for g in schedule.gradients if g in after),
        )
        memories = _memories([n for n in kept if n.name not in fixed])
        sent = {g.meta["storage"][0] for n in first if (g := schedule.gradients[n]) is not None}
        return _BackwardParts(
            priced.ledger.costs(replace(schedule, backward=(*early, *late))),
            priced.ledger.costs(second),
            tuple(late),
            memories,
            tuple(n for n in memories if n.meta["storage"][0] in sent),
        )


def _memories(nodes: list[fx.Node]) -> tuple[fx.Node, ...]:
    """Returns the first node of each memory, without integers."""
    found: dict[Any, fx.Node] = {}
    for node in nodes:
        if node.meta.get("storage"):
            found.setdefault(node.meta["storage"][0], node)
    return tuple(found.values())
