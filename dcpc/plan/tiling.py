"""Prepares a program whose regions of wide values run a few rows at a time.

program ─► regions ─► program of tiles ─► sharding          (priced and run as any program)
└────► program of a region's rows ─► graphs of a tile, their costs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import sympy
from torch import Tensor

from dcpc.buckets import Bucket
from dcpc.codegen import Variant
from dcpc.codegen.lower.tiles import ROWS, TiledCall, apply_tiles
from dcpc.errors import PlanError
from dcpc.ir import BucketPlan, Placement
from dcpc.ops.tiled import Tiling, above_autograd
from dcpc.passes.sharding.attention_ways import restricted
from dcpc.passes.sharding.sharding import analyse
from dcpc.passes.unpad.wide_rows import tile_regions
from dcpc.plan.prices.priced import Priced
from dcpc.plan.runnable import Runnable
from dcpc.plan.traced import Traced
from dcpc.symbolic_profile import Ledger, tile_costs
from dcpc.trace import casting

ZERO = sympy.Integer(0)
LOGITS, MLP = 4.0, 1.5  # least width of a region, as a multiple of its ends'
# Rows of a tile and least widths that are tried, the cheapest first.
TILES = tuple((most, wider) for wider in (LOGITS, MLP) for most in (4096, 1024, 256))


def in_tiles(
    traced: Traced, most: int, wider: float = LOGITS, derive_rules: bool = False
) -> Traced | None:
    """Returns a program that runs its widest regions in tiles; None: it has no such region.

    Args:
        traced: program to rewrite.
        most: most rows of a tile.
        wider: least width of a region, see `tile_regions`.
        derive_rules: whether ops without a sharding rule are run on pieces to find one.
    """
    regions = tile_regions(traced.program, traced.sharding, wider)
    if not regions:
        return None
    program, calls = apply_tiles(
        traced.program, regions, most, f"{traced.backend} {traced.device.kernels_of}"
    )
    for call in calls:
        if call.tiling.costs is None:
            _prepare(traced, call)
    sharding = restricted(program, analyse(program, derive_rules), traced.attention)
    whole = traced.whole or traced.program
    return replace(traced, program=program, sharding=sharding, tracers={}, whole=whole)


class TileLadder:
    """Chooses for each bucket the program that it runs: whole, or in tiles of some rows.

    Args:
        by_bucket: program of each bucket.
        tile: most rows of a tile; "auto": where a bucket recomputes or does not fit; "none".
    """

    def __init__(self, by_bucket: Mapping[Bucket, Runnable], tile: int | str) -> None:
        self._tile = tile
        self.by_bucket = dict(by_bucket)
        if isinstance(tile, int):
            self.by_bucket = {b: tiled(v, tile) or v for b, v in by_bucket.items()}
        self._of: dict[int, Runnable] = {id(v.priced): v for v in self.by_bucket.values()}

    @property
    def priced(self) -> dict[Bucket, Priced]:
        """Prices of each bucket's first program."""
        return {b: v.priced for b, v in self.by_bucket.items()}

    def others(self, bucket: Bucket, plan: BucketPlan | PlanError) -> Iterator[tuple[Priced, str]]:
        """Yields the programs in tiles, where the plan lacks memory; the cheapest first.

        Wide layers are in tiles only where nothing else fits: what recompute frees of them costs
        the same.
        """
        if self._tile != "auto" or (isinstance(plan, BucketPlan) and not plan.menu_step):
            return
        whole = self.by_bucket[bucket]
        for most, wider in TILES:
            wanted = wider == LOGITS or isinstance(plan, PlanError)
            made = tiled(whole, most, wider) if wanted and most < bucket.tokens else None
            if made is not None:
                self._of[id(made.priced)] = made
                what = "logits" if wider == LOGITS else "logits and wide layers"
                yield made.priced, f"{what} {most} rows at a time"

    def chosen(self, priced: Mapping[Bucket, Priced]) -> dict[Bucket, Runnable]:
        """Returns the program of each bucket that was planned."""
        planned = {b: self._of[id(p)] for b, p in priced.items()}
        return {b: planned.get(b, v) for b, v in self.by_bucket.items()}


def tiled(runnable: Runnable, most: int, wider: float = LOGITS) -> Runnable | None:
    """Returns a program in tiles; None: it has no region that is far wider than its ends."""
    if (most, wider) not in runnable.in_tiles:
        made = in_tiles(runnable.traced, most, wider, bool(runnable.traced.sharding.derived))
        found = None if made is None else Runnable(made)
        if found is not None:
            found.whole, found.tiles = runnable, (most, wider)
        runnable.in_tiles[most, wider] = found
    return runnable.in_tiles[most, wider]


def _prepare(traced: Traced, call: TiledCall) -> None:
    """Gives a region the graphs that run a tile, and their costs."""
    program, device, tiling = call.program, traced.device, call.tiling
    inner = Traced(
        program, analyse(program, False), device, traced.backend, dict, reference=program.hints
    )
    runnable = Runnable(inner)
    placement = runnable.priced.placement(program.hints, 1)
    joint = inner.lowering(placement).joint
    ledger = Ledger(joint.names, 1, fuses=traced.backend == "inductor", gpu=device.kernels_of)
    costs = ledger.costs(runnable.partition(placement, 0))
    (rows,) = program.symbols.values()
    tiling.costs = tile_costs(ledger, costs, rows)
    flops = sum((w.flops for w in tiling.costs.forward if w.op_class == "matmul"), ZERO)
    result = sympy.Mul(*program.info[program.outputs[0]].shape)
    tiling.product_flops = float(flops.subs({rows: 1}) / result.subs({rows: 1}))
    tiling.graphs = CompiledTiles(runnable, placement, tiling)


class CompiledTiles:
    """The graphs of a region's rows, each compiled when a tile is first that long."""

    def __init__(self, runnable: Runnable, placement: Placement, tiling: Tiling) -> None:
        self._runnable, self._placement, self._tiling = runnable, placement, tiling
        self._known: dict[int, tuple[Variant, tuple[int, ...]]] = {}

    def forward(self, parts: Sequence[Tensor], _: Sequence[Tensor]) -> Sequence[Tensor]:
        """Returns the results of a tile."""
        variant, rows = self._at(parts)
        made: Sequence[Tensor] = variant.run_forward([*parts, *rows])
        return made[: variant.partition.returned]

    def backward(
        self, parts: Sequence[Tensor], flowing: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Returns the gradients of a tile's operands, given those of its results."""
        variant, rows = self._at(parts)
        given = [*parts, *rows]
        taken = [given[i] for i in variant.backward_takes]
        saved = variant.run_forward(given)[variant.partition.returned :]
        begins = variant.partition.begins
        arguments = [*saved, *taken, *(flowing[i].contiguous() for i in begins)]
        del saved
        found: Sequence[Tensor | None] = variant.run_backward(arguments)
        return found

    def _at(self, parts: Sequence[Tensor]) -> tuple[Variant, tuple[int, ...]]:
        count = self._tiling.count(parts)
        if count not in self._known:
            with above_autograd(), casting(parts[0].device.type, None):
                sizes = {ROWS: count}
                self._known[count] = self._runnable.variant(self._placement, 0, sizes, 0)
        return self._known[count]
