"""Schedules of a pipeline: candidates, replay, bound, search, and the check before every step."""

from dcpc.runtime.pipeline.schedule.actions import (
    Action,
    Hop,
    PipelineSchedule,
    PipelineWork,
    StageCost,
)
from dcpc.runtime.pipeline.schedule.bound import PipelineBound, lower_bound
from dcpc.runtime.pipeline.schedule.check import blocked, check
from dcpc.runtime.pipeline.schedule.orders import adaptive, one_f_one_b
from dcpc.runtime.pipeline.schedule.recompute import fitted
from dcpc.runtime.pipeline.schedule.replay import PipelineReplay, RanAction, replay
from dcpc.runtime.pipeline.schedule.search import FoundSchedule, search, sequences
from dcpc.runtime.pipeline.schedule.wait_free import WaitFree

__all__ = [
    "Action",
    "FoundSchedule",
    "Hop",
    "PipelineBound",
    "PipelineReplay",
    "PipelineSchedule",
    "PipelineWork",
    "RanAction",
    "StageCost",
    "WaitFree",
    "adaptive",
    "blocked",
    "check",
    "fitted",
    "lower_bound",
    "one_f_one_b",
    "replay",
    "search",
    "sequences",
]
