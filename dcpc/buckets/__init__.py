"""Buckets of shapes: the lengths that a model is compiled for, from Python or YAML."""

from dcpc.buckets.shape_buckets import (
    BATCH,
    MAX_BATCH,
    Bucket,
    Buckets,
    DimExpr,
    Fixed,
    InputSpec,
    Sizes,
    held_by,
)
from dcpc.buckets.specs import MAX_SIZE, completed, shapes_and_dtypes, tokens_of
from dcpc.buckets.yaml_lines import path_of

__all__ = [
    "BATCH",
    "MAX_BATCH",
    "MAX_SIZE",
    "Bucket",
    "Buckets",
    "DimExpr",
    "Fixed",
    "InputSpec",
    "Sizes",
    "completed",
    "held_by",
    "path_of",
    "shapes_and_dtypes",
    "tokens_of",
]
