"""What is known of lowered graphs for planning: what their calls cost, and what to make again.

A rank's graph hardly depends on how many ranks there are: the group's name, and pieces of
constants, which are integers here as pieces of dims are. So placements that split alike at several
degrees have one graph, one menu of recompute and one timeline for each of its plans; only what
collectives cost differs.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import inf

import sympy
import torch
from torch import fx

from dcpc.buckets import Sizes
from dcpc.codegen import VIEWS, Key, LoweredPair, UnitNodes
from dcpc.fx.leaves import leaf_key, size_key
from dcpc.ir import OUTSIDE, Fold, Placement, Profile, Program, tensor_operands
from dcpc.passes.recompute.menu import AlikeBlocks, ForwardCall, Menu, ValueMemory, recompute_menu
from dcpc.symbolic_profile import (
    Costs,
    Device,
    Ledger,
    Meter,
    Prediction,
    Usage,
    with_constants,
)

_DENSE = torch.ops.aten.clone.default  # of a parameter that does not lie row after row


@dataclass(frozen=True, slots=True)
class GatherStep:
    """A step of recompute that gathers parameters again.

    Attributes:
        after: steps of the menu before it.
        gathers: from it on, the calls that gather again, and how many of the copies that each
            stands for keep theirs all the same, from the last on.
        seconds: of all these gathers.
        size_bytes: of what they gather.
    """

    after: int
    gathers: Mapping[str, int]
    seconds: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Structure:
    """One lowered graph.

    Attributes:
        lowering: the graph, of one of the degrees.
        device: what costs are predicted for.
        ledger: costs of its nodes, at a degree that the graph alone tells.
        meter: reads them at sizes.
        choices: the menu; of a folded program its blocks, which choose alike.
        copies: what its nodes stand for, None where each stands for itself.
        keys: name of a value -> what it is called in every trace.
        costs: steps of recompute -> what runs then costs.
        turns: the steps that gather parameters again in backward, in order.
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

    @property
    def menu(self) -> Menu:
        """Choices of what backward makes again."""
        return self.choices.menu if isinstance(self.choices, AlikeBlocks) else self.choices

    @property
    def steps(self) -> int:
        """Steps of recompute there are; those that gather parameters again are among them."""
        return len(self.menu.steps) + len(self.turns)

    def turn(self, menu_step: int) -> GatherStep | None:
        """Returns the last of so many steps that gathers parameters again; None: none does."""
        taken = self._turns_in(menu_step)
        return self.turns[taken - 1] if taken else None

    def gathered_again(self, menu_step: int) -> dict[int, int]:
        """Returns number of a unit -> copies that it stands for and that keep theirs.

        Args:
            menu_step: steps of recompute that are taken.
        """
        turn = self.turn(menu_step)
        gathers = {} if turn is None else turn.gathers
        units = self.lowering.joint.gathers
        return {u.number: gathers[u.gather.name] for u in units if u.gather.name in gathers}

    def made_again(self, menu_step: int) -> set[Key]:
        """Returns what so many steps of recompute make again, but for parameters."""
        return {self.keys[name] for name in self._made_again(menu_step)}

    def _made_again(self, menu_step: int) -> frozenset[str]:
        of_menu = menu_step - self._turns_in(menu_step)
        if isinstance(self.choices, AlikeBlocks) and not of_menu:
            return self.choices.least
        return self.menu.made_again(of_menu)

    def _turns_in(self, menu_step: int) -> int:
        return sum(turn.after + i < menu_step for i, turn in enumerate(self.turns))

    def run(self, menu_step: int) -> Costs:
        """Returns what runs if so many steps of recompute are taken."""
        if menu_step not in self.costs:
            turn = self.turn(menu_step)
            gathers = {} if turn is None else turn.gathers
            names = self._made_again(menu_step) | gathers.keys()
            schedule = self.lowering.schedule({self.keys[name] for name in names})
            copies = self.copies and replace(self.copies, kept=gathers)
            self.costs[menu_step] = self.ledger.costs(schedule, copies)
        return self.costs[menu_step]


@dataclass(frozen=True, slots=True)
class _RunSizes:
    sizes: tuple[tuple[str, int], ...]
    menu_step: int


