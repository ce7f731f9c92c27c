"""What is known of an option besides its name and type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CommandOption:
    """How the command line reads an option.

    Attributes:
        type: what typer makes of the text.
        value: option from this.
        default: of that type; None: the option's own default.
        least: smallest number.
        metavar: what help calls the value.
        choices: values that a shell offers.
    """

    type: Any
    value: Callable[[Any], Any] = lambda given: given
    default: Any = None
    least: int | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OptionFacts:
    """What is known of an option besides its name, type and default.

    Attributes:
        meaning: for documents, docstrings and help.
        default: what documents say of the default; "": its value.
        check: raises a `DcpcError` for a value that is not possible.
        command: how the command line reads it; None: it is Python's alone.
    """

    meaning: str
    default: str = ""
    check: Callable[[Any], object] | None = None
    command: CommandOption | None = None


def declare(value: Any, meaning: str, **more: Any) -> Any:
    """Returns the field of an option; `more` are the other facts."""
    return field(default=value, metadata={"facts": OptionFacts(meaning, **more)})


def quoted(names: Iterable[str]) -> str:
    """Returns names as a list of code for documents."""
    return ", ".join(f'`"{name}"`' for name in names)


def facts(option: Field[Any]) -> OptionFacts:
    """Returns what is known of a field of the types below."""
    found: OptionFacts = option.metadata["facts"]
    return found
