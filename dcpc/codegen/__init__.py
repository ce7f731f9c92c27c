"""Phase 4: a plan becomes a runnable variant, and the Python a person can read."""

from dcpc.codegen.backends import compile_graph, decompositions
from dcpc.codegen.build import Key, Lowering
from dcpc.codegen.collectives import bind_group, wire_log
from dcpc.codegen.excerpt import excerpt
from dcpc.codegen.joint import Tracer
from dcpc.codegen.library import Library
from dcpc.codegen.lockstep import integers_of, run_in_step, summed
from dcpc.codegen.schedule import VIEWS
from dcpc.codegen.variant import Boxed, Variant, delivering

__all__ = [
    "VIEWS",
    "Boxed",
    "Key",
    "Library",
    "Lowering",
    "Tracer",
    "Variant",
    "bind_group",
    "compile_graph",
    "decompositions",
    "delivering",
    "excerpt",
    "integers_of",
    "run_in_step",
    "summed",
    "wire_log",
]
