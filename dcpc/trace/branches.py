"""What the trace took for granted of sizes, and buckets at which that does not hold.

A forward that computes with a size in Python (`int(n ** 0.5)`, `if n % 8 == 0`) is traced at one
size. Export notes what it assumed as assertions in the graph, which the canonical form drops: an
equation that does not hold at a bucket would make the graph silently wrong there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import Mod, PythonMod

from dcpc.buckets import BATCH, Buckets
from dcpc.errors import TraceError

BATCHES = (2, 3)  # what an equation is tried at where a bucket names no batch
SMALLEST = 2  # sizes of 0 and 1 run the graph of more


def refuse_branches(
    env: ShapeEnv,
    buckets: Buckets,
    symbols: Mapping[str, sympy.Symbol],
    mapping: Mapping[sympy.Symbol, sympy.Expr],
) -> None:
    """Raises where the trace holds for some of the buckets only.

    An equation that does not hold is an error. That two sizes differ, or that one does not divide
    another, torch assumes all the time (of strides, of positions that are interpolated), and the
    graph is right without. Of a remainder by a number there is a warning: it may be that forward
    pads to a multiple, and padding by 0 is right too, or that it branches.

    Args:
        env: of the exported graph.
        buckets: the sizes that the graph is for.
        symbols: our symbol of each named dim.
        mapping: torch's symbols -> expressions of ours.

    Raises:
        TraceError: an equation does not hold at a bucket.
    """
    for assertion in (a for found in env.deferred_runtime_asserts.values() for a in found):
        expr = _in_dims(assertion.expr, env, mapping)
        if not isinstance(expr, sympy.Eq) and not _is_remainder(expr):
            continue
        for sizes in _sizes(buckets):
            at = {symbols[n]: sympy.Integer(size) for n, size in sizes.items() if n in symbols}
            if expr.subs(at) == sympy.false:
                named = ", ".join(f"{n} {s}" for n, s in sizes.items())
                what = f"forward was traced as if {expr}"
                if isinstance(expr, sympy.Eq):
                    raise TraceError(
                        f"{what}; expected a graph that holds at every bucket, and at {named} it "
                        "does not; look for a Python int(), a comparison or a square root of a "
                        "size in forward, or keep to sizes where it holds"
                    )
                warnings.warn(
                    f"{what}, and at {named} that is not so: right where forward only pads to a "
                    "multiple, wrong where it branches; `dcpc check` compares such sizes",
                    stacklevel=2,
                )
                break


def _is_remainder(expr: sympy.Basic) -> bool:
    """Whether an assertion is of a remainder by a number, which a length may or may not leave."""
    return isinstance(expr, sympy.Ne) and any(
        isinstance(side, (Mod, PythonMod)) and side.args[1].is_Integer and side.free_symbols
        for side in expr.args
    )


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
