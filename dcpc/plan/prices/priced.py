"""Finds the best placement of a program and its costs, on a smaller program where blocks repeat."""

from __future__ import annotations

from dcpc.buckets import BATCH, Sizes
from dcpc.codegen import Key, LoweredPair, gather_key
from dcpc.ir import LEAVES, Placement
from dcpc.plan.folding import Lift
from dcpc.plan.prices.placements import PlacementSolver
from dcpc.plan.prices.studies import Structure, Study, split_constants, structure_of
from dcpc.plan.traced import PlacementId
from dcpc.symbolic_profile import Ledger

# Of placements with the same lowered graph: number of the sharding (see `PlacementId`), keys of the
# constant factors of which each rank has one element (a plain number), backend of the graph, and
# degree at which recompute choices are weighed.
_StructureKey = tuple[int, frozenset[int], str, int]


class Priced:
    """Finds placements and prices of a program; all placements here are of the whole program.

    Attributes:
        lift: map between the program and the smaller one that is placed and priced.
        traced: whole program.
        placements: solver of placements of the smaller program.
    """

    def __init__(self, lift: Lift) -> None:
        self.lift, self.traced = lift, lift.whole
        self.placements = PlacementSolver(lift.small, lift.copies({}))
        program, reference = lift.small.program, lift.small.reference
        self._reference = program.dims({BATCH: 1, **(reference or program.hints)})
        self._studies: dict[PlacementId, Study] = {}
        self._structures: dict[_StructureKey, Structure] = {}
        self._graphs: dict[_StructureKey, LoweredPair] = {}
        # Backend -> the first graph's ledger: equal calls cost the same in later graphs.
        self._ledgers: dict[str, Ledger] = {}

    def placement(self, sizes: Sizes, sp: int, *, near: bool = False) -> Placement:
        """Returns the placement of least predicted seconds; see `PlacementSolver.at`."""
        found = self.lift.up(self.placements.at(sizes, sp, near=near))
        assert found.sp == sp, f"got a placement for sp {found.sp}; expected one for sp {sp}"
        return found

    def at(self, placement: Placement) -> Study:
        """Returns the prices of a placement: its recompute menu, and costs at any sizes."""
        small = self.lift.down(placement)
        key = self.lift.small.id_of(small)
        if key not in self._studies:
            structure = self._structure(small, self.traced.backend)
            self._studies[key] = Study(structure, small.sp, self.traced.away)
        return self._studies[key]

    def made_again(
        self,
        placement: Placement,
        menu_step: int,
        backend: str = "",
        *,
        gathers_again: frozenset[int] | None = None,
    ) -> set[Key]:
        """Returns keys of all values recomputed after `menu_step` recompute steps, in all blocks.

        Args:
            placement: placement of the whole program.
            menu_step: number of recompute steps taken.
            backend: backend of the graph; default: the model's.
            gathers_again: numbers of the parameter units that backward gathers again; None: as the
                steps say.
        """
        structure = self._structure(self.lift.down(placement), backend or self.traced.backend)
        found = self.lift.every_block(structure.made_again(menu_step))
        if self.traced.units is None:
            return found
        if gathers_again is None:
            gathers_again = self.lift.gathered_again(structure.gathered_again(menu_step))
        return found | {gather_key(self.traced.units.units[k]) for k in gathers_again}

    def away(self, placement: Placement, menu_step: int, backend: str = "") -> set[Key]:
        """Returns keys of the values that leave the device, in all blocks; see `made_again`."""
        if menu_step < LEAVES:
            return set()
        structure = self._structure(self.lift.down(placement), backend or self.traced.backend)
        return self.lift.every_block(structure.away(menu_step))

    def gathered_again(self, placement: Placement, menu_step: int) -> frozenset[int]:
        """Returns numbers of the units that backward gathers again after `menu_step` steps."""
        structure = self._structure(self.lift.down(placement), self.traced.backend)
        return self.lift.gathered_again(structure.gathered_again(menu_step))

    def _structure(self, small: Placement, backend: str) -> Structure:
        """Returns the costs that all placements with the same sharding share, at any degree."""
        traced, sp = self.lift.small, small.sp
        constants = split_constants(traced.program, small)
        single = frozenset(key for key, size in constants.items() if size == sp)
        alone = bool(single) or sp == 1
        degree = sp if alone else 2 * max(chosen.across for chosen in small.nodes.values())
        key = traced.id_of(small).split, single, backend, degree
        if key not in self._graphs:
            self._graphs[key] = traced.lowering(small, None, backend, any_degree=bool(constants))
        graph = self._graphs[key]
        if constants and not graph.any_degree:
            degree = sp
            key = (*key[:3], degree)
            graph = traced.lowering(small, None, backend)
        if key not in self._structures:
            copies, known = self.lift.copies(graph.joint.owner), self._ledgers.get(backend)
            found = structure_of(
                graph, degree, self._reference, traced.device, copies, known,
                traced.staying(graph),
            )  # fmt: skip
            self._structures[key] = found
            self._ledgers.setdefault(backend, found.ledger)
        return self._structures[key]
