"""Options of `dcpc.compile` and of planning: declared once, checked, and documented."""

from dcpc.plan.options.declared import CommandOption, OptionFacts, facts
from dcpc.plan.options.kinds import CompileOptions, ModelOptions, PlanOptions
from dcpc.plan.options.signatures import commanded, default_of, options_table, taking
from dcpc.plan.options.values import (
    AUTOCAST,
    MOST_COMMUNICATORS,
    PARAMETERS,
    RECOMPUTE,
    VERIFY,
    autocast_of,
    block_of,
    check_choice,
    degrees,
    few_degrees,
    fitting_degrees,
    memory_of,
    parse_block,
    parse_degrees,
)

__all__ = [
    "AUTOCAST",
    "MOST_COMMUNICATORS",
    "PARAMETERS",
    "RECOMPUTE",
    "VERIFY",
    "CommandOption",
    "CompileOptions",
    "ModelOptions",
    "OptionFacts",
    "PlanOptions",
    "autocast_of",
    "block_of",
    "check_choice",
    "commanded",
    "default_of",
    "degrees",
    "facts",
    "few_degrees",
    "fitting_degrees",
    "memory_of",
    "options_table",
    "parse_block",
    "parse_degrees",
    "taking",
]
