"""A model in pipeline stages: where it is cut, the graphs of each stage, what runs them."""

from dcpc.compiled.pipeline.chain import CallChain, chain_of
from dcpc.compiled.pipeline.costs import MixedBucket, ProgramCosts, StageDevice
from dcpc.compiled.pipeline.cut import StagePlan, plan_stages, stage_bytes
from dcpc.compiled.pipeline.programs import StageProgram, stage_programs
from dcpc.compiled.pipeline.stages import ProgramStage, shared_parameters, stages_of

__all__ = [
    "CallChain",
    "MixedBucket",
    "ProgramCosts",
    "ProgramStage",
    "StageDevice",
    "StagePlan",
    "StageProgram",
    "chain_of",
    "plan_stages",
    "shared_parameters",
    "stage_bytes",
    "stage_programs",
    "stages_of",
]
