"""Prices each way to split an attention at any length, and finds where the cheapest one changes.

Everything around the attention is taken to be split along the sequence, as at long lengths: of an
attention by heads the cost includes that queries, keys and values are sent from rows to heads, and
the result back. Seconds are those of the report, forward and backward, with the start of each
collective and without a price for memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcpc.buckets import Sizes
from dcpc.ir import Program
from dcpc.passes.placement.label_costs import Costs
from dcpc.passes.placement.node_options import PlacementModel
from dcpc.passes.placement.objective import Objective
from dcpc.passes.placement.state_graph import Option, change_between
from dcpc.passes.sharding.attention_ways import (
    LOWERINGS,
    attentions,
    lowering_of,
    way_text,
    why_not,
)
from dcpc.passes.sharding.rule_types import is_usable
from dcpc.passes.sharding.sharding import Sharding

SCANNED = 48  # number of lengths tested between the shortest and the longest


@dataclass(frozen=True, slots=True)
class Way:
    """One lowering of one attention.

    Attributes:
        lowering: name in `LOWERINGS`.
        across: number of ranks that share heads in a hybrid, else 1.
        seconds: seconds of forward and backward.
    """

    lowering: str
    across: int
    seconds: float

    def __str__(self) -> str:
        return way_text(self.lowering, self.across)


@dataclass(frozen=True, slots=True)
class _Costed:
    """An alternative as entries of the catalogue."""

    lowering: str
    option: Option
    changes: tuple[int, ...]


class LoweringCosts:
    """The lowerings of a program's attentions, priced at any sizes.

    Attributes:
        groups: names of attentions with the same lowerings and costs, in graph order.
    """

    def __init__(self, program: Program, sharding: Sharding) -> None:
        self._program, self._sharding = program, sharding
        self._model = PlacementModel(program, sharding)
        position = {name: i for i, name in enumerate(self._model.names)}
        alike: dict[tuple[_Costed, ...], list[str]] = {}
        for node in attentions(program):
            ways = tuple(self._ways(node.name, position[node.name]))
            alike.setdefault(ways, []).append(node.name)
        self._costed = {names[0]: ways for ways, names in alike.items()}
        self.groups = tuple(tuple(names) for names in alike.values())

    def _ways(self, name: str, position: int) -> Iterator[_Costed]:
        model, nodes = self._model, self._model.nodes
        kind = model.kinds[nodes.kinds[position]]
        alternatives = self._sharding.alternatives[name]
        rows = [o for a, o in zip(alternatives, kind.options, strict=True) if a.across == 1]
        if not rows:
            return
        home = rows[0]  # a ring's operands and output are split along the rows
        sources = [model.kinds[nodes.kinds[s]] for s in nodes.sources[position]]
        for chosen, option in zip(alternatives, kind.options, strict=True):
            if lowering_of(chosen) not in LOWERINGS:
                continue
            steps = [
                change_between(source, model.catalogue, have, want)
                for source, have, want in zip(sources, home.operands, option.operands, strict=True)
            ]
            steps.append(change_between(kind, model.catalogue, option.output, home.output))
            yield _Costed(lowering_of(chosen), option, tuple(steps))

    def at(self, sizes: Sizes, sp: int, objective: Objective) -> dict[str, list[Way]]:
        """Returns the ways of each group's first attention, cheapest first."""
        catalogue = self._model.catalogue
        numbers = catalogue.numbers(self._program.dims(sizes))
        shares = catalogue.shares(numbers, sp)
        prices = catalogue.prices(numbers, shares, sp, objective)
        found = {}
        for name, ways in self._costed.items():
            best: dict[str, Way] = {}
            for w in ways:
                if not self._usable(w.option, shares, sp):
                    continue
                seconds = prices.works_s[w.option.work] + prices.changes_s[list(w.changes)].sum()
                way = Way(w.lowering, max(w.option.across, 1), float(seconds))
                if str(way) not in best or way.seconds < best[str(way)].seconds:
                    best[str(way)] = way
            found[name] = sorted(best.values(), key=lambda way: way.seconds)
        return found

    def _usable(self, option: Option, shares: Costs, sp: int) -> bool:
        return sp > 1 and bool(shares[option.split] < 1.0) and is_usable(option.across, sp)

    def why_not(self, name: str, sp: int) -> Mapping[str, str]:
        """Returns, by lowering, why an attention cannot have it."""
        node = next(n for n in attentions(self._program) if n.name == name)
        return why_not(self._program, self._sharding, node, sp)

    def crossovers(
        self,
        name: str,
        sizes: Sizes,
        dim: str,
        ends: tuple[int, int],
        sp: int,
        objective: Objective,
    ) -> list[tuple[int, Way]]:
        """Returns (first length, way) of each range of lengths with one cheapest way.

        Args:
            name: first attention of a group.
            sizes: length of every named dim.
            dim: named dim that varies.
            ends: shortest and longest length of that dim.
            sp: number of ranks in the group.
            objective: quantity to minimise.
        """

        def best(length: int) -> Way | None:
            ways = self.at({**sizes, dim: length}, sp, objective)[name]
            return ways[0] if ways else None

        low, high = ends
        scan = np.unique(np.geomspace(low, high, SCANNED).round().astype(int)).tolist()
        found: list[tuple[int, Way]] = []
        before: Way | None = None
        last = low
        for length in scan:
            way = best(length)
            if way is not None and str(way) != str(before):
                wanted = str(way)
                start = _first(last, length, lambda n: str(best(n)) == wanted)  # noqa: B023
                found.append((start if found else low, way))
            before, last = way, length
        return found


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Returns the first length after `low` at which a condition holds that holds at `high`."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True)
class AskedAt:
    """A bucket at which the report compares the ways to split each attention.

    Attributes:
        bucket: name of the bucket.
        sizes: length of every named dim, batch included.
        sp: number of ranks in the group, above 1.
        weighed: objective of the placement.
        chosen: name of an attention -> its lowering in the plan.
    """

    bucket: str
    sizes: Sizes
    sp: int
    weighed: Objective
    chosen: Mapping[str, str]


