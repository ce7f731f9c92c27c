"""The result of `dcpc.compile(pipeline=)`: a compiled model of which each rank runs a stage."""

from __future__ import annotations

from dcpc.compiled.model import CompiledModel
from dcpc.compiled.model.core import ModelCore
from dcpc.compiled.pipeline.trained.cutting import CutModel
from dcpc.compiled.pipeline.trained.stage_runs import ModelInStages, StagesInsight


class PipelinedModel(CompiledModel):
    """A model in stages: pipelines x stages x sp ranks, each with the parameters of its stage.

    `parameters()` are those of this rank's stage; what an optimizer has of others it leaves alone,
    as their gradient is None. A parameter that several stages read (tied embeddings) is on each of
    their ranks, with the same gradient: optimizers alike keep it alike. `state_dict()` is whole.
    A stage that trains none has one without elements, which no step changes: optimizers refuse an
    empty list, and the other ranks would wait for this one.

    `train_step`, `clip_grad_norm_`, `evaluate` and calls are collective: the last two over the
    ranks of a pipeline, which pass the same batch. Calls are for `torch.no_grad()`;
    `reduce_gradients`, `source`, `profile` and `predict` are refused.

    Attributes:
        stage: number of this rank's stage.
    """

    def __init__(self, core: ModelCore, cut: CutModel, staging: str) -> None:
        """Leaves other stages to other ranks; collective over all ranks."""
        execution = ModelInStages(core, cut)
        super().__init__(core, execution, StagesInsight(execution, staging))
        self.stage = execution.grid.stage
