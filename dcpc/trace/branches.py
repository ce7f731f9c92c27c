"""What the trace took for granted of sizes, and buckets at which that does not hold.

A forward that computes with a size in Python (`int(n ** 0.5)`, `if n % 8 == 0`) is traced at one
size. Export notes what it assumed as assertions in the graph, which the canonical form drops: an
equation or an inequality (`if n > 20 * batch`, pieces of `tensor_split`) that does not hold at a
bucket would make the graph silently wrong there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import Mod, PythonMod

from dcpc.buckets import BATCH, Buckets
from dcpc.errors import TraceError

# What an assertion is tried at where a bucket names no batch: the planner takes some of these.
BATCHES = (2, 3, 64)
SMALLEST = 2  # sizes of 0 and 1 run the graph of more


def refuse_branches(
    env: ShapeEnv,
    buckets: Buckets,
    symbols: Mapping[str, sympy.Symbol],
    mapping: Mapping[sympy.Symbol, sympy.Expr],
) -> None:
    """Raises where the trace holds for some of the buckets only.

    An equation or an inequality that does not hold is an error. That two sizes differ, or that one
    does not divide another, torch assumes all the time (of strides, of positions that are
    interpolated), and the graph is right without. That a number leaves a remainder is a warning: it
    may be that forward pads to a multiple, and padding by 0 is right too, or that it branches.

    Args:
        env: of the exported graph.
        buckets: the sizes that the graph is for.
        symbols: our symbol of each named dim.
        mapping: torch's symbols -> expressions of ours.

    Raises:
        TraceError: an equation or an inequality does not hold at a bucket.
    """
    for assertion in (a for found in env.deferred_runtime_asserts.values() for a in found):
        expr = _in_dims(assertion.expr, env, mapping)
        remainder = _is_remainder(expr)
        if isinstance(expr, sympy.Ne) and not remainder:
            continue
        for sizes in _sizes(buckets):
            at = {symbols[n]: sympy.Integer(size) for n, size in sizes.items() if n in symbols}
            if expr.subs(at) == sympy.false:
                named = ", ".join(f"{n} {s}" for n, s in sizes.items())
                what = f"forward was traced as if {expr}"
                if not remainder:
                    raise TraceError(
                        f"{what}; expected a graph that holds at every bucket, and at {named} it "
                        "does not; look for a Python int(), a comparison, a square root or a "
                        "tensor_split of a size in forward, or keep to sizes where it holds"
                        + ", the batch among them"
                        * _of_batch(expr, buckets, symbols)
                    )
                warnings.warn(
                    f"{what}, and at {named} that is not so: right where forward only pads to a "
                    "multiple, wrong where it branches; `dcpc check` compares such sizes",
                    stacklevel=2,
                )
                break


def _is_remainder(expr: sympy.Basic) -> bool:
    """Whether an assertion is that a length leaves a remainder by a number, whatever it is."""
    if isinstance(expr, sympy.Lt | sympy.Gt) and expr.lts != 0:
        return False
    return isinstance(expr, sympy.Ne | sympy.Lt | sympy.Gt) and any(
        isinstance(side, (Mod, PythonMod)) and side.args[1].is_Integer and side.free_symbols
        for side in expr.args
    )


def _of_batch(expr: sympy.Basic, buckets: Buckets, symbols: Mapping[str, sympy.Symbol]) -> bool:
    """Whether an assertion is of a batch that the planner chooses."""
    free = any(bucket.batch is None for bucket in buckets.buckets)
    return free and symbols.get(BATCH) in expr.free_symbols


def _in_dims(
    expr: sympy.Basic, env: ShapeEnv, mapping: Mapping[sympy.Symbol, sympy.Expr]
) -> sympy.Basic:
    """Returns torch's expression over our dims, without what torch concludes from it."""
    for _ in range(len(env.replacements) + 1):
        replaced = expr.xreplace(dict(env.replacements))
        if replaced == expr:
            break
        expr = replaced
    return expr.xreplace(dict(mapping))


def _sizes(buckets: Buckets) -> Iterator[dict[str, int]]:
    for bucket in buckets.buckets:
        sizes = {n: max(s, SMALLEST) for n, s in bucket.sizes.items()}
        for batch in [sizes[BATCH]] if BATCH in sizes else BATCHES:
            yield {**sizes, BATCH: batch}
