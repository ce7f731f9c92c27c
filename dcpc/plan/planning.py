"""A plan for every bucket: settings are priced by the symbolic profile, and one is chosen."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

import torch

from dcpc.buckets import BATCH, Bucket, Sizes
from dcpc.codegen.variant.source import variant_source
from dcpc.errors import BucketError, PlanError
from dcpc.fx.garbage import without_collection
from dcpc.ir import BucketPlan, Placement, Profile, Program
from dcpc.ir.thresholds import DOUBLING_GAIN, PLACEMENT_LOSS, WIDER_GROUP_GAIN
from dcpc.plan.choose import TriedRow, choose, crossover_lines, least_recompute
from dcpc.plan.notes.attention import attention_lines
from dcpc.plan.notes.gathers import gather_lines
from dcpc.plan.notes.kernels import kernel_lines
from dcpc.plan.priced import Priced
from dcpc.plan.progress import tracked
from dcpc.plan.runnable import Runnable
from dcpc.plan.studies import Study
from dcpc.symbolic_profile import (
    LARGE_SEGMENT_BYTES,
    Device,
    OptimizerMemory,
    ReportRow,
    bytes_text,
    render_report,
)
from dcpc.trace.loss import Loss

# Micro-batches are tried in powers of two, up to where one more doubling gains nothing.
MOST_SAMPLES = 1 << 12
# Autograd's own gradient of the loss, one number, lives beside the share that a variant takes.
LOSS_GRADIENT_BYTES = 8
# Of a GPU's memory: where a plan needs less, what lies idle between its blocks fits as well; but
# two segments that hardly begin to be used are much of a small budget.
AMPLE = 0.8
IDLE_BYTES = 2 * LARGE_SEGMENT_BYTES


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What the user asked for.

    Attributes:
        sps: degrees to try.
        recompute_mode: "auto", "none" or "all".
        memory_bytes: of one rank.
        resident_bytes: what stays on a rank whatever runs: parameters, buffers, their gradients and
            the optimizer's state.
        world: number of ranks.
        residents: bytes of each tensor among them.
        step_bytes: what the optimizer's step takes besides, when backward's memory is free again.
        parameters: who holds them: "whole", "step", "pull" or "rounds".
        block: ranks that share them out and gather them from each other; 0: nothing is gathered.
        gradient_bytes: that a rank keeps of all gradients.
        communicators: process groups of a rank whose memory is not torch's; 0 of a CPU's ranks.
        optimizer: memory of what trains the model.
    """

    sps: tuple[int, ...]
    recompute_mode: str
    memory_bytes: int
    resident_bytes: int
    world: int
    residents: tuple[int, ...] = ()
    step_bytes: int = 0
    parameters: str = "whole"
    block: int = 0
    gradient_bytes: int = 0
    communicators: int = 0
    optimizer: OptimizerMemory = field(default_factory=OptimizerMemory)


