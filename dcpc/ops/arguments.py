"""Passes a named tuple's fields as an op's arguments, in the order of its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, get_type_hints

Fields = TypeVar("Fields", bound=tuple[Any, ...])

_TYPES = {int: "SymInt", int | None: "SymInt?", float: "float", bool: "bool", str: "str"}


def arguments(fields: Any, prefix: str = "", defaults: bool = False) -> str:
    """Returns the part of an op's schema that takes a named tuple's fields, in their order.

    Args:
        fields: class of the named tuple; its fields are numbers, booleans and strings.
        prefix: prefix of the arguments' names.
        defaults: whether the arguments have the fields' default values.
    """
    given = fields._field_defaults if defaults else {}
    ends = {name: f"={value!r}" for name, value in given.items()}
    hints = get_type_hints(fields).items()
    return ", ".join(f"{_TYPES[kind]} {prefix}{name}{ends.get(name, '')}" for name, kind in hints)


def taken(fields: type[Fields], call: Mapping[str, Any], prefix: str = "") -> Fields:
    """Returns the named tuple whose fields are arguments of a call, by name."""
    return fields(*(call[prefix + name] for name in fields.__annotations__))
