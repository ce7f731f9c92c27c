"""The table of bad input: kinds by section, in the order of the page of errors."""

from tests.cases.bad_input.calls import CALLS
from tests.cases.bad_input.commands import COMMANDS
from tests.cases.bad_input.data import DATA
from tests.cases.bad_input.declared import DECLARED
from tests.cases.bad_input.kinds import Kind
from tests.cases.bad_input.options import OPTIONS

SECTIONS: dict[str, tuple[Kind, ...]] = {**DECLARED, **OPTIONS, **DATA, **CALLS, **COMMANDS}

__all__ = ["SECTIONS", "Kind"]
