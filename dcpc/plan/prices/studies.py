"""Caches the cost and the recompute options of each lowered graph, to price many settings quickly.

One rank's graph hardly depends on the number of ranks: only the group's name does, and pieces of
constants, which are integer inputs here, as pieces of dims are. So placements that shard alike at
several degrees share one graph, one recompute menu and one memory timeline for each setting of the
menu; only the cost of collectives differs.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from math import inf

import sympy
import torch
from torch import fx

from dcpc.buckets import Sizes
from dcpc.codegen import VIEWS, Key, LoweredPair, UnitNodes
from dcpc.fx.leaves import leaf_key, size_key
from dcpc.ir import (
    LEAVES,
    OUTSIDE,
    Fold,
    Placement,
    Profile,
    Program,
    Schedule,
    tensor_operands,
)
from dcpc.passes.recompute.menu import AlikeBlocks, ForwardCall, Menu, ValueMemory, recompute_menu
from dcpc.plan.prices.away_kinds import LEVELS, AwayKinds, at_level, events_of, kinds_of
from dcpc.symbolic_profile import (
    START,
    Away,
    Costs,
    Device,
    Ledger,
    Meter,
    Prediction,
    Usage,
    with_constants,
)

_DENSE = torch.ops.aten.clone.default  # copies a parameter that is not stored row by row


@dataclass(frozen=True, slots=True)
class GatherStep:
    """A recompute step in which backward gathers some parameters a second time.

    Attributes:
        after: number of menu steps taken before this one.
        gathers: name of a gather call that runs again in backward, once this step is taken -> how
            many of the copies it stands for still keep their parameters from forward (the last
            copies).
        seconds: predicted seconds of all the gathers that run again.
        size_bytes: bytes that they gather: the memory freed between forward and backward.
    """

    after: int
    gathers: Mapping[str, int]
    seconds: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Structure:
    """One lowered graph with its costs and its recompute menu.

    Attributes:
        lowering: lowered graph at one of the degrees that share it.
        device: device for which costs are predicted.
        ledger: symbolic costs of the graph's nodes, at a degree that depends on the graph alone.
        meter: evaluator of these costs at given sizes.
        choices: recompute menu; for a folded program, blocks whose copies all recompute alike.
        copies: number of calls that each node stands for in a folded program; None: each stands for
            one.
        keys: name of a value -> its key, which is the same in every trace.
        costs: number of recompute steps -> costs of the graphs that then run (a cache).
        turns: recompute steps that gather parameters again in backward, in order.
        sizes: size of each integer of the graph at which choices are weighed.
        kinds: number of recompute steps -> kinds of values that could leave (a cache).
        leaving: menu step with values that leave -> its calls, as from `schedule` (a cache).
    """

    lowering: LoweredPair
    device: Device
    ledger: Ledger
    meter: Meter
    choices: Menu | AlikeBlocks
    copies: Fold | None
    keys: Mapping[str, Key]
    costs: dict[int, Costs]
    turns: tuple[GatherStep, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    kinds: dict[int, AwayKinds] = field(default_factory=dict)
    leaving: dict[int, tuple[Schedule, Fold | None]] = field(default_factory=dict)

    @property
    def menu(self) -> Menu:
        """Recompute menu: numbered sets of values that backward recomputes."""
        return self.choices.menu if isinstance(self.choices, AlikeBlocks) else self.choices

    @property
    def steps(self) -> int:
        """Number of recompute steps: those of the menu and those that gather parameters again."""
        return len(self.menu.steps) + len(self.turns)

    def turn(self, menu_step: int) -> GatherStep | None:
        """Returns the last of the first `menu_step` steps that gathers parameters again."""
        menu_step %= LEAVES
        taken = self._turns_in(menu_step)
        return self.turns[taken - 1] if taken else None

    def gathered_again(self, menu_step: int) -> dict[int, int]:
        """Returns unit gathered again in backward -> copies that keep their parameters."""
        turn = self.turn(menu_step)
        gathers = {} if turn is None else turn.gathers
        units = self.lowering.joint.gathers
        return {u.number: gathers[u.gather.name] for u in units if u.gather.name in gathers}

    def made_again(self, menu_step: int) -> set[Key]:
        """Returns keys of the values recomputed after `menu_step` steps, without parameters."""
        return {self.keys[name] for name in self._made_again(menu_step)}

    def _made_again(self, menu_step: int) -> frozenset[str]:
        menu_step %= LEAVES
        of_menu = menu_step - self._turns_in(menu_step)
        if isinstance(self.choices, AlikeBlocks) and not of_menu:
            return self.choices.least
        return self.menu.made_again(of_menu)

    def _turns_in(self, menu_step: int) -> int:
        return sum(turn.after + i < menu_step for i, turn in enumerate(self.turns))

    def run(self, menu_step: int) -> Costs:
        """Returns the costs of the graphs that run when `menu_step` recompute steps are taken."""
        if menu_step not in self.costs:
            schedule, copies = self.schedule(menu_step)
            self.costs[menu_step] = self.ledger.costs(schedule, copies)
        return self.costs[menu_step]

    def schedule(self, menu_step: int) -> tuple[Schedule, Fold | None]:
        """Returns the calls of those graphs, and the copies that they stand for."""
        if menu_step in self.leaving:
            return self.leaving[menu_step]
        turn = self.turn(menu_step)
        gathers = {} if turn is None else turn.gathers
        names = self._made_again(menu_step) | gathers.keys()
        away = self.away(menu_step)
        schedule = self.lowering.schedule({self.keys[name] for name in names}, away)
        found = schedule, self.copies and replace(self.copies, kept=gathers)
        if away:
            self.leaving[menu_step] = found
        return found

    def away(self, menu_step: int) -> set[Key]:
        """Returns keys of the values that leave the device."""
        level, recomputed = divmod(menu_step, LEAVES)
        names = at_level(self.kinds_at(recomputed), level) if level else ()
        return {self.keys[name] for name in names}

    def kinds_at(self, menu_step: int) -> AwayKinds:
        """Returns the kinds of values that could leave after so many recompute steps."""
        if menu_step not in self.kinds:
            schedule, copies = self.schedule(menu_step)
            self.kinds[menu_step] = kinds_of(
                self.lowering, schedule, copies, self.meter, self.sizes
            )
        return self.kinds[menu_step]


@dataclass(frozen=True, slots=True)
class _PredictionKey:
    sizes: tuple[tuple[str, int], ...]
    menu_step: int


class Study:
    """Prices one lowered graph at one degree: its recompute menu, and its costs at any sizes."""

    def __init__(self, structure: Structure, sp: int, away: Away | None = None) -> None:
        self._structure, self._sp, self._away = structure, sp, away
        self._ledger = structure.ledger.at(sp)
        self._meter = structure.meter.at(self._ledger)
        self._profiles: dict[int, Profile] = {}
        self._predictions: dict[_PredictionKey, Prediction] = {}

    @property
    def menu(self) -> Menu:
        """Recompute menu, cheapest steps first."""
        return self._structure.menu

    @property
    def steps(self) -> int:
        """Number of recompute steps; the last one recomputes everything that can be."""
        return self._structure.steps

    @property
    def overlaps(self) -> bool:
        """Whether the device copies while it computes."""
        return self._structure.device.overlaps

    def levels(self, menu_step: int) -> int:
        """Returns the number of levels of values that leave; 0: nothing can.

        Where all copies of a block let the same values go, or copies take their time alone, only
        those in the order of forward.
        """
        structure = self._structure
        if self._away is None or not structure.kinds_at(menu_step):
            return 0
        return LEVELS * (2 if structure.copies is None and self.overlaps else 1)

    @property
    def turns(self) -> tuple[int, ...]:
        """For each step that gathers parameters again, the number of recompute steps before it."""
        return tuple(turn.after + i for i, turn in enumerate(self._structure.turns))

    def gathers_cost(self, menu_step: int) -> tuple[float, int]:
        """Returns seconds and bytes of the gathers that run again after `menu_step` steps."""
        turn = self._structure.turn(menu_step)
        return (turn.seconds, turn.size_bytes) if turn else (0.0, 0)

    @property
    def priced(self) -> AbstractSet[int]:
        """Numbers of recompute steps whose symbolic costs are already known."""
        return self._structure.costs.keys()

    def profile(self, menu_step: int) -> Profile:
        """Returns the symbolic costs when `menu_step` recompute steps are taken."""
        if menu_step not in self._profiles:
            profile = self._ledger.profile(self._structure.run(menu_step))
            # Constant dims that the degree divides: their pieces are equal on all ranks.
            constants = {
                i.symbol: sympy.Integer(i.value({}, self._sp, 0))
                for i in self._structure.lowering.lowered.integers
                if i.role == "length"
                and i.size.is_Integer
                and i.parent == i.size
                and i.size % self._sp == 0
            }
            self._profiles[menu_step] = with_constants(profile, constants) if constants else profile
        return self._profiles[menu_step]

    def local_sizes(self, sizes: Sizes, rank: int = 0) -> dict[str, int]:
        """Returns the profile's symbols -> values on one rank: dims, and lengths of its pieces.

        Rank 0 of a group has the most: where a dim does not divide, the first ranks get one element
        more.
        """
        lowering = self._structure.lowering
        return lowering.lowered.local_sizes(lowering.program.dims(sizes), self._sp, rank)

    def predict(self, menu_step: int, sizes: Sizes) -> Prediction:
        """Returns costs at given sizes: the fullest rank's, and the largest peak of any rank."""
        key = _PredictionKey(tuple(sizes.items()), menu_step)
        if key not in self._predictions:
            fullest, *others = self._ranks(sizes)
            self._warn_of_fixed(fullest)
            costs, device = self._structure.run(menu_step), self._structure.device
            found = self._meter.read(costs, fullest, device)
            if others:
                peak = int(self._meter.most_alive(costs, others, device).max())
                found = replace(found, peak_bytes=max(found.peak_bytes, peak))
            if menu_step >= LEAVES:
                found = self._waiting(found, menu_step, fullest)
            self._predictions[key] = found
        return self._predictions[key]

    def _waiting(self, found: Prediction, menu_step: int, sizes: Mapping[str, int]) -> Prediction:
        """Returns a prediction with the bytes that leave, and the seconds waited for them."""
        structure, away = self._structure, self._away
        assert away is not None, "values leave where they may"
        schedule, copies = structure.schedule(menu_step)
        events = events_of(schedule, copies, self._meter, sizes, structure.device)
        out_s, back_s = away.waits(*events, structure.device)
        return replace(
            found,
            seconds_s=found.seconds_s + out_s + back_s,
            forward_s=found.forward_s + out_s,
            away_bytes=int(sum(size for _, kind, size in events[0] if kind == START)),
        )

    def _ranks(self, sizes: Sizes) -> list[dict[str, int]]:
        """Returns `local_sizes` of each rank whose costs may differ, the fullest rank first."""
        lowering = self._structure.lowering
        dims = lowering.program.dims(sizes)
        return lowering.lowered.sizes_of_ranks(dims, self._sp, self._meter.names)

    def _warn_of_fixed(self, sizes: Mapping[str, int]) -> None:
        """Warns if costs are read at a size for which torch's derivative was not traced."""
        fixed = self._structure.lowering.fixed
        other = {n: size for n, size in fixed.items() if max(2, sizes.get(n, size)) != size}
        if other:
            asked = ", ".join(f"{n} = {sizes[n]}" for n in other)
            known = ", ".join(f"{n} = {size}" for n, size in other.items())
            warnings.warn(
                f"bytes and seconds at {asked} are those of {known}: torch differentiates an op of "
                "this model for one size alone (what runs has a graph for each size, and is "
                "right); look for an op whose derivative goes through a dim in a loop, or compile "
                "one size at a time",
                stacklevel=3,
            )

    def live(self, menu_step: int, sizes: Sizes) -> list[tuple[str, int]]:
        """Returns name and live bytes of each program point, in order: the largest of any rank.

        The points after the one named "backward" belong to backward. In a model folded to three
        copies of its blocks the points are those of the copies; their bytes include activations of
        the other blocks.
        """
        costs = self._structure.run(menu_step)
        live = self._meter.most_alive(costs, self._ranks(sizes), self._structure.device)
        return list(zip(costs.timeline.names, map(int, live), strict=True))

    def usage(
        self, menu_step: int, sizes: Sizes, resident: Sequence[int], limit_bytes: float = inf
    ) -> Usage:
        """Returns the GPU memory that the fullest rank needs under torch's caching allocator.

        Args:
            menu_step: number of recompute steps taken.
            sizes: length of each dim, batch included.
            resident: bytes of each tensor that lives throughout (parameters, optimizer state), not
                of inputs.
            limit_bytes: memory of the GPU in bytes.
        """
        costs = self._structure.run(menu_step)
        return self._meter.usage(costs, self.local_sizes(sizes), resident, limit_bytes)


