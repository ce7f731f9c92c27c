"""What is known of lowered graphs for planning: what their calls cost, and what to make again.

A rank's graph hardly depends on how many ranks there are: the group's name, and pieces of
constants, which are integers here as pieces of dims are. So placements that split alike at several
degrees have one graph, one menu of recompute and one timeline for each of its plans; only what
collectives cost differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from dcpc.codegen import VIEWS, Key, Lowering
from dcpc.folding import Folded
from dcpc.ir import Fold, Placement, Profile, Program, tensor_operands
from dcpc.leaves import leaf_key, size_key
from dcpc.passes.recompute import AlikeBlocks, Call, Memory, Menu, recompute_menu
from dcpc.symbolic_profile import Costs, Device, Ledger, Meter, with_constants

Sizes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Structure:
    """One lowered graph.

    Attributes:
        lowering: the graph, of one of the degrees.
        ledger: costs of its nodes, at a degree that the graph alone tells.
        meter: reads them at sizes.
        alike: the blocks of a folded program, which choose alike; None: each for itself.
        whole: the menu of other programs.
        copies: what its nodes stand for, None where each stands for itself.
        keys: name of a value -> what it is called in every trace.
        costs: recompute -> what runs then costs.
    """

    lowering: Lowering
    ledger: Ledger
    meter: Meter
    alike: AlikeBlocks | None
    whole: Menu | None
    copies: Fold | None
    keys: Mapping[str, Key]
    costs: dict[int, Costs]

    @property
    def menu(self) -> Menu:
        """Choices of what backward makes again."""
        found = self.whole if self.alike is None else self.alike.menu
        assert found is not None, "a program is folded or not"
        return found

    def made_again(self, recompute: int) -> set[Key]:
        """Returns what so many steps of recompute make again."""
        if self.alike is not None and not recompute:
            names = self.alike.least
        else:
            names = self.menu.made_again(recompute)
        return {self.keys[name] for name in names}

    def run(self, recompute: int) -> Costs:
        """Returns what runs if so many steps of recompute are taken."""
        if recompute not in self.costs:
            schedule = self.lowering.schedule(self.made_again(recompute))
            self.costs[recompute] = self.ledger.costs(schedule, self.copies)
        return self.costs[recompute]

    def at(self, sp: int) -> Study:
        """Returns it with the costs of a degree."""
        ledger = self.ledger.at(sp)
        constants = {
            i.symbol: sympy.Integer(i.value({}, sp, 0))
            for i in self.lowering.lowered.integers
            if i.role == "length" and i.size.is_Integer and i.parent == i.size and i.size % sp == 0
        }
        return Study(self, ledger, self.meter.at(ledger), constants)


@dataclass(frozen=True, slots=True)
class Study:
    """A lowered graph at one degree.

    Attributes:
        structure: what it has in common with other degrees.
        ledger: costs of its nodes.
        meter: reads them at sizes.
        constants: pieces of constants that are the same on all ranks.
    """

    structure: Structure
    ledger: Ledger
    meter: Meter
    constants: Mapping[sympy.Symbol, sympy.Integer]

    def profile(self, costs: Costs) -> Profile:
        """Returns costs of the structure as expressions of the dims."""
        profile = self.ledger.profile(costs)
        return with_constants(profile, self.constants) if self.constants else profile


def structure_of(
    lowering: Lowering,
    degree: int,
    reference: Mapping[sympy.Symbol, int],
    device: Device,
    folded: Folded | None,
    like: Structure | None = None,
) -> Structure:
    """Returns what is known of a lowered graph.

    Its menu is made of sizes that are the same on all ranks: they make the same values again,
    collectives among them.

    Args:
        lowering: the graph.
        degree: ranks at which choices of recompute are weighed; that of the graph, whoever asks.
        reference: lengths of all dims at which they are.
        device: what costs are predicted for.
        folded: what the program stands for, where it is a folded one: equal blocks choose alike.
        like: another of the same tracer and device.
    """
    names, nodes = lowering.joint.names, [*lowering.joint.gm.graph.nodes]
    known = None if like is None else like.ledger
    fuses = lowering.backend == "inductor"
    ledger = Ledger(names, degree, fuses=fuses, gpu=device.gpu, like=known)
    meter = Meter(ledger, nodes)
    decided, needed = lowering.choices()
    sizes = {i.name: i.value(reference, degree, 0) for i in lowering.lowered.integers}
    calls = _calls(decided, needed, *meter.calls(decided, sizes, device))
    copies = None if folded is None else folded.copies(lowering.joint.owner)
    alike = whole = None
    if copies is None:
        whole = recompute_menu(calls, _memory(lowering, meter, sizes))
    else:
        alike = AlikeBlocks(calls, [copies.copy(call.name) for call in calls])
    keys = {name: key for key, name in lowering.keys.items()}
    return Structure(lowering, ledger, meter, alike, whole, copies, keys, {})


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
) -> list[Call]:
    """Returns the calls of a joint graph's forward as the menu wants them."""
    known = {n.name for n in nodes}
    return [
        Call(
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


def _memory(lowering: Lowering, meter: Meter, sizes: Sizes) -> Memory:
    """Returns where the values of a lowered graph lie, at given sizes."""
    joint = lowering.joint
    storages, size_bytes, transient_bytes = meter.memory([*joint.gm.graph.nodes], sizes)
    run = lowering.schedule(())
    return Memory(
        storages=storages,
        size_bytes=size_bytes,
        transient_bytes=transient_bytes,
        backward=tuple(
            (n.name, tuple(s.name for s in n.all_input_nodes))
            for n in run.backward
            if n.name not in joint.forward
        ),
        gradients=frozenset(n.name for n in run.gradients if n is not None),
    )

