"""Schedules of a pipeline: candidates, replay, bound, search, and the check before every step."""

from dcpc.runtime.pipeline.schedule.actions import (
    Action,
    Hop,
    PipelineSchedule,
    PipelineWork,
    StageCost,
)
from dcpc.runtime.pipeline.schedule.check import blocked, check
from dcpc.runtime.pipeline.schedule.order_search import FoundSchedule, search
from dcpc.runtime.pipeline.schedule.orders import adaptive, one_f_one_b
from dcpc.runtime.pipeline.schedule.recompute import fitted
from dcpc.runtime.pipeline.schedule.replay import PipelineReplay, replay
from dcpc.runtime.pipeline.schedule.schedule_bound import lower_bound
from dcpc.runtime.pipeline.schedule.wait_free import WaitFree
