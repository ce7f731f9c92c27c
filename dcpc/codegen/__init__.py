"""Phase 4: a plan becomes a runnable variant, and the Python a person can read."""

from dcpc.codegen.build import Key, Lowering
from dcpc.codegen.collectives import bind_group, wire_log
from dcpc.codegen.partition import VIEWS
from dcpc.codegen.variant import Variant, delivering

__all__ = ["VIEWS", "Key", "Lowering", "Variant", "bind_group", "delivering", "wire_log"]
