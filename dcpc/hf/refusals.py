"""Refuses settings of a Trainer that dcpc cannot honour, each with the reason and the way out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dcpc.errors import PlanError
from dcpc.plan.options import away_kinds

# Where a Trainer's `compute_loss` may be defined: these return the loss of the model's forward.
_OWN_LOSSES = ("transformers.trainer", "trl.trainer.sft_trainer")
_LAYERWISE = ("lomo", "adalomo")
# The options of `dcpc.compile` by which no rank has the model.
_APART = "parameters=, pipeline= or away='parameters'"


def refuse(trainer: Any, compile_options: Mapping[str, Any]) -> None:
    """Refuses settings with which dcpc would train differently than the Trainer.

    Raises:
        PlanError: a setting is refused; all of them are named.
    """
    found = [*_arguments(trainer.args), *_losses(trainer), *_parallel(trainer)]
    mode = compile_options.get("parameters", "whole")
    away = away_kinds(compile_options.get("away", "auto"))[1]
    if mode != "whole" or away or compile_options.get("pipeline"):
        found += _sharded(trainer)
    if found:
        raise PlanError("dcpc.hf.TrainerMixin: " + "; ".join(found))


def _arguments(args: Any) -> Iterator[str]:
    """Yields a text for each training argument that is refused."""
    if args.fp16:
        yield (
            "got fp16=True; expected bf16 or neither: backward runs inside of a step, before a "
            "gradient scaler could scale the loss; pass bf16=True"
        )
    if args.torch_compile:
        yield "got torch_compile=True; expected False: dcpc compiles the model; leave it out"
    if args.use_liger_kernel:
        yield (
            "got use_liger_kernel=True; expected False: its kernels replace layers by functions "
            "with a backward of their own, which are not captured; leave it out"
        )
    if args.neftune_noise_alpha is not None:
        yield (
            "got neftune_noise_alpha; expected None: its noise depends on the padded length of a "
            "batch, which dcpc chooses; leave it out"
        )
    if args.auto_find_batch_size:
        yield (
            "got auto_find_batch_size=True; expected False: the plan fits the memory it is given; "
            "leave it out and pass compile_options={'memory': ...}"
        )
    if args.dataloader_drop_last:
        yield (
            "got dataloader_drop_last=True; expected False: every sample is trained once an epoch, "
            "and the last step may be smaller; leave it out"
        )
    if args.train_sampling_strategy not in ("random", "sequential"):
        yield (
            f"got train_sampling_strategy={args.train_sampling_strategy!r}; expected 'random' or "
            "'sequential': dcpc sorts the samples of a step by length and balances the ranks; "
            "leave it out"
        )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if optimizer.startswith(_LAYERWISE) or "layerwise" in optimizer:
        yield (
            f"got optim={optimizer!r}; expected an optimizer that steps after backward: this one "
            "updates parameters while gradients are made, before they are summed over the ranks; "
            "choose another"
        )


def _losses(trainer: Any) -> Iterator[str]:
    """Yields a text for each loss that is not the model's own."""
    reason = "dcpc compiles the loss that the model's forward returns"
    if trainer.args.label_smoothing_factor:
        yield (
            f"got label_smoothing_factor={trainer.args.label_smoothing_factor}; expected 0: the "
            f"Trainer makes that loss of the logits, and {reason}; compute it in forward"
        )
    if trainer.compute_loss_func is not None:
        yield f"got compute_loss_func; expected none: {reason}; compute it in forward"
    owners = (c for c in type(trainer).__mro__ if "compute_loss" in vars(c))
    owner = next(c for c in owners if not c.__module__.startswith("dcpc."))
    if owner.__module__ not in _OWN_LOSSES:
        yield (
            f"got {owner.__name__}.compute_loss; expected the Trainer's own: {reason}; compute it "
            "in forward"
        )
    if getattr(trainer.args, "loss_type", "nll") != "nll":
        yield f"got loss_type={trainer.args.loss_type!r}; expected 'nll': {reason}; leave it out"
    if getattr(trainer, "aux_loss_enabled", False):
        yield (
            "got a loss with a part for the balance of experts; expected one that is a mean over "
            "labels: that part does not add up over micro-batches; pass router_aux_loss_coef=0.0"
        )
    if getattr(trainer.args, "activation_offloading", False):
        yield (
            "got activation_offloading=True; expected False: dcpc plans what is kept for backward; "
            "leave it out and pass compile_options={'memory': ...}"
        )


def _parallel(trainer: Any) -> Iterator[str]:
    """Yields a text for each other parallelism that is in use."""
    args = trainer.args
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled or args.fsdp:
        yield (
            "got DeepSpeed or FSDP; expected neither: dcpc shares sequences out over the ranks and "
            "sums the gradients itself; leave them out"
        )
    if args.n_gpu > 1:
        yield (
            f"got {args.n_gpu} GPUs in one process; expected one process a GPU: start it by "
            "torchrun or accelerate launch"
        )
    if args.parallelism_config is not None:
        yield (
            "got parallelism_config; expected none: dcpc chooses the degree of sequence "
            "parallelism for each length; leave it out"
        )
    if trainer.is_model_parallel or trainer.is_distributed_loading_by_transformers:
        yield (
            "got a model split over devices; expected a whole one on each rank; load it without "
            "device_map and without a distributed config"
        )


def _sharded(trainer: Any) -> Iterator[str]:
    """Yields a text for each setting that needs the whole model on a rank."""
    if trainer.optimizer is not None:
        yield (
            f"got optimizers=(...) beside {_APART}; expected a class: a rank's parameters are "
            "known once the model is compiled; pass optim= in the arguments, or "
            "optimizer_cls_and_kwargs="
        )
    if trainer.args.load_best_model_at_end and trainer.args.save_only_model:
        yield (
            f"got load_best_model_at_end and save_only_model beside {_APART}; expected one of "
            "them: the best model comes back from the ranks' own parts of a checkpoint; leave "
            "save_only_model out"
        )
    if trainer.args.bf16_full_eval or trainer.args.fp16_full_eval:
        yield (
            f"got bf16_full_eval or fp16_full_eval beside {_APART}; expected neither: the "
            "parameters that train would be rounded; pass bf16=True"
        )
