"""What a compiled model tells of its plans, its costs and what has run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from dcpc.buckets import BATCH, Bucket, Buckets
from dcpc.codegen import wire_log
from dcpc.compiled.model.saving import SavedModel
from dcpc.compiled.tighter import TighterPlans
from dcpc.errors import DispatchError
from dcpc.ir import BucketPlan, Packable, PlanRow, Profile, Program, ValueRange
from dcpc.passes.masks.packable import packable
from dcpc.plan.runnable import Runnable
from dcpc.runtime.planner.own_lengths import OwnLengths
from dcpc.runtime.planner.speeds import LearnedSpeeds, speeds_line
from dcpc.runtime.step.stats import Stats
from dcpc.symbolic_profile import Prediction

_GPU_MULTIPLE = 64  # of a row of tokens: the tiles of matrix products on a GPU


class ModelInsight(SavedModel):
    """A compiled model that can be looked into."""

    buckets: Buckets
    plans: dict[Bucket, BucketPlan]
    staging: str = ""  # why the model runs in stages, or does not
    _tighter: TighterPlans
    _learned: LearnedSpeeds

    def report(self) -> str:
        """Returns the plan of each bucket, its predicted costs as formulas of the dims, and why.

        At the end it says what was compared with the model itself, and where.
        """
        later = {e.verifier: e for e in reversed(self._editions.made_later)}
        more = [e for v, e in reversed(later.items()) if v is not self.verifier]
        text = f"{self.planned.report()}\n{self.verifier.report()}"
        text += self._tighter.report() + self._dispatch.unpadding_line() + self._padding_line()
        if self._learned.learns or self.speeds:
            text += speeds_line(self.speeds, self._learned.changes) + "\n"
        text += f"{self.staging}\n" * bool(self.staging)
        return text + "".join(f"{e}: {e.verifier.report()}" for e in more)

    def source(self, bucket: Bucket | Mapping[str, int]) -> str:
        """Returns the forward and backward that run for a bucket as Python a person can read."""
        return self.planned.source(self._bucket(bucket))

    def profile(self, bucket: Bucket | Mapping[str, int]) -> Profile:
        """Returns a bucket's costs as expressions of the dims."""
        return self.planned.profile(self._bucket(bucket))

    def predict(self, bucket: Bucket | Mapping[str, int], batch: int | None = None) -> Prediction:
        """Returns a bucket's predicted costs on the fullest rank.

        Args:
            bucket: which one; a batch among its sizes is as `batch`.
            batch: samples in the micro-batch; default: the planned ones.

        Raises:
            DispatchError: there is no such bucket, or `batch` is no number of samples.
        """
        if batch is None and isinstance(bucket, Mapping):
            batch = bucket.get(BATCH)
        bucket = self._bucket(bucket)
        whole = isinstance(batch, int) and not isinstance(batch, bool)
        if batch is not None and (not whole or batch < 1):
            raise DispatchError(
                f"predict: got batch={batch!r}; expected an integer >= 1, samples of a "
                "micro-batch; correct it, or leave it out for the planned ones"
            )
        plan = self.plans[bucket]
        sizes = {**bucket.sizes, BATCH: batch or plan.micro_batch}
        placement = self._dispatch.placement(bucket, sizes, self._dispatch.setting(bucket))
        priced = self.planned.by_bucket[bucket].priced
        return priced.at(placement).predict(plan.menu_step, sizes)

    def own_lengths(self, multiple: int | None) -> OwnLengths:
        """Returns at which lengths besides the buckets' the graphs run, and what that saves.

        Args:
            multiple: what lengths are rounded up to. Default: 64 on a GPU where the inputs have one
                named dim besides `batch`, else 1.
        """
        one = len([n for n in self.buckets.names if n != BATCH]) == 1
        chosen = multiple or (_GPU_MULTIPLE if one and self.groups.device.type == "cuda" else 1)
        lengths = self._dispatch.lengths
        return OwnLengths(lengths.runs_at, self._seconds_at, lengths.least, chosen)

    def _padding_line(self) -> str:
        found = self._dispatch.lengths.compiled_anew
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
        priced = self.planned.by_bucket[bucket].priced
        placement = priced.placement({**bucket.sizes, BATCH: row.micro_batch}, row.sp)
        return priced.at(placement).predict(row.menu_step, {**sizes, BATCH: count}).seconds_s

    @property
    def packable(self) -> Packable:
        """Whether a row may hold several sequences, for `DataLoader(packing=)`; else why not."""
        # Rows of one token have nothing to pack, and their trace may have no attention.
        longer = [b for b in self.buckets if any(n > 1 for _, n in b.shape_key)]
        used = {id(v): v for v in (self.planned.by_bucket[b] for b in longer or self.buckets)}
        traces = [v.traced for v in used.values()]
        found = [packable(t.program, t.sharding.rules) for t in traces]
        return next((p for p in found if p.reason), found[0])

    @property
    def value_ranges(self) -> Mapping[Bucket, Mapping[str, tuple[ValueRange, ...]]]:
        """What the model's ops need of integer inputs, by bucket and input."""
        return self._dispatch.value_ranges

    def division_problems(
        self, weigh: Callable[[Mapping[str, Tensor]], float] | None, pad: Mapping[str, int | float]
    ) -> Mapping[str, str]:
        """Returns what a sample's loss depends on besides the sample, each with why; see `verify/`.

        Args:
            weigh: of a micro-batch's inputs; None: its samples.
            pad: input name -> what fills it up at its end.
        """
        return self.verifier.division_problems(weigh, pad)

    def packing_problem(
        self,
        cases: Callable[[Mapping[str, Tensor]], list[Mapping[str, Tensor]]],
        weigh: Callable[[Mapping[str, Tensor]], float],
    ) -> str:
        """Returns how packed rows have another loss than their sequences; see `verify/`.

        Args:
            cases: drawn rows -> the packed rows, then each of their sequences alone.
            weigh: of the inputs of one sequence.
        """
        return self.verifier.packing_problem(cases, weigh)

    @property
    def block(self) -> int:
        """Ranks that wait for each other after each micro-batch of a step; 0: none do."""
        return self.planned.block

    @property
    def node_ranks(self) -> int:
        """Ranks of a node of the device that was planned for."""
        return self.planned.device.node_ranks

    @property
    def replans(self) -> int:
        """How often rows of the tables were replaced by others."""
        return self._tighter.changes

    @property
    def speeds(self) -> tuple[float, ...]:
        """How fast ranks are beside the fastest one, as plans are made now; nothing: all alike."""
        return self._learned.speeds

    @property
    def program(self) -> Program:
        """The traced model; only where all buckets share one trace."""
        return self.planned.program

    @property
    def runnable(self) -> Runnable:
        """Graphs, placements and prices; only where all buckets share one trace."""
        return self.planned.runnable

    def stats(self) -> Stats:
        """Returns counts of what has run on this rank."""
        stats = self._dispatch.stats
        every = [self._editions.first, *self._editions.made_later]
        traces = {id(v): v for e in every for v in e.planned.traces}
        stats.variants = sum(v.compiled_count for v in traces.values())
        stats.wire_bytes = wire_log.total_bytes()
        stats.out_of_memory = dict(self._tighter.counts)
        stats.budgets = dict(self._tighter.budgets)
        stats.speeds, stats.speed_changes = self.speeds, self._learned.changes
        return stats

    def _bucket(self, bucket: Bucket | Mapping[str, int]) -> Bucket:
        return self.planned.find(bucket.sizes if isinstance(bucket, Bucket) else bucket)
