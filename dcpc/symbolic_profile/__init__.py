"""A partition's costs as expressions of its dims: bytes, FLOPs, seconds, and the report of them."""

from dcpc.symbolic_profile.evaluate import Meter, Prediction, evaluator
from dcpc.symbolic_profile.memory.allocator import LARGE_SEGMENT_BYTES, Usage, rounded
from dcpc.symbolic_profile.memory.events import Folding
from dcpc.symbolic_profile.memory.optimizer import (
    OptimizerLike,
    OptimizerMemory,
    state_bytes,
    step_bytes,
)
from dcpc.symbolic_profile.memory.sizes import bytes_of
from dcpc.symbolic_profile.ops.onednn import halves
from dcpc.symbolic_profile.profile import (
    Costs,
    Ledger,
    profile_partition,
    tile_costs,
    with_constants,
)
from dcpc.symbolic_profile.report import (
    COLUMNS,
    ReportRow,
    as_text,
    bytes_text,
    cells_of,
    dominating_term,
    formula,
    headed,
    recompute_text,
    render_formulas,
    render_report,
    seconds_text,
    variant_formulas,
)
from dcpc.symbolic_profile.seconds.calibration import (
    CalibratedPoint,
    Calibration,
    CalibrationKey,
    machine,
)
from dcpc.symbolic_profile.seconds.fits import ClassFit, CollectiveFit, Fits
from dcpc.symbolic_profile.seconds.hardware import (
    DEVICES,
    Device,
    Link,
    calibrated,
    detect,
    find,
)
from dcpc.symbolic_profile.seconds.waits import END, START, Away, Events
