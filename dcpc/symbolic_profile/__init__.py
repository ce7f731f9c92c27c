"""A partition's costs as expressions of its dims: bytes, FLOPs, seconds, and the report of them."""

from dcpc.symbolic_profile.calls import CallCosts
from dcpc.symbolic_profile.evaluate import Evaluator, evaluator
from dcpc.symbolic_profile.hardware import DEVICES, Device, Link, calibrate_cpu, detect, find
from dcpc.symbolic_profile.profile import profile_partition
from dcpc.symbolic_profile.report import (
    ReportRow,
    bytes_text,
    formula,
    render_report,
    seconds_text,
)

__all__ = [
    "DEVICES",
    "CallCosts",
    "Device",
    "Evaluator",
    "Link",
    "ReportRow",
    "bytes_text",
    "calibrate_cpu",
    "detect",
    "evaluator",
    "find",
    "formula",
    "profile_partition",
    "render_report",
    "seconds_text",
]
