"""The einsum-like notation of sharding rules.

    *n i, o i, o -> *n o          operands in the order of the op's tensor arguments
    b (k g) q d, b k s d -> ...   a dim in parentheses is a product of names
    *n                            any number of leading dims, aligned at the right; 1 broadcasts

Inspired by the op sharding rules of OpenXLA Shardy (factors in einsum-like notation).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import sympy

from dcpc.errors import RuleError
from dcpc.passes.sharding.rule_types import Names

_TOKEN = re.compile(r"\*[a-z]\w*|\([a-z][\w ]*\)|[a-z]\w*")


@dataclass(frozen=True, slots=True)
class Pattern:
    """One parsed rule: the dims of each operand and of the output."""

    operands: tuple[tuple[str, ...], ...]
    output: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Returns the pattern of a rule's text.

        Raises:
            RuleError: the text is not in this notation.
        """
        left, arrow, right = text.partition("->")
        if not arrow:
            raise RuleError(
                f"sharding rule '{text}': got no '->'; expected 'operands -> output' such as "
                "'*n i, o i -> *n o'; add the output"
            )
        return cls(tuple(_dims(part, text) for part in left.split(",")), _dims(right, text))

    def names(self) -> set[str]:
        """Returns every name of the rule, without stars."""
        dims = [d for operand in (*self.operands, self.output) for d in operand]
        return {name.lstrip("*") for dim in dims for name in _members(dim)}


def _dims(text: str, rule: str) -> tuple[str, ...]:
    tokens = _TOKEN.findall(text)
    rest = _TOKEN.sub("", text).strip()
    if rest or sum(t.startswith("*") for t in tokens) > 1:
        raise RuleError(
            f"sharding rule '{rule[:80]}': got '{text.strip()[:80]}'; expected names, one *name at "
            "most, and products such as (h d); rewrite this operand"
        )
    return tuple(tokens)


def _members(dim: str) -> tuple[str, ...]:
    return tuple(dim.strip("()").split())


def bind(
    pattern: Pattern, shapes: list[tuple[sympy.Expr, ...]], output: tuple[sympy.Expr, ...]
) -> tuple[tuple[Names, ...], Names, dict[str, sympy.Expr]]:
    """Matches a pattern to shapes.

    Returns:
        names of each operand, names of the output, and the size of each name.

    Raises:
        RuleError: numbers of dims or sizes do not fit the pattern.
    """
    if len(shapes) > len(pattern.operands):
        raise RuleError(
            f"{len(shapes)} tensor operands, the rule has {len(pattern.operands)}; "
            "add the missing ones"
        )
    sizes: dict[str, sympy.Expr] = {}
    given = pattern.operands[: len(shapes)]
    tensors = [*zip(given, shapes, strict=True), (pattern.output, output)]
    starred = [(d, s) for d, s in tensors if any(token.startswith("*") for token in d)]
    spread = max((len(s) - len(d) + 1 for d, s in starred), default=0)
    expanded = [(_expand(dims, len(shape), spread), shape) for dims, shape in tensors]
    for want_composite in (False, True):
        for dims, shape in expanded:
            for dim, size in zip(dims, shape, strict=True):
                _learn(_members(dim), size, sizes, want_composite)
    bound = [_assign(dims, shape, sizes) for dims, shape in expanded]
    # A name of size 1 is left out of all dims: it can be neither split nor summed.
    return tuple(bound[:-1]), bound[-1], {n: s for n, s in sizes.items() if s != 1}


def _expand(dims: tuple[str, ...], ndim: int, spread: int) -> list[str]:
    """`*n i` on 3 dims, where *n spreads over at most 2 -> n0 n1 i, aligned at the right."""
    stars = [d for d in dims if d.startswith("*")]
    count = ndim - len(dims) + len(stars)
    if count < 0 or (not stars and count != 0):
        raise RuleError(f"{ndim} dims, the rule wants '{' '.join(dims)}'")
    names: list[str] = []
    for dim in dims:
        if dim.startswith("*"):
            names += [f"{dim[1:]}{i}" for i in range(spread - count, spread)]
        else:
            names.append(dim)
    return names


def _learn(
    members: tuple[str, ...], size: sympy.Expr, sizes: dict[str, sympy.Expr], composite: bool
) -> None:
    unknown = [m for m in members if m not in sizes]
    if composite and len(members) > 1 and len(unknown) == 1:
        known = sympy.Mul(*[sizes[m] for m in members if m in sizes])
        sizes[unknown[0]] = sympy.cancel(size / known)
    if len(members) == 1 and (unknown or sizes[members[0]] == 1):
        sizes[members[0]] = size


def _assign(dims: list[str], shape: tuple[sympy.Expr, ...], sizes: dict[str, sympy.Expr]) -> Names:
    assigned: list[tuple[str, ...]] = []
    for dim, size in zip(dims, shape, strict=True):
        members = _members(dim)
        product = sympy.Mul(*[sizes[m] for m in members])
        if size == 1:
            assigned.append(())
        elif sympy.expand(product - size) == 0:
            assigned.append(tuple(m for m in members if sizes[m] != 1))
        else:
            raise RuleError(f"dim '{dim}' is {size}, expected {product}")
    return tuple(assigned)
