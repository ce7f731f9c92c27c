"""Runs an excerpt of a graph at given sizes and says how long each of its calls takes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, fx

from dcpc.codegen import Boxed, compile_graph, excerpt
from dcpc.fx.repeats import repeated_runs
from dcpc.symbolic_profile.ops.facts import Facts, argument

_Shape: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

BLOCKS = 2  # of each run of repeated blocks: the first may find other caches than those after it


def typical_blocks(gm: fx.GraphModule) -> frozenset[str]:
    """Returns the names of all calls but those of a repeated block's third and later copies."""
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    dropped: set[str] = set()
    for run in repeated_runs([(str(n.target), str(n.meta.get("val"))) for n in calls]):
        dropped |= {n.name for n in calls[run.start + BLOCKS * run.period : run.stop]}
    return frozenset(n.name for n in calls) - dropped


class Timed:
    """A forward or backward graph, or two blocks of it, whose calls can be timed."""

    def __init__(self, gm: fx.GraphModule, facts: Facts, device: torch.device) -> None:
        self.gm = excerpt(gm, typical_blocks(gm))
        self.calls = [n for n in self.gm.graph.nodes if n.op == "call_function"]
        self._placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        self._facts, self._device = facts, device
        self._dead = _last_reads(self.gm)
        self._whole: Boxed | None = None
        self._shapes: dict[tuple[tuple[str, int], ...], list[_Shape]] = {}

    def arguments(self, dims: Mapping[str, int], given: Mapping[str, Tensor]) -> list[Any]:
        """Returns a value for each placeholder: the given ones, the others drawn."""
        key = tuple(sorted(dims.items()))
        if key not in self._shapes:
            sizes = {s: sympy.Integer(dims[s.name]) for s in self._facts.symbols}
            self._shapes[key] = [self._shape(n.meta["val"], sizes) for n in self._placeholders]
        return [
            given[n.name] if n.name in given else self._drawn(n.meta["val"], shape)
            for n, shape in zip(self._placeholders, self._shapes[key], strict=True)
        ]

    def seconds_each(self, arguments: list[Any]) -> list[float]:
        """Returns the seconds of each of `calls`, run in order."""
        values = dict(zip(self._placeholders, arguments, strict=True))
        clock = _clock(self._device)
        marks = []
        for node in self.calls:
            args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            marks.append(clock.mark())
            values[node] = node.target(*args, **kwargs)
            marks.append(clock.mark())
            del args, kwargs  # they hold what is freed now
            for dead in self._dead[node]:
                del values[dead]
        between: list[float] = clock.between(marks)
        return between[::2]

    def seconds_alone(self, node: fx.Node, dims: Mapping[str, int], rounds: int) -> float:
        """Returns the least seconds of one call on drawn operands, after one that warms up."""
        sizes = {s: sympy.Integer(dims[s.name]) for s in self._facts.symbols}
        values = {
            n: self._drawn(n.meta["val"], self._shape(n.meta["val"], sizes))
            for n in node.all_input_nodes
        }
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
        clock, marks = _clock(self._device), []
        for _ in range(rounds + 1):
            marks.append(clock.mark())
            node.target(*args, **kwargs)  # type: ignore[operator]
            marks.append(clock.mark())
        between: list[float] = clock.between(marks)
        return min(between[2::2])

    def length(self, node: fx.Node, dims: Mapping[str, int]) -> int:
        """Returns the queries of one of `calls` that is an attention."""
        query = self._facts.of(argument(node, "query"))[0].shape[2]
        return int(query.xreplace({s: sympy.Integer(dims[s.name]) for s in self._facts.symbols}))

    def compile(self, backend: str, mode: Any) -> tuple[sympy.Basic, ...]:
        """Compiles the excerpt, for `seconds`; returns the backend's guards on sizes."""
        self._whole, guards = compile_graph(self.gm, backend, mode)
        return guards

    def seconds(self, arguments: list[Any]) -> float:
        """Returns the seconds of the whole excerpt, compiled."""
        assert self._whole is not None, "compile it first"
        clock = _clock(self._device)
        given = list(arguments)
        start = clock.mark()
        self._whole(given)
        between: list[float] = clock.between([start, clock.mark()])
        return between[0]

    def _shape(self, value: Any, sizes: Mapping[sympy.Symbol, sympy.Integer]) -> _Shape:
        """Returns shape and strides of a tensor, or ((), (n,)) of an integer."""
        if not isinstance(value, Tensor):
            return (), (int(self._facts.size(value).xreplace(sizes)),)
        shape, strides = (
            tuple(int(self._facts.size(n).xreplace(sizes)) for n in of)
            for of in (value.shape, value.stride())
        )
        return shape, strides

    def _drawn(self, value: Any, shape: _Shape) -> Any:
        """Returns a value of this shape; its contents do not change a CPU's seconds."""
        lengths, strides = shape
        if not isinstance(value, Tensor):
            return strides[0]
        count = 1 + sum((n - 1) * s for n, s in zip(lengths, strides, strict=True))
        flat = torch.empty(max(count, 0), dtype=value.dtype, device=self._device)
        if not (value.dtype.is_floating_point or value.dtype.is_complex):
            flat.zero_()  # indices: 0 is in every table
        elif self._device.type == "cpu":
            flat.fill_(0.5)
        else:  # a GPU takes more power, and so longer, where bits differ
            flat.normal_()
        return flat.as_strided(lengths, strides)


def _last_reads(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """Returns node -> the calls whose values nothing reads after it; outputs live on."""
    seen: set[fx.Node] = set()
    dead: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(gm.graph.nodes):
        own = [] if node.users or node.op != "call_function" else [node]
        last = [s for s in node.all_input_nodes if s not in seen and s.op == "call_function"]
        seen.update(node.all_input_nodes)
        dead[node] = [*own, *last]
    return dead


class _Wall:
    """Seconds that passed; on one thread those that it computed, whatever else the machine does."""

    def __init__(self) -> None:
        self.mark = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def between(self, marks: list[Any]) -> list[float]:
        return [b - a for a, b in itertools.pairwise(marks)]


class _Events:
    """Seconds in a GPU's stream; a call that the host starts late counts as long as it waits."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, marks: list[Any]) -> list[float]:
        torch.cuda.synchronize()
        return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)]


def _clock(device: torch.device) -> Any:
    clocks: dict[str, Callable[[], Any]] = {"cuda": _Events}
    return clocks.get(device.type, _Wall)()