def structure_of(
    lowering: LoweredPair,
    degree: int,
    reference: Mapping[sympy.Symbol, int],
    device: Device,
    copies: Fold | None,
    like: Ledger | None = None,
    stays: frozenset[int] | None = None,
) -> Structure:
    """Returns the costs and the recompute menu of a lowered graph.

    The menu is computed at sizes that are the same on all ranks, so that all ranks recompute the
    same values, collectives among them.

    Args:
        lowering: lowered graph.
        degree: ranks at which recompute choices are weighed; it depends on the graph alone.
        reference: length of each dim at which recompute choices are weighed.
        device: device for which costs are predicted.
        copies: number of calls that each node of a folded program stands for; copies recompute
            alike. None: each node stands for one.
        like: ledger of another graph of the same tracer and device, whose costs are reused.
        stays: numbers of the gradients that live to the end of backward; None: all.
    """
    names, nodes = lowering.joint.names, [*lowering.joint.gm.graph.nodes]
    fuses = lowering.backend == "inductor"
    ledger = Ledger(names, degree, fuses=fuses, gpu=device.kernels_of, like=like, stays=stays)
    meter = Meter(ledger, nodes)
    decided, needed = lowering.choices()
    sizes = {i.name: i.value(reference, degree, 0) for i in lowering.lowered.integers}
    seconds, size_bytes = meter.seconds(decided, sizes, device), meter.sizes(decided, sizes)
    calls = _calls(decided, needed, seconds, size_bytes)
    choices: Menu | AlikeBlocks
    if copies is None:
        choices = recompute_menu(calls, _memory(lowering, meter, sizes, stays))
    else:
        choices = AlikeBlocks(calls, [copies.copy(call.name) for call in calls])
    keys = {name: key for key, name in lowering.keys.items()}
    found = Structure(lowering, device, ledger, meter, choices, copies, keys, {}, sizes=sizes)
    units = lowering.joint.units
    again = [u for u in lowering.joint.gathers if units and u.number in units.again]
    if not again:
        return found
    seconds = meter.seconds([u.gather for u in again], sizes, device)
    return replace(found, turns=_turns(found.menu, again, seconds.tolist(), copies))


