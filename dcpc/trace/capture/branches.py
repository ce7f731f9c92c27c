"""Checks the assumptions about sizes that the trace made, at every bucket.

A forward that computes with a size in Python (`int(n ** 0.5)`, `if n % 8 == 0`) is traced at one
size. Export notes what it assumed as assertions in the graph, which the canonical form drops: an
equation or an inequality (`if n > 20 * batch`, `if n % 3 > 1`) that does not hold at a bucket
would make the graph silently wrong there. So may an inequation (`if n != 9`), or it is one of
torch's own and makes no difference: there the graph is compared with forward, call by call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import Mod, PythonMod

from dcpc.buckets import BATCH, Buckets
from dcpc.errors import TraceError
from dcpc.trace.capture.dims import ExampleError
from dcpc.trace.capture.paths import TAKEN, UnknownPathError

# Batches at which an assertion is tested if a bucket fixes no batch: the planner may choose these.
BATCHES = (2, 3, 64)
TRIED = range(2, 65)  # batches searched for MOST at which two sizes are equal that must differ
MOST = 2
SMALLEST = 2  # sizes of 0 and 1 run the graph of more


def refuse_branches(
    env: ShapeEnv,
    buckets: Buckets,
    symbols: Mapping[str, sympy.Symbol],
    mapping: Mapping[sympy.Symbol, sympy.Expr],
    difference: Callable[[Mapping[str, int]], str],
) -> tuple[sympy.Basic, ...]:
    """Returns the relations of dims that the trace assumed; raises where one fails and must not.

    An equation or an inequality that fails is an error. Torch often assumes that two sizes differ,
    or that one does not divide the other (of strides, of interpolated positions), and a forward
    that pads to a multiple does so too: there the graph is right all the same. But forward may also
    branch (`if n != 9`), and then the graph is the other branch: at such sizes the calls of both
    are compared.

    Args:
        env: shape environment of the exported graph.
        buckets: sizes that the graph is for.
        symbols: our symbol of each named dim.
        mapping: torch's symbols -> expressions of our symbols.
        difference: function of sizes that says how the graph's calls differ from forward's, "" if
            they do not; it raises UnknownPathError.

    Raises:
        TraceError: an equation or inequality fails at a bucket, or another relation fails and the
            graph differs from forward there.
    """
    compared: set[tuple[tuple[str, int], ...]] = set()
    every = (a for found in env.deferred_runtime_asserts.values() for a in found)
    found = [_in_dims(assertion.expr, env, mapping) for assertion in every]
    for expr in found:
        differ = isinstance(expr, sympy.Ne) or _is_remainder(expr)
        for sizes in _sizes(buckets, expr if differ else None, symbols):
            at = {symbols[n]: sympy.Integer(size) for n, size in sizes.items() if n in symbols}
            holds = expr.subs(at)
            if holds == sympy.true or (not differ and holds != sympy.false):
                continue
            what = (
                f"forward was traced as if {expr}; expected a graph that holds at every bucket, "
                f"and at {', '.join(f'{n} {s}' for n, s in sizes.items())} it "
                "does not"
            )
            if not differ:
                raise ExampleError(_advised(what, expr, buckets, symbols))
            key = tuple(sorted(sizes.items()))
            if key not in compared:
                compared.add(key)
                _compare(_advised(what, expr, buckets, symbols), sizes, difference)
    return tuple(dict.fromkeys(expr for expr in found if expr != sympy.true))


def refuse_batch_of_one(buckets: Buckets, difference: Callable[[Mapping[str, int]], str]) -> None:
    """Refuses a model that branches at a batch of 1 (`if batch == 1`): the graph is for 2 and more.

    Torch assumes that a symbolic batch is not 1, and asserts nothing. Yet any call may have a batch
    of 1: the rest of an epoch, or the planner's choice.

    Raises:
        TraceError: forward makes other calls at a batch of 1.
    """
    what = "forward was traced for batches of 2 and more"
    one, two = ({**buckets.buckets[0].sizes, BATCH: n} for n in (1, 2))
    found = _difference(what, one, difference)
    # A number that is computed of a size is written otherwise than the size itself, at any batch.
    if found and (TAKEN in found or not _difference(what, two, difference)):
        raise TraceError(
            f"{what}, and at 1 does something else: {found}; leave the branch on the batch out, or "
            "declare the batch as a number in the buckets' specs"
        )


def _compare(
    what: str, sizes: Mapping[str, int], difference: Callable[[Mapping[str, int]], str]
) -> None:
    if found := _difference(what, sizes, difference):
        raise ExampleError(f"{what} ({found})")


def _difference(
    what: str, sizes: Mapping[str, int], difference: Callable[[Mapping[str, int]], str]
) -> str:
    """Returns how the graph differs from forward at these sizes; warns if that is unknown."""
    try:
        return difference(sizes)
    except UnknownPathError as error:
        at = ", ".join(f"{n} {s}" for n, s in sizes.items())
        warnings.warn(
            f"{what}; at {at} forward could not be followed ({error}), so whether the graph is "
            "right there is not known; `dcpc check` compares such sizes",
            stacklevel=2,
        )
        return ""


def _advised(
    what: str, expr: sympy.Basic, buckets: Buckets, symbols: Mapping[str, sympy.Symbol]
) -> str:
    """Returns a message with advice appended."""
    return (
        f"{what}; look for a Python int(), a comparison or a square root of a size in forward, or "
        "keep to sizes where it holds"
    ) + ", the batch among them" * _of_batch(expr, buckets, symbols)


def _is_remainder(expr: sympy.Basic) -> bool:
    """Whether an assertion only says that a length divided by a number leaves a remainder."""
    if isinstance(expr, sympy.Lt | sympy.Gt) and expr.lts != 0:
        return False
    return isinstance(expr, sympy.Ne | sympy.Lt | sympy.Gt) and any(
        isinstance(side, (Mod, PythonMod)) and side.args[1].is_Integer and side.free_symbols
        for side in expr.args
    )


def _of_batch(expr: sympy.Basic, buckets: Buckets, symbols: Mapping[str, sympy.Symbol]) -> bool:
    """Whether an assertion depends on a batch that the planner chooses."""
    free = any(bucket.batch is None for bucket in buckets.buckets)
    return free and symbols.get(BATCH) in expr.free_symbols


def _in_dims(
    expr: sympy.Basic, env: ShapeEnv, mapping: Mapping[sympy.Symbol, sympy.Expr]
) -> sympy.Basic:
    """Returns torch's expression over our dims, with torch's own replacements of symbols undone."""
    for _ in range(len(env.replacements) + 1):
        replaced = expr.xreplace(dict(env.replacements))
        if replaced == expr:
            break
        expr = replaced
    return expr.xreplace(dict(mapping))


def _sizes(
    buckets: Buckets, unequal: sympy.Basic | None, symbols: Mapping[str, sympy.Symbol]
) -> Iterator[dict[str, int]]:
    """Yields the sizes at which an assertion is tested: each bucket's, with its batch or several.

    Args:
        buckets: buckets that the graph is for.
        unequal: the assertion if it states that two sizes differ: then batches are tested at which
            they might be equal, or a single one if it does not depend on the batch.
        symbols: our symbol of each named dim.
    """
    batch, free = symbols.get(BATCH), {BATCH} - buckets.static.keys()
    for bucket in buckets.buckets:
        # Another dim that is 1 is so in every bucket of a trace (`Buckets.by_trace`).
        sizes = {n: max(s, SMALLEST) if n in free else s for n, s in bucket.sizes.items()}
        batches: Iterable[int] = [sizes[BATCH]] if BATCH in sizes else BATCHES
        if unequal is not None and BATCH not in sizes:
            batches = BATCHES[:1]
            if batch in unequal.free_symbols:
                at = {symbols[n]: sympy.Integer(s) for n, s in sizes.items() if n in symbols}
                batches = _equal_at(unequal.subs(at), batch)
        for chosen in batches:
            yield {**sizes, BATCH: chosen}


def _equal_at(unequal: sympy.Basic, batch: sympy.Symbol) -> list[int]:
    """Returns a few batches at which two sizes that were assumed to differ may be equal.

    Of remainders the first few are enough: they come again.
    """
    found: list[int] = []
    if isinstance(unequal, sympy.Ne):
        gap = sympy.expand(unequal.lhs - unequal.rhs)
        slope = gap.coeff(batch, 1)
        if slope.is_Number and slope and (gap - slope * batch).is_Number:
            root = -(gap - slope * batch) / slope
            return [int(root)] if root.is_Integer and root >= SMALLEST else []
    for size in TRIED:
        if unequal.subs({batch: sympy.Integer(size)}) != sympy.true:
            found.append(size)
    return found[:MOST]
