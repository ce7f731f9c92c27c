"""Reports of a compiled model: its plans, its costs, and counts of calls and steps."""

from __future__ import annotations

from collections.abc import Mapping

from dcpc.buckets import BATCH, Bucket
from dcpc.codegen import wire_log
from dcpc.compiled.model.core import ModelCore
from dcpc.errors import DispatchError
from dcpc.ir import Packable, PlanRow, Profile
from dcpc.passes.masks.packable import packable
from dcpc.runtime.planner.own_lengths import OwnLengths
from dcpc.runtime.planner.speeds import speeds_line
from dcpc.runtime.step.stats import Stats
from dcpc.symbolic_profile import Prediction

_GPU_MULTIPLE = 64  # of a row of tokens: the tiles of matrix products on a GPU


class ModelInsight:
    """Plans, costs and counts of a compiled model.

    Args:
        core: state that all parts of the model share.
        staging: reason why the model runs in stages, or does not; "": nobody asked.
    """

    def __init__(self, core: ModelCore, staging: str = "") -> None:
        self.core, self.staging = core, staging

    def report(self, full: bool = False) -> str:
        """Returns the plan of each bucket, its predicted costs, and why.

        At the end it says what was compared with the model itself, and where. `full` adds costs as
        formulas of the dims and the cost of each way to split attention.
        """
        core = self.core
        later = {e.verifier: e for e in reversed(core.editions.made_later)}
        more = [e for v, e in reversed(later.items()) if v is not core.verifier]
        text = f"{core.planned.report(full)}\n{core.verifier.report()}"
        text += core.tighter.report() + core.dispatch.unpadding_line() + self._padding_line()
        if core.learned.learns or self.speeds:
            text += speeds_line(self.speeds, core.learned.changes) + "\n"
        text += f"{self.staging}\n" * bool(self.staging)
        return text + "".join(f"{e}: {e.verifier.report()}" for e in more)

    def source(self, bucket: Bucket | Mapping[str, int]) -> str:
        """Returns the forward and backward that run for a bucket as Python a person can read."""
        return self.core.planned.source(self._bucket(bucket, "source"))

    def profile(self, bucket: Bucket | Mapping[str, int]) -> Profile:
        """Returns a bucket's costs as expressions of the dims."""
        return self.core.planned.profile(self._bucket(bucket, "profile"))

    def predict(self, bucket: Bucket | Mapping[str, int], batch: int | None = None) -> Prediction:
        """Returns a bucket's predicted costs on the fullest rank.

        Args:
            bucket: bucket, or its sizes; a batch among the sizes is as `batch`.
            batch: samples in the micro-batch; default: the planned ones.

        Raises:
            DispatchError: there is no such bucket, or `batch` is no number of samples.
        """
        if batch is None and isinstance(bucket, Mapping):
            batch = bucket.get(BATCH)
        bucket = self._bucket(bucket, "predict")
        whole = isinstance(batch, int) and not isinstance(batch, bool)
        if batch is not None and (not whole or batch < 1):
            raise DispatchError(
                f"predict: got batch={batch!r}; expected an integer >= 1, samples of a "
                "micro-batch; correct it, or leave it out for the planned ones"
            )
        plan = self.core.plans[bucket]
        sizes = {**bucket.sizes, BATCH: batch or plan.micro_batch}
        placement = self.core.dispatch.placement(bucket, sizes, self.core.dispatch.setting(bucket))
        priced = self.core.planned.by_bucket[bucket].priced
        return priced.at(placement).predict(plan.menu_step, sizes)

    def own_lengths(self, multiple: int | None) -> OwnLengths:
        """Returns the lengths besides the buckets' at which the graphs run, with their seconds.

        Args:
            multiple: number that lengths are rounded up to. Default: 64 on a GPU where the inputs
                have one named dim besides `batch`, else 1.
        """
        core = self.core
        one = len([n for n in core.buckets.names if n != BATCH]) == 1
        chosen = multiple or (_GPU_MULTIPLE if one and core.groups.device.type == "cuda" else 1)
        lengths = core.dispatch.lengths
        return OwnLengths(lengths.runs_at, self._seconds_at, lengths.least, chosen)

    def _padding_line(self) -> str:
        found = self.core.dispatch.lengths.compiled_anew
        if not found:
            return ""
        return (
            f"lengths: samples are padded to their buckets, {', '.join(map(str, found))}: Inductor "
            f"would compile {next(iter(found.values()))} anew for each length\n"
        )

    def _seconds_at(
        self, bucket: Bucket, row: PlanRow, sizes: Mapping[str, int], count: int
    ) -> float:
        """Returns the predicted seconds of some samples of some lengths by a row."""
        priced = self.core.planned.by_bucket[bucket].priced
        placement = priced.placement({**bucket.sizes, BATCH: row.micro_batch}, row.sp)
        return priced.at(placement).predict(row.menu_step, {**sizes, BATCH: count}).seconds_s

    @property
    def packable(self) -> Packable:
        """Whether a row may hold several sequences, for `DataLoader(packing=)`; else why not."""
        # Rows of one token have nothing to pack, and their trace may have no attention.
        every, by_bucket = self.core.buckets, self.core.planned.by_bucket
        longer = [b for b in every if any(n > 1 for _, n in b.shape_key)]
        used = {id(v): v for v in (by_bucket[b] for b in longer or every)}
        traces = [v.traced for v in used.values()]
        found = [packable(t.program, t.sharding.rules) for t in traces]
        return next((p for p in found if p.reason), found[0])

    @property
    def replans(self) -> int:
        """Number of times that rows of the tables were replaced by others."""
        return self.core.tighter.changes

    @property
    def speeds(self) -> tuple[float, ...]:
        """Speeds of the ranks beside the fastest one, as plans are made now; empty: all alike."""
        return self.core.learned.speeds

    def stats(self) -> Stats:
        """Returns counts and seconds of this rank's calls and steps so far."""
        stats = self.core.dispatch.stats
        every = [self.core.editions.first, *self.core.editions.made_later]
        traces = {id(v): v for e in every for v in e.planned.traces}
        stats.variants = sum(v.compiled_count for v in traces.values())
        stats.wire_bytes = wire_log.total_bytes()
        stats.out_of_memory = dict(self.core.tighter.counts)
        stats.budgets = dict(self.core.tighter.budgets)
        stats.speeds, stats.speed_changes = self.speeds, self.core.learned.changes
        return stats

    def _bucket(self, bucket: Bucket | Mapping[str, int], what: str) -> Bucket:
        return self.core.planned.find(bucket.sizes if isinstance(bucket, Bucket) else bucket)
