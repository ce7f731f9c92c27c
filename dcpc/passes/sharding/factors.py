"""Common refinement of dims into atomic factors, by union-find.

`[B, T*S, D]` has dims `(B) (T S) (D)`. Reading `(T S)` as one dim of size 12 and elsewhere as
`(3 4)` splits it everywhere: a factor that is split somewhere is split everywhere, so that a label
such as "sharded along S" means the same on both sides of a view.
"""

from __future__ import annotations

from collections.abc import Iterable

import sympy


def quotient(a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
    """Returns a / b where b divides a at all values of the dims, else None.

    Both are sizes, so the ratio is not negative; sympy cannot tell that of `(height + 1) // 2`.
    """
    ratio = sympy.cancel(a / b)
    return ratio if ratio.is_integer and ratio.is_nonnegative else None


class FactorTable:
    """Factors by key; a key stands for itself, for another key (unified), or for its parts."""

    def __init__(self) -> None:
        """An empty table."""
        self._size: list[sympy.Expr] = []
        self._same_as: list[int] = []
        self._parts: dict[int, tuple[int, ...]] = {}
        self._quotients: dict[tuple[sympy.Expr, sympy.Expr], sympy.Expr | None] = {}

    def new(self, size: sympy.Expr) -> int:
        """Returns a new factor of this size."""
        self._size.append(size)
        self._same_as.append(len(self._size) - 1)
        return len(self._size) - 1

    def size(self, key: int) -> sympy.Expr:
        """Returns the global size of a factor."""
        return self._size[key]

    def atoms(self, keys: Iterable[int]) -> list[int]:
        """Returns the atomic factors that a sequence of factors stands for, in order."""
        found: list[int] = []
        for key in keys:
            root = self._find(key)
            parts = self._parts.get(root)
            if parts is None:
                found.append(root)
            else:
                found += self.atoms(parts)
        return found

    def unify(self, left: Iterable[int], right: Iterable[int]) -> bool:
        """Makes two sequences of factors the same, splitting where one is finer.

        Returns:
            False if their sizes have no common refinement (12 as 3*4 and as 2*6); factors unified
            before the first mismatch stay unified.
        """
        a, b = self.atoms(left), self.atoms(right)
        i = j = 0
        while i < len(a) and j < len(b):
            # Looked up again: keys unified a step before may be here, too (rows and columns of one
            # size), and a link from other than a root would undo that.
            x, y = self._find(a[i]), self._find(b[j])
            same = x == y or self._size[x] == self._size[y]
            rest = None if same else self._quotient(self._size[x], self._size[y])
            # A size may have two spellings: parts of 1 would be split off it again and again.
            if same or rest == 1:
                self._same_as[x] = y
            elif rest is not None:
                self._split(x, self._size[y], rest)
            elif (rest := self._quotient(self._size[y], self._size[x])) is not None:
                self._split(y, self._size[x], rest)
            else:
                return False
            if x == y or self._find(x) == self._find(y):
                i, j = i + 1, j + 1
            else:
                a[i:], b[j:] = self.atoms(a[i:]), self.atoms(b[j:])
        return i == len(a) and j == len(b)

    def _quotient(self, a: sympy.Expr, b: sympy.Expr) -> sympy.Expr | None:
        pair = (a, b)
        if pair not in self._quotients:
            self._quotients[pair] = quotient(a, b)
        return self._quotients[pair]

    def _find(self, key: int) -> int:
        while self._same_as[key] != key:
            self._same_as[key] = self._same_as[self._same_as[key]]
            key = self._same_as[key]
        return key

    def _split(self, key: int, first: sympy.Expr, rest: sympy.Expr) -> None:
        self._parts[key] = (self.new(first), self.new(rest))
