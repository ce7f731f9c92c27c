"""Costs of a model on each bucket for all simulated systems: the profile's rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcpc.buckets import BATCH, Bucket
from dcpc.errors import PlanError
from dcpc.ir import PlanRow
from dcpc.plan.planning import Planned
from dcpc.symbolic_profile import Device

KNOTS = 64  # lengths at which a packed sequence is priced; between them it is on a line


@dataclass(frozen=True, slots=True)
class SimRow(PlanRow):
    """A row that fits a rank's memory, and its bytes sent.

    Attributes:
        wire_bytes: bytes that all ranks of the group send.
    """

    wire_bytes: float


@dataclass(frozen=True, slots=True)
class BucketCosts:
    """The rows of one bucket.

    Attributes:
        bucket: the shape.
        tokens: tokens of a sample.
        least: rows with the least recompute that fits, for each sp and micro-batch.
        full: rows with all recomputed.
        usual: samples of a micro-batch where a user fixes it; 0: as many as fit.
    """

    bucket: Bucket
    tokens: int
    least: tuple[SimRow, ...]
    full: tuple[SimRow, ...]
    usual: int = 0

    def row(self, rows: Sequence[SimRow], sp: int) -> SimRow | None:
        """Returns the row of a degree with the usual micro-batch, or the largest below it."""
        fits = [r for r in rows if r.sp == sp and (not self.usual or r.micro_batch <= self.usual)]
        return max(fits, key=lambda r: r.micro_batch, default=None)

    def least_degree(self) -> int:
        """Returns the smallest sp at which the usual micro-batch fits with all recomputed.

        Without a usual one, or where it fits nowhere: at which one sample fits.
        """
        wanted = [r.sp for r in self.full if self.usual and r.micro_batch == self.usual]
        return min(wanted or [r.sp for r in self.full])


@dataclass(frozen=True, slots=True)
class Packing:
    """Sequences end to end in one row of the longest bucket's length.

    Attributes:
        bucket: longest bucket.
        sp: degree of every pack.
        menu_step: recompute of every pack, as the bucket needs to fit.
        fixed_s: seconds of a pack before the first sequence.
        lengths: lengths at which `seconds_s` is known, ascending.
        seconds_s: seconds that a sequence of each length adds; between them on a line.
        token_wire_bytes: bytes that the group sends for a token.
    """

    bucket: Bucket
    sp: int
    menu_step: int
    fixed_s: float
    lengths: tuple[int, ...]
    seconds_s: tuple[float, ...]
    token_wire_bytes: float

    @property
    def cap_tokens(self) -> int:
        """Tokens of a pack."""
        return tokens_of(self.bucket)

    def sample_s(self, length: int) -> float:
        """Seconds that a sequence adds to a pack."""
        return float(np.interp(length, self.lengths, self.seconds_s))


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """A model on a machine.

    Attributes:
        buckets: rows of each bucket.
        world: ranks.
        node_ranks: ranks of a node.
        gradient_bytes: bytes that a step sums over all ranks, or over all blocks.
        reduction_s: seconds of that sum.
        packing: costs of packs; None where a sample has more than one length.
        gather_s: seconds of gathering all parameters twice and of summing their gradients, where
            ranks shard them and the rows leave it out.
        gather_wire_bytes: bytes that all ranks send for it.
        block: ranks that shard parameters where the rows include it: then all systems run a step in
            rounds, and sum over the blocks alone at its end; 0: they hold them whole.
    """

    buckets: tuple[BucketCosts, ...]
    world: int
    node_ranks: int
    gradient_bytes: float
    reduction_s: float
    packing: Packing | None = None
    gather_s: float = 0.0
    gather_wire_bytes: float = 0.0
    block: int = 0

    def of(self, bucket: Bucket) -> BucketCosts:
        """Returns the rows of a bucket."""
        return next(b for b in self.buckets if b.bucket == bucket)

    def fixed_degree(self, *, least: bool = False) -> int:
        """Returns the smallest sp at which one sample of every bucket fits.

        Args:
            least: whether recompute is as little as fits; else all is recomputed.

        Raises:
            PlanError: there is none, as short buckets were not priced at the longest one's degree.
        """
        every = [{r.sp for r in (b.least if least else b.full)} for b in self.buckets]
        common = set[int].intersection(*every)
        if not common:
            raise PlanError(
                f"got no degree at which all {len(every)} buckets have a row; expected one: each "
                "has those that gain or fit; leave out the shortest or the longest, or name --sp"
            )
        return min(common)

    @property
    def reduction_wire_bytes(self) -> float:
        """Returns the bytes that all ranks send to sum the gradients, as a ring."""
        owners = self.world // (self.block or 1)  # of a row, that sum it
        return 2.0 * (owners - 1) * self.gradient_bytes


def of_planned(planned: Planned, world: int, device: Device) -> ModelCosts:
    """Returns the costs of a planned model.

    Where a system fixes the micro-batch, it has as many tokens as a sample of the longest bucket.
    """
    found = []
    gradients = 0.0
    for bucket, rows in planned.tables.items():
        priced = planned.by_bucket[bucket].priced
        least, full = [], []
        for row in (r for r in rows if r.sp <= world):
            sizes = {**bucket.sizes, BATCH: row.micro_batch}
            study = priced.at(priced.placement(sizes, row.sp))
            if row.fits:
                wire = study.predict(row.menu_step, sizes).wire_bytes
                least.append(SimRow(row.sp, row.micro_batch, row.menu_step, row.seconds_s,
                                    float(wire * row.sp)))  # fmt: skip
            all_ = study.predict(row.steps, sizes)
            needed = row.needed_bytes - row.peak_bytes + all_.peak_bytes
            if needed <= planned.memory_bytes:
                full.append(SimRow(row.sp, row.micro_batch, row.steps, all_.seconds_s,
                                   float(all_.wire_bytes * row.sp)))  # fmt: skip
            gradients = float(study.profile(row.menu_step).gradient_bytes)
        if not full or not least:
            raise PlanError(
                f"bucket {bucket}: got no row that fits {planned.memory_bytes} bytes a rank with "
                f"all recomputed on {world} ranks; lower the bucket, or raise --memory"
            )
        found.append(BucketCosts(bucket, tokens_of(bucket), tuple(least), tuple(full)))
    longest = max(b.tokens for b in found)
    found = [replace(b, usual=longest // b.tokens) for b in found]
    block = planned.block
    if block:  # each micro-batch has summed its gradients within its block
        whole_bytes = float(planned.request.gradient_bytes * block)
        costs = ModelCosts(
            tuple(found), world, device.node_ranks, whole_bytes, planned.sum_s, block=block
        )
        return replace(costs, packing=_packing(planned, costs))
    seconds_s = device.all_reduce_s(gradients, world)
    costs = ModelCosts(
        tuple(found), world, device.node_ranks, gradients, seconds_s,
        # A gather sends half of what an all-reduce does, and so does the sum of rows.
        gather_s=1.5 * seconds_s, gather_wire_bytes=3.0 * (world - 1) * gradients,
    )  # fmt: skip
    return replace(costs, packing=_packing(planned, costs))


def _packing(planned: Planned, costs: ModelCosts) -> Packing | None:
    """Packs at the smallest sp at which the longest bucket fits, with the recompute it needs.

    A sequence adds the seconds of a second sample of its length: it attends to itself alone.
    """
    names = {name for b in costs.buckets for name, _ in b.bucket.shape_key}
    if len(names) != 1:
        return None
    (name,) = names
    longest = max(costs.buckets, key=lambda b: b.tokens)
    sp = min(row.sp for row in longest.least)
    row = min((r for r in longest.least if r.sp == sp), key=lambda r: r.micro_batch)
    priced = planned.by_bucket[longest.bucket].priced
    if planned.static or BATCH not in priced.traced.program.symbols:
        return None
    sizes = {**longest.bucket.sizes, BATCH: row.micro_batch}
    study = priced.at(priced.placement(sizes, sp))

    def seconds(length: int, batch: int) -> float:
        return study.predict(row.menu_step, {name: length, BATCH: batch}).seconds_s

    shortest = max(1, min(b.tokens for b in costs.buckets) // KNOTS)
    knots = np.geomspace(shortest, longest.tokens, KNOTS)
    lengths = sorted({round(float(x)) for x in knots} | {b.tokens for b in costs.buckets})
    added = [seconds(length, 2) - seconds(length, 1) for length in lengths]
    return Packing(
        bucket=longest.bucket,
        sp=sp,
        menu_step=row.menu_step,
        fixed_s=max(0.0, seconds(longest.tokens, 1) - added[-1]),
        lengths=tuple(lengths),
        seconds_s=tuple(added),
        token_wire_bytes=row.wire_bytes / row.micro_batch / longest.tokens,
    )


def tokens_of(bucket: Bucket) -> int:
    """Returns the product of a bucket's lengths, its batch apart."""
    tokens = 1
    for _, size in bucket.shape_key:
        tokens *= size
    return tokens


def cheapest(rows: Sequence[SimRow], sp: int) -> SimRow | None:
    """Returns the row of a degree with the fewest seconds a sample."""
    fits = [r for r in rows if r.sp == sp]
    return min(fits, key=lambda r: r.seconds_s / r.micro_batch, default=None)


def run_of(rows: Sequence[SimRow], sp: int, samples: int) -> tuple[SimRow, float]:
    """Returns the smallest row of a degree that holds so many samples, and their seconds.

    Between two rows seconds are on a line; below the first they are its share.
    """
    own = sorted((r for r in rows if r.sp == sp), key=lambda r: r.micro_batch)
    at = bisect_left([r.micro_batch for r in own], samples)
    assert at < len(own), f"{samples} samples are more than any row of sp={sp} holds"
    row = own[at]
    few, few_s = (own[at - 1].micro_batch, own[at - 1].seconds_s) if at else (0, 0.0)
    share = (samples - few) / (row.micro_batch - few)
    return row, few_s + (row.seconds_s - few_s) * share
