"""dcpc: a declarative compiler for training on sequences of very different lengths.

Example:
    compiled = dcpc.compile(model, buckets)
"""

from dcpc.api import compile, materialize
from dcpc.buckets import Bucket, Buckets
from dcpc.compiled import CompiledModel, OutputPiece
from dcpc.errors import (
    BucketError,
    CheckpointError,
    CodegenError,
    DataError,
    DcpcError,
    DefectError,
    DispatchError,
    GroupError,
    PlanError,
    ProfileError,
    RuleError,
    StoreError,
    TraceError,
    VerifyError,
)
from dcpc.passes.sharding.rules import register_sharding_rule
from dcpc.runtime.data.loader import DataLoader
from dcpc.runtime.data.settings import Settings
from dcpc.runtime.data.weights import CountLabels
from dcpc.runtime.planner.splits.microbatch import microbatch
from dcpc.runtime.step.loggers import ConsoleLogger, TensorBoardLogger
from dcpc.runtime.step.recording import timeline

__version__ = "0.1.0"

__all__ = [
    "Bucket",
    "BucketError",
    "Buckets",
    "CheckpointError",
    "CodegenError",
    "CompiledModel",
    "ConsoleLogger",
    "CountLabels",
    "DataError",
    "DataLoader",
    "DcpcError",
    "DefectError",
    "DispatchError",
    "GroupError",
    "OutputPiece",
    "PlanError",
    "ProfileError",
    "RuleError",
    "Settings",
    "StoreError",
    "TensorBoardLogger",
    "TraceError",
    "VerifyError",
    "compile",
    "materialize",
    "microbatch",
    "register_sharding_rule",
    "timeline",
]
