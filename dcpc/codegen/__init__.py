"""Phase 4: a plan becomes a runnable variant, and the Python a person can read."""

from dcpc.codegen.build import Lowering
from dcpc.codegen.collectives import bind_group, wire_log
from dcpc.codegen.segments import segments
from dcpc.codegen.variant import Variant, delivering

__all__ = ["Lowering", "Variant", "bind_group", "delivering", "segments", "wire_log"]
