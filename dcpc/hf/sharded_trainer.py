"""A Trainer where ranks share out the parameters, or have a stage each.

create_optimizer    of `compiled.parameters()`: this rank's rows, or those of its stage
prediction_step     each rank's batch by the compiled model, all ranks together
save_model          the whole model, gathered a parameter at a time; the main rank writes it
checkpoints         folder `dcpc` in each: a part from every rank; any other mode can read it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Trainer

from dcpc.compiled import CompiledModel
from dcpc.compiled.pipeline.trained.pipelined import PipelinedModel
from dcpc.errors import CheckpointError

_LABELS, _IGNORED = "labels", -100
FOLDER = "dcpc"


def is_sharded(compiled: CompiledModel | None) -> bool:
    """Returns whether an optimizer of this rank has a part of the parameters alone."""
    return compiled is not None and (
        isinstance(compiled, PipelinedModel) or compiled.planned.request.parameters != "whole"
    )


def is_apart(compiled: CompiledModel | None) -> bool:
    """Returns whether no rank has the plain model's values between two steps."""
    return compiled is not None and (
        isinstance(compiled, PipelinedModel) or compiled.planned.request.parameters == "rounds"
    )


class ShardedTrainer(Trainer):  # type: ignore[misc]
    """The parts of a Trainer that read or write parameters by themselves.

    Attributes:
        compiled: compiled model, from the first training on.
    """

    compiled: CompiledModel | None = None

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Returns the names of parameters that decay, by the plain model's modules."""
        return list(super().get_decay_parameter_names(self.model))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Returns the optimizer of the parameters that this rank updates."""
        own = self.compiled if is_sharded(self.compiled) else model
        found: torch.optim.Optimizer = super().create_optimizer(own)
        return found

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if isinstance(model, CompiledModel) and is_sharded(model):
            return torch.tensor(model.clip_grad_norm_(self.args.max_grad_norm))
        return super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and isinstance(model, CompiledModel) and is_sharded(model):
            return model.clip_grad_norm_(float("inf"))
        return super()._get_grad_norm(model, grad_norm=grad_norm)

    # --------------------------------------------------------------------------------- evaluation

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Returns loss, outputs and labels of a batch; outputs are captured only where asked for.

        Args:
            model: model as `_wrap_model` returned it.
            inputs: input name -> tensor.
            prediction_loss_only: whether the loss alone is wanted.
            ignore_keys: names of outputs that are left out.
        """
        if prediction_loss_only and isinstance(model, CompiledModel):
            inputs = self._prepare_inputs(inputs)
            count = self._get_num_items_in_batch([inputs], self.args.device)
            with torch.no_grad():
                return self.by_all_ranks(model, inputs, False, count), None, None
        found: tuple[Any, Any, Any] = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        return found

    def by_all_ranks(
        self, model: CompiledModel, inputs: Mapping[str, Any], outputs: bool, count: Any
    ) -> Any:
        """Returns the loss of this rank's batch, with `outputs` also the model's other outputs.

        All ranks run the batch of each rank in turn. Collective over all ranks.

        Args:
            model: compiled model.
            inputs: this rank's batch; of it the model gets the inputs of its buckets.
            outputs: whether `(loss, outputs)` is wanted.
            count: labels of all ranks' batches, by which the Trainer divides; None: it does not.
        """
        own = {n: inputs[n].cpu() for n in model.buckets.inputs if inputs.get(n) is not None}
        every: list[Any] = [own] * self.accelerator.num_processes
        if len(every) > 1:
            dist.all_gather_object(every, own)
        mine: Any = None
        with torch.autocast(self.args.device.type, enabled=False), _without_cache(self.model):
            for rank, batch in enumerate(every):
                found = model.evaluate(self._prepare_input(batch), outputs=outputs)
                mine = found if rank == self.accelerator.process_index else mine
        loss, rest = mine if outputs else (mine, None)
        if count is not None:
            loss = loss * self._share_of_labels(inputs[_LABELS], count)
        return (loss, rest) if outputs else loss

    def _share_of_labels(self, labels: Tensor, count: Any) -> Any:
        """Returns the factor from a batch's mean to this rank's part of the mean over all."""
        own = (labels[..., int(self._loss_shifts_labels) :] != _IGNORED).sum()
        ranks = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        return own * ranks / count

    # -------------------------------------------------------------------------------- checkpoints

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Saves the model; where no rank has it, all gather it, one parameter after the other."""
        if state_dict is None and self.compiled is not None and is_apart(self.compiled):
            state_dict, parts, whole = {}, self.compiled.state_dict(), dict[int, Tensor]()
            for name, x in parts.items():
                if id(x) not in whole:  # a tied one is written once
                    found = x.full_tensor() if hasattr(x, "full_tensor") else x
                    whole[id(x)] = found.cpu() if self.args.should_save else found.new_empty(0)
                state_dict[name] = whole[id(x)]
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.compiled is None or not is_sharded(self.compiled):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self.compiled.save(
            Path(output_dir) / FOLDER,
            self.state.global_step,
            optimizer=_innermost(self.optimizer),
            scheduler=self.lr_scheduler,
            wait=True,
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        folder = Path(checkpoint or "") / FOLDER
        if checkpoint is not None and self.compiled is not None and folder.is_dir():
            optimizer = _innermost(self.optimizer)
            self.compiled.load(folder, optimizer=optimizer, scheduler=self.lr_scheduler)
        elif checkpoint is not None and is_sharded(self.compiled):
            raise CheckpointError(
                f"resume_from_checkpoint: got {checkpoint}, which has no folder '{FOLDER}'; "
                "expected a checkpoint that was trained with parameters=, pipeline= or "
                "away='parameters': the state of an optimizer of whole parameters is one file; "
                "resume it without these options"
            )
        else:
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Loads a checkpoint's model; from folder `dcpc` it comes later, with the optimizer."""
        if not (Path(resume_from_checkpoint) / FOLDER).is_dir():
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint or "") / FOLDER
        if self.compiled is not None and folder.is_dir():
            self.compiled.load(folder)
        else:
            super()._load_best_model()


def _innermost(optimizer: Any) -> Any:
    """Returns the optimizer within accelerate's."""
    return getattr(optimizer, "optimizer", optimizer)


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Has a generating model return no cache of keys and values, which is no tensor."""
    config: Any = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    if before:
        config.use_cache = False
    try:
        yield
    finally:
        if before:
            config.use_cache = before
