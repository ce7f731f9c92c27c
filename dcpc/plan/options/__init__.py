"""Options of `dcpc.compile` and of planning: declared once, checked, and documented."""

from dcpc.plan.options.declared import facts
from dcpc.plan.options.kinds import CompileOptions, ModelOptions, PlanOptions
from dcpc.plan.options.signatures import commanded, options_table, taking
from dcpc.plan.options.values import (
    MOST_COMMUNICATORS,
    autocast_of,
    away_kinds,
    block_of,
    degrees,
    disk_of,
    few_degrees,
    fitting_degrees,
    host_of,
    memory_of,
    parse_degrees,
)
