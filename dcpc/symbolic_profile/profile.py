"""Costs of a run of a graph: each node is read once for all runs of the graph."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from dcpc.errors import ProfileError
from dcpc.fx.leaves import leaf_key, tree_key
from dcpc.ir import Fold, Partition, Profile, Schedule, Work
from dcpc.ops.attention import Capability
from dcpc.symbolic_profile.memory.lifetimes import Numbered
from dcpc.symbolic_profile.memory.memory import MemoryTimeline, live_rows, timeline_of
from dcpc.symbolic_profile.memory.run import RankRun
from dcpc.symbolic_profile.ops.facts import Facts, GroupSize, at_ranks
from dcpc.symbolic_profile.ops.flops import ZERO, cost_of
from dcpc.symbolic_profile.ops.tile_costs import TileCosts, tile_work
from dcpc.symbolic_profile.ops.transients import transient_bytes
from dcpc.symbolic_profile.polynomials import Basis, undominated
from dcpc.symbolic_profile.seconds.time import MATMUL_CLASSES


def profile_partition(
    partition: Partition, sp: GroupSize = 1, threads: int | None = None
) -> Profile:
    """Returns the costs of a partition on one rank, as expressions of the dims.

    The device is chosen when the profile is evaluated.

    Args:
        partition: forward and backward graphs; only read.
        sp: ranks of the group of every collective, or group name -> ranks.
        threads: threads an op runs on, each with buffers in the CPU's attention; default: torch's.

    Raises:
        ProfileError: a size has a symbol that `partition.names` does not translate, or a gradient's
            size is not fixed.

    Warns:
        UserWarning: ops that no table has, by name; they count one operation an output element.
    """
    ledger = Ledger(partition.names, sp, threads)
    return ledger.profile(ledger.costs(partition))


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of one forward and backward.

    Attributes:
        timeline: allocations and frees.
        calls: for each kind of call: one such call, whether it is forward's, and their number.
        parameters: size of a fixed resident -> number of storages.
        inputs: size of another resident -> number of storages.
        unpriced: ops that no table has.
    """

    timeline: MemoryTimeline
    calls: tuple[tuple[fx.Node, bool, int], ...]
    parameters: Mapping[sympy.Expr, int]
    inputs: Mapping[sympy.Expr, int]
    unpriced: tuple[str, ...]


Works: TypeAlias = tuple[Work, ...]


