"""The costs of each possible stage of a program at each bucket, from the profile of the whole.

seconds    of the calls that a stage has, forward, backward and made again, by its device's speed;
           sends are hidden behind them where the device overlaps, else added
bytes      parameters with gradients and the optimizer's state, once; what forward keeps, and what
           was received, for each micro-batch on its way (as many as there are stages from here on,
           as in 1F1B); and what is alive besides at the worst point of its calls
recompute  the least of a few settings of the whole program's menu that fits
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import sympy
from torch import fx

from dcpc.buckets import Sizes
from dcpc.codegen import LoweredPair
from dcpc.compiled.pipeline.chain import CallChain
from dcpc.compiled.pipeline.model_stage import states_of
from dcpc.ir import Placement, Program, Schedule
from dcpc.passes.stages.cut_costs import CutCosts, Floats
from dcpc.plan.prices.priced import Priced
from dcpc.plan.runnable import Runnable
from dcpc.symbolic_profile import Device, Ledger, Meter, OptimizerMemory

Integers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

LEVELS = 5  # settings of recompute that are tried of the whole program's menu


@dataclass(frozen=True, slots=True)
class StageDevice:
    """The device that runs a stage.

    Attributes:
        speed: speed beside that of the planned device, which is 1.
        memory_bytes: memory that a stage may use.
        optimizer: memory of the optimizer of the stage's parameters.
    """

    speed: float = 1.0
    memory_bytes: float = inf
    optimizer: OptimizerMemory = field(default_factory=OptimizerMemory, compare=False)


@dataclass(frozen=True, slots=True)
class MixedBucket:
    """A shape of the mixture.

    Attributes:
        sizes: length of every dim of a micro-batch, batch included.
        share: share of the micro-batches that have it.
        trace: number of the model's trace that runs it.
    """

    sizes: Sizes
    share: float
    trace: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _BlockCosts:
    """Costs of the chain's blocks at one bucket and one setting of recompute, `[blocks]` each.

    Attributes:
        seconds: seconds of their calls.
        saved_bytes: bytes that forward keeps for backward.
        beside_bytes: bytes alive at their worst point, without those kept and the gradients of
            parameters.
    """

    seconds: Floats
    saved_bytes: Floats
    beside_bytes: Floats


class ProgramCosts:
    """Costs of the blocks of a program's chain.

    Args:
        runnable: runnable of the whole program.
        chain: chain of the program.
        sp: number of ranks that run each stage together.
    """

    def __init__(self, runnable: Runnable, chain: CallChain, sp: int = 1) -> None:
        self._sp = sp
        self._traced, self._chain = runnable.traced, chain
        self._program: Program = runnable.traced.program
        self._priced: Priced = runnable.priced
        self._placement: Placement = self._priced.placement(self._program.hints, sp)
        self._lowering: LoweredPair = self._traced.lowering(self._placement)
        device = self._traced.device
        self._ledger = Ledger(self._lowering.joint.names, sp, gpu=device.kernels_of)
        self._meter = Meter(self._ledger, [*self._lowering.joint.gm.graph.nodes])
        self._fixed = frozenset(chain.calls)
        self._block_of = _blocks_of(self._program, chain)
        self._readers = self._read_by(set(self._program.learning))
        self._frozen = self._read_by(set(self._program.parameters) - set(self._program.learning))

    @property
    def device(self) -> Device:
        """Device that has speed 1."""
        return self._traced.device

    def of_kind(
        self, sizes: Sizes, kind: StageDevice, depth: int, fixed: Floats, at: Integers
    ) -> Floats:
        """Returns the seconds of every stage at a shape, `[depth, places, places]`.

        Args:
            sizes: lengths of a micro-batch.
            kind: kind of device.
            depth: count of the numbers of stages behind it that are priced, from 0 on.
            fixed: bytes of a stage's parameters, `[places, places]`.
            at: number of this chain's border of each place.
        """
        wire_s, received = self._wire(sizes)
        levels = [self._at_level(sizes, step) for step in self._levels(kind)]
        found = np.full((depth, *fixed.shape), inf)
        here = np.ix_(at, at)
        for behind in range(depth):
            for level in reversed(levels):  # the least recompute last: it is taken where it fits
                busy_s = _ranges(level.seconds) / kind.speed
                own = np.maximum(busy_s, wire_s) if self.device.overlaps else busy_s + wire_s
                kept = (_ranges(level.saved_bytes) + received[:, None]) * (behind + 1)
                beside = _most(level.beside_bytes)
                fits = fixed + kept[here] + beside[here] <= kind.memory_bytes
                found[behind] = np.where(fits, own[here], found[behind])
        found[:, np.triu(at[:, None] >= at, 1)] = inf  # no call of this trace
        return found

    def _levels(self, kind: StageDevice) -> list[int]:
        steps = self._priced.at(self._placement).steps
        if kind.memory_bytes == inf:
            return [0]
        return sorted({round(steps * i / (LEVELS - 1)) for i in range(LEVELS)})

    def _at_level(self, sizes: Sizes, menu_step: int) -> _BlockCosts:
        schedule = self._lowering.schedule(self._priced.made_again(self._placement, menu_step))
        dims = self._local(sizes)
        blocks = len(self._chain.borders) - 1
        seconds, saved = np.zeros(blocks), np.zeros(blocks)
        for nodes, forward in ((schedule.forward, True), (schedule.backward, False)):
            each = self._meter.seconds(nodes, dims, self.device, forward=forward)
            np.add.at(seconds, [self._block(n) for n in nodes], each)
        size_bytes = self._meter.sizes(schedule.saved, dims)
        seen: set[int] = set()
        for node, size in zip(schedule.saved, size_bytes, strict=True):
            memory = node.meta["storage"]
            if not memory or memory[0] not in seen:
                saved[self._block(node)] += size
                seen.update(memory)
        return _BlockCosts(seconds, saved, self._beside(schedule, dims, saved))

    def _beside(self, schedule: Schedule, dims: Mapping[str, int], saved: Floats) -> Floats:
        """Returns the bytes alive in each block, without those that it and blocks before it keep.

        Gradients of parameters of the blocks behind it, which backward has made, are not among
        them.
        """
        costs, owner = self._ledger.costs(schedule), self._lowering.joint.owner
        live = self._meter.live_bytes(costs, dims, self.device)
        # What is free is made again by whoever needs it: it says nothing of the place.
        nodes = (*schedule.forward, *schedule.backward)
        placed = [n for n in nodes if owner.get(n.name) in self._fixed]
        known = {n.name: self._block(n) for n in placed}
        kept, gradients = np.cumsum(saved), np.zeros(len(saved) + 1)
        for size, blocks in self._readers.values():
            gradients[min(blocks)] += size
        behind = gradients[::-1].cumsum()[::-1]
        found, block, backward = np.zeros(len(saved)), 0, False
        for name, alive in zip(costs.timeline.names, live, strict=True):
            backward |= name == "backward"
            block = known.get(name, len(saved) - 1 if name == "backward" else block)
            beside = float(alive) - kept[block] - behind[block + 1] * backward
            found[block] = max(found[block], beside)
        return found

    def _block(self, node: fx.Node) -> int:
        return self._block_of.get(self._lowering.joint.owner.get(node.name, node.name), 0)

    def _local(self, sizes: Sizes) -> dict[str, int]:
        dims = self._program.dims(sizes)
        return {i.name: i.value(dims, self._sp, 0) for i in self._lowering.lowered.integers}

    def _wire(self, sizes: Sizes) -> tuple[Floats, Floats]:
        """Returns the seconds that stages send, and the bytes that cross each border."""
        dims, info = self._program.dims(sizes), self._program.info
        crossing = np.array([
            sum(float(info[n].size_bytes.subs(dims)) for n in names)
            for names in self._chain.crossing
        ])  # fmt: skip
        crossing[-1] = 0.0
        link = self.device.link(2 * self._sp)
        each = np.where(crossing > 0, link.alpha_s + crossing / link.bytes_per_s, 0.0)
        return each[:, None] + each[None, :], crossing

    def residents(self, at: Integers, optimizer: OptimizerMemory) -> dict[int, tuple[float, Bools]]:
        """Returns the bytes that each parameter takes, and which stages read it.

        Args:
            at: number of this chain's border of each place.
            optimizer: memory of the optimizer of the parameters.

        Returns:
            Id of a parameter -> its bytes with what belongs to it, and `[places, places]`.
        """
        found, held = {}, self._traced.tensors()
        learning: Any = [held[n] for n in self._program.learning if n in held]
        states = states_of(learning, optimizer)
        for readers, gradients in ((self._readers, 1), (self._frozen, 0)):
            for key, (size, blocks) in readers.items():
                every = np.append(sorted(blocks), len(self._chain.borders))
                first = every[np.searchsorted(every, at)]  # block behind each place
                own = size + gradients * (size + states.get(key, 0))
                found[key] = (own, at > first[:, None])
        return found

    def _read_by(self, placeholders: set[str]) -> dict[int, tuple[float, set[int]]]:
        """Returns the bytes of each parameter, and the blocks that read it under some name."""
        held, found = self._traced.tensors(), dict[int, tuple[float, set[int]]]()
        for node in self._program.gm.graph.find_nodes(op="placeholder"):
            blocks = {self._block_of[u.name] for u in node.users if u.name in self._block_of}
            if node.name in placeholders and blocks:
                tensor = held[node.name]
                known = found.setdefault(id(tensor), (float(tensor.nbytes), set()))
                known[1].update(blocks)
        return found


def mixed_costs(
    programs: Sequence[ProgramCosts],
    at: Integers,
    mixture: Sequence[MixedBucket],
    kinds: Sequence[tuple[StageDevice, int]],
    all_devices: bool = False,
) -> CutCosts:
    """Returns the costs of every stage that a model of one trace or several can be cut into.

    A stage has the parameters that any trace reads in it, and runs a shape by its own trace.

    Args:
        programs: costs of each trace's program.
        at: number of each trace's border of each place where all may be cut, `[places, traces]`.
        mixture: shapes, whose shares add up to 1.
        kinds: kinds of devices, with the number of each.
        all_devices: whether each device has to have a stage.
    """
    bounded = any(kind.memory_bytes < inf for kind, _ in kinds)
    depth = sum(count for _, count in kinds) if bounded or all_devices else 1
    fixed = _resident_bytes(programs, at, kinds[0][0].optimizer)
    seconds = np.stack([
        np.stack([programs[b.trace].of_kind(b.sizes, kind, depth, fixed, at[:, b.trace])
                  for kind, _ in kinds])
        for b in mixture
    ])  # fmt: skip
    if all_devices:  # the first stage has all others behind it
        seconds[:, :, :-1, 0] = inf
    return CutCosts(seconds, tuple(b.share for b in mixture), tuple(n for _, n in kinds))


def _resident_bytes(
    programs: Sequence[ProgramCosts], at: Integers, optimizer: OptimizerMemory
) -> Floats:
    """Returns the bytes of every stage's parameters, `[places, places]`."""
    merged: dict[int, tuple[float, Bools]] = {}
    for number, own in enumerate(programs):
        for key, (size, reads) in own.residents(at[:, number], optimizer).items():
            had = merged.get(key)
            merged[key] = size, reads if had is None else had[1] | reads
    found = np.full((len(at), len(at)), float(optimizer.given_bytes or 0))
    for size, reads in merged.values():
        found[reads] += size
    return found


