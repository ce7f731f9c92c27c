"""Torch ops that run a region of a forward graph a few rows at a time, forward and backward.

    dcpc_tile::Region_1a2b3c(hidden, weight, labels)                   -> losses
    dcpc_tile::Region_1a2b3c_backward(hidden, weight, labels, d_losses) -> d_hidden, d_weight

The number of tiles is the least with which no tile has more rows than it may; they are as equal as
can be. Backward makes each tile's values again, so that those of one tile are alive. Gradients of
operands without rows are added up over the tiles, of half precision in float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_aggregate

NAMESPACE = "dcpc_tile"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
_AUTOGRAD = [
    getattr(torch._C.DispatchKey, k)
    for k in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView")
]
_in_float64: ContextVar[bool] = ContextVar("dcpc_tiles_in_float64", default=False)
_KNOWN: dict[Any, Tiling] = {}  # by op, of forward and of backward


class TileGraphs(Protocol):
    """What runs one tile."""

    def forward(self, parts: Sequence[Tensor], flowing: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the results of a tile's operands; `flowing` is empty."""

    def backward(
        self, parts: Sequence[Tensor], flowing: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of the operands that learn, given those of the results."""


@dataclass(eq=False)
class Tiling:
    """A region and how it runs.

    Attributes:
        body: the region's graph: placeholders are its operands, outputs its results.
        rows: dim of rows of each operand; -1: it has none.
        dtypes: dtype of each operand; of operands in float64 all is float64.
        exits: dtype, shape and dim of rows of each result; the number of rows is 0 in the shape.
        learns: indices of the operands that get a gradient.
        most: most rows of a tile.
        target: backend and kernels of the graphs that run: costs are theirs.
        op: op of forward.
        back_op: op of backward.
        graphs: what runs and differentiates a tile; None: the body, and autograd.
        product_flops: FLOPs of forward's products for each element of the first result.
        costs: costs of forward and of backward, see `symbolic_profile/ops/tile_costs.py`.
    """

    body: fx.GraphModule
    rows: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    exits: tuple[tuple[torch.dtype, tuple[int, ...], int], ...]
    learns: tuple[int, ...]
    most: int
    target: str
    op: OpOverload = field(init=False)
    back_op: OpOverload = field(init=False)
    graphs: TileGraphs | None = None
    product_flops: float = 0.0
    costs: Any = None

    @property
    def name(self) -> str:
        """A name that is equal in all processes of a job."""
        facts = self.rows, self.dtypes, self.exits, self.learns, self.most, self.target
        text = f"{self.body.code} {facts}"
        return f"Region_{hashlib.sha256(text.encode()).hexdigest()[:10]}"

    def count(self, operands: Sequence[Tensor]) -> Any:
        """Returns the number of rows of these operands."""
        return next(x.shape[d] for x, d in zip(operands, self.rows, strict=True) if d >= 0)

    def results(self, operands: Sequence[Tensor], wide: bool = False) -> list[Tensor]:
        """Returns a new tensor for each result; `wide`: in float64."""
        found, rows = [], self.count(operands)
        for dtype, shape, dim in self.exits:
            dtype = torch.float64 if wide and dtype.is_floating_point else dtype
            sizes = [*shape[:dim], rows, *shape[dim + 1 :]]
            found.append(torch.empty(sizes, dtype=dtype, device=operands[0].device))
        return found

    def run(self, *operands: Tensor) -> Any:
        """Returns the results of all rows."""
        wide = self._is_wide(operands)
        results = self.results(operands, wide)
        run = self._run(wide).forward
        for start, length in self._tiles(operands):
            made = run(self._parts(operands, start, length), ())
            for whole, part, (_, _, dim) in zip(results, made, self.exits, strict=True):
                assert part is not None, "a result is a tensor"
                whole.narrow(dim, start, length).copy_(part)
        return results[0] if len(results) == 1 else tuple(results)

    def differentiate(self, *given: Tensor) -> Any:
        """Returns the gradients of `learns`, given the operands and the results' gradients."""
        operands, tangents = given[: len(self.rows)], given[len(self.rows) :]
        learning = [operands[i] for i in self.learns]
        dims = [self.rows[i] for i in self.learns]
        sums = [
            torch.empty_like(x, memory_format=torch.contiguous_format)
            if dim >= 0
            else torch.zeros(x.shape, dtype=summed_in(x.dtype), device=x.device)
            for x, dim in zip(learning, dims, strict=True)
        ]
        ends = [dim for _, _, dim in self.exits]
        run = self._run(self._is_wide(operands)).backward
        for start, length in self._tiles(operands):
            flowing = [t.narrow(d, start, length) for t, d in zip(tangents, ends, strict=True)]
            made = [*run(self._parts(operands, start, length), flowing)]
            for i, (whole, dim) in enumerate(zip(sums, dims, strict=True)):
                part, made[i] = made[i], None  # freed before the next tile
                if dim >= 0:
                    into = whole.narrow(dim, start, length)
                    into.zero_() if part is None else into.copy_(part)
                elif part is not None:
                    whole.add_(part)
                del part
        found = [s.to(x.dtype) for s, x in zip(sums, learning, strict=True)]
        return found[0] if len(found) == 1 else tuple(found)

    def _tiles(self, operands: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
        rows = self.count(operands)
        tiles = -(-rows // self.most)
        for i in range(tiles):
            start = i * rows // tiles
            yield start, (i + 1) * rows // tiles - start

    def _parts(self, operands: Sequence[Tensor], start: int, length: int) -> list[Tensor]:
        pairs = zip(operands, self.rows, strict=True)
        return [x if d < 0 else x.narrow(d, start, length).contiguous() for x, d in pairs]

    def _run(self, wide: bool) -> TileGraphs:
        if wide or self.graphs is None:
            return PlainTiles(self._wide_body if wide else self.body, self.learns)
        return self.graphs

    def _is_wide(self, operands: Sequence[Tensor]) -> bool:
        pairs = zip(operands, self.dtypes, strict=True)
        return _in_float64.get() or any(x.dtype == torch.float64 != dtype for x, dtype in pairs)

    @cached_property
    def _wide_body(self) -> fx.GraphModule:
        """The region with float64 in place of other floating dtypes, as where it is verified."""

        def other(x: Any) -> Any:
            floating = isinstance(x, torch.dtype) and x.is_floating_point
            return torch.float64 if floating else x

        graph = fx.Graph()
        graph.output(graph.graph_copy(self.body.graph, {}))
        for node in graph.nodes:
            if node.op == "call_function":
                node.args, node.kwargs = map_aggregate((node.args, node.kwargs), other)
        return fx.GraphModule(torch.nn.Module(), graph)


@dataclass(frozen=True, slots=True)
class PlainTiles:
    """A region run call by call, and differentiated by autograd."""

    body: fx.GraphModule
    learns: Sequence[int]

    def forward(self, parts: Sequence[Tensor], _: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the results of a tile."""
        found: Sequence[Tensor] = self.body(*parts)
        return found

    def backward(
        self, parts: Sequence[Tensor], flowing: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of the operands that learn."""
        with above_autograd(), torch.enable_grad():
            given = [x.detach() for x in parts]
            learning = [given[i].requires_grad_() for i in self.learns]
            made = self.body(*given)
            pairs = [(y, g) for y, g in zip(made, flowing, strict=True) if y.requires_grad]
            outputs, tangents = zip(*pairs, strict=True)
            return torch.autograd.grad(outputs, learning, tangents, allow_unused=True)


@contextmanager
def in_float64() -> Iterator[None]:
    """Has regions compute in float64 throughout, as where they are compared with the model."""
    token = _in_float64.set(True)
    try:
        yield
    finally:
        _in_float64.reset(token)


@contextmanager
def above_autograd() -> Iterator[None]:
    """Lets autograd see the calls of an op, as if they were made outside of it."""
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        left_out = left_out.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), left_out):
        yield


def tiling_of(op: object) -> Tiling | None:
    """Returns the region of an op, or of its backward; None: it is another op."""
    return _KNOWN.get(op) if isinstance(op, OpOverload) else None


def tiled(made: Tiling) -> Tiling:
    """Returns a region with its ops, the same one for equal regions."""
    name = made.name
    known = next((t for t in _KNOWN.values() if t.name == name), None)
    if known is not None:
        return known
    given = ", ".join(f"Tensor x{i}" for i in range(len(made.rows)))
    tangents = "".join(f", Tensor g{i}" for i in range(len(made.exits)))
    for at, schema, run, fake in (
        (name, f"({given}) -> {_several(made.exits)}", made.run, _shaped(made)),
        (
            f"{name}_backward",
            f"({given}{tangents}) -> {_several(made.learns)}",
            made.differentiate,
            _shaped_gradients(made),
        ),
    ):
        _LIBRARY.define(at + schema)
        _LIBRARY.impl(at, run, "CPU")
        _LIBRARY.impl(at, run, "CUDA")
        torch.library.register_fake(f"{NAMESPACE}::{at}", fake, lib=_LIBRARY)
    made.op = getattr(torch.ops.dcpc_tile, name).default
    made.back_op = getattr(torch.ops.dcpc_tile, f"{name}_backward").default
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", _backward_of(made), setup_context=_save, lib=_LIBRARY
    )
    _KNOWN[made.op] = _KNOWN[made.back_op] = made
    return made


def _several(values: Sequence[object]) -> str:
    return "Tensor" if len(values) == 1 else f"({', '.join(['Tensor'] * len(values))})"


def _shaped(made: Tiling) -> Callable[..., Any]:
    def fake(*operands: Tensor) -> Any:
        found = made.results(operands)
        return found[0] if len(found) == 1 else tuple(found)

    return fake


def _shaped_gradients(made: Tiling) -> Callable[..., Any]:
    def fake(*given: Tensor) -> Any:
        found = [given[i].new_empty(given[i].shape) for i in made.learns]
        return found[0] if len(found) == 1 else tuple(found)

    return fake


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward_of(made: Tiling) -> Callable[..., Any]:
    def backward(ctx: Any, *tangents: Tensor) -> tuple[Tensor | None, ...]:
        found = made.back_op(*ctx.saved_tensors, *tangents)
        each = iter((found,) if isinstance(found, Tensor) else found)
        return tuple(next(each) if i in made.learns else None for i in range(len(made.rows)))

    return backward


def summed_in(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which gradients of operands without rows are summed over tiles."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
