"""Buckets of shapes: the lengths that a model is compiled for, from Python or YAML."""

from dcpc.buckets.shape_buckets import (
    BATCH,
    MAX_BATCH,
    Bucket,
    Buckets,
    DimExpr,
    InputSpec,
    Sizes,
)

__all__ = [
    "BATCH",
    "MAX_BATCH",
    "Bucket",
    "Buckets",
    "DimExpr",
    "InputSpec",
    "Sizes",
]
