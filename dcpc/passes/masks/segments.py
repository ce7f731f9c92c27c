"""Recognises packed sequences: the part of a mask that requires equal segments of query and key.

    S[b, i] == S[b, j]                        the sequences of a row, by any integers S
    S[b, i] != 0                              with that, the same as S[b, j] != 0
    P[b, j] <= P[b, i]                        with S counted from P, the same as j <= i

A library that takes positions which restart finds its sequences by counting where they do not go
on (`cumsum(diff(P) != 1)`), and compares these positions, not those in the row. Inside of such a
sequence P goes up by 1 from each position to the next, so both have the same distances.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import fx

from dcpc.fx.large_graphs import op_name
from dcpc.ir import Program
from dcpc.passes.masks.mask_graph import MaskReader
from dcpc.passes.masks.mask_values import Affine, Data, Truth, both, compared, either, negation
from dcpc.passes.sharding.op_kinds import arguments

# An expression of lookups whose indices are Affine in the positions b, i (query) and j (key).
Expression: TypeAlias = Any

# Positions and numbers of sequences do not wrap in these.
COUNTING = (torch.int64, torch.int32)

_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def segment_of(program: Program, part: Truth) -> Expression | None:
    """Returns the S of `S[b, i] == S[b, j]`, read at the key; None for other conditions."""
    sides = _equal_sides(part)
    if sides is None:
        return None
    for query, key in (sides, sides[::-1]):
        own = "i" in positions(query) and positions(query) <= {"b", "i"}
        if own and _at_key(query) == key and _is_integer(program, key):
            return key
    return None


def _equal_sides(part: Truth) -> tuple[Expression, Expression] | None:
    """Returns the two values that a condition requires to be equal."""
    if part.data is None or part.kind not in ("data", "not data"):
        return None
    op, *rest = part.data.recipe
    if (part.kind, op) == ("not data", "sub"):
        return rest[0], rest[1]
    if (part.kind, op) not in (("data", "eq"), ("not data", "ne")):
        return None
    a, b = rest
    if a == 0:
        a, b = b, a
    if b == 0 and isinstance(a, tuple) and a[0] == "sub":
        return a[1], a[2]
    return a, b


def positions(recipe: Expression) -> set[str]:
    """Returns the positions at which an expression is looked up."""
    if isinstance(recipe, Affine):
        return {name for name, _ in recipe.coefficients}
    if isinstance(recipe, tuple):
        return {name for part in recipe for name in positions(part)}
    return set()


def _at_key(recipe: Expression) -> Expression:
    """Returns an expression with the query's position replaced by the key's."""
    if isinstance(recipe, Affine):
        moved = {"j" if v == "i" else v: c for v, c in recipe.coefficients}
        return Affine.of(recipe.number, moved)
    return tuple(map(_at_key, recipe)) if isinstance(recipe, tuple) else recipe


def _is_integer(program: Program, recipe: Expression) -> bool:
    """Whether an expression is made of integers alone, so that equality is exact."""
    if not isinstance(recipe, tuple):
        return isinstance(recipe, int)
    if recipe[0] == "get":
        dtype = program.info[recipe[1]].dtype
        return not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool
    if recipe[0] == "cast":  # equal before it, equal after it, and the other way where none wraps
        return recipe[1] in COUNTING and _is_integer(program, recipe[2])
    return all(_is_integer(program, part) for part in recipe[1:])


def within(reader: MaskReader, segment: Expression, truth: Truth) -> Truth:
    """Returns a truth with as little of the query in it as possible, where segments are equal."""
    if truth.kind in ("all", "any"):
        members = [within(reader, segment, member) for member in truth.members]
        return both(*members) if truth.kind == "all" else either(*members)
    if truth.data is None:
        return truth
    positive = _as_distance(reader, segment, truth.data.recipe)
    if positive is not None:
        return positive if truth.kind == "data" else negation(positive)
    recipe = _shared(truth.data.recipe, segment)
    return Truth(truth.kind, data=Data(recipe))


def _shared(recipe: Expression, segment: Expression) -> Expression:
    """Returns an expression with the query's segment replaced by the key's, which is equal."""
    if not isinstance(recipe, tuple) or not recipe:
        return recipe
    if recipe[0] in ("get", segment[0]) and _at_key(recipe) == segment:
        return segment
    if recipe[0] == "get":
        return recipe
    return (recipe[0], *(_shared(part, segment) for part in recipe[1:]))


def _as_distance(reader: MaskReader, segment: Expression, recipe: Expression) -> Truth | None:
    """Returns a comparison of restarting positions as one of i and j, within a segment."""
    op, *rest = recipe
    if op not in _COMPARISONS:
        return None
    terms: dict[Expression, int] = {}
    number = 0
    for side, sign in zip(rest, (1, -1), strict=True):
        found = _linear(side)
        if found is None:
            return None
        for term, count in found[0].items():
            terms[term] = terms.get(term, 0) + sign * count
        number += sign * found[1]
    terms = {term: count for term, count in terms.items() if count}
    if len(terms) != 2 or sum(terms.values()) != 0:
        return None
    query = next((t for t in terms if positions(t) <= {"b", "i"} and "i" in positions(t)), None)
    if query is None or _at_key(query) not in terms or not _counts(reader, segment, query):
        return None
    times = terms[query]
    return compared(op, Affine.of(number, {"i": times, "j": -times}), Affine(0))


def _linear(recipe: Expression) -> tuple[dict[Expression, int], int] | None:
    """Returns (lookup -> coefficient, number) of a linear expression; None for others."""
    if isinstance(recipe, int):
        return {}, recipe
    if not isinstance(recipe, tuple):
        return None
    if recipe[0] == "get":
        return {recipe: 1}, 0
    if recipe[0] not in ("add", "sub", "mul"):
        return None
    a, b = map(_linear, recipe[1:])
    if a is None or b is None:
        return None
    if recipe[0] == "mul":
        if a[0] and b[0]:
            return None
        (terms, number), (_, factor) = (a, b) if a[0] else (b, a)
        return {t: c * factor for t, c in terms.items()}, number * factor
    sign = 1 if recipe[0] == "add" else -1
    terms = dict(a[0])
    for term, count in b[0].items():
        terms[term] = terms.get(term, 0) + sign * count
    return terms, a[1] + sign * b[1]


def is_one(reader: MaskReader, segment: Expression) -> bool:
    """Returns whether all positions are of one segment, as they are made by `arange`."""
    counted = _counted(reader, segment)
    return isinstance(counted, Affine) and dict(counted.coefficients) == {"j": 1}


def _counts(reader: MaskReader, segment: Expression, query: Expression) -> bool:
    """Whether segments are `cumsum(diff(P) != 1)` of the P that is looked up at the query.

    Then P increases by 1 from each position of a segment to the next: any other step is counted,
    and equal counts mean that there was none.
    """
    return bool(_counted(reader, segment) == Data(_at_key(query)))


def _counted(reader: MaskReader, segment: Expression) -> Any:
    """Returns the P of segments that are `cumsum(diff(P) != 1)`, at the key; else None."""
    if segment[0] != "get":
        return None
    _, name, index = segment
    count = next(n for n in reader.program.gm.graph.nodes if n.name == name)
    if op_name(count) != "cumsum" or index[-1] != Affine(0, (("j", 1),)):
        return None
    args = arguments(count)
    last = len(index) - 1
    broken = _source(args["self"])
    if args["dim"] % len(index) != last or op_name(broken) != "ne":
        return None
    steps, one = (arguments(broken)[key] for key in ("self", "other"))
    if one != 1 or not isinstance(steps, fx.Node) or op_name(steps) != "diff":
        return None
    given = arguments(steps)
    first = given["prepend"]
    aligned = isinstance(first, fx.Node) and reader.shape(first)[last] == 1
    if {reader.dtype(count), reader.dtype(steps)} - {*COUNTING}:
        return None
    if given["n"] != 1 or given["dim"] % len(index) != last or not aligned or given["append"]:
        return None
    return reader.read(given["self"], index)


def _source(node: fx.Node) -> fx.Node:
    """Returns a value without the casts after it."""
    while op_name(node) == "_to_copy":
        (node,) = node.all_input_nodes
    return node
