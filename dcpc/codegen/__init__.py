"""Phase 4: a plan becomes a runnable variant, and the Python a person can read."""

from dcpc.codegen.away.away_ops import ARRIVE, ASK, GONE, LEAVE, forward_alone
from dcpc.codegen.away.host_store import LOOSE, PAGE_BYTES, store_of, text_of
from dcpc.codegen.collectives.collectives import bind_group, wire_log
from dcpc.codegen.collectives.resident import Resident, fetched, kept_after
from dcpc.codegen.collectives.rows import ROWS_GROUP
from dcpc.codegen.joint.gathers import UnitNodes, gather_key, take_part
from dcpc.codegen.joint.joint import Tracer, with_quotients
from dcpc.codegen.joint.library import Library
from dcpc.codegen.joint.partition import divided
from dcpc.codegen.joint.position_tables import VIEWS
from dcpc.codegen.variant.backends import BACKENDS, compile_graph, decompositions
from dcpc.codegen.variant.boxed import RUN, Boxed
from dcpc.codegen.variant.build import Key, LoweredPair
from dcpc.codegen.variant.call import VariantCall, call_of
from dcpc.codegen.variant.divided_run import DividedRun
from dcpc.codegen.variant.empty import MISREAD
from dcpc.codegen.variant.excerpt import excerpt
from dcpc.codegen.variant.lockstep import Result, integers_of, run_in_step, summed
from dcpc.codegen.variant.variant import Variant, broken_guards, delivering, resolved
