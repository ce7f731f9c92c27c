"""Verdicts on the zoo's models: each is traced once, then run by forked ranks."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from importlib import import_module

import torch

from dcpc.commands.check import Prepared, Verdict, compare, prepare
from dcpc.passes.sharding.attention_ways import LOWERINGS
from dcpc.runtime.groups.local_ranks import run_ranks
from dcpc.verify.exactness import nan_as_infinite
from tests.zoo.models import DEPTH, ZooModel

TABLES = {"named": "tests.zoo.models:NAMED", "more": "tests.zoo.more:MORE"}


def table(which: str) -> Mapping[str, ZooModel]:
    """Returns the models of one table."""
    module, _, name = TABLES[which].partition(":")
    found: Mapping[str, ZooModel] = getattr(import_module(module), name)
    return found


def prepared(model: ZooModel, sp: int, ways: Sequence[str]) -> list[Prepared | Verdict]:
    """Returns one model's traces, placed and lowered for a group of `sp` ranks."""
    return prepare(
        model.make,
        model.buckets,
        model.sizes,
        sp,
        large=model.coverage_sizes,
        example=model.example,
        attention=("auto", *ways),
    )


def on_rank(rank: int, model: Prepared) -> Verdict:
    """Returns the verdict on a prepared model, without tracing anything."""
    return compare(model, lift=False)


def judged(
    which: str, name: str, sp: int, timeout_s: float, layers: int, ways: Sequence[str]
) -> Verdict:
    """Returns the verdict on a model: traced once, then run by `sp` gloo ranks.

    The ranks are forked from the process that traced, so that the trace, most of the work, is made
    once and not by every rank. So is the one without casts, where a model needs it.
    """
    warnings.simplefilter("ignore")  # replicated ops are in the verdict
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # Autograd starts a thread for each GPU, and a process that has some cannot be forked.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    DEPTH["layers"] = layers
    return together([_judged(one, sp, timeout_s) for one in prepared(table(which)[name], sp, ways)])


def _judged(trace: Prepared | Verdict, sp: int, timeout_s: float) -> Verdict:
    if isinstance(trace, Verdict):
        return trace
    found = _by_ranks(trace, sp, timeout_s)
    if found.may_be_rounding:
        trace.lift()
        found = _by_ranks(trace, sp, timeout_s)
    return found


def together(traces: Sequence[Verdict]) -> Verdict:
    """Returns the verdict on all traces of a model: FLOPs of the largest, all differences."""
    worst = max(traces, key=lambda v: (bool(v.error), _elements(v)))
    ways = {way for v in traces for way in v.lowerings}
    return replace(
        worst,
        trace_s=sum(v.trace_s for v in traces),
        symbolic=tuple(dict.fromkeys(n for v in traces for n in v.symbolic)),
        fixed=tuple(dict.fromkeys(n for v in traces for n in v.fixed)),
        differences=tuple(d for v in traces for d in v.differences),
        lifted=tuple(d for v in traces for d in v.lifted or v.differences)
        if any(v.lifted for v in traces)
        else (),
        skipped=tuple(text for v in traces for text in v.skipped),
        lowerings={w: tuple(d for v in traces for d in v.lowerings.get(w, ())) for w in ways},
    )


def _elements(verdict: Verdict) -> int:
    return 0 if verdict.coverage is None else math.prod(verdict.coverage.sizes.values())


def _by_ranks(model: Prepared, sp: int, timeout_s: float) -> Verdict:
    """Returns the worst verdict of all ranks: gradients are summed, so each compares them all."""
    each = run_ranks(on_rank, sp, model, timeout_s=timeout_s, fork=True)
    return max(each, key=lambda v: (bool(v.error), nan_as_infinite(v.worst)))


def verdicts(
    which: str,
    names: Sequence[str],
    sp: int,
    workers: int,
    timeout_s: float,
    layers: int = 2,
    start: str = "spawn",
    ways: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, Verdict]:
    """Returns the verdict on each model; `workers` processes trace and fork at a time.

    The last of the table are the largest and start first. `start` is how the workers do: forks of a
    process that has done nothing but imports need not import again. `ways` are those to split
    a model's attention that are compared besides what costs least; default: all.
    """
    with ProcessPoolExecutor(workers, multiprocessing.get_context(start)) as pool:
        ways = dict.fromkeys(names, LOWERINGS) if ways is None else ways
        rest = (sp, timeout_s, layers)
        jobs = {n: pool.submit(judged, which, n, *rest, ways.get(n, ())) for n in reversed(names)}
        return {n: jobs[n].result() for n in names}


def alone(which: str, name: str, sp: int, timeout_s: float) -> Verdict:
    """Returns the verdict on one model from processes of its own, whatever happens to them."""
    try:
        return verdicts(which, [name], sp, 1, timeout_s, start="fork")[name]
    except Exception as error:  # of another process, and of any kind
        last = (str(error).strip() or type(error).__name__).splitlines()[-1]
        return Verdict(sp, error=f"{type(error).__name__}: {last}")