class Study:
    """A lowered graph at one degree: its menu, and its costs at any sizes.

    Args:
        structure: what it has in common with other degrees.
        sp: the degree.
    """

    def __init__(self, structure: Structure, sp: int) -> None:
        self._structure, self._sp = structure, sp
        self._ledger = structure.ledger.at(sp)
        self._meter = structure.meter.at(self._ledger)
        self._profiles: dict[int, Profile] = {}
        self._predictions: dict[_RunSizes, Prediction] = {}

    @property
    def menu(self) -> Menu:
        """The choices of what backward makes again, cheapest steps first."""
        return self._structure.menu

    @property
    def steps(self) -> int:
        """Steps of recompute there are, up to making again all that can be."""
        return self._structure.steps

    @property
    def turns(self) -> tuple[int, ...]:
        """Steps of recompute before each that gathers parameters again."""
        return tuple(turn.after + i for i, turn in enumerate(self._structure.turns))

    def gathers_cost(self, menu_step: int) -> tuple[float, int]:
        """Returns seconds and bytes of what so many steps of recompute gather again."""
        turn = self._structure.turn(menu_step)
        return (turn.seconds, turn.size_bytes) if turn else (0.0, 0)

    @property
    def priced(self) -> AbstractSet[int]:
        """The numbers of steps of recompute whose costs are known at any sizes."""
        return self._structure.costs.keys()

    def profile(self, menu_step: int) -> Profile:
        """Returns the symbolic costs of a recompute setting."""
        if menu_step not in self._profiles:
            profile = self._ledger.profile(self._structure.run(menu_step))
            # pieces of constants that are the same on all ranks
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
        """Returns the sizes of a profile's symbols: dims, and lengths of one rank's pieces.

        Rank 0 of a group is the fullest: the first ranks get one element more.
        """
        lowering = self._structure.lowering
        return lowering.lowered.local_sizes(lowering.program.dims(sizes), self._sp, rank)

    def predict(self, menu_step: int, sizes: Sizes) -> Prediction:
        """Returns the costs at given sizes on the fullest rank; the peak is any rank's largest."""
        key = _RunSizes(tuple(sizes.items()), menu_step)
        if key not in self._predictions:
            fullest, *others = self._ranks(sizes)
            self._warn_of_fixed(fullest)
            costs, device = self._structure.run(menu_step), self._structure.device
            found = self._meter.read(costs, fullest, device)
            if others:
                peak = int(self._meter.most_alive(costs, others, device).max())
                found = replace(found, peak_bytes=max(found.peak_bytes, peak))
            self._predictions[key] = found
        return self._predictions[key]

    def _ranks(self, sizes: Sizes) -> list[dict[str, int]]:
        """Returns `local_sizes` of each rank whose costs may differ, the fullest first."""
        lowering = self._structure.lowering
        dims = lowering.program.dims(sizes)
        return lowering.lowered.sizes_of_ranks(dims, self._sp, self._meter.names)

    def _warn_of_fixed(self, sizes: Mapping[str, int]) -> None:
        """Warns where costs are read at sizes that the graph is not for."""
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
        """Returns the points of a forward and a backward, and the most alive at each on a rank.

        After the point "backward" those of backward come. Of a model planned as three copies of
        its blocks the points are theirs, at which what the others keep is counted.
        """
        costs = self._structure.run(menu_step)
        live = self._meter.most_alive(costs, self._ranks(sizes), self._structure.device)
        return list(zip(costs.timeline.names, map(int, live), strict=True))

    def usage(
        self, menu_step: int, sizes: Sizes, resident: Sequence[int], limit_bytes: float = inf
    ) -> Usage:
        """Returns what the fullest rank needs of a GPU as torch's allocator gives it out.

        Args:
            menu_step: steps of the menu.
            sizes: lengths of the dims.
            resident: bytes of each tensor that stays, inputs excepted.
            limit_bytes: of the GPU.
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
    """Returns what is known of a lowered graph.

    Its menu is made of sizes that are the same on all ranks: they make the same values again,
    collectives among them.

    Args:
        lowering: the graph.
        degree: ranks at which choices of recompute are weighed; that of the graph, whoever asks.
        reference: lengths of all dims at which they are.
        device: what costs are predicted for.
        copies: what its nodes stand for, None where each stands for itself: copies choose alike.
        like: costs of another graph of the same tracer and device.
        stays: numbers of the gradients that live to the end of backward; None: all.
    """
    names, nodes = lowering.joint.names, [*lowering.joint.gm.graph.nodes]
    fuses = lowering.backend == "inductor"
    ledger = Ledger(names, degree, fuses=fuses, gpu=device.kernels_of, like=like, stays=stays)
    meter = Meter(ledger, nodes)
    decided, needed = lowering.choices()
    sizes = {i.name: i.value(reference, degree, 0) for i in lowering.lowered.integers}
    calls = _calls(decided, needed, *meter.calls(decided, sizes, device))
    choices: Menu | AlikeBlocks
    if copies is None:
        choices = recompute_menu(calls, _memory(lowering, meter, sizes, stays))
    else:
        choices = AlikeBlocks(calls, [copies.copy(call.name) for call in calls])
    keys = {name: key for key, name in lowering.keys.items()}
    found = Structure(lowering, device, ledger, meter, choices, copies, keys, {})
    units = lowering.joint.units
    again = [u for u in lowering.joint.gathers if units and u.number in units.again]
    if not again:
        return found
    seconds, _ = meter.calls([u.gather for u in again], sizes, device)
    return replace(found, turns=_turns(found.menu, again, seconds.tolist(), copies))


def _turns(
    menu: Menu, units: Sequence[UnitNodes], seconds: Sequence[float], copies: Fold | None
) -> tuple[GatherStep, ...]:
    """Returns the steps that gather again, one unit after the other, the cheapest a byte first.

    Of those that cost the same the first in forward: it would be kept for the longest. Of copies
    that stand for more, the first two gather again together, as the second one is what others are
    like.

    Args:
        menu: among whose steps they are.
        units: that backward may gather again, in the order of forward.
        seconds: of each one's gather.
        copies: what they stand for.
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
            continue  # with the middle one
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
    """Returns the steps that cost at most so much a byte; a larger menu has others between."""
    at = menu.at_price(seconds_per_byte)
    most = menu.seconds(at)
    return at if menu.alike else bisect_right(menu.steps, most, key=lambda k: menu.seconds(k + 1))


def split_constants(program: Program, placement: Placement) -> dict[int, int]:
    """Returns the factors of constant size that a placement splits: key -> size."""
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
    """Returns the calls of a joint graph's forward as the menu wants them."""
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
    """Returns what values of equal dtypes and shapes share."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(map(size_key, value.shape))
    if isinstance(value, list | tuple):
        return tuple(map(_shape, value))
    return leaf_key(value)


def _memory(
    lowering: LoweredPair, meter: Meter, sizes: Sizes, stays: frozenset[int] | None
) -> ValueMemory:
    """Returns where the values of a lowered graph lie, at given sizes."""
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
