"""Counts and seconds of all calls and steps so far, measured beside predicted."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from dcpc.buckets import Bucket
from dcpc.runtime.data.steps import Step
from dcpc.runtime.step.result import StepResult

LOG = logging.getLogger("dcpc")


@dataclass(slots=True)
class BucketSeconds:
    """Seconds of a bucket's micro-batches in train steps on this rank.

    Attributes:
        runs: number of micro-batches.
        predicted_s: predicted seconds of all of them, forward and backward.
        measured_s: measured seconds of the same, waits for other ranks inside collectives included.
    """

    runs: int = 0
    predicted_s: float = 0.0
    measured_s: float = 0.0


@dataclass(slots=True)
class Stats:
    """Counts and seconds so far, of this rank unless a line says "of each rank".

    Attributes:
        calls: bucket -> forward calls.
        samples: bucket -> samples; packed: rows.
        unpadded: forward calls that ran without their padding.
        seconds: bucket -> seconds of its micro-batches in train steps.
        steps: train steps, those skipped included.
        skipped: steps left out as their loss was NaN or infinite.
        variants: variants compiled.
        wire_bytes: bytes sent in the variants' collectives.
        reduced_bytes: bytes of gradients put into the sums over ranks.
        early_bytes: part of `reduced_bytes` that was sent before a step's last backward had ended.
        busy_s: seconds of each rank in its micro-batches; waits inside collectives included.
        idle_s: seconds of each rank from its own last micro-batch to that of the last rank.
        predicted_busy_s: planned seconds of each rank in its micro-batches.
        predicted_imbalance: mean idle share the plans of the steps predicted, 0 to 1.
        measured_imbalance: mean idle share measured in the steps, 0 to 1.
        out_of_memory: bucket -> how often it was planned again, as a rank ran out of memory in it.
        budgets: bucket -> bytes that it may need of a rank since then, the model included.
        speeds: speed of each rank beside the fastest, by which plans are made; empty: all alike.
        speed_changes: number of times that `speeds` followed measured ones.
    """

    calls: dict[Bucket, int] = field(default_factory=dict)
    samples: dict[Bucket, int] = field(default_factory=dict)
    unpadded: int = 0
    seconds: dict[Bucket, BucketSeconds] = field(default_factory=dict)
    steps: int = 0
    skipped: int = 0
    variants: int = 0
    wire_bytes: int = 0
    reduced_bytes: int = 0
    early_bytes: int = 0
    busy_s: tuple[float, ...] = ()
    idle_s: tuple[float, ...] = ()
    predicted_busy_s: tuple[float, ...] = ()
    predicted_imbalance: float = 0.0
    measured_imbalance: float = 0.0
    out_of_memory: dict[Bucket, int] = field(default_factory=dict)
    budgets: dict[Bucket, int] = field(default_factory=dict)
    speeds: tuple[float, ...] = ()
    speed_changes: int = 0

    def __str__(self) -> str:
        """Returns the table of buckets, that of ranks, and a line of all steps."""
        rows: list[tuple[str, ...]] = [
            ("bucket", "calls", "samples", "micro-batches", "measured s", "predicted s")
        ]
        for bucket in sorted(self.calls.keys() | self.seconds, key=lambda b: (b.tokens, str(b))):
            took = self.seconds.get(bucket, BucketSeconds())
            counts = self.calls.get(bucket, 0), self.samples.get(bucket, 0), took.runs
            seconds = took.measured_s, took.predicted_s
            rows.append((str(bucket), *map(str, counts), *(f"{t:.3f}" for t in seconds)))
        ranks: list[tuple[str, ...]] = [("rank", "busy s", "predicted s", "idle s", "speed")]
        every = zip(self.busy_s, self.predicted_busy_s, self.idle_s, strict=True)
        for rank, each_s in enumerate(every):
            speed = f"{self.speeds[rank]:.2f}" if self.speeds else "1"
            ranks.append((str(rank), *(f"{t:.3f}" for t in each_s), speed))
        early = self.early_bytes / max(self.reduced_bytes, 1)
        return "\n".join([
            *_columns(rows), "", *_columns(ranks), "",
            f"{self.steps} steps ({self.skipped} skipped), {self.variants} variants, "
            f"{self.unpadded} calls without padding, "
            f"{sum(self.out_of_memory.values())} times out of memory",
            f"imbalance {self.measured_imbalance:.1%} (predicted {self.predicted_imbalance:.1%}); "
            f"gradients {self.reduced_bytes / 1e6:,.1f} MB, {early:.0%} early; "
            f"collectives of variants {self.wire_bytes / 1e6:,.1f} MB",
        ])  # fmt: skip

    def called(self, bucket: Bucket, samples: int) -> None:
        """Counts one forward call."""
        self.calls[bucket] = self.calls.get(bucket, 0) + 1
        self.samples[bucket] = self.samples.get(bucket, 0) + samples

    def stepped(self, step: Step, result: StepResult) -> None:
        """Counts one train step."""
        self.steps += 1
        self.skipped += result.skipped
        self.reduced_bytes += result.reduced_bytes
        self.early_bytes += result.early_bytes
        self.busy_s = _added(self.busy_s, result.busy_s)
        self.idle_s = _added(self.idle_s, result.idle_s)
        self.predicted_busy_s = _added(self.predicted_busy_s, step.plan.busy_s)
        self.predicted_imbalance += (step.plan.imbalance - self.predicted_imbalance) / self.steps
        self.measured_imbalance += (result.imbalance - self.measured_imbalance) / self.steps
        for mb, measured_s in zip(step.micro_batches, result.micro_batch_s, strict=True):
            if mb.weight != 0:
                seconds = self.seconds.setdefault(mb.bucket, BucketSeconds())
                seconds.runs += 1
                seconds.predicted_s += step.plan.micro_batches[mb.number].seconds_s
                seconds.measured_s += measured_s


def log_step(step: Step, result: StepResult) -> None:
    """Writes one line on a step to the log "dcpc", at INFO."""
    early = f", {result.early_bytes / result.reduced_bytes:.0%} early" if result.early_bytes else ""
    norm = "" if result.grad_norm is None else f", gradient norm {result.grad_norm:.4g}"
    if result.skipped:
        norm = " (not finite: step skipped, gradients as before)"
    LOG.info(
        "step %d of epoch %d: loss %.6g%s; %d samples, %d tokens in %.3f s (predicted %.3f s); "
        "busy %s s (predicted %s s); imbalance %.1f%% (predicted %.1f%%); gradients %.1f MB%s",
        step.index,
        step.epoch,
        float(result.loss),
        norm,
        step.samples,
        step.tokens,
        result.seconds_s,
        step.plan.makespan_s,
        _short(result.busy_s),
        _short(step.plan.busy_s),
        100 * result.imbalance,
        100 * step.plan.imbalance,
        result.reduced_bytes / 1e6,
        early,
    )


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns rows as lines: the first column to the left, the others to the right."""
    columns = [(max(map(len, column)), column) for column in zip(*rows, strict=True)]
    sides = "<" + ">" * len(columns)
    cells = [[f"{c:{side}{n}}" for c in of] for side, (n, of) in zip(sides, columns, strict=False)]
    return ["  ".join(line) for line in zip(*cells, strict=True)]


def _added(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True)) if a else tuple(b)


def _short(seconds: tuple[float, ...]) -> str:
    """Returns seconds of up to eight ranks one by one, of more as a range."""
    if len(seconds) > 8:
        return f"{min(seconds):.3f} to {max(seconds):.3f}"
    return " ".join(f"{t:.3f}" for t in seconds)
