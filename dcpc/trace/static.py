"""Captures a model of which forward takes dims for numbers: these are static, a trace a length.

A loop `for t in range(x.shape[1])` makes `seq` static; `[0] * x.shape[0]` the batch, so that every
micro-batch has one sample.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch
from torch import nn

from dcpc.buckets import BATCH, Buckets
from dcpc.errors import TraceError
from dcpc.ir import Program
from dcpc.trace.capture.capture import trace
from dcpc.trace.capture.dims import SizeError
from dcpc.trace.loss import Loss

# Each trace is captured, planned, verified and compiled by itself, a second or more of each.
MOST_STATIC_TRACES = 32


def trace_all(
    model: nn.Module, buckets: Buckets, autocast: torch.dtype | None, loss: Loss | None
) -> tuple[Buckets, list[Program]]:
    """Returns as `trace_static`, with no dim static where none has to be; errors are the same."""
    try:
        return buckets, [trace(model, b, autocast, loss) for b in buckets.by_trace().values()]
    except SizeError as refused:
        return trace_static(model, buckets, autocast, loss, refused)


def trace_static(
    model: nn.Module,
    buckets: Buckets,
    autocast: torch.dtype | None,
    loss: Loss | None,
    refused: SizeError,
) -> tuple[Buckets, list[Program]]:
    """Returns the buckets with the dims that have to be static, and a program of each trace.

    The programs are in the order of `Buckets.by_trace`. Dims that torch says were fixed are tried
    first, then each dim alone, the batch last, then all.

    Args:
        model: module as for `trace`.
        buckets: buckets to capture for.
        autocast: dtype of the autocast; None: every op computes in the dtype of its operands.
        loss: function of forward's output and the inputs; None: forward returns the loss.
        refused: refusal of the trace with symbolic dims.

    Raises:
        TraceError: the model is refused with any dims static, or needs too many traces.
    """
    found = {**refused.dims}  # with the user's line
    every = sorted(buckets.names, key=lambda name: name == BATCH)
    waiting = deque([{*found}, *({n} for n in every), {*every}])
    tried: list[set[str]] = [set()]
    while waiting:
        names = waiting.popleft()
        if names in tried:
            continue
        tried.append(names)
        mine = buckets.with_static({n: found.get(n, refused.where) for n in every if n in names})
        groups = mine.by_trace().values()
        if len(groups) > MOST_STATIC_TRACES:
            if names <= {*found}:
                raise _too_many(mine) from refused
            continue
        try:
            programs = [trace(model, each, autocast, loss) for each in groups]
        except SizeError as error:
            found = {**error.dims, **found}
            waiting.appendleft(names | error.dims.keys())
        else:
            notes = static_notes(mine)
            return mine, [replace(p, notes=(*notes, *p.notes)) for p in programs]
    raise TraceError(str(refused)) from refused


def static_notes(buckets: Buckets) -> list[str]:
    """Returns the report's line about each static dim."""
    return [_note(name, buckets) for name in buckets.static]


def _note(name: str, buckets: Buckets) -> str:
    what = f"dim '{name}' is static, as forward takes it for a number{buckets.static[name]}: "
    if name == BATCH:
        return f"{what}every micro-batch has one sample"
    count = len({bucket[name] for bucket in buckets})
    return (
        f"{what}a trace for each of its {count} lengths ({len(buckets.by_trace())} traces in all), "
        "no formula in it; samples are padded to these lengths"
    )


def _too_many(buckets: Buckets) -> TraceError:
    lines = ", ".join(f"'{n}'{line}" for n, line in buckets.static.items() if n != BATCH)
    return TraceError(
        f"forward takes dims for numbers ({lines}), so each of their lengths needs a trace: got "
        f"{len(buckets.by_trace())}; expected {MOST_STATIC_TRACES} at most, as each is captured, "
        "planned, verified and compiled by itself; declare fewer lengths "
        "(Buckets.from_lengths(count=)), or write forward without a number made of a length"
    )
