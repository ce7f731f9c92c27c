"""Signatures, docstrings and documents that are made of the options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, ParamSpec, Protocol, TypeVar

from torch import nn

from dcpc.buckets import Buckets
from dcpc.errors import DcpcError, PlanError, bare, check_call
from dcpc.plan.options.declared import CommandOption, OptionFacts, facts
from dcpc.plan.options.kinds import ModelOptions, PlanOptions
from dcpc.plan.options.values import check_given

P = ParamSpec("P")
T = TypeVar("T")
Result_co = TypeVar("Result_co", covariant=True)


class Taking(Protocol[P, Result_co]):
    """A function of a model, its buckets and options by name."""

    def __call__(
        self, model: nn.Module, buckets: Buckets, *args: P.args, **options: P.kwargs
    ) -> Result_co:
        """Calls it."""


def taking(
    kind: Callable[P, T],
    refused: Callable[[DcpcError, Mapping[str, Any]], None] | None = None,
    within: str = "dcpc.api",
) -> Callable[[Callable[[nn.Module, Buckets, T], Result_co]], Taking[P, Result_co]]:
    """Lets callers of a function give the fields of its options by name.

    The signature and the docstring that Python shows have a line an option.

    Args:
        kind: a type of options, the function's last argument.
        refused: is told of an error in them, and of all arguments, before it is raised.
        within: module of the function, as users name it.
    """
    make: Callable[..., T] = kind
    options = fields(kind)  # type: ignore[arg-type]
    keywords = [
        inspect.Parameter(
            o.name, inspect.Parameter.KEYWORD_ONLY, default=o.default, annotation=o.type
        )
        for o in options
    ]

    def decorate(function: Callable[[nn.Module, Buckets, T], Result_co]) -> Taking[P, Result_co]:
        told = inspect.signature(function)
        own = [p for p in told.parameters.values() if p.name != "options"]
        signature = told.replace(parameters=[*own, *keywords])

        @functools.wraps(function)
        @bare
        def run(*args: Any, **given: Any) -> Result_co:
            check_call(f"{within}.{function.__name__}", signature, args, given, PlanError)
            bound = signature.bind(*args, **given)
            model, buckets = bound.args
            try:
                check_given(model, buckets)
                options = make(**bound.kwargs)
            except DcpcError as error:
                if refused is not None:
                    refused(error, bound.arguments)
                raise
            return function(model, buckets, options)

        run.__signature__ = signature  # type: ignore[attr-defined]
        lines = [f"    {o.name}: {facts(o).meaning}. Default: {default_of(o)}." for o in options]
        run.__doc__ = "\n".join([inspect.getdoc(function) or "", "", "Options:", *lines])
        return run

    return decorate


def default_of(option: Field[Any]) -> str:
    """Returns the text of an option's default for documents."""
    quote = '"' * isinstance(option.default, str)
    return facts(option).default or f"`{quote}{option.default}{quote}`"


def options_table(kind: type[ModelOptions]) -> str:
    """Returns the options of a type as a table of Markdown."""
    rows = [f"| `{o.name}` | {default_of(o)} | {facts(o).meaning} |" for o in fields(kind)]
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *rows]) + "\n"


def commanded() -> Mapping[str, tuple[OptionFacts, CommandOption, Any]]:
    """Returns facts, reading and default of each option of `plan` that the command line has."""
    return {
        o.name: (facts(o), read, o.default)
        for o in fields(PlanOptions)
        if (read := facts(o).command) is not None
    }
