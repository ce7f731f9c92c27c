"""Rewrites a program to run its regions of wide values a few rows at a time, one call each.

    hidden [b, s, d] ─► [1, b s, d] ─► dcpc_tile::Region(hidden, weight, labels) ─► losses [b s]

The region is a program of its own, over one sample of so many rows: what runs it, and what it
costs, follows from that program as of any other.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from dcpc.codegen.lower.rewriting import RESIZED, RowRewriting, Shape
from dcpc.fx.integers import Emitter
from dcpc.fx.large_graphs import LazyGraphModule
from dcpc.ir import Program, TensorInfo, TileRegion, tensor_operands
from dcpc.ops.tiled import Tiling, tiled

aten = torch.ops.aten

ROWS = "rows"
HINT = 61  # rows of a region where it is traced


@dataclass(frozen=True, slots=True)
class TiledCall:
    """A region as an op, and the program of its rows.

    Attributes:
        tiling: the region's op.
        program: program of one sample, whose outputs are the region's results.
    """

    tiling: Tiling
    program: Program


def apply_tiles(
    program: Program, regions: Sequence[TileRegion], most: int, target: str
) -> tuple[Program, tuple[TiledCall, ...]]:
    """Returns a program that runs the regions in tiles, and the regions.

    Args:
        program: traced model.
        regions: regions of it, none of which shares a call with another.
        most: most rows of a tile.
        target: backend and kernels of the graphs that run, by which equal regions differ.
    """
    rewriting = _InTiles(program, regions, most, target)
    found = rewriting.rewritten(graph_hash=f"{program.graph_hash} tiles of {most} rows")
    return found, tuple(rewriting.made)


class _InTiles(RowRewriting):
    def __init__(
        self, program: Program, regions: Sequence[TileRegion], most: int, target: str
    ) -> None:
        self.most, self.target = most, target
        self.inside = {name for region in regions for name in region.calls}
        self.last = {region.calls[-1]: region for region in regions}
        self.made: list[TiledCall] = []
        self.nodes = {n.name: n for n in program.gm.graph.nodes}
        super().__init__(program, regions[0].factors, -1, -1, sympy.Integer(0))

    def call(self, node: fx.Node) -> None:
        """Adds a call; a region at the place of its last call."""
        if node.name not in self.inside:
            given = [self.value(n.name) for n in tensor_operands(node, self.program.info)]
            self.padded[node.name] = self.made_of(node, given, self.program.info[node.name].shape)
        elif node.name in self.last:
            self._region(self.last[node.name], node)

    def _region(self, region: TileRegion, last: fx.Node) -> None:
        sizes = {f.key: f.size for n in region.calls for dim in self.factors[n] for f in dim}
        self.batch, self.seq = region.rows[0], region.rows[-1]
        self.rows = sympy.Mul(*(sizes[key] for key in region.rows))
        one = len(region.rows) == 1
        given = []
        for name in region.operands:
            x = self.value(name)
            keys = {f.key for dim in self.factors[name] for f in dim}
            rowed = not keys.isdisjoint(region.rows)
            given.append(self.of_rows(x, name) if rowed and not one else x)
        body = _Body(self, region, [self.nodes[n] for n in region.calls])
        tiling = body.tiling()
        self.made.append(TiledCall(tiling, body.program()))
        call = self.graph.call_function(tiling.op, tuple(given))
        call.meta = {k: v for k, v in last.meta.items() if k != "val"}
        for i, name in enumerate(region.exits):
            several = len(region.exits) > 1
            made = self.graph.call_function(operator.getitem, (call, i)) if several else call
            made.meta = dict(call.meta)
            if one:
                self.padded[name] = self.known(made, name, self.program.info[name].shape)
            else:
                self.packed[name] = self.known(made, name, self.shape(name))
                self.value(name)  # of these rows: another region may have others


class _Body:
    """The region's graph, over one sample of `ROWS` rows."""

    def __init__(self, of: _InTiles, region: TileRegion, calls: Sequence[fx.Node]) -> None:
        self.of, self.region, self.program_ = of, region, of.program
        self.rows = sympy.Symbol(ROWS, integer=True, positive=True)
        self.graph = fx.Graph()
        self.at: dict[str, fx.Node] = {}
        self.info: dict[str, TensorInfo] = {}
        self.scalars: dict[str, sympy.Expr] = {}
        for i, name in enumerate(self.region.operands):
            node = self.graph.placeholder(f"x{i}")
            node.meta = {"device": of.devices[name]}
            learns = i in self.region.learns
            info = TensorInfo(self.shape(name), self.program_.info[name].dtype, learns)
            self.at[name], self.info[node.name] = node, info
        size = self._size_node()
        self.emitter = Emitter(self.graph, {self.rows: size})
        for node in calls:
            self._add(node)
        outputs = tuple(self.at[name] for name in self.region.exits)
        self.graph.output(outputs)
        self.outputs = tuple(n.name for n in outputs)

    def shape(self, name: str) -> Shape:
        """Returns a value's shape, of one sample."""
        return self.of.shape(name, self.rows)

    def row_dim(self, name: str) -> int:
        """Returns the dim of rows of a value, -1 if it has none."""
        return next((d for d, size in enumerate(self.shape(name)) if size == self.rows), -1)

    def _size_node(self) -> fx.Node:
        name = next(n for n in self.region.operands if self.row_dim(n) >= 0)
        node = self.graph.call_function(aten.sym_size.int, (self.at[name], self.row_dim(name)))
        self.scalars[node.name] = self.rows
        return node

    def _add(self, node: fx.Node) -> None:
        scalars = self.program_.scalars
        if node.target in RESIZED:
            sizes = [self.emitter.emit(size) for size in self.shape(node.name)]
            given = self.at[str(node.args[0])]
            made = self.graph.call_function(node.target, (given, sizes), dict(node.kwargs))
        else:
            args, kwargs = fx.node.map_arg(
                (node.args, dict(node.kwargs)),
                lambda n: int(scalars[n.name]) if n.name in scalars else self.at[n.name],
            )
            made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta = {k: v for k, v in node.meta.items() if k != "val"}
        made.meta["device"] = self.of.devices[node.name]
        info = self.program_.info[node.name]
        self.at[node.name] = made
        self.info[made.name] = TensorInfo(self.shape(node.name), info.dtype, info.requires_grad)

    def tiling(self) -> Tiling:
        """Returns the op that runs the region."""
        exits = []
        for name in self.region.exits:
            dim = self.row_dim(name)
            sizes = [0 if d == dim else int(size) for d, size in enumerate(self.shape(name))]
            exits.append((self.program_.info[name].dtype, tuple(sizes), dim))
        return tiled(
            Tiling(
                body=LazyGraphModule(torch.nn.Module(), self.graph),
                rows=tuple(self.row_dim(name) for name in self.region.operands),
                dtypes=tuple(self.program_.info[name].dtype for name in self.region.operands),
                exits=tuple(exits),
                learns=self.region.learns,
                most=self.of.most,
                target=self.of.target,
            )
        )

    def program(self) -> Program:
        """Returns the region's program; backward begins at its results with a gradient."""
        learned = [i for i, n in enumerate(self.outputs) if self.info[n].requires_grad]
        names = [self.at[n].name for n in self.region.operands]
        return Program(
            gm=fx.GraphModule(torch.nn.Module(), self.graph),
            parameters={},
            buffers={},
            constants={},
            inputs={name: name for name in names},
            symbols={ROWS: self.rows},
            info=self.info,
            scalars=self.scalars,
            outputs=self.outputs,
            begins=tuple(learned),
            hints={ROWS: HINT},
            graph_hash=f"{self.program_.graph_hash} region",
        )