def _turns(
    menu: Menu, units: Sequence[UnitNodes], seconds: Sequence[float], copies: Fold | None
) -> tuple[GatherStep, ...]:
    """Returns the steps that gather parameters again: a unit a step, fewest seconds a byte first.

    Of units at the same price the first of forward comes first, as it would be kept the longest. In
    a folded program the first copy joins the middle copy's step, as the middle copy stands for
    others.
    """
    size_bytes = [sum(int(t.nbytes) for t in u.gather.meta["val"]) for u in units]
    prices = [s / b for s, b in zip(seconds, size_bytes, strict=True)]
    where = {
        u.gather.name: OUTSIDE if copies is None else copies.copy(u.gather.name) for u in units
    }
    firsts = {run: (name, i) for i, (name, (run, copy)) in enumerate(where.items()) if copy == 0}
    middles = {run for run, copy in where.values() if copy == 1}
    found: list[GatherStep] = []
    taken: dict[str, int] = {}
    total_s, total_bytes = 0.0, 0
    for i in sorted(range(len(units)), key=lambda i: (prices[i], i)):
        name = units[i].gather.name
        run, copy = where[name]
        if copy == 0 and run in middles:
            continue  # joins the middle copy's step
        stands_for = 1 if copies is None else copies.count(name)
        kept = [0]
        if copy == 1 and run in firsts:
            first, place = firsts[run]
            taken |= {first: 0}
            total_s, total_bytes = total_s + seconds[place], total_bytes + size_bytes[place]
            if all(n.target is not _DENSE for n in units[i].whole):
                kept = [*range(stands_for - 1, -1, -1)]
        for count in kept:
            taken = {**taken, name: count}
            gathered = stands_for - count
            found.append(
                GatherStep(
                    _after(menu, prices[i]),
                    taken,
                    total_s + gathered * seconds[i],
                    total_bytes + gathered * size_bytes[i],
                )
            )
        total_s, total_bytes = found[-1].seconds, found[-1].size_bytes
    return tuple(found)


