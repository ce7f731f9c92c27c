"""Everything made from one program, made once and kept: placements, graphs, profiles, variants."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf

import sympy
import torch

from dcpc.buckets import BATCH
from dcpc.codegen import Key, Library, Lowering, Tracer, Variant, decompositions
from dcpc.folding import FEWEST, Folded, fold
from dcpc.ir import Fold, Partition, Placement, Profile, Program
from dcpc.passes.lowerings import restricted
from dcpc.passes.placement import Rates
from dcpc.passes.recompute import Menu
from dcpc.passes.sharding import Sharding, analyse
from dcpc.placements import Lifted, Placements, Solved, compute_dtype, rates_of
from dcpc.studies import Structure, Study, split_constants, structure_of
from dcpc.symbolic_profile import Costs, Device, Prediction, Usage

Sizes = Mapping[str, int]
Inspect = Callable[["Variants", Placement, Lowering, Partition, Sizes], None]


class Variants:
    """The variants of one program on one device.

    Args:
        program: the traced model.
        sharding: its factors and alternatives.
        device: what costs are predicted for.
        backend: "eager" or "inductor".
        tensors: gives placeholder name -> parameter, buffer or constant.
        reference: lengths at which choices of recompute are weighed: those of the largest bucket;
            default: those of the trace.
        folded: what the program stands for, where it is a folded one.
        fewest: copies of a block from which on three of them are planned for all.
        like: others of the same program, whose derivatives of calls are used.
        libraries: derivatives of calls by backend, for several programs of one model; default: own.

    Attributes:
        planner: what places and prices: the variants of the folded program, or these themselves.
        placements: how the program's values are split.
        inspect: called with the graphs of each variant, and the sizes that it is built for, before
            it is compiled; None: nobody is.
    """

    def __init__(
        self,
        program: Program,
        sharding: Sharding,
        device: Device,
        backend: str,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        reference: Sizes | None = None,
        folded: Folded | None = None,
        fewest: int = FEWEST,
        like: Variants | None = None,
        libraries: dict[str, Library] | None = None,
    ) -> None:
        self.program, self.sharding, self.device, self.backend = program, sharding, device, backend
        self.reference = {BATCH: 1, **(reference or program.hints)}
        self._studies: dict[tuple[object, ...], Study] = {}
        self._structures: dict[tuple[object, ...], Structure] = {}
        self._one_degree: set[tuple[object, ...]] = set()  # keys that need a structure a degree
        self.tensors = tensors
        known = {} if like is None else like._libraries
        self._libraries: dict[str, Library] = known if libraries is None else libraries
        self._fold = folded
        self.planner = self._folded(fewest) if folded is None else self
        self.placements = self._all_placements()
        self._local_sizes: dict[tuple[object, ...], dict[str, int]] = {}
        self._tracers: dict[str, Tracer] = {} if like is None else like._tracers
        self._lowerings: dict[tuple[object, ...], Lowering] = {}
        self._partitions: dict[tuple[object, ...], Partition] = {}
        self._profiles: dict[tuple[object, ...], Profile] = {}
        self._predictions: dict[tuple[object, ...], Prediction] = {}
        self._variants: dict[tuple[object, ...], list[Variant]] = {}
        self.inspect: Inspect | None = None

    def _folded(self, fewest: int) -> Variants:
        """Returns what plans: the variants of three copies of each repeated block, or these."""
        folded = fold(self.program, fewest)
        if folded is None:
            return self
        small = analyse(folded.program, bool(self.sharding.derived))
        small = restricted(folded.program, small, self.sharding.attention)
        if not folded.agrees(self.sharding, small):
            return self
        return Variants(
            folded.program,
            small,
            self.device,
            self.backend,
            self.tensors,
            self.reference,
            folded,
            libraries=self._libraries,
        )

    def _all_placements(self) -> Placements:
        planner = self.planner
        if planner is self:
            return Solved(self.program, self.sharding, self.device, self._copies({}))
        assert planner._fold is not None, "a planner that is not this one is of a folded program"
        return Lifted(planner.placements, planner._fold, self.program, self.sharding)

    def placement(self, sizes: Sizes, sp: int, *, near: bool = False) -> Placement:
        """Returns the placement of least predicted time at these sizes; see `Placements.at`."""
        found = self.placements.at(sizes, sp, near=near)
        assert found.sp == sp, f"got a placement for sp {found.sp}; expected one for sp {sp}"
        return found

    def _copies(self, owner: Mapping[str, str]) -> Fold | None:
        """Returns what the nodes of a graph stand for, None where each stands for itself."""
        return None if self._fold is None else self._fold.copies(owner)

    def _planned(self, placement: Placement) -> Placement:
        """Returns the planner's own placement of what was lifted from it."""
        return self.placements.origin(placement)

    def rates(self, sp: int) -> Rates:
        """Returns what the placement needs to know of the device, for groups of `sp` ranks."""
        return rates_of(self.device, sp, compute_dtype(self.program))

    def lowering(
        self, placement: Placement, hints: tuple[int, ...] | None = None, backend: str = ""
    ) -> Lowering:
        """Returns the lowered and differentiated graph of a placement.

        Args:
            placement: of the program.
            hints: sizes to trace at, () for the usual ones; None: traced with all other graphs.
            backend: default: the model's.
        """
        backend = backend or self.backend
        key = (self.placements.number(placement), hints, backend)
        if key not in self._lowerings:
            tracer = self._tracer(hints, backend)
            self._lowerings[key] = Lowering(tracer, placement, group_name(placement.sp), backend)
        return self._lowerings[key]

    @property
    def runs_what_was_priced(self) -> bool:
        """Whether the graphs that are priced are those that run: no fold, no trace for Inductor."""
        return self.backend == "eager" and self.planner is self

    def _tracer(self, hints: tuple[int, ...] | None, backend: str) -> Tracer:
        """Returns what differentiates a lowered graph: without hints one for all placements."""
        if hints is not None:
            return Tracer(self.program, self.tensors(), Library(decompositions(backend)), hints)
        if backend not in self._tracers:
            if backend not in self._libraries:
                self._libraries[backend] = Library(decompositions(backend))
            library = self._libraries[backend]
            self._tracers[backend] = Tracer(self.program, self.tensors(), library)
        return self._tracers[backend]

    def partition(
        self,
        placement: Placement,
        recompute: int,
        hints: tuple[int, ...] | None = None,
        backend: str = "",
    ) -> Partition:
        """Returns forward and backward in which `recompute` steps of the menu are taken."""
        key = (self.placements.number(placement), recompute, hints, backend or self.backend)
        if key not in self._partitions:
            lowering = self.lowering(placement, hints, backend)
            chosen = self.made_again(placement, recompute, backend)
            self._partitions[key] = lowering.partition(chosen)
        return self._partitions[key]

    def menu(self, placement: Placement) -> Menu:
        """Returns the choices of what backward makes again, cheapest steps first."""
        return self.planner._study(self._planned(placement)).structure.menu

    def steps(self, placement: Placement) -> int:
        """Returns how many steps of recompute there are, up to making again all that can be."""
        return len(self.menu(placement).steps)

    def priced(self, placement: Placement) -> AbstractSet[int]:
        """Returns the numbers of steps of recompute whose costs are known at any sizes."""
        return self.planner._study(self._planned(placement)).structure.costs.keys()

    def _study(self, placement: Placement, backend: str = "") -> Study:
        """Returns the costs and choices of a placement's lowered graph."""
        key = (self.placements.number(placement), backend or self.backend)
        if key not in self._studies:
            self._studies[key] = self._structure(placement, *key).at(placement.sp)
        return self._studies[key]

    def _structure(self, placement: Placement, number: int, backend: str) -> Structure:
        """Returns what placements have in common that split alike at any degree."""
        constants = split_constants(self.program, placement)
        single = frozenset(key for key, size in constants.items() if size == placement.sp)
        key: tuple[object, ...] = (self.placements.split(number), single, backend)
        key = (*key, placement.sp) if key in self._one_degree else key
        if key not in self._structures:
            lowering = self._for_any_degree(placement, backend) if constants else None
            rings = (chosen.across for chosen in placement.nodes.values())
            degree = placement.sp if single or placement.sp == 1 else 2 * max(rings)
            if lowering is not None and not lowering.any_degree:
                degree = placement.sp
                self._one_degree.add(key[:3])
                key = (*key[:3], degree)
            self._structures[key] = structure_of(
                lowering or self.lowering(placement, None, backend),
                degree,
                self._dims(self.reference),
                self.device,
                self._fold,
                next((s for k, s in self._structures.items() if k[2] == backend), None),
            )
        return self._structures[key]

    def _for_any_degree(self, placement: Placement, backend: str) -> Lowering:
        tracer, group = self._tracer(None, backend), group_name(placement.sp)
        return Lowering(tracer, placement, group, backend, any_degree=True)

    def made_again(self, placement: Placement, recompute: int, backend: str = "") -> set[Key]:
        """Returns what so many steps of recompute make again, of all blocks."""
        if self.planner is not self:
            return self.planner.made_again(self._planned(placement), recompute, backend)
        chosen = self._study(placement, backend).structure.made_again(recompute)
        if self._fold is not None:
            twins = self._fold.twins
            chosen |= {(twin, *k[1:]) for k in chosen for twin in twins.get(k[0], ())}
        return chosen

    def _costs(self, placement: Placement, recompute: int) -> Costs:
        """Returns what runs if so many steps of recompute are taken, and what it costs."""
        return self._study(placement).structure.run(recompute)

    def profile(self, placement: Placement, recompute: int) -> Profile:
        """Returns the symbolic costs of a placement and recompute setting."""
        if self.planner is not self:
            return self.planner.profile(self._planned(placement), recompute)
        key = (self.placements.number(placement), recompute)
        if key not in self._profiles:
            costs = self._costs(placement, recompute)
            self._profiles[key] = self._study(placement).profile(costs)
        return self._profiles[key]

    def local_sizes(self, placement: Placement, sizes: Sizes, rank: int = 0) -> dict[str, int]:
        """Returns the sizes of a profile's symbols: dims, and lengths of one rank's pieces.

        Rank 0 of a group is the fullest: the first ranks get one element more.
        """
        if self.planner is not self:
            return self.planner.local_sizes(self._planned(placement), sizes, rank)
        key = (self.placements.number(placement), tuple(sizes.items()), rank)
        if key not in self._local_sizes:
            dims = self._dims(sizes)
            integers = self._study(placement).structure.lowering.lowered.integers
            self._local_sizes[key] = {i.name: i.value(dims, placement.sp, rank) for i in integers}
        return self._local_sizes[key]

    def _dims(self, sizes: Sizes) -> dict[sympy.Symbol, int]:
        """Symbol -> length; a model without a batch has no symbol for it."""
        symbols = self.program.symbols
        return {symbols[n]: size for n, size in sizes.items() if n in symbols}

    def predict(self, placement: Placement, recompute: int, sizes: Sizes) -> Prediction:
        """Returns the costs at given sizes, on the fullest rank."""
        if self.planner is not self:
            return self.planner.predict(self._planned(placement), recompute, sizes)
        key = (self.placements.number(placement), recompute, tuple(sizes.items()))
        if key not in self._predictions:
            dims = self.local_sizes(placement, sizes)
            self._warn_of_fixed(placement, dims)
            costs = self._costs(placement, recompute)
            found = self._study(placement).meter.read(costs, dims, self.device)
            self._predictions[key] = found
        return self._predictions[key]

    def _warn_of_fixed(self, placement: Placement, sizes: Mapping[str, int]) -> None:
        """Warns where costs are read at sizes that the graph is not for."""
        fixed = self._study(placement).structure.lowering.fixed
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

    def live(self, placement: Placement, recompute: int, sizes: Sizes) -> list[tuple[str, int]]:
        """Returns the points of a forward and a backward, and the bytes alive at each.

        After the point "backward" those of backward come. Of a model planned as three copies of
        its blocks the points are theirs, at which what the others keep is counted.
        """
        if self.planner is not self:
            return self.planner.live(self._planned(placement), recompute, sizes)
        costs = self._costs(placement, recompute)
        dims = self.local_sizes(placement, sizes)
        live = self._study(placement).meter.live_bytes(costs, dims, self.device)
        return list(zip(costs.timeline.names, map(int, live), strict=True))

    def usage(
        self,
        placement: Placement,
        recompute: int,
        sizes: Sizes,
        resident: Sequence[int],
        limit_bytes: float = inf,
    ) -> Usage:
        """Returns what the fullest rank needs of a GPU as torch's allocator gives it out.

        Args:
            placement: of the program.
            recompute: steps of the menu.
            sizes: lengths of the dims.
            resident: bytes of each tensor that stays, inputs excepted.
            limit_bytes: of the GPU.
        """
        if self.planner is not self:
            small = self._planned(placement)
            return self.planner.usage(small, recompute, sizes, resident, limit_bytes)
        costs = self._costs(placement, recompute)
        dims = self.local_sizes(placement, sizes)
        return self._study(placement).meter.usage(costs, dims, resident, limit_bytes)

    def variant(
        self, placement: Placement, recompute: int, sizes: Sizes, rank: int
    ) -> tuple[Variant, tuple[int, ...]]:
        """Returns a runnable variant that is right at these sizes, and the integers for the call.

        A variant is right wherever the sizes that torch looked at while compiling compare the same
        way; where they do not, another one is compiled for these sizes.
        """
        dims = self._dims(sizes)
        backend = self._backend(placement, dims)
        key = (self.placements.number(placement), recompute, backend)
        known = self._variants.setdefault(key, [])
        for variant in known:
            values, broken = variant.integer_values(dims, rank)
            if not broken:
                return variant, values
        # Inductor adds guards of its own to what it compiles: such a graph is traced alone.
        hints: tuple[int, ...] | None = None if backend == "eager" else ()
        if known:
            hints = tuple(max(2, v) for v in known[0].integer_values(dims, rank)[0])
        lowering = self.lowering(placement, hints, backend)
        parts = self.partition(placement, recompute, hints, backend)
        if self.inspect is not None:
            self.inspect(self, placement, lowering, parts, sizes)
        variant = lowering.variant(parts)
        values, broken = variant.integer_values(dims, rank)
        if broken and not hints:
            known.append(variant)
            return self.variant(placement, recompute, sizes, rank)
        known.append(variant)
        return variant, values

    def _backend(self, placement: Placement, dims: Mapping[sympy.Symbol, int]) -> str:
        """Returns "eager" where a rank of the group would have an empty piece.

        Inductor calls kernels that cannot take one. Decided from global sizes, so alike on all
        ranks.
        """
        if self.backend == "eager" or placement.sp == 1:
            return self.backend
        integers = self.lowering(placement).lowered.integers
        if all(i.shortest(dims, placement.sp) > 0 for i in integers):
            return self.backend
        sizes = ", ".join(f"{s} = {n}" for s, n in dims.items())
        warnings.warn(
            f"sp {placement.sp} leaves a rank without elements at {sizes}: run by the eager "
            "backend; choose a smaller sp for this bucket",
            stacklevel=2,
        )
        return "eager"

    def sharded_batch_is_idle(self, placement: Placement, sizes: Sizes) -> bool:
        """Whether a placement made for more samples would leave ranks without any at this batch."""
        if placement.sp == 1 or sizes.get(BATCH, 1) >= placement.sp:
            return False
        symbol = self.program.symbols.get(BATCH)
        for name, chosen in placement.nodes.items():
            label = chosen.output
            if label.sharded and placement.factors[name][label.dim][label.index].size == symbol:
                return True
        return False

    @property
    def compiled_count(self) -> int:
        """Variants compiled so far."""
        return sum(map(len, self._variants.values()))


def group_name(sp: int) -> str:
    """Returns the name by which variants find the process group of a degree."""
    return f"sp{sp}"
