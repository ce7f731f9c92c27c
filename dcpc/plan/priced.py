"""How a program is best split, and what it then costs, asked of the program that stands for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dcpc.buckets import BATCH, Sizes
from dcpc.codegen import Key, LoweredPair, gather_key
from dcpc.ir import Placement
from dcpc.plan.folding import Lift
from dcpc.plan.placements import Placements
from dcpc.plan.studies import Structure, Study, split_constants, structure_of
from dcpc.plan.traced import PlacementId
from dcpc.symbolic_profile import Ledger


@dataclass(frozen=True, slots=True)
class _StructureKey:
    """What placements share that have one lowered graph.

    Attributes:
        split: how they split, see `PlacementId`.
        single: the constant factors of which a rank has one element, which is a number.
        backend: of the graph.
        degree: ranks at which choices of recompute are weighed.
    """

    split: int
    single: frozenset[int]
    backend: str
    degree: int


class Priced:
    """Placements and costs of a program. All placements here are those of the whole program.

    Args:
        lift: between the program and the one that is placed and priced.

    Attributes:
        lift: the same.
        traced: the whole program.
        placements: of the program that stands for it.
    """

    def __init__(self, lift: Lift) -> None:
        self.lift, self.traced = lift, lift.whole
        self.placements = Placements(lift.small, lift.copies({}))
        program, reference = lift.small.program, lift.small.reference
        self._reference = program.dims({BATCH: 1, **(reference or program.hints)})
        self._studies: dict[PlacementId, Study] = {}
        self._structures: dict[_StructureKey, Structure] = {}
        self._graphs: dict[_StructureKey, LoweredPair] = {}
        # By backend the first graph's: calls on the same fake tensors cost the same in all others.
        self._ledgers: dict[str, Ledger] = {}

    def placement(self, sizes: Sizes, sp: int, *, near: bool = False) -> Placement:
        """Returns the placement of least predicted time at these sizes; see `Placements.at`."""
        found = self.lift.up(self.placements.at(sizes, sp, near=near))
        assert found.sp == sp, f"got a placement for sp {found.sp}; expected one for sp {sp}"
        return found

    def at(self, placement: Placement) -> Study:
        """Returns what is known of a placement: its menu of recompute, and costs at any sizes."""
        small = self.lift.down(placement)
        key = self.lift.small.id_of(small)
        if key not in self._studies:
            self._studies[key] = Study(self._structure(small, self.traced.backend), small.sp)
        return self._studies[key]

    def made_again(
        self,
        placement: Placement,
        menu_step: int,
        backend: str = "",
        *,
        gathers_again: frozenset[int] | None = None,
    ) -> set[Key]:
        """Returns what so many steps of recompute make again, of all blocks.

        Args:
            placement: of the program.
            menu_step: how many.
            backend: of the graph; default: the model's.
            gathers_again: units of parameters that are among it; None: as the steps say.
        """
        structure = self._structure(self.lift.down(placement), backend or self.traced.backend)
        found = self.lift.every_block(structure.made_again(menu_step))
        if self.traced.units is None:
            return found
        if gathers_again is None:
            gathers_again = self.lift.gathered_again(structure.gathered_again(menu_step))
        return found | {gather_key(self.traced.units.units[k]) for k in gathers_again}

    def gathered_again(self, placement: Placement, menu_step: int) -> frozenset[int]:
        """Returns the units of parameters that so many steps of recompute gather again."""
        structure = self._structure(self.lift.down(placement), self.traced.backend)
        return self.lift.gathered_again(structure.gathered_again(menu_step))

    def _structure(self, small: Placement, backend: str) -> Structure:
        """Returns what placements have in common that split alike at any degree."""
        traced, sp = self.lift.small, small.sp
        constants = split_constants(traced.program, small)
        single = frozenset(key for key, size in constants.items() if size == sp)
        alone = bool(single) or sp == 1
        degree = sp if alone else 2 * max(chosen.across for chosen in small.nodes.values())
        key = _StructureKey(traced.id_of(small).split, single, backend, degree)
        if key not in self._graphs:
            self._graphs[key] = traced.lowering(small, None, backend, any_degree=bool(constants))
        graph = self._graphs[key]
        if constants and not graph.any_degree:
            key = replace(key, degree=sp)
            graph = traced.lowering(small, None, backend)
        if key not in self._structures:
            copies, known = self.lift.copies(graph.joint.owner), self._ledgers.get(backend)
            found = structure_of(
                graph, key.degree, self._reference, traced.device, copies, known,
                traced.staying(graph),
            )  # fmt: skip
            self._structures[key] = found
            self._ledgers.setdefault(backend, found.ledger)
        return self._structures[key]
