"""The demo's two plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

import dcpc
from examples.forced import ForcedVariant

MB = 1e6


def plot_loss(losses: Sequence[float], tokens: Sequence[int], path: Path) -> None:
    """Draws the loss of each step over the tokens trained on so far."""
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.plot([t / 1e3 for t in tokens], losses, lw=0.8, alpha=0.5, label="step")
    axes.plot([t / 1e3 for t in tokens], _smooth(losses), lw=2, label="mean of the last 8 steps")
    axes.set(xlabel="thousand bytes of source", ylabel="loss, nats a byte")
    axes.set_title("GPT on the standard library's functions and classes, 2 ranks")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_memory(compiled: dcpc.CompiledModel, path: Path) -> None:
    """Draws what one sample needs over its length, for each degree and recompute setting.

    Lines are the predicted formulas, points what was chosen for each bucket.
    """
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    longest = max(b["seq"] for b in compiled.buckets)
    lengths = [longest * i // 64 for i in range(1, 65)]
    settings = {(p.sp, p.menu_step) for p in compiled.plans.values()}
    sizes = {"batch": 1, "seq": longest}
    priced = compiled.runnable.priced
    placements = {sp: priced.placement(sizes, sp) for sp in compiled.groups.degrees}
    everything = {sp: priced.at(placements[sp]).steps for sp in placements}
    settings |= {(sp, k) for sp in placements for k in (0, everything[sp])}
    for sp, recompute in sorted(settings):
        variant = ForcedVariant(compiled, placements[sp], recompute)
        needed = [needed_bytes(compiled, variant, {"batch": 1, "seq": n}) / MB for n in lengths]
        label = f"sp {sp}, {recompute} of {everything[sp]} steps of recompute"
        axes.plot(lengths, needed, ls="-" if sp == 1 else "--", label=label)
    for bucket, plan in compiled.plans.items():
        placement = priced.placement({**bucket.sizes, "batch": 1}, plan.sp)
        variant = ForcedVariant(compiled, placement, plan.menu_step)
        mb = needed_bytes(compiled, variant, {**bucket.sizes, "batch": 1}) / MB
        axes.plot(bucket["seq"], mb, "ko", ms=4)
    cap_mb = compiled.memory_bytes / MB
    axes.axhline(cap_mb, color="red", lw=1)
    axes.text(0, cap_mb, f" memory= {cap_mb:.0f} MB", color="red", va="bottom")
    axes.set(xlabel="length, bytes", ylabel="predicted need of a rank, one sample, MB")
    axes.set_title("Predicted peak; points: the setting chosen for each bucket")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def needed_bytes(
    compiled: dcpc.CompiledModel, variant: ForcedVariant, sizes: dict[str, int]
) -> int:
    """Returns all a rank needs, as `dcpc.compile` counts it.

    Parameters, their accumulated gradients, Adam's two moments; the micro-batch's inputs,
    activations and new gradients.
    """
    cost = variant.predict(sizes)
    resident_bytes = 4 * sum(p.nbytes for p in compiled.parameters())
    return resident_bytes + cost.peak_bytes + cost.input_bytes


def _smooth(values: Sequence[float], window: int = 8) -> list[float]:
    ends = range(1, len(values) + 1)
    return [sum(values[max(0, i - window) : i]) / min(i, window) for i in ends]