def lowering_lines(costs: LoweringCosts, points: Sequence[AskedAt]) -> list[str]:
    """Returns the report's lines: the seconds of each way to split each attention, by bucket.

    Further lines say why some ways are impossible, and why the chosen way is not the fastest.
    """
    lines: list[str] = []
    for names in costs.groups:
        mine = []
        for point in points:
            seconds = Objective(point.weighed.device)
            ways = costs.at(point.sizes, point.sp, seconds)[names[0]]
            if ways:
                shown = ", ".join(f"{way} {1e3 * way.seconds:.3g} ms" for way in ways)
                mine.append(f"  {point.bucket}, sp {point.sp}: {shown}")
                mine += _why(costs, names[0], ways, point)
        if not mine:
            continue
        more = " and those like it" if len(names) > 1 else ""
        lines.append(f"ways to split {names[0]}{more}, by seconds")
        lines += mine
        refused = {p.sp: costs.why_not(names[0], p.sp) for p in points}
        lines += dict.fromkeys(
            f"  not {way} at sp {sp}: {why}"
            for sp, of in refused.items()
            for way, why in of.items()
        )
    return lines


def _why(costs: LoweringCosts, name: str, ways: Sequence[Way], point: AskedAt) -> Iterator[str]:
    """Yields why the chosen way is not the fastest; nothing if it is."""
    chosen, fastest = point.chosen.get(name, ""), str(ways[0])
    if chosen in ("", fastest):
        return
    weighed = {str(w): w.seconds for w in costs.at(point.sizes, point.sp, point.weighed)[name]}
    if chosen not in weighed:
        why = f"no rank waits for another inside it; {fastest} is the fastest that splits a sample"
    elif weighed[chosen] <= weighed[fastest]:
        cost, other = (f"{1e3 * weighed[way]:.3g} ms" for way in (chosen, fastest))
        why = f"with the bytes it keeps for backward it costs {cost}, {fastest} {other}"
    else:
        why = "it saves more on the values around it, which are split alike"
    yield f"    {chosen} is chosen: {why}"