class Ledger:
    """Costs of each node of a graph, read once for all runs of it.

    Args:
        names: torch symbol -> expression of the bucket's dims.
        sp: ranks of the group of every collective, or group name -> ranks.
        threads: threads an op runs on; default: torch's.
        fuses: whether the backend fuses pointwise calls into kernels, as Inductor does.
        gpu: capability of the GPU whose kernels ops run; None: they run the CPU's.
        like: ledger of another graph of the same tracer and device: calls on the same fake tensors
            cost the same there.
        stays: numbers of the gradients that live to the end of backward, see `timeline_of`.
    """

    def __init__(
        self,
        names: Mapping[sympy.Symbol, sympy.Expr],
        sp: GroupSize = 1,
        threads: int | None = None,
        fuses: bool = False,
        gpu: Capability | None = None,
        like: Ledger | None = None,
        stays: frozenset[int] | None = None,
    ) -> None:
        self._stays = stays
        self.facts: Facts = Facts(names, None if like is None else like.facts)
        self._sp, self._threads = sp, threads or torch.get_num_threads()
        self._fuses, self._gpu = fuses, gpu
        self._numbered = Numbered(self.facts, self.transient)
        # Calls that cost the same are of one kind; the first of it stands for them.
        self._kinds: dict[fx.Node, int] = {}
        self._likes: dict[tuple[object, ...], int] = {}
        self._firsts: list[fx.Node] = []
        self._transients: dict[int, sympy.Expr] = {}
        self._works: dict[int, tuple[Works, Works]] = {}
        known = ({}, {}) if like is None else (like._known_transients, like._known_works)
        self._known_transients: dict[tuple[object, ...], sympy.Expr] = known[0]
        self._known_works: dict[tuple[object, ...], tuple[Works, Works]] = known[1]

    def at(self, sp: int) -> Ledger:
        """Returns the same for groups of so many ranks, with all that does not depend on it."""
        other = copy.copy(self)
        other._sp = sp
        other._works = {
            k: w for k, w in self._works.items() if not any(map(_depends_on_ranks, w[0]))
        }
        return other

    @property
    def ranks(self) -> GroupSize:
        """Ranks of the group of every collective, or group name -> ranks."""
        return self._sp

    def at_degree(self, size: sympy.Expr) -> sympy.Expr:
        """Returns a transient in which the number of ranks is known."""
        return at_ranks(size, self._sp)

    def kinds(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Returns one node of each kind of some calls: those of a kind cost the same."""
        return [self._firsts[kind] for kind in dict.fromkeys(map(self._kind, nodes))]

    def transient(self, node: fx.Node) -> sympy.Expr:
        """Returns the bytes that a call has besides its outputs, at any degree."""
        kind = self._kind(node)
        found = self._transients.get(kind)
        if found is None:
            like = self._like(self._firsts[kind])
            found = self._known_transients.get(like)
            if found is None:
                found = transient_bytes(node, self.facts, self._threads, self._gpu)
                self._known_transients[like] = found
            self._transients[kind] = found
        return found

    def _kind(self, node: fx.Node) -> int:
        found = self._kinds.get(node)
        if found is None:
            found = self._likes.setdefault(self._like(node), len(self._firsts))
            if found == len(self._firsts):
                self._firsts.append(node)
            self._kinds[node] = found
        return found

    def _like(self, node: fx.Node) -> tuple[object, ...]:
        """Equal for calls that cost the same: those of one op and the same fake tensors.

        Blocks that repeat share their fake tensors, which the nodes keep alive.
        """
        inputs = node.all_input_nodes
        place = {n: i for i, n in enumerate(inputs)}
        alike = [id(n.meta.get("val")) for n in inputs]
        own = [t.storage for n in (*inputs, node) for t in self.facts.of(n)]
        first = [own.index(s) for s in own]

        def plain(leaf: Any) -> Hashable:
            return ("input", place[leaf]) if isinstance(leaf, fx.Node) else leaf_key(leaf)

        arguments = tree_key((node.args, node.kwargs), plain)
        return node.target, id(node.meta.get("val")), *alike, *first, arguments

    def work(self, node: fx.Node, *, forward: bool) -> Works:
        """Returns the costs of a call: none of a view, several of a region that runs in tiles."""
        kind = self._kind(node)
        if kind not in self._works:
            self._works[kind] = self._work(self._firsts[kind])
        return self._works[kind][0 if forward else 1]

    def _work(self, node: fx.Node) -> tuple[Works, Works]:
        like = self._like(node)
        for key in (like, (self._sp, like)):
            if key in self._known_works:
                return self._known_works[key]
        tiles = tile_work(node, self.facts)
        own = (cost_of(node, self.facts, self._sp),) if tiles is None else tiles
        found = tuple(w for w in own if w is not None)
        both = (
            tuple(replace(w, forward=True) for w in found),
            tuple(replace(w, forward=False) for w in found),
        )
        ranked = any(map(_depends_on_ranks, found))
        self._known_works[(self._sp, like) if ranked else like] = both
        return both

    def costs(self, what: Partition | Schedule, fold: Fold | None = None) -> Costs:
        """Returns the costs of a partition's graphs, or of a schedule.

        Warns:
            UserWarning: ops that no table has, by name.
        """
        run = RankRun.of(what)
        resident = set(what.resident) if isinstance(what, Partition) else None
        parameters, inputs = self._residents(run.primals, resident, fold)
        calls, unpriced = self._calls(run, fold)
        return Costs(
            timeline=timeline_of(run, self._numbered, fold, self._fuses, self._stays),
            calls=calls,
            parameters=parameters,
            inputs=inputs,
            unpriced=unpriced,
        )

    def _calls(
        self, run: RankRun, fold: Fold | None
    ) -> tuple[tuple[tuple[fx.Node, bool, int], ...], tuple[str, ...]]:
        """Returns the kinds of calls that cost something, and the ops that no table has."""
        found: list[tuple[fx.Node, bool, int]] = []
        unpriced: dict[str, None] = {}
        for nodes, forward in ((run.forward, True), (run.backward, False)):
            counts: Counter[int] = Counter(map(self._kind, nodes))
            if fold is not None:
                stands_for = fold.count if forward else fold.count_again
                for node in nodes:
                    counts[self._kind(node)] += stands_for(node.name) - 1
            for kind, count in counts.items():
                first = self._firsts[kind]
                work = self.work(first, forward=forward)
                if not work:
                    continue
                found.append((first, forward, count))
                if any(w.op_class == "unpriced" for w in work):
                    unpriced[str(first.target)] = None
        if unpriced:
            share = self._share_of_bytes(found)
            warnings.warn(
                f"profile: got ops without a cost, {', '.join(unpriced)}; they count one operation "
                "for each element of their largest operand, and no memory beside their results. "
                f"Of the bytes that all calls move they have {share:.0%}: where they take k times "
                f"what is counted, a step takes about {share:.0%} of k - 1 longer than planned; "
                "register a formula with torch.utils.flop_counter.register_flop_formula, or write "
                "their kernel of torch's ops, whose calls are counted",
                stacklevel=4,
            )
        return tuple(found), tuple(unpriced)

    def _share_of_bytes(self, calls: Sequence[tuple[fx.Node, bool, int]]) -> float:
        """Returns the share of all bytes moved that calls without a cost move, at dims of 1,024."""
        found = {False: 0.0, True: 0.0}
        for node, forward, count in calls:
            for call in self.work(node, forward=forward):
                sizes = dict.fromkeys(call.bytes_moved.free_symbols, 1024)
                moved_bytes = float(call.bytes_moved.subs(sizes))
                found[call.op_class == "unpriced"] += count * moved_bytes
        return found[True] / max(1.0, sum(found.values()))

    def _residents(
        self, primals: Sequence[fx.Node], resident: set[str] | None, fold: Fold | None
    ) -> tuple[dict[sympy.Expr, int], dict[sympy.Expr, int]]:
        """Returns the sizes of fixed storages and of the others, each storage once."""
        fixed: dict[sympy.Expr, int] = {}
        others: dict[sympy.Expr, int] = {}
        seen: set[int] = set()
        for node in primals:
            if resident is not None and node.name not in resident:
                continue
            for t in self.facts.of(node):
                if t.storage not in seen:
                    seen.add(t.storage)
                    into = fixed if t.storage_bytes.is_Integer else others
                    count = 1 if fold is None else fold.count(node.name)
                    into[t.storage_bytes] = into.get(t.storage_bytes, 0) + count
        return fixed, others

    def profile(self, costs: Costs) -> Profile:
        """Returns costs as expressions of the dims.

        Raises:
            ProfileError: a gradient's size is not fixed.
        """
        sizes = tuple(map(self.at_degree, costs.timeline.sizes))
        rows, basis = live_rows(replace(costs.timeline, sizes=sizes))
        kept = undominated(rows, basis)
        counts: Counter[Work] = Counter()
        for node, forward, count in costs.calls:
            for each in self.work(node, forward=forward):
                counts[each] += count
        work = tuple(replace(w, count=n) for w, n in counts.items())
        matmuls = [w for w in work if w.op_class in MATMUL_CLASSES]
        return Profile(
            flops=_total([(w.flops, w.count) for w in matmuls]),
            forward_flops=_total([(w.flops, w.count) for w in matmuls if w.forward]),
            bytes_moved=_total([(w.bytes_moved, w.count) for w in work]),
            wire_bytes=_total([(w.wire_bytes, w.count) for w in work]),
            saved_bytes=_total(list(costs.timeline.saved.items())),
            peak_terms=tuple(basis.expression(rows[i]) for i in kept),
            peak_points=tuple(costs.timeline.names[i] for i in kept),
            parameter_bytes=int(_total(list(costs.parameters.items()))),
            input_bytes=_total(list(costs.inputs.items())),
            gradient_bytes=_fixed(_total(list(costs.timeline.gradients.items()))),
            work=work,
            unpriced=costs.unpriced,
            symbols=self.facts.symbols,
        )


def tile_costs(ledger: Ledger, costs: Costs, rows: sympy.Symbol) -> TileCosts:
    """Returns the costs of a program of some rows as those of a tile."""
    found: dict[bool, list[Work]] = {True: [], False: []}
    for node, forward, count in costs.calls:
        for w in ledger.work(node, forward=forward):
            flops, moved = count * w.flops, count * w.bytes_moved
            found[forward].append(replace(w, flops=flops, bytes_moved=moved))
    live, basis = live_rows(costs.timeline)
    start = costs.timeline.names.index("backward")
    halves = []
    for half in (live[:start], live[start:]):
        kept = undominated(half, basis)
        halves.append(tuple(basis.expression(half[i]) for i in kept))
    made, differentiated = (tuple(found[forward]) for forward in (True, False))
    first, second = halves
    return TileCosts(rows, made, (*made, *differentiated), first, (*first, *second))


def with_constants(profile: Profile, values: Mapping[sympy.Symbol, sympy.Integer]) -> Profile:
    """Returns a profile with values put in for some symbols."""

    def settle(size: sympy.Expr) -> sympy.Expr:
        return sympy.expand(size.xreplace(values))

    totals = ("flops", "forward_flops", "bytes_moved", "wire_bytes", "saved_bytes", "input_bytes")
    each = ("flops", "bytes_moved", "wire_bytes")
    return replace(
        profile,
        **{name: settle(getattr(profile, name)) for name in totals},
        peak_terms=tuple(map(settle, profile.peak_terms)),
        work=tuple(
            replace(w, **{name: settle(getattr(w, name)) for name in each}) for w in profile.work
        ),
        symbols=tuple(s for s in profile.symbols if s not in values),
    )


def _depends_on_ranks(work: Work) -> bool:
    return work.ranks > 1 or work.op_class == "collective"


def _total(terms: list[tuple[sympy.Expr, int]]) -> sympy.Expr:
    basis = Basis(size for size, _ in terms)
    rows = basis.matrix([size for size, _ in terms])
    counts = [float(count) for _, count in terms]
    return basis.expression(counts @ rows) if terms else ZERO


def _fixed(size: sympy.Expr) -> int:
    if not size.is_Integer:
        raise ProfileError(
            f"gradients: got {size} bytes; expected a fixed number; a gradient is a view of an "
            "activation: clone it in the graph"
        )
    return int(size)
