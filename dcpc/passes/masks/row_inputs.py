"""Finds how values made of one input alone depend on it, by computing them for a few short rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import sympy
import torch
from torch import Tensor, fx

from dcpc.buckets import BATCH
from dcpc.fx.large_graphs import called_on_cpu, op_name
from dcpc.passes.masks.row_graph import MixedError, RowGraph, is_segment

_SIZE, _SAMPLES = 11, 2  # length and number of the rows that are computed
# Scales of the random numbers in a row, beside a row of ones: integers are below the scale.
_SCALES = (2, 3, 30)
_SPECIAL = 24  # most numbers, from comparisons in the graph, that are tried at each position
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


class _FailedError(MixedError):
    """Raised where a value cannot be computed for an example."""


class InputAlone:
    """The values that are computed from one input of a model alone."""

    def __init__(self, row: RowGraph, placeholder: str) -> None:
        self._row, self._placeholder = row, placeholder
        self._info = row.program.info[placeholder]
        self._mine = frozenset({placeholder})

    def shift(self) -> int:
        """Returns by how many positions the values read from an input precede their position."""
        name, shifts = self._row.program.inputs[self._placeholder], set()
        # How many labels count has no place.
        nodes = [n for n in self._frontier() if self._row.program.info[n.name].shape]
        moved = self._moved([node.name for node in nodes])
        for node in nodes:
            own = moved[node.name]
            used = sorted(t for t, places in own.items() if places)
            k = used[0] if used else 0
            late = range(k, _SIZE)
            if used != list(late) or any(own[t] != {t - k} for t in late):
                raise MixedError(
                    f"{self._row.where(node)} has what it reads of '{name}' at other places"
                )
            shifts.add(k)
        if len(shifts) > 1:
            raise MixedError(
                f"it reads '{name}' at its own place and {max(shifts)} places on, which in a row "
                "is the next sequence's"
            )
        return shifts.pop() if shifts else 0

    def _moved(self, names: Sequence[str]) -> dict[str, dict[int, set[int]]]:
        """Returns node -> changed position of the input -> positions of the node that change.

        Rows of one repeated number would hide dependence on order: a median, for example, does not
        change.
        """
        found: dict[str, dict[int, set[int]]] = {n: {t: set() for t in range(_SIZE)} for n in names}
        dim = self._info.shape.index(self._row.length)
        for value, numbers, sure in self._rows():
            try:
                before = self.values(value, names)
            except _FailedError:
                if sure:
                    raise
                continue
            for t in range(_SIZE):
                for number in numbers:
                    changed = value.clone()
                    changed.select(dim, t).fill_(number)
                    try:
                        after = self.values(changed, names)
                    except _FailedError:
                        if sure and number in (0, 2):
                            raise
                        continue  # it is an index of something
                    for name in names:
                        found[name][t] |= self._places(name, before[name] != after[name])
        return found

    def _rows(self) -> Iterator[tuple[Tensor, list[float], bool]]:
        """Yields (row, numbers to change a position to, whether it must be computable)."""
        dtype, special = self._info.dtype, self._special()
        signed = [] if dtype == torch.bool or not dtype.is_signed else [-100]
        yield self._filled(1), [0, 2, *signed, *special], True
        if dtype == torch.bool:
            yield self._filled(0), [1], True
        generator = torch.Generator().manual_seed(0)
        for scale in _SCALES:
            shape = self._sizes(self._info.shape)
            if dtype.is_floating_point or dtype.is_complex:
                value = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
                numbers = [scale, -scale, *special]
            else:
                value = torch.randint(scale, shape, generator=generator)
                numbers = [0, scale - 1, *special]
            yield value.to(dtype), numbers, False

    def _special(self) -> list[float]:
        """Returns the numbers with which values of this input are compared, and neighbours."""
        if self._info.dtype == torch.bool:
            return []
        nodes = (n for n in self._row.nodes if self._row.sources[n.name] == self._mine)
        compared = (n for n in nodes if n.op == "call_function" and op_name(n) in _COMPARISONS)
        whole = not self._info.dtype.is_floating_point
        kinds = int if whole else (int, float)
        given = {x for n in compared for x in n.args if isinstance(x, kinds)}
        return sorted({x + step for x in given for step in (-1, 0, 1)} - {0, 1, 2, -100})[:_SPECIAL]

    def _places(self, name: str, differs: Tensor) -> set[int]:
        """Returns the positions in the row of the true elements."""
        shape = self._row.program.info[name].shape
        dims = [d for d, size in enumerate(shape) if self._row.along(size)]
        if len(dims) != 1:
            return set(range(_SIZE)) if differs.any() else set()
        (dim,) = dims
        rows = sympy.Poly(shape[dim], *shape[dim].free_symbols)
        batch = self._row.program.symbols.get(BATCH)
        size = differs.shape[dim] // (_SAMPLES if batch in rows.gens else 1)
        at = differs.nonzero()[:, dim] % size
        return {int(i) for i in at}

    def changed(self, numbers: Iterable[int]) -> bool:
        """Returns whether any value outside the attentions depends on the number in the input."""
        names = {node.name for node in self._frontier()}
        seen = [self.values(self._filled(n), names) for n in numbers]
        return any(not torch.equal(seen[0][n], other[n]) for other in seen[1:] for n in names)

    def _frontier(self) -> list[fx.Node]:
        """Returns the last values that are made of this input alone and that the loss reads."""
        row, found = self._row, []
        for node in row.nodes:
            own = row.sources.get(node.name) == self._mine and node.name in row.program.info
            users = [
                u for u in node.users
                if u.name in row.live and u.name not in row.program.scalars
                and not is_segment(node, u)
            ]  # fmt: skip
            if own and any(row.sources[u.name] != self._mine for u in users):
                found.append(node)
        return found

    # ------------------------------------------------------------------------------- examples

    def values(self, value: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
        """Returns the values of nodes that are computed from this input alone."""
        row = self._row
        known: dict[fx.Node, object] = {}
        for node in row.nodes:
            if node.name == self._placeholder:
                known[node] = value
            elif node.name in row.program.scalars:
                known[node] = self._sizes((row.program.scalars[node.name],))[0]
            elif (
                node.op == "call_function"
                and row.sources[node.name] <= self._mine
                and all(n in known for n in node.all_input_nodes)
            ):
                try:
                    known[node] = called_on_cpu(node, known)
                except (RuntimeError, IndexError, ValueError, TypeError) as e:
                    raise _FailedError(
                        f"{row.where(node)} cannot be looked into: {e}, at {_SIZE} positions"
                    ) from e
        by_name = {node.name: x for node, x in known.items() if isinstance(x, Tensor)}
        return {name: by_name[name] for name in names}

    def holding(self, *given: Tensor) -> Tensor:
        """Returns the input with one of these rows for each sample."""
        assert len(given) == _SAMPLES, f"{len(given)} rows"
        return torch.stack(given).to(self._info.dtype)

    def _filled(self, number: int) -> Tensor:
        return torch.full(self._sizes(self._info.shape), number).to(self._info.dtype)

    def _sizes(self, shape: Iterable[sympy.Expr]) -> list[int]:
        sizes = {self._row.length: _SIZE}
        if BATCH in self._row.program.symbols:
            sizes[self._row.program.symbols[BATCH]] = _SAMPLES
        return [int(sympy.sympify(s).subs(sizes)) for s in shape]
