"""mkdocstrings: examples as code, and options of `compile` and `plan` with their meaning."""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from typing import Any

import griffe

EXAMPLE = re.compile(r"^( *)Example:\n((?:\1 +.*\n|\s*\n)+)", re.M)
ASKED = re.compile(r"^    options: .*\n(?:     +.*\n)*", re.M)
OPTION = re.compile(r"^    (\w+): ", re.M)


class Docstrings(griffe.Extension):
    """Turns docstrings of the house's form into what the site's parser shows best."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Gives a function that `taking` decorates the signature and docstring it has at run time.

        Args:
            func: as griffe read it.
            kwargs: what griffe passes besides.
        """
        if not any(str(d.value).startswith("taking(") for d in func.decorators):
            return
        made = getattr(importlib.import_module(func.module.path), func.name)
        text = EXAMPLE.sub(_fenced, _options_as_list(inspect.getdoc(made) or ""))
        func.docstring = griffe.Docstring(text, parent=func, parser="google")
        func.parameters = griffe.Parameters(
            *map(_parameter, inspect.signature(made).parameters.values())
        )

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Fences the code of `Example:`.

        Args:
            obj: as griffe read it.
            kwargs: what griffe passes besides.
        """
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(_fenced, inspect.cleandoc(obj.docstring.value) + "\n")


def _fenced(match: re.Match[str]) -> str:
    code = textwrap.dedent(match[2]).strip()
    return f"```python\n{code}\n```\n\n"


def _options_as_list(text: str) -> str:
    """Returns a docstring whose `Options:` are a list in its text: they have defaults in words."""
    first, _, options = text.partition("Options:\n")
    first = ASKED.sub("", first)
    return f"{first}**Options:**\n\n" + OPTION.sub(r"* `\1`: ", options)


def _parameter(told: inspect.Parameter) -> griffe.Parameter:
    default = None if told.default is inspect.Parameter.empty else repr(told.default)
    kind = griffe.ParameterKind[told.kind.name.lower()]
    return griffe.Parameter(told.name, annotation=str(told.annotation), kind=kind, default=default)
