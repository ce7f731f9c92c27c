"""What the house weighs: lines, methods, long functions, names that collide, prose to decode.

    python -m tests.house [ROOT]        # prints the table

`tests/test_house.py` holds today's counts, which only fall. All figures are of `dcpc/`, but for the
line of benchmarks. Aims, and why some are missed, are in `tests/house_aims.py`.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.house_aims import AIMS, MEASURED, ROOMS
from tests.walk import walk

ROOT = Path(__file__).parent.parent
MOST_LINES, MOST_ARGUMENTS, MOST_METHODS = 50, 8, 12
WHOLE = ("CompiledModel", "PipelinedModel")  # classes whose methods are counted with their bases
DATA = ("__init__.py", "README.md")  # file names that every folder has

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = Function | ast.ClassDef | ast.Module


def lines_of(files: list[Path]) -> int:
    """Returns the lines of some files."""
    return sum(len(f.read_text().splitlines()) for f in files)


def methods_of(node: ast.ClassDef) -> list[Function]:
    """Returns the methods of a class, its bases' left out."""
    return [n for n in node.body if isinstance(n, Function)]


def arguments_of(node: Function) -> list[ast.arg]:
    """Returns the arguments of a function, `self` and `cls` left out."""
    given = node.args
    rest = [a for a in (given.vararg, given.kwarg) if a is not None]
    found = [*given.posonlyargs, *given.args, *given.kwonlyargs, *rest]
    return [a for a in found if a.arg not in ("self", "cls")]


def length_of(node: Function) -> int:
    """Returns the lines of a function, its docstring among them."""
    return (node.end_lineno or 0) - node.lineno + 1


def entries_of(text: str) -> list[str]:
    """Returns what a docstring says of each argument and attribute, the name left out."""
    return re.findall(r"^ {4}\*{0,2}\w+(?: \(.*?\))?: +(.+)$", text, re.M)


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a module's or a statement's own and inner statements; expressions hold none."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, name, ()):
            yield from statements(inner)


@dataclass
class House:
    """The sources of a tree.

    Attributes:
        root: folder that `dcpc/` and `benchmarks/` are in.
    """

    root: Path = ROOT

    @cached_property
    def files(self) -> list[Path]:
        """Modules of dcpc."""
        return sorted(self.root.glob("dcpc/**/*.py"))

    @cached_property
    def benchmarks(self) -> list[Path]:
        """Modules of benchmarks."""
        return sorted(self.root.glob("benchmarks/**/*.py"))

    @cached_property
    def trees(self) -> dict[Path, ast.Module]:
        """Modules of dcpc, parsed."""
        return {f: ast.parse(f.read_text()) for f in self.files}

    @cached_property
    def documented(self) -> list[Documented]:
        """Modules, classes and functions."""
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        return [n for tree in self.trees.values() for n in statements(tree) if isinstance(n, kinds)]

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        """Class by name."""
        return {n.name: n for n in self.documented if isinstance(n, ast.ClassDef)}

    @cached_property
    def functions(self) -> list[Function]:
        """Functions and methods."""
        return [n for n in self.documented if isinstance(n, Function)]

    @cached_property
    def docstrings(self) -> list[str]:
        """Docstrings of modules, classes and functions."""
        found = (ast.get_docstring(n) for n in self.documented)
        return [text for text in found if text]

    def docstring_lines(self) -> int:
        """Returns the lines of docstrings."""
        return sum(len(text.splitlines()) for text in self.docstrings)

    def tower(self, name: str) -> tuple[int, int]:
        """Returns the methods of a class with those of its bases, and the levels of these.

        A method that a class overrides counts once.
        """
        names: set[str] = set()
        levels, todo = 0, [name]
        while todo:
            levels += 1
            here = [self.classes[n] for n in todo if n in self.classes]
            names |= {m.name for node in here for m in methods_of(node)}
            bases = (ast.unparse(b).split("[")[0].split(".")[-1] for n in here for b in n.bases)
            todo = [b for b in dict.fromkeys(bases) if b in self.classes]
        return len(names), levels

    def long_functions(self) -> list[str]:
        """Returns functions over `MOST_LINES` lines."""
        return [n.name for n in self.functions if length_of(n) > MOST_LINES]

    def wide_functions(self) -> list[str]:
        """Returns functions of more than `MOST_ARGUMENTS` arguments."""
        return [n.name for n in self.functions if len(arguments_of(n)) > MOST_ARGUMENTS]

    def large_classes(self) -> list[str]:
        """Returns classes of more than `MOST_METHODS` methods, their bases' left out."""
        return [name for name, n in self.classes.items() if len(methods_of(n)) > MOST_METHODS]

    def underscored(self) -> list[str]:
        """Returns class names that another class has without an underscore."""
        return [n for n in self.classes if n.startswith("_") and n.lstrip("_") in self.classes]

    def plurals(self) -> list[str]:
        """Returns class names that are another class's and an "s", underscores left out."""
        bare = {n.lstrip("_") for n in self.classes}
        return [n for n in sorted(bare) if f"{n}s" in bare]

    def repeated_files(self) -> dict[str, int]:
        """Returns names of modules that several folders have, with their number."""
        counts = Counter(f.name for f in self.files if f.name not in DATA)
        return {name: n for name, n in counts.items() if n > 1}

    def decoded(self) -> list[str]:
        """Returns first lines of docstrings that need a "what"."""
        firsts = (text.splitlines()[0] for text in self.docstrings)
        return [first for first in firsts if re.search(r"\bwhat\b", first)]

    @cached_property
    def entries(self) -> list[str]:
        """Texts of arguments and attributes."""
        return [entry for text in self.docstrings for entry in entries_of(text)]

    def genitives(self) -> list[str]:
        """Returns texts of arguments that begin with "of"."""
        return [entry for entry in self.entries if re.match(r"of\b", entry)]


