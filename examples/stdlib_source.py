"""Real text of every length: each function and class of the running interpreter's standard library.

    CPython 3.11.7: 22,095 segments, 16.5 MB; median 259 bytes, p95 2,525, p99 8,693,
    longest 118,563

A segment is the lines of one `def`, `async def` or `class` statement (decorators left out), nested
ones too: a method is a segment, and again a part of its class. Files below a folder `test` (the
regression tests) and installed packages are left out.

A sample is one segment as bytes between a begin and an end token. A segment longer than the largest
bucket is cut at line borders; each piece is a sample of its own.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

BEGIN, END = 256, 257
IGNORE = -100
# What fills up a sample to its bucket.
PAD = {"input_ids": 0, "labels": IGNORE}

_LEFT_OUT = frozenset({"test", "site-packages", "dist-packages"})
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# The fields that hold statements, or what holds them (`except` and `case`).
_BODIES = ("body", "handlers", "orelse", "finalbody", "cases")


def segments(root: Path | None = None) -> list[bytes]:
    """Returns the source of every function and class below a folder, in order of path.

    Args:
        root: the folder; default: the running interpreter's standard library.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = []
    for path in sorted(root.rglob("*.py")):
        if not _LEFT_OUT.intersection(path.relative_to(root).parts):
            found.extend(_segments_of(path))
    return found


def cut(segment: bytes, limit_bytes: int) -> list[bytes]:
    """Returns a segment as pieces of at most `limit_bytes`, each as many whole lines as fit.

    A single line that is longer is cut within.
    """
    pieces, current = [], b""
    for line in segment.splitlines(keepends=True):
        if len(current) + len(line) > limit_bytes and current:
            pieces.append(current)
            current = b""
        current += line
        while len(current) > limit_bytes:
            pieces.append(current[:limit_bytes])
            current = current[limit_bytes:]
    return [*pieces, current] if current else pieces


class StdlibSource(Dataset[dict[str, Tensor]]):
    """The segments as samples for next-byte prediction; deterministic.

    Attributes:
        counts: how many segments, bytes and cuts there are.
    """

    def __init__(
        self,
        max_tokens: int,
        root: Path | Sequence[bytes] | None = None,
        limit: int | None = None,
        every: int = 1,
    ) -> None:
        """Reads the sources.

        Args:
            max_tokens: length of the largest bucket.
            root: where, or the segments; default: the running interpreter's standard library.
            limit: keep only about this many segments, evenly spread; default: all.
            every: a sample has the first of each so many bytes: with 4 it is about as long as the
                text is in the tokens of a vocabulary of words.
        """
        found = segments(root) if root is None or isinstance(root, Path) else [*root]
        if limit is not None and limit < len(found):
            found = [found[len(found) * i // limit] for i in range(limit)]
        self._segments, self._every = found, every
        self._texts: list[bytes] = []
        long = 0
        for segment in found:
            pieces = cut(segment, every * (max_tokens - 1))
            long += len(pieces) > 1
            self._texts.extend(piece[::every] for piece in pieces)
        self.counts = Counts.of(found, long, len(self._texts) - len(found))

    def cut_at(self, max_tokens: int) -> StdlibSource:
        """Returns the same segments for another length of the largest bucket."""
        return StdlibSource(max_tokens, self._segments, every=self._every)

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Returns `input_ids` and `labels`, int64 `[seq]`: each label is the byte that follows."""
        tokens = torch.tensor([BEGIN, *self._texts[index], END])
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}

    def dims(self, index: int) -> dict[str, int]:
        """Returns the length of a sample without making it."""
        return {"seq": len(self._texts[index]) + 1}


@dataclass(frozen=True, slots=True)
class Counts:
    """What a data set is made of.

    Attributes:
        segments: functions and classes.
        size_bytes: their bytes.
        median_bytes: middle one's bytes; p95 and p99 likewise.
        p95_bytes: see above.
        p99_bytes: see above.
        longest_bytes: the longest one's.
        long: segments longer than the largest bucket.
        cuts: cuts made in these.
    """

    segments: int
    size_bytes: int
    median_bytes: int
    p95_bytes: int
    p99_bytes: int
    longest_bytes: int
    long: int
    cuts: int

    @classmethod
    def of(cls, found: Iterable[bytes], long: int, cuts: int) -> Counts:
        """Returns the counts of some segments."""
        sizes = sorted(map(len, found))

        def at(share: float) -> int:
            return sizes[int(share * len(sizes))]

        return cls(len(sizes), sum(sizes), at(0.5), at(0.95), at(0.99), sizes[-1], long, cuts)

    def __str__(self) -> str:
        return (
            f"{self.segments:,} functions and classes, {self.size_bytes / 1e6:.1f} MB: "
            f"median {self.median_bytes:,} bytes, p95 {self.p95_bytes:,}, p99 {self.p99_bytes:,}, "
            f"longest {self.longest_bytes:,}; {self.long:,} longer than the largest bucket, "
            f"cut {self.cuts:,} times at line borders"
        )


def _segments_of(path: Path) -> Iterator[bytes]:
    source = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old sources have invalid escape sequences
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):  # lib2to3 keeps Python 2 and broken files as test data
            return
    # bytes.splitlines knows the line ends that the parser knows, and no others.
    lines = source.splitlines(keepends=True)
    for node in _statements(tree):
        if isinstance(node, _DEFINITIONS):
            yield b"".join(lines[node.lineno - 1 : node.end_lineno])


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the statements below a node in order; `ast.walk` looks at every expression too."""
    for name in _BODIES:
        for child in getattr(node, name, ()):
            yield child
            yield from _statements(child)
