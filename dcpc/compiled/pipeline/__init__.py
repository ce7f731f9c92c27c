"""A model in pipeline stages: where it is cut, the graphs of each stage, what runs them."""

from dcpc.compiled.pipeline.chain import Chain, chain_of
from dcpc.compiled.pipeline.programs import StageProgram, stage_programs
from dcpc.compiled.pipeline.stages import ProgramStage, shared_parameters, stages_of

__all__ = [
    "Chain",
    "ProgramStage",
    "StageProgram",
    "chain_of",
    "shared_parameters",
    "stage_programs",
    "stages_of",
]