# Figure -> how it is counted. Each is held by `tests/test_house.py`, and only falls.
COUNTS: dict[str, Callable[[House], int]] = {
    "lines in dcpc/": lambda h: lines_of(h.files),
    "lines in benchmarks/": lambda h: lines_of(h.benchmarks),
    "methods of CompiledModel": lambda h: h.tower("CompiledModel")[0],
    "methods of PipelinedModel": lambda h: h.tower("PipelinedModel")[0],
    "functions > 50 lines": lambda h: len(h.long_functions()),
    "functions of >= 9 parameters": lambda h: len(h.wide_functions()),
    "classes > 12 methods": lambda h: len(h.large_classes()),
    "class names that differ by an underscore": lambda h: len(h.underscored()),
    "class names that differ by a plural": lambda h: len(h.plurals()),
    "file names that repeat": lambda h: len(h.repeated_files()),
    'docstrings whose first sentence needs "what"': lambda h: len(h.decoded()),
    'argument texts that begin with "of"': lambda h: len(h.genitives()),
}


def table(house: House) -> list[tuple[str, str]]:
    """Returns the rows of the table: a figure, and its value with what it is out of."""
    more = {
        "lines in dcpc/": f" in {len(house.files)} files, {house.docstring_lines():,} of docstring",
        "lines in benchmarks/": f" in {len(house.benchmarks)} files",
        'docstrings whose first sentence needs "what"': f" of {len(house.docstrings):,}",
        'argument texts that begin with "of"': f" of {len(house.entries):,}",
    }
    more |= {f"methods of {n}": f" on {house.tower(n)[1]} levels" for n in WHOLE}
    return [(name, f"{count(house):,}{more.get(name, '')}") for name, count in COUNTS.items()]


def refused_pairs(page: str) -> int:
    """Returns the pairs of options that the page of combinations refuses, two values of one not."""
    same = re.findall(r"^(\d+)\. Two values of one option", page, re.M)
    marks = re.findall(r"\*\*(\d+)\*\*", page)
    return sum(mark not in same for mark in marks) // 2  # each pair stands twice


def printed(house: House) -> Table:
    """Returns the table with aims, and the reason beside each aim that is missed."""
    found = Table("figure", "value", "aim", "why it is missed", show_lines=True)
    values = dict(table(house))
    for name, (aim, why) in AIMS.items():
        missed = COUNTS[name](house) > aim
        found.add_row(name, values[name], f"<= {aim:,}", why if missed else "")
    page = (house.root / "docs" / "combinations.md").read_text()
    found.add_row(
        "pairs of options that are refused",
        f"{refused_pairs(page)} of 190",
        "a physical reason",
        "each has one in docs/combinations.md",
    )
    rooms, climbs = walk()
    found.add_row("rooms on the walk of the model through compile", str(len(rooms)), "<= 20", ROOMS)
    found.add_row("climbs on that walk", str(len(climbs)), "<= 4", "")
    for row in MEASURED:
        found.add_row(*row)
    return found


if __name__ == "__main__":
    Console(width=None if sys.stdout.isatty() else 150).print(
        printed(House(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT))
    )