@dataclass(frozen=True, slots=True)
class Planned:
    """A model traced and planned for some buckets on some ranks; nothing of it has run.

    Attributes:
        by_bucket: what is made from the trace of each bucket: prices and graphs. Buckets share a
            trace unless a dim is 1 in one of them and not in the other.
        plans: the setting of every bucket.
        tables: the rows each was chosen from.
        request: what was asked for.
        autocast: what the traces were captured under; None: no autocast.
        misfits: buckets that fit with no setting, and the error that says so; they have rows in
            `tables` and no plan. `dcpc.api.plan` and `dcpc.compile` raise the first such error.
        loss: of what the model's forward returned; None: forward returned it.
    """

    by_bucket: Mapping[Bucket, Runnable]
    plans: Mapping[Bucket, BucketPlan]
    tables: Mapping[Bucket, tuple[TriedRow, ...]]
    request: PlanRequest
    autocast: torch.dtype | None = None
    misfits: Mapping[Bucket, PlanError] = field(default_factory=dict)
    loss: Loss | None = None

    @property
    def memory_bytes(self) -> int:
        """Memory of one rank."""
        return self.request.memory_bytes

    @property
    def report_rows(self) -> tuple[ReportRow, ...]:
        """What the report says of each bucket: its plan, its profile, and the sizes of a rank."""
        rows = []
        for bucket, plan in self.plans.items():
            sizes = {**bucket.sizes, BATCH: plan.micro_batch}
            local = self.study(bucket).local_sizes(sizes)
            rows.append(ReportRow(plan, self.profile(bucket), local))
        return tuple(rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know besides: of the traces, equal layers said once, and seconds."""
        alike: dict[str, list[str]] = {}
        for note in dict.fromkeys(note for v in self.traces for note in v.traced.program.notes):
            alike.setdefault(re.sub(r"_\d+", "", note), []).append(note)
        notes = [first + f" (and {len(m)} more like it)" * bool(m) for first, *m in alike.values()]
        priced = {bucket: v.priced for bucket, v in self.by_bucket.items()}
        notes += gather_lines(priced, self.plans)
        notes += kernel_lines(self.device, (v.traced.program for v in self.traces))
        if self.sum_s:
            request = self.request
            notes.append(
                f"{request.world // request.block} blocks of {request.block} ranks share out "
                "parameters and run free of each other; once a step a rank sums its rows' "
                f"gradients, {bytes_text(request.gradient_bytes)}, with the ranks of its place in "
                f"the others, which takes {self.sum_s:.3g} s"
            )
        near = sum(v.priced.placements.near_count for v in self.traces)
        if near:
            notes.append(
                f"{near} settings are split as other lengths or degrees are: at most "
                f"{PLACEMENT_LOSS:.1%} above the least cost"
            )
        error = self.device.seconds_error
        if error is not None:
            notes.append(
                f"seconds are calibrated: ± {error:.1%} in the median of the measured sizes; those "
                "of one size may be further off"
            )
        return tuple(notes)

    @property
    def block(self) -> int:
        """Ranks that gather parameters from each other while they run; 0: nothing is gathered."""
        return self.request.block

    @property
    def sum_s(self) -> float:
        """Predicted seconds in which a step's gradients are summed over blocks; 0: of all ranks."""
        request = self.request
        owners = request.world // request.block if request.block else 1
        return self.device.all_reduce_s(request.gradient_bytes, owners, request.world)

    @property
    def traces(self) -> tuple[Runnable, ...]:
        """What is made from each trace, in the order of the buckets."""
        return tuple({id(v): v for v in self.by_bucket.values()}.values())

    @property
    def device(self) -> Device:
        """What was planned for."""
        return self.traces[0].traced.device

    @property
    def runnable(self) -> Runnable:
        """What is made from the one trace that all buckets share."""
        traces = self.traces
        assert len(traces) == 1, f"{len(traces)} traces: ask for those of a bucket"
        return traces[0]

    @property
    def program(self) -> Program:
        """The one traced model that all buckets share."""
        return self.runnable.traced.program

    def report(self) -> str:
        """Returns the plan of each bucket, its predicted costs as formulas of the dims, and why."""
        changes = crossover_lines(list(self.plans.values()))
        text = render_report(self.report_rows)
        text += (
            f"\na rank keeps {bytes_text(self.request.resident_bytes)} besides each peak: "
            f"parameters ({self.request.parameters}), buffers, their gradients, the optimizer's "
            "state\n"
        )
        if self.request.communicators:
            each_bytes = self.device.communicator_bytes
            text += (
                f"{self.request.communicators} communicators of a rank take "
                f"{bytes_text(self.request.communicators * each_bytes)} of the device beside that "
                f"({bytes_text(each_bytes)} each, as an H100 had); memory= in bytes is without "
                "them\n"
            )
        text += "".join(f"\n{line}" for line in changes) + "\n"
        text += "".join(f"\n{line}" for line in self.attention) + "\n" * bool(self.attention)
        return text + "".join(f"\n{note}" for note in self.notes) + "\n" * bool(self.notes)

    @property
    def attention(self) -> list[str]:
        """How the attentions of split buckets are split, what each way costs, and why; lines."""
        return attention_lines(self.by_bucket, self.plans)

    def source(self, bucket: Bucket) -> str:
        """Returns the forward and backward that run for a bucket as Python a person can read."""
        plan, placement = self.plans[bucket], self.placement(bucket)
        parts = self.by_bucket[bucket].partition(placement, plan.menu_step)
        return variant_source(parts, plan, placement)

    def profile(self, bucket: Bucket) -> Profile:
        """Returns a bucket's costs as expressions of the dims."""
        return self.study(bucket).profile(self.plans[bucket].menu_step)

    def study(self, bucket: Bucket) -> Study:
        """Returns what a bucket's placement costs at any sizes."""
        return self.by_bucket[bucket].priced.at(self.placement(bucket))

    def placement(self, bucket: Bucket) -> Placement:
        """Returns how a full micro-batch of a bucket is split."""
        plan = self.plans[bucket]
        sizes = {**bucket.sizes, BATCH: plan.micro_batch}
        return self.by_bucket[bucket].priced.placement(sizes, plan.sp)

    def find(self, sizes: Mapping[str, int]) -> Bucket:
        """Returns the bucket of these lengths; a batch among them does not matter.

        Raises:
            BucketError: there is none.
            PlanError: it fits with no setting.
        """
        if not isinstance(sizes, Mapping):
            raise BucketError(
                f"got bucket {sizes!r}; expected a dim -> its length; pass one of the compiled "
                f"buckets, such as {next(iter(self.tables)).sizes}"
            )
        key = tuple(sorted((n, s) for n, s in sizes.items() if n != BATCH))
        for bucket in self.tables:
            if bucket.shape_key == key:
                if bucket in self.misfits:
                    raise self.misfits[bucket]
                return bucket
        raise BucketError(
            f"got bucket {Bucket.of(sizes)}; expected one of "
            f"{', '.join(map(str, list(self.tables)[:8]))}; pass one of the compiled buckets"
        )


class BucketPlans(NamedTuple):
    """The settings of some buckets.

    Attributes:
        plans: bucket -> its setting, of those that fit.
        tables: bucket -> the rows it was chosen from.
        misfits: bucket that fits with no setting -> the error that says so.
    """

    plans: dict[Bucket, BucketPlan]
    tables: dict[Bucket, tuple[TriedRow, ...]]
    misfits: dict[Bucket, PlanError]


def plan_buckets(
    by_bucket: Mapping[Bucket, Priced], request: PlanRequest, *, partly: bool = True
) -> BucketPlans:
    """Returns the setting of every bucket, the rows it was chosen from, and what fits with none.

    Args:
        by_bucket: bucket -> prices of its trace.
        request: what was asked for.
        partly: whether to plan the other buckets where one fits with no setting; else that one
            is the last.
    """
    found = BucketPlans({}, {}, {})
    left = [*by_bucket]
    with without_collection():  # graphs are kept, and walked in vain
        for bucket, priced in tracked([*by_bucket.items()], "plan", lambda item: item[0]):
            left.remove(bucket)
            later = [b for b in left if by_bucket[b] is priced]
            plan, found.tables[bucket] = _plan(priced, bucket, request, later)
            if isinstance(plan, BucketPlan):
                found.plans[bucket] = plan
                continue
            found.misfits[bucket] = plan
            if not partly:
                break
    return found


def plan_with_degrees(
    by_bucket: Mapping[Bucket, Priced], request: PlanRequest, degrees: Mapping[Bucket, int]
) -> BucketPlans:
    """Returns what `plan_buckets` does where each bucket's degree is given.

    Args:
        by_bucket: what each bucket costs.
        request: whose degrees do not count.
        degrees: bucket -> ranks.
    """
    plans: dict[Bucket, BucketPlan] = {}
    tables: dict[Bucket, tuple[TriedRow, ...]] = {}
    misfits: dict[Bucket, PlanError] = {}
    for sp in sorted(set(degrees.values())):
        mine = {b: priced for b, priced in by_bucket.items() if degrees[b] == sp}
        found = plan_buckets(mine, replace(request, sps=(sp,)))
        plans |= found.plans
        tables |= found.tables
        misfits |= found.misfits
    in_order = {b: plans[b] for b in by_bucket if b in plans}
    return BucketPlans(in_order, {b: tables[b] for b in by_bucket}, misfits)


def _plan(
    priced: Priced, bucket: Bucket, request: PlanRequest, later: Sequence[Bucket]
) -> tuple[BucketPlan | PlanError, tuple[TriedRow, ...]]:
    """Returns the setting of one bucket, and the rows it was chosen from; see `_rows`.

    Where none fits, the error that says so takes the setting's place. Where the rows that fit do
    not fit a GPU's segments, those that seemed not worth having may.
    """
    for every in (False, True):
        rows = tuple(_rows(priced, bucket, request, later, every))
        # Calls outside of planned steps run on aligned blocks; only the planner uses others.
        own = {(row.sp, row.micro_batch): row for row in rows if request.world % row.sp == 0}
        try:
            plan: BucketPlan | PlanError = _choose(priced, bucket, own, request)
        except PlanError as error:
            plan = error.with_traceback(None)  # it may be kept, and frames hold graphs
            if any(row.fits for row in rows) and not every:
                continue
        break
    return plan, tuple(own.get((row.sp, row.micro_batch), row) for row in rows)


def _choose(
    priced: Priced, bucket: Bucket, rows: dict[tuple[int, int], TriedRow], request: PlanRequest
) -> BucketPlan:
    """Returns the setting of a bucket; on a GPU one that fits as its allocator lays out blocks.

    Where the segments of a choice are too large, its row is priced again with as much less memory,
    and takes the place of the old one.
    """
    while True:
        most = request.memory_bytes
        plan = choose(bucket, [*rows.values()], most, request.world, request.recompute_mode)
        key = plan.sp, plan.micro_batch
        over = _reserved_bytes(priced, bucket, rows[key], request) - most
        if over <= 0:
            return plan
        less = replace(request, memory_bytes=rows[key].needed_bytes - over)
        row = replace(_row(priced, bucket, *key, less), segments=True)
        if not row.fits:
            reserved = _reserved_bytes(priced, bucket, row, request)
            row = replace(row, fits=reserved <= most, needed_bytes=max(row.needed_bytes, reserved))
        rows[key] = row


def _reserved_bytes(priced: Priced, bucket: Bucket, row: TriedRow, request: PlanRequest) -> int:
    """Returns the bytes of the segments that a row needs, 0 where it surely has room for them."""
    most = request.memory_bytes
    if not priced.traced.device.gpu or row.needed_bytes <= min(AMPLE * most, most - IDLE_BYTES):
        return 0
    sizes = {**bucket.sizes, BATCH: row.micro_batch}
    study = priced.at(priced.placement(sizes, row.sp, near=True))
    stays = request.residents or (request.resident_bytes,)
    return study.usage(row.menu_step, sizes, stays, request.memory_bytes).reserved_bytes


def _rows(
    priced: Priced, bucket: Bucket, request: PlanRequest, later: Sequence[Bucket], every: bool
) -> Iterator[TriedRow]:
    """Yields the rows of a bucket that may be worth having.

    Not tried: degrees beyond twice the last one that was faster; and a micro-batch at a degree if
    half of both fits: that group has the same samples a rank and sends less far, so it is at most a
    few percent slower, and leaves the other ranks to other samples.

    Args:
        priced: of the bucket's trace.
        bucket: what to price.
        request: what was asked for.
        later: other buckets of the trace that will be priced.
        every: try these, too.
    """
    fastest_s, widest = inf, max(request.sps)
    ample: set[tuple[float, float]] = set()  # (sp, micro-batch) that fit, or whose halves do
    for sp in request.sps:
        if sp > widest and not every:
            return
        best = inf
        for batch in _batches(priced, bucket, sp, request):
            if (sp / 2, batch / 2) in ample and not every:
                ample.add((sp, batch))
                continue
            others = [{**b.sizes, BATCH: b.batch or batch} for b in (bucket, *later)]
            priced.placements.foresee(others, sp)
            row = _row(priced, bucket, sp, batch, request)
            yield row
            if row.fits:
                ample.add((sp, batch))
                if row.seconds_s < fastest_s * (1 - WIDER_GROUP_GAIN):
                    fastest_s, widest = row.seconds_s, 2 * sp
            if not row.fits or row.rank_seconds > best * (1 - DOUBLING_GAIN):
                break
            best = row.rank_seconds


def _batches(priced: Priced, bucket: Bucket, sp: int, request: PlanRequest) -> Sequence[int]:
    """Micro-batches to try: the given one, or powers of two.

    From sp samples on the batch itself is split and the group is sp independent ranks: that row is
    the one of a smaller sp, so a free choice of sp stops before it.
    """
    if BATCH not in priced.traced.program.symbols:
        return (1,)
    if bucket.batch is not None:
        return (bucket.batch,)
    powers = []
    size = 1
    while size <= MOST_SAMPLES and (size < sp or sp == 1 or len(request.sps) == 1):
        powers.append(size)
        size *= 2
    return powers


def _row(priced: Priced, bucket: Bucket, sp: int, batch: int, request: PlanRequest) -> TriedRow:
    """Returns the cheapest row of one degree and micro-batch: the least recompute that fits."""
    sizes = {**bucket.sizes, BATCH: batch}
    return row_of(priced.at(priced.placement(sizes, sp, near=True)), sizes, sp, request)


def row_of(study: Study, sizes: Sizes, sp: int, request: PlanRequest) -> TriedRow:
    """Returns the cheapest row of a placement: the least recompute that fits.

    Args:
        study: of the placement.
        sizes: length of every dim, batch included.
        sp: ranks of the group.
        request: what was asked for; its degrees do not count.
    """
    batch = sizes.get(BATCH, 1)

    def most() -> int:
        return study.steps

    def row(menu_step: int) -> TriedRow:
        cost = study.predict(menu_step, sizes)
        run_bytes = cost.peak_bytes + cost.input_bytes + LOSS_GRADIENT_BYTES
        needed = request.resident_bytes + max(run_bytes, request.step_bytes)
        fits = needed <= request.memory_bytes
        peak_bytes, seconds_s = cost.peak_bytes, cost.seconds_s
        return TriedRow(sp, batch, menu_step, seconds_s, most, peak_bytes, needed, fits=fits)

    if request.recompute_mode in ("all", "none"):
        return row(most() if request.recompute_mode == "all" else 0)
    return least_recompute(row, most, study.priced)


def plans_text(plans: Mapping[Bucket, BucketPlan]) -> str:
    """Returns the decisions as text, equal on ranks that decided alike."""
    return "; ".join(
        f"{b}: sp {p.sp}, micro-batch {p.micro_batch}, recompute {p.menu_step}"
        for b, p in plans.items()
    )
