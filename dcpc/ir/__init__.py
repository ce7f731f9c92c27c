"""The frozen types that cross a phase border: the only thing two phases share.

Data goes one way: `Program` (trace) -> `Placement`, `Recompute`, `Plan` (passes) -> `Partition` and
`Profile` (codegen, symbolic_profile) -> a variant that runs (codegen, runtime). Decisions refer to
nodes of the program's forward graph **by name** and never edit it.
"""

from dcpc.ir.costs import LEAVES, BucketPlan, PlanRow, Profile, Work
from dcpc.ir.graphs import OUTSIDE, DividedBackward, Fold, GatherUnits, Partition, Schedule
from dcpc.ir.masks import Extent, MaskDecision, MaskPlan, Packable, Recipe, ValueRange
from dcpc.ir.placement import (
    PARTIAL,
    REPLICATED,
    WHOLE_GRADIENT,
    Factor,
    Label,
    NodePlacement,
    Placement,
    RowCheck,
    TileRegion,
    UnpadPlan,
)
from dcpc.ir.program import Program, TensorInfo, call_of, is_tuple, tensor_operands
