"""Reads YAML as plain data together with the line of every field, so that errors can name it."""

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dcpc.errors import DcpcError

# A field's way from the top of the file, e.g. ("sizes", 1, "seq").
FieldPath = tuple[str | int, ...]

# Our files are shallow; the bound also ends the walk in a file whose alias contains itself.
_MAX_DEPTH = 6


@dataclass(frozen=True, slots=True)
class LinedYaml:
    """A YAML document.

    Attributes:
        data: the document as dicts, lists and scalars.
        file: path that it was read from.
        lines: 1-based line of each field.
    """

    data: Any
    file: Path
    lines: dict[FieldPath, int]

    def place(self, path: FieldPath) -> str:
        """Returns `file:line` of a field, or of the nearest parent that is in the file."""
        while path and path not in self.lines:
            path = path[:-1]
        return f"{self.file}:{self.lines.get(path, 1)}"


def read_yaml(file: str | Path, error: type[DcpcError]) -> LinedYaml:
    """Returns the one document in a file, read with the safe loader (no code is run).

    Raises:
        DcpcError: the file cannot be read, is not YAML or repeats a key (class `error`).
    """
    file = path_of(file, error, "the file to read")
    try:
        loader = yaml.SafeLoader(file.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        lines: dict[FieldPath, int] = {}
        if node is not None:
            _reject_repeated_keys(node, file, error, _MAX_DEPTH, {})
        data = loader.construct_document(node) if node is not None else None
        # After construction, which has expanded merge keys (`<<:`) in the nodes.
        if node is not None:
            _mark_lines(node, (), lines)
    except OSError as e:
        where = "" if file.is_absolute() else f" in {Path.cwd()}"
        raise error(
            f"{file}: cannot be read, got {e.strerror}{where}; expected a readable file; correct "
            "the path"
        ) from e
    except yaml.MarkedYAMLError as e:
        line = e.problem_mark.line + 1 if e.problem_mark else 1
        raise error(
            f"{file}:{line}: not valid YAML, got {e.problem}; expected one document, indented by "
            "spaces; correct this line or the one before it"
        ) from e
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        said = "nesting without end" if isinstance(e, RecursionError) else f"{e}"
        raise error(
            f"{file}:1: not valid YAML, got {said}; expected one UTF-8 document of a few levels; "
            "correct the file"
        ) from e
    return LinedYaml(data, file, lines)


def path_of(file: object, error: type[DcpcError], what: str) -> Path:
    """Returns a valid file path.

    Raises:
        DcpcError: it is no path, or one that no file can have (class `error`).
    """
    if isinstance(file, str | Path) and str(file) and "\0" not in str(file):
        return Path(file)
    raise error(
        f"{what}: got {reprlib.repr(file)}; expected a path, as text or pathlib.Path; pass one"
    )


def _reject_repeated_keys(
    node: yaml.Node, file: Path, error: type[DcpcError], depth: int, seen: dict[int, int]
) -> None:
    """YAML forbids a key twice in one mapping; PyYAML would keep the last without a word.

    Aliases make one node of many places: `seen` has how deep each was looked into.
    """
    if depth <= seen.get(id(node), 0):
        return
    seen[id(node)] = depth
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        first: dict[str, int] = {}
        for key, value in node.value:
            children.append(value)
            if not isinstance(key, yaml.ScalarNode):
                continue
            line = key.start_mark.line + 1
            if key.value in first:
                raise error(
                    f"{file}:{line}: got field '{key.value}' twice, first in line "
                    f"{first[key.value]}; expected it once; remove one"
                )
            first[key.value] = line
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    for child in children:
        _reject_repeated_keys(child, file, error, depth - 1, seen)


def _mark_lines(node: yaml.Node, path: FieldPath, lines: dict[FieldPath, int]) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if len(path) == _MAX_DEPTH:
        return
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines[(*path, key.value)] = key.start_mark.line + 1
                _mark_lines(value, (*path, key.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            _mark_lines(value, (*path, i), lines)
