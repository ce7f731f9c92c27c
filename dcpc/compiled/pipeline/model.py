"""What `dcpc.compile(pipeline=)` returns: a compiled model of which each rank runs a stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcpc.buckets import BATCH, Bucket, Buckets
from dcpc.compiled.model import CompiledModel
from dcpc.compiled.pipeline.costs import MixedBucket, StageDevice
from dcpc.compiled.pipeline.cut import StagePlan, plan_stages
from dcpc.compiled.pipeline.ownership import leave_to_others, owners_of
from dcpc.compiled.pipeline.planner import PipelinePlanner, at_batch
from dcpc.errors import CheckpointError, DcpcError, DispatchError, PlanError
from dcpc.plan.planning import Planned
from dcpc.runtime.data.steps import Step
from dcpc.runtime.groups.agreement import agree
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.planner.protocol import BatchPlanner
from dcpc.runtime.step.pipelined import OwnStage, clip_stages, pipelined_step
from dcpc.runtime.step.result import StepResult
from dcpc.symbolic_profile import bytes_text
