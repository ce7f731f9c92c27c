"""Finds where all traces of a model may be cut: at the same place of the model in each chain.

    clips    embed | s0 | t0 | s1 | t1 | loss      Two borders are one place if the parameters that
    images   embed |  s0     |  s1     | loss      both traces read lie on the same sides of them.

A stage then has the same parameters in every trace, but for those that one trace alone reads. Each
trace is cut exactly, whatever the others do: places only say who holds which parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import sympy
from numpy.typing import NDArray

from dcpc.compiled.pipeline.chain import MOST_BORDERS, CallChain
from dcpc.errors import PlanError
from dcpc.plan.traced import Traced

MOST_PAIRS = 16  # ways to take borders of each trace that have the same parameters on their sides

# A border's parameters before and behind it, a bit each.
_Sides = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CommonBorders:
    """Places at which every trace of a model may be cut.

    Attributes:
        at: numbers of each place's border in the traces' chains, in rising order; the first
            and the last place are the ends of all chains.
    """

    at: tuple[tuple[int, ...], ...]

    @property
    def array(self) -> NDArray[np.int64]:
        """The same numbers, `[places, traces]`."""
        return np.array(self.at, dtype=np.int64)

    @property
    def most_stages(self) -> int:
        """Stages that each have a call in every trace, at most."""
        at = self.array
        longest = np.zeros(len(at), dtype=np.int64)
        for place in range(1, len(at)):
            before = (at[:place] < at[place]).all(axis=1)
            longest[place] = (longest[:place][before] + 1).max(initial=0)
        return int(longest[-1])


def common_borders(
    traces: Sequence[Traced],
    chains: Sequence[CallChain],
    dims: Sequence[Mapping[sympy.Symbol, int]],
) -> CommonBorders:
    """Returns where all traces may be cut; of one trace its own borders.

    Args:
        traces: traces of one model.
        chains: chain of each trace.
        dims: lengths of each trace at which bytes are weighed: of many places the narrowest are
            left.
    """
    if len(traces) == 1:
        return CommonBorders(tuple((border,) for border in range(len(chains[0].borders))))
    sides = _sides(traces, chains)
    borders: list[dict[_Sides, list[int]]] = []
    for own in sides:
        found: dict[_Sides, list[int]] = {}
        for number in range(1, len(own) - 1):
            found.setdefault(own[number], []).append(number)
        borders.append(found)
    shared = [key for key in borders[0] if all(key in found for found in borders)]
    inner = {way for key in shared for way in _ways([found[key] for found in borders])}
    if len(inner) > MOST_BORDERS:
        widths = [_bytes(*each) for each in zip(traces, chains, dims, strict=True)]
        width = {way: sum(w[b] for w, b in zip(widths, way, strict=True)) for way in inner}
        inner = set(sorted(inner, key=lambda way: (width[way], way))[:MOST_BORDERS])
    ends = tuple(len(chain.borders) - 1 for chain in chains)
    return CommonBorders(((0,) * len(chains), *sorted(inner), ends))


def borders_like(
    borders: Sequence[int],
    cut: tuple[Traced, CallChain],
    other: tuple[Traced, CallChain],
    dims: Mapping[sympy.Symbol, int],
) -> tuple[int, ...]:
    """Returns where another program of a model is cut so that its stages have the same parameters.

    Args:
        borders: numbers of the borders at which the first program is cut, its ends included.
        cut: first program and its chain.
        other: other program of the same model, and its chain.
        dims: lengths of the other program at which bytes are weighed: of several places the
            narrowest is taken.

    Raises:
        PlanError: the other program has no such places.
    """
    (first, own), (traced, chain) = cut, other
    known, sides = _sides((first, traced), (own, chain))
    width, found = _bytes(traced, chain, dims), [0]
    for border in borders[1:-1]:
        later = range(found[-1] + 1, len(chain.borders) - 1)
        same = [number for number in later if sides[number] == known[border]]
        if not same:
            raise PlanError(
                f"stages: got a program of the model that has no place between the parameters of "
                f"stages {len(found) - 1} and {len(found)}, where the model is cut; expected one: "
                "a rank has the parameters of its stage alone; take another number of stages"
            )
        found.append(min(same, key=lambda number: width[number]))
    return (*found, len(chain.borders) - 1)


def _ways(numbers: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Returns ways to take one border of each trace: all of them; of too many one after another."""
    if prod(map(len, numbers)) <= MOST_PAIRS:
        return list(itertools.product(*numbers))
    most = max(map(len, numbers))
    return [tuple(own[k * len(own) // most] for own in numbers) for k in range(most)]


def _sides(traces: Sequence[Traced], chains: Sequence[CallChain]) -> list[list[_Sides]]:
    """Returns, for each trace's borders, the parameters of all traces read before and behind."""
    read = [_read_by_calls(traced, chain) for traced, chain in zip(traces, chains, strict=True)]
    every = [frozenset[int]().union(*calls) for calls in read]
    common = frozenset.intersection(*every)
    bit = {key: 1 << n for n, key in enumerate(sorted(common))}
    found = []
    for calls, chain in zip(read, chains, strict=True):
        own = [sum(bit[key] for key in keys & common) for keys in calls]
        before = [*itertools.accumulate(own, int.__or__, initial=0)]
        behind = [*itertools.accumulate(reversed(own), int.__or__, initial=0)][::-1]
        found.append([(before[b], behind[b]) for b in chain.borders])
    return found


def homes_of(
    traces: Sequence[Traced], chains: Sequence[CallChain], borders: Sequence[Sequence[int]]
) -> list[dict[str, int]]:
    """Returns of each trace the parameters that no call of it reads -> a stage that reads them.

    A call of another trace does. So a stage that has a parameter anyhow is the one that gives it a
    gradient of zeros, where the loss depends on it and no call does.

    Args:
        traces: traces of one model.
        chains: chain of each trace.
        borders: number, in each chain, of the border at which each stage begins, and of the end.
    """
    stages: dict[int, int] = {}
    read = [_read_by_calls(traced, chain) for traced, chain in zip(traces, chains, strict=True)]
    for t, (calls, chain) in enumerate(zip(read, chains, strict=True)):
        for stage, (low, high) in enumerate(itertools.pairwise(at[t] for at in borders)):
            for keys in calls[chain.borders[low] : chain.borders[high]]:
                stages |= {key: min(stage, stages.get(key, stage)) for key in keys}
    return [
        {name: stages[id(tensor)] for name, tensor in v.tensors().items() if id(tensor) in stages}
        for v in traces
    ]


def _read_by_calls(traced: Traced, chain: CallChain) -> list[frozenset[int]]:
    """Returns the ids of the parameters that each call reads, itself or by free nodes."""
    held, program = traced.tensors(), traced.program
    carried: dict[str, frozenset[int]] = {}  # by what is free, and by parameters
    found: dict[str, frozenset[int]] = {}
    for node in program.gm.graph.nodes:
        sources = (carried.get(source.name, frozenset()) for source in node.all_input_nodes)
        keys = frozenset[int]().union(*sources)
        if node.name in program.parameters:
            carried[node.name] = frozenset([id(held[node.name])])
        elif node.name in chain.free:
            carried[node.name] = keys
        elif node.op == "call_function":
            found[node.name] = keys
    return [found[name] for name in chain.calls]


def _bytes(traced: Traced, chain: CallChain, dims: Mapping[sympy.Symbol, int]) -> tuple[float, ...]:
    """Returns the bytes that cross each border of a chain."""
    info = traced.program.info
    return tuple(
        sum(float(info[name].size_bytes.subs(dims)) for name in names) for names in chain.crossing
    )
