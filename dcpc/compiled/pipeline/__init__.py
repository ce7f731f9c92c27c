"""A model in pipeline stages: where it is cut, the graphs of each stage, their execution."""

from dcpc.compiled.pipeline.chain import CallChain, chain_of
from dcpc.compiled.pipeline.cut import plan_stages, stage_bytes
from dcpc.compiled.pipeline.model_stage import ModelStage, StageState, shared_parameters
from dcpc.compiled.pipeline.scheduled import ScheduledStages
from dcpc.compiled.pipeline.stage_costs import MixedBucket, ProgramCosts, StageDevice
from dcpc.compiled.pipeline.stages import ProgramStage, stages_of
from dcpc.compiled.pipeline.trained.auto import choose_stages
from dcpc.compiled.pipeline.trained.cutting import CutModel, cut_model
from dcpc.compiled.pipeline.trained.pipelined import PipelinedModel
from dcpc.compiled.pipeline.trained.stage_refusals import refuse_beside_stages, stage_degree
from dcpc.compiled.pipeline.trained.stages_report import stages_report
from dcpc.compiled.pipeline.trained.together import run_in_turn
from dcpc.compiled.pipeline.trained.verified import stages_problem
from dcpc.compiled.pipeline.work import pipeline_work
