"""Facts of an option besides its name and type."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class CommandOption:
    """How the command line reads an option.

    Attributes:
        type: type that typer parses the text into.
        value: function from the parsed value to the option's value.
        default: default value, of the type `type`; None: the option's own default.
        least: smallest allowed number.
        metavar: name of the value in the help text.
        choices: values offered by the shell's completion.
    """

    type: Any
    value: Callable[[Any], Any] = lambda given: given
    default: Any = None
    least: int | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OptionFacts:
    """Facts of an option besides its name, type and default.

    Attributes:
        meaning: sentence for documents, docstrings and help.
        default: default as documents describe it; "": the value itself.
        check: function that raises a `DcpcError` for an impossible value.
        command: command line's form of the option; None: only Python has it.
    """

    meaning: str
    default: str = ""
    check: Callable[[Any], object] | None = None
    command: CommandOption | None = None


def declare(value: Any, meaning: str, **more: Any) -> Any:
    """Returns the dataclass field of an option; `more` are further facts."""
    return field(default=value, metadata={"facts": OptionFacts(meaning, **more)})


def quoted(names: Iterable[str]) -> str:
    """Returns names as a list of code for documents."""
    return ", ".join(f'`"{name}"`' for name in names)


def facts(option: Field[Any]) -> OptionFacts:
    """Returns the facts that a field of the option types declares."""
    found: OptionFacts = option.metadata["facts"]
    return found
