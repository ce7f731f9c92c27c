"""Chooses how much each stage recomputes of each micro-batch, so that enough fit at once."""

from __future__ import annotations

from collections.abc import Sequence

from dcpc.runtime.pipeline.schedule.actions import PipelineWork, StageCost


def fitted(
    work: PipelineWork, sequence: Sequence[int], caps: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Returns settings with which each stage holds any `caps[stage]` neighbours of the sequence.

    Where they do not fit, the micro-batch whose next setting frees most bytes a second takes it,
    until they do or nobody has another one.
    """
    return tuple(
        _stage(work.costs[s], sequence, caps[s], work.memory_bytes[s]) for s in range(work.stages)
    )


def _stage(
    costs: Sequence[Sequence[StageCost]], sequence: Sequence[int], cap: int, size: float
) -> tuple[int, ...]:
    chosen = [0] * len(sequence)
    for end in range(1, len(sequence) + 1):
        window = sequence[max(0, end - cap) : end]
        while _needs(costs, chosen, window) > size:
            rates = [(_rate(costs[i], chosen[i]), i) for i in window]
            rate, at = max(rates)
            if rate < 0:
                break
            chosen[at] += 1
    return tuple(chosen)


def _needs(
    costs: Sequence[Sequence[StageCost]], chosen: Sequence[int], window: Sequence[int]
) -> float:
    """Returns the most bytes while all of a window are held and one of them runs."""
    found = [costs[i][chosen[i]] for i in window]
    most = max(max(c.forward_bytes, c.backward_bytes) - c.held_bytes for c in found)
    return sum(c.held_bytes for c in found) + max(most, 0.0)


def _rate(options: Sequence[StageCost], at: int) -> float:
    """Returns bytes freed a second by the next setting; below 0: there is none."""
    if at + 1 >= len(options):
        return -1.0
    now, then = options[at], options[at + 1]
    more_s = then.forward_s + then.backward_s - now.forward_s - now.backward_s
    return max(0.0, now.held_bytes - then.held_bytes) / max(more_s, 1e-12)