def _ranges(each: Floats) -> Floats:
    """Returns the sums over the blocks from `a` up to `b`, `[blocks + 1, blocks + 1]`."""
    sums = np.concatenate([[0.0], np.cumsum(each)])
    return np.asarray(np.maximum(sums[None, :] - sums[:, None], 0.0))


def _most(each: Floats) -> Floats:
    """Returns the largest of the blocks from `a` up to `b`, `[blocks + 1, blocks + 1]`."""
    found = np.zeros((len(each) + 1, len(each) + 1))
    for a in range(len(each)):
        found[a, a + 1 :] = np.maximum.accumulate(each[a:])
    return found


def _blocks_of(program: Program, chain: CallChain) -> dict[str, int]:
    """Returns the block of each call; a free one is in that of the first that it is made for."""
    found: dict[str, int] = {}
    for i, name in enumerate(chain.calls):
        found[name] = int(np.searchsorted(chain.borders, i, side="right")) - 1
    for node in reversed(program.gm.graph.nodes):
        if node.name not in found and node.op != "output":
            users = [found[u.name] for u in node.users if u.name in found]
            if users:
                found[node.name] = min(users)
    return found


def mixture_dims(program: Program, mixture: Sequence[MixedBucket]) -> dict[sympy.Symbol, int]:
    """Returns the lengths of the largest shape of a mixture."""
    return program.dims(max((b.sizes for b in mixture), key=lambda s: sum(s.values())))