def _after(menu: Menu, seconds_per_byte: float) -> int:
    """Returns the number of menu steps that cost at most so many seconds per byte freed."""
    at = menu.at_price(seconds_per_byte)
    most = menu.seconds(at)
    return at if menu.alike else bisect_right(menu.steps, most, key=lambda k: menu.seconds(k + 1))


def split_constants(program: Program, placement: Placement) -> dict[int, int]:
    """Returns key -> size of each factor of constant size that a placement shards."""
    found: dict[int, int] = {}
    for node in program.gm.graph.nodes:
        chosen = placement.nodes.get(node.name)
        if chosen is None:
            continue
        sources = tensor_operands(node, program.info) if chosen.operands else []
        wanted = zip((*sources, node), (*chosen.operands, chosen.output), strict=True)
        for tensor, label in wanted:
            if label.sharded:
                factor = placement.factors[tensor.name][label.dim][label.index]
                if factor.size.is_Integer:
                    found[factor.key] = int(factor.size)
    return found


def _calls(
    nodes: Sequence[fx.Node],
    needed: frozenset[str],
    seconds: Iterable[float],
    sizes: Iterable[float],
) -> list[ForwardCall]:
    """Returns the calls of a joint graph's forward, described for the recompute menu."""
    known = {n.name for n in nodes}
    return [
        ForwardCall(
            name=node.name,
            reads=tuple(s.name for s in node.all_input_nodes if s.name in known),
            kind=(node.target, _shape(node.meta["val"])),
            seconds=float(cost),
            size_bytes=float(size),
            savable=isinstance(node.meta["val"], torch.Tensor) and node.target not in VIEWS,
            needed=node.name in needed,
        )
        for node, cost, size in zip(nodes, seconds, sizes, strict=True)
    ]


def _shape(value: object) -> object:
    """Returns a hashable key that is equal for values of equal dtypes and shapes."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(map(size_key, value.shape))
    if isinstance(value, list | tuple):
        return tuple(map(_shape, value))
    return leaf_key(value)


def _memory(
    lowering: LoweredPair, meter: Meter, sizes: Sizes, stays: frozenset[int] | None
) -> ValueMemory:
    """Returns storages, bytes and reads in backward of a lowered graph's values, at given sizes."""
    joint = lowering.joint
    storages, size_bytes, transient_bytes = meter.memory([*joint.gm.graph.nodes], sizes)
    run = lowering.schedule(())
    return ValueMemory(
        storages=storages,
        size_bytes=size_bytes,
        transient_bytes=transient_bytes,
        backward=tuple(
            (n.name, tuple(s.name for s in n.all_input_nodes))
            for n in run.backward
            if n.name not in joint.forward
        ),
        gradients=frozenset(
            n.name
            for number, n in enumerate(run.gradients)
            if n is not None and (stays is None or number in stays)
        ),
    )
