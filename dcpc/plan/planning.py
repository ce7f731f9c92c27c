"""Plans every bucket: prices settings by the symbolic profile and chooses one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple, TypeAlias

import torch

from dcpc.buckets import BATCH, Bucket, Buckets, Sizes
from dcpc.codegen.variant.source import variant_source
from dcpc.errors import BucketError, PlanError
from dcpc.fx.garbage import without_collection
from dcpc.ir import LEAVES, BucketPlan, Placement, Profile, Program
from dcpc.ir.thresholds import AWAY_GAIN, DOUBLING_GAIN, PLACEMENT_LOSS, TILE_GAIN, WIDER_GROUP_GAIN
from dcpc.plan.choose import TriedRow, choose, crossover_text, least_recompute
from dcpc.plan.notes.attention_note import attention_lines
from dcpc.plan.notes.gather_note import gather_lines
from dcpc.plan.notes.kernel_note import kernel_lines
from dcpc.plan.prices.away_kinds import LEVELS
from dcpc.plan.prices.priced import Priced
from dcpc.plan.prices.studies import Study
from dcpc.plan.progress_bar import tracked
from dcpc.plan.runnable import Runnable
from dcpc.symbolic_profile import (
    LARGE_SEGMENT_BYTES,
    Device,
    OptimizerMemory,
    Prediction,
    ReportRow,
    bytes_text,
    render_formulas,
    render_report,
)
from dcpc.trace.loss import Loss

# Micro-batches are tried in powers of two, up to where one more doubling gains nothing.
MOST_SAMPLES = 1 << 12
AWAY_TRIES = 8  # numbers of recompute steps, besides 0, with which values leave
AWAY_STEP = 64  # levels between those that are tried at first
# The gradient of the loss that autograd itself makes: one number, beside a variant's memory.
LOSS_GRADIENT_BYTES = 8
# A plan that needs less than this share of a GPU fits with the allocator's fragmentation, too; on a
# small budget at least two segments must stay free.
AMPLE = 0.8
IDLE_BYTES = 2 * LARGE_SEGMENT_BYTES
MORE_NOTE = "formulas and ways to split attention: report(full=True), dcpc report --full"


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Options that a plan depends on, in bytes and ranks.

    Attributes:
        sps: degrees to try.
        recompute_mode: "auto", "none" or "all".
        memory_bytes: memory of one rank.
        resident_bytes: bytes that stay on a rank throughout: parameters, buffers, their gradients
            and the optimizer's state.
        world: number of ranks.
        residents: bytes of each tensor counted in `resident_bytes`.
        step_bytes: transient bytes of the optimizer's step, which runs after backward's memory is
            freed.
        parameters: how ranks hold parameters: "whole", "step" (ZeRO-1), "pull" or "rounds"
            (ZeRO-3).
        block: ranks that shard parameters and gather them from each other (HSDP); 0: nothing is
            gathered.
        gradient_bytes: bytes of all gradients that a rank keeps.
        communicators: process groups of a rank whose buffers torch does not count (NCCL); 0 on a
            CPU.
        optimizer: memory of what trains the model.
        tile: most rows of a tile of the widest values; "auto": where that pays; "none": no tiles.
        away_bytes: most bytes of saved values that may leave a rank's device; 0: none do.
        all_leave: whether all leave that can and find room, whether that pays or not.
        held_away: name of the store where parameters, their gradients and the optimizer's state
            are; "": on the device.
        state_away: name of the store where the optimizer's state is; "": on the device.
        held_away_bytes: bytes that they take there.
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
    tile: int | str = "none"
    away_bytes: int = 0
    all_leave: bool = False
    held_away: str = ""
    state_away: str = ""
    held_away_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Planned:
    """A model traced and planned for some buckets on some ranks; nothing has run yet.

    Attributes:
        by_bucket: prices and graphs made from the trace of each bucket. Buckets share a trace
            unless a dim is 0 or 1 in one of them and not in the other, or static.
        plans: chosen setting of each bucket.
        tables: rows from which each setting was chosen.
        request: options that the plan depends on.
        autocast: dtype of the autocast under which the model was traced; None: no autocast.
        misfits: bucket that fits with no setting -> the error that says so. It has rows in `tables`
            and no plan. `dcpc.api.plan` and `dcpc.compile` raise that error.
        loss: loss function of the model's outputs; None: the model's forward returns the loss.
        static: dims that are static in the traces, as in `Buckets.static`.
    """

    by_bucket: Mapping[Bucket, Runnable]
    plans: Mapping[Bucket, BucketPlan]
    tables: Mapping[Bucket, tuple[TriedRow, ...]]
    request: PlanRequest
    autocast: torch.dtype | None = None
    misfits: Mapping[Bucket, PlanError] = field(default_factory=dict)
    loss: Loss | None = None
    static: Mapping[str, str] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> int:
        """Memory of one rank in bytes."""
        return self.request.memory_bytes

    @property
    def report_rows(self) -> tuple[ReportRow, ...]:
        """One report row a bucket: its plan, its profile, and the sizes on one rank."""
        rows = []
        for bucket, plan in self.plans.items():
            sizes = {**bucket.sizes, BATCH: plan.micro_batch}
            local = self.study(bucket).local_sizes(sizes)
            rows.append(ReportRow(plan, self.profile(bucket), local))
        return tuple(rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines below the report: notes of the traces (equal layers once), gathers, accuracy."""
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
                f"placements of other lengths or degrees used again: {near}, each at most "
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
        """Ranks that gather parameters from each other in a micro-batch; 0: nothing is gathered."""
        return self.request.block

    @property
    def sum_s(self) -> float:
        """Predicted seconds of a step's all-reduce of gradients over blocks; 0: one block."""
        request = self.request
        owners = request.world // request.block if request.block else 1
        return self.device.all_reduce_s(request.gradient_bytes, owners, request.world)

    @property
    def traces(self) -> tuple[Runnable, ...]:
        """The distinct traces with their graphs, in the order of the buckets."""
        return tuple({id(v): v for v in self.by_bucket.values()}.values())

    def captured(self, buckets: Buckets) -> list[Program]:
        """Returns the program that was captured for each group of buckets that share a trace."""
        firsts = (next(iter(mine)) for mine in buckets.by_trace().values())
        each = (self.by_bucket[bucket].traced for bucket in firsts)
        return [traced.whole or traced.program for traced in each]

    @property
    def device(self) -> Device:
        """Device for which the model was planned."""
        return self.traces[0].traced.device

    @property
    def runnable(self) -> Runnable:
        """Graphs of the one trace that all buckets share."""
        traces = self.traces
        assert len(traces) == 1, f"{len(traces)} traces: ask for those of a bucket"
        return traces[0]

    @property
    def program(self) -> Program:
        """Program of the one trace that all buckets share."""
        return self.runnable.traced.program

    def report(self, full: bool = False) -> str:
        """Returns each bucket's plan with its reason; `full`: formulas and attention as well."""
        text = render_report(self.report_rows)
        mode = self.request.parameters
        text += (
            f"a rank keeps {bytes_text(self.request.resident_bytes)} besides each peak: "
            f"parameters ({mode}), buffers, their gradients, the optimizer's state"
        )
        if self.request.state_away:
            away = bytes_text(self.request.held_away_bytes)
            held = "all but the buffers are" if self.request.held_away else "that state is"
            text += f"; {held} away, in host= and disk=: {away} of this rank"
        text += "\n"
        if self.request.communicators:
            each_bytes = self.device.communicator_bytes
            text += (
                f"{self.request.communicators} communicators of a rank take "
                f"{bytes_text(self.request.communicators * each_bytes)} of the device beside that "
                f"({bytes_text(each_bytes)} each, as an H100 had); memory= in bytes is without "
                "them\n"
            )
        text += render_formulas(self.report_rows) + "\n" if full else ""
        changes = [crossover_text(list(self.plans.values()))]
        below = [changes, self.attention if full else [], self.notes]
        text += "\n".join("".join(f"{line}\n" for line in lines) for lines in below if lines)
        return text if full else f"{text}{MORE_NOTE}\n"

    @property
    def attention(self) -> list[str]:
        """Lines on each split bucket's attention: sharding, cost of each way, crossovers."""
        return attention_lines(self.by_bucket, self.plans)

    def source(self, bucket: Bucket) -> str:
        """Returns the forward and backward graphs of a bucket as readable Python."""
        plan, placement = self.plans[bucket], self.placement(bucket)
        parts = self.by_bucket[bucket].partition(placement, plan.menu_step)
        return variant_source(parts, plan, placement)

    def profile(self, bucket: Bucket) -> Profile:
        """Returns a bucket's costs as expressions of the dims."""
        return self.study(bucket).profile(self.plans[bucket].menu_step)

    def study(self, bucket: Bucket) -> Study:
        """Returns the prices of a bucket's placement, at any sizes."""
        return self.by_bucket[bucket].priced.at(self.placement(bucket))

    def placement(self, bucket: Bucket) -> Placement:
        """Returns the placement of a bucket's full micro-batch."""
        plan = self.plans[bucket]
        sizes = {**bucket.sizes, BATCH: plan.micro_batch}
        return self.by_bucket[bucket].priced.placement(sizes, plan.sp)

    def find(self, sizes: Mapping[str, int]) -> Bucket:
        """Returns the bucket with these lengths; a `batch` among them is ignored.

        Raises:
            BucketError: no bucket has these lengths.
            PlanError: the bucket fits with no setting.
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


class ChosenSettings(NamedTuple):
    """The settings of some buckets.

    Attributes:
        plans: bucket -> its setting, of those that fit.
        tables: bucket -> the rows it was chosen from.
        misfits: bucket that fits with no setting -> the error that says so.
        priced: bucket -> prices of the program that it runs.
    """

    plans: dict[Bucket, BucketPlan]
    tables: dict[Bucket, tuple[TriedRow, ...]]
    misfits: dict[Bucket, PlanError]
    priced: dict[Bucket, Priced]


# Programs of the same numbers for a bucket, each with the reason for it.
Others: TypeAlias = Callable[[Bucket, BucketPlan | PlanError], Iterator[tuple[Priced, str]]]


def no_others(bucket: Bucket, plan: BucketPlan | PlanError) -> Iterator[tuple[Priced, str]]:
    """Yields no other program for a bucket."""
    return iter(())


def plan_buckets(
    by_bucket: Mapping[Bucket, Priced],
    request: PlanRequest,
    *,
    partly: bool = True,
    others: Others = no_others,
) -> ChosenSettings:
    """Returns the setting of every bucket, the rows it was chosen from, and the misfits.

    Args:
        by_bucket: prices of each bucket's trace.
        request: options that the plan depends on.
        partly: whether to go on with other buckets when one fits with no setting; else planning
            ends there.
        others: function that yields other programs of the same numbers for a bucket, given the plan
            with the last one.
    """
    found = ChosenSettings({}, {}, {}, {})
    left = [*by_bucket]
    with without_collection():  # all graphs stay alive: a collection would find nothing
        for bucket, priced in tracked([*by_bucket.items()], "plan", lambda item: item[0]):
            left.remove(bucket)
            later = [b for b in left if by_bucket[b] is priced]
            plan, table = _plan(priced, bucket, request, later)
            for other, why in others(bucket, plan):
                tried, rows = _plan(other, bucket, request, ())
                better = isinstance(tried, BucketPlan) and _is_better(tried, plan)
                if isinstance(tried, BucketPlan) and better:
                    plan, table = replace(tried, reason=f"{tried.reason}; {why}"), rows
                    priced = other
                if isinstance(plan, BucketPlan) and not (better and plan.menu_step):
                    break
            found.tables[bucket], found.priced[bucket] = table, priced
            if isinstance(plan, BucketPlan):
                found.plans[bucket] = plan
                continue
            found.misfits[bucket] = plan
            if not partly:
                break
    return found


def _is_better(tried: BucketPlan, plan: BucketPlan | PlanError) -> bool:
    """Whether a plan with another program fits where the first does not, or is quicker."""
    if isinstance(plan, PlanError):
        return True
    each = (p.seconds_s * p.sp / p.micro_batch for p in (tried, plan))
    return next(each) < (1 - TILE_GAIN) * next(each)


def plan_with_degrees(
    by_bucket: Mapping[Bucket, Priced],
    request: PlanRequest,
    degrees: Mapping[Bucket, int],
    others: Others = no_others,
) -> ChosenSettings:
    """Plans like `plan_buckets`, with a given degree for each bucket."""
    plans: dict[Bucket, BucketPlan] = {}
    tables: dict[Bucket, tuple[TriedRow, ...]] = {}
    misfits: dict[Bucket, PlanError] = {}
    chosen: dict[Bucket, Priced] = {}
    for sp in sorted(set(degrees.values())):
        mine = {b: priced for b, priced in by_bucket.items() if degrees[b] == sp}
        found = plan_buckets(mine, replace(request, sps=(sp,)), others=others)
        chosen |= found.priced
        plans |= found.plans
        tables |= found.tables
        misfits |= found.misfits
    in_order = {b: plans[b] for b in by_bucket if b in plans}
    return ChosenSettings(in_order, {b: tables[b] for b in by_bucket}, misfits, chosen)


def _plan(
    priced: Priced, bucket: Bucket, request: PlanRequest, later: Sequence[Bucket]
) -> tuple[BucketPlan | PlanError, tuple[TriedRow, ...]]:
    """Returns the setting of one bucket, and the rows it was chosen from; see `_rows`.

    If no row fits, an error takes the setting's place. If rows fit by their peak but not by a GPU
    allocator's segments, the rows that `_rows` skipped at first are tried as well.
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
    """Returns the best setting of a bucket that fits; on a GPU its allocator's segments fit, too.

    While the segments of the chosen row exceed the memory, that row is priced again with as much
    less memory, and replaced.
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
    """Returns the segment bytes that a row needs on a GPU; 0 where the row surely fits."""
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
    """Yields the priced rows of a bucket that may be worth choosing.

    Skipped: degrees beyond twice the last one that was faster; and a micro-batch at a degree if
    half of both fits: that group has the same samples a rank and sends less far, so it is at most a
    few percent slower, and leaves the other ranks to other samples.

    Args:
        priced: prices of the bucket's trace.
        bucket: bucket to price.
        request: options that the plan depends on.
        later: other buckets of the trace that will be priced next; their placements are solved
            together.
        every: whether to price the skipped rows as well.
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
    """Returns the micro-batches to try: the bucket's own batch, or powers of two.

    From `sp` samples on a group could shard the batch alone and act as `sp` independent ranks: that
    is the row of a smaller degree, so a free choice of degree stops before it.
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
    """Returns the row of one degree and micro-batch with the least recompute that fits."""
    sizes = {**bucket.sizes, BATCH: batch}
    return row_of(priced.at(priced.placement(sizes, sp, near=True)), sizes, sp, request)


def run_bytes(cost: Prediction) -> int:
    """Returns the bytes of a micro-batch while it runs, beside those that stay on a rank."""
    return cost.peak_bytes + cost.input_bytes + LOSS_GRADIENT_BYTES


def row_of(study: Study, sizes: Sizes, sp: int, request: PlanRequest) -> TriedRow:
    """Returns the row with the least recompute that fits, or a quicker one whose values leave."""
    batch = sizes.get(BATCH, 1)

    def most() -> int:
        return study.steps

    def row(menu_step: int) -> TriedRow:
        cost = study.predict(menu_step, sizes)
        needed = request.resident_bytes + max(run_bytes(cost), request.step_bytes)
        fits = needed <= request.memory_bytes and cost.away_bytes <= request.away_bytes
        peak_bytes, seconds_s = cost.peak_bytes, cost.seconds_s
        all_bytes = study.predict(0, sizes).saved_bytes
        kept_bytes = cost.saved_bytes + cost.away_bytes
        return TriedRow(
            sp, batch, menu_step, seconds_s, most, peak_bytes, needed, fits=fits,
            again_bytes=max(0, all_bytes - kept_bytes), activation_bytes=all_bytes,
            away_bytes=cost.away_bytes,
        )  # fmt: skip

    if request.recompute_mode in ("all", "none"):
        found = row(most() if request.recompute_mode == "all" else 0)
    else:
        found = least_recompute(row, most, study.priced)
    if not request.away_bytes:
        return found
    if request.all_leave:
        step, levels = found.menu_step, range(min(LEVELS, study.levels(found.menu_step)), -1, -1)
        return _first(row, step, levels, lambda r: r.away_bytes <= request.away_bytes)
    if found.fits and not (found.menu_step and study.overlaps):
        return found
    return _or_away(found, row, study, request.recompute_mode)


def _or_away(found: TriedRow, row: Callable[[int], TriedRow], study: Study, mode: str) -> TriedRow:
    """Returns a row in which saved values leave the device, where that is quicker or alone fits.

    For some numbers of recompute steps: the least of the bytes that can leave with which it fits.
    """
    most = study.steps
    tried = {"none": [0], "all": [most]}.get(
        mode, [most * i // AWAY_TRIES for i in range(AWAY_TRIES + 1)]
    )
    least_s = (1 - AWAY_GAIN) * found.seconds_s if found.fits else inf
    for menu_step in dict.fromkeys(tried):
        if row(menu_step).seconds_s >= least_s:
            continue
        for end in range(LEVELS, study.levels(menu_step) + 1, LEVELS):
            best = _first(row, menu_step, range(end - LEVELS + AWAY_STEP, end + 1, AWAY_STEP))
            if best.fits and best.seconds_s < least_s:
                found, least_s = best, best.seconds_s
    level, menu_step = divmod(found.menu_step, LEAVES)
    if not level or not found.fits:
        return found
    finer = _first(row, menu_step, range(level - AWAY_STEP + 1, level + 1))
    return finer if finer.seconds_s <= found.seconds_s else found


def _first(
    row: Callable[[int], TriedRow],
    menu_step: int,
    levels: Sequence[int],
    fits: Callable[[TriedRow], bool] = lambda r: r.fits,
) -> TriedRow:
    """Returns the row of the first level that fits, by bisection; of the last, if none does."""
    low, high = -1, len(levels) - 1
    best = row(menu_step + LEAVES * levels[high])
    while high - low > 1:
        middle = (low + high) // 2
        one = row(menu_step + LEAVES * levels[middle])
        low, high, best = (low, middle, one) if fits(one) else (middle, high, best)
    return best


def plans_text(plans: Mapping[Bucket, BucketPlan]) -> str:
    """Returns the decisions as one text, which ranks compare to see that they decided alike."""
    return "; ".join(
        f"{b}: sp {p.sp}, micro-batch {p.micro_batch}, recompute {p.recompute} (step {p.menu_step})"
        for b, p in plans.items()
    )
