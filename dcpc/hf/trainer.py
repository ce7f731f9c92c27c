"""`TrainerMixin`: the Trainer's loop, logs, checkpoints and evaluation around dcpc's steps.

    get_train_dataloader   a `StepLoader`: one batch is one whole step of all ranks
    _wrap_model            the compiled model, so that accelerate adds no DistributedDataParallel
    training_step          `compiled.train_step`: gradients are whole on every rank afterwards

`self.model` stays the plain module: it evaluates, generates and is saved as without dcpc. Where no
rank has its values, `sharded_trainer.py` has what takes its place.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from dcpc import api
from dcpc.buckets import Buckets, InputSpec
from dcpc.compiled import CompiledModel
from dcpc.errors import DataError, PlanError
from dcpc.hf.collated import MASK, CollatedSamples, CollatedStream, accelerates_order
from dcpc.hf.refusals import refuse
from dcpc.hf.sharded_trainer import ShardedTrainer, is_apart
from dcpc.hf.step_batches import STEP, LoaderState, StepLoader, StepStream, saved_in
from dcpc.runtime.data.loader import DataLoader
from dcpc.runtime.data.packing import POSITIONS
from dcpc.runtime.data.weights import SAMPLES, CountLabels, Weight

_LABELS = "labels"


class TrainerMixin(ShardedTrainer):
    """Trains the model of a transformers Trainer as dcpc compiles it.

    Example:
        class MyTrainer(dcpc.hf.TrainerMixin, Trainer):
            buckets = "buckets.yaml"

    A step has `per_device_train_batch_size * ranks * gradient_accumulation_steps` samples, or
    `loader_options["tokens_per_step"]` tokens; dcpc makes its micro-batches of them.

    Attributes:
        buckets: the inputs and lengths to compile for, or the file with them.
        compile_options: further arguments of `dcpc.compile`, such as `{"memory": 80e9}`.
        loader_options: keyword arguments of `dcpc.DataLoader`, such as `{"tokens_per_step":
            65536}`.
        compiled: the compiled model, from the first training on.
    """

    buckets: Buckets | str | Path | None = None
    compile_options: Mapping[str, Any] = {}
    loader_options: Mapping[str, Any] = {}
    args: Any  # the Trainer's own

    def __init__(
        self,
        *args: Any,
        buckets: Buckets | str | Path | None = None,
        compile_options: Mapping[str, Any] | None = None,
        loader_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Creates the Trainer, and refuses settings that dcpc cannot honour.

        Args:
            args: positional arguments of the Trainer.
            buckets: buckets or their file; default: the class's.
            compile_options: keyword arguments of `dcpc.compile`; default: the class's.
            loader_options: keyword arguments of `dcpc.DataLoader`; default: the class's.
            kwargs: keyword arguments of the Trainer.

        Raises:
            PlanError: there are no buckets, or a setting is refused.
            BucketError: the file of the buckets is wrong.
        """
        self.buckets = self.buckets if buckets is None else buckets
        self.compile_options = dict(compile_options or self.compile_options)
        self.loader_options = dict(loader_options or self.loader_options)
        super().__init__(*args, **kwargs)
        if self.buckets is None:
            raise PlanError(
                f"{type(self).__name__}: got no buckets; expected the lengths to compile for; set "
                "`buckets = 'buckets.yaml'` in the class, or pass buckets="
            )
        if not isinstance(self.buckets, Buckets):
            self.buckets = Buckets.from_yaml(self.buckets)
        refuse(self, self.compile_options)
        self.args = copy.copy(self.args)  # the caller's stay as they are
        # A step of dcpc has all samples that the Trainer would accumulate over.
        self._accumulated: int = self.args.gradient_accumulation_steps
        self.args.gradient_accumulation_steps = 1
        # The plan says what backward makes again.
        self.args.activation_checkpointing = self.args.gradient_checkpointing = False
        self._step_loader: StepLoader | None = None
        self.add_callback(LoaderState())

    # ------------------------------------------------------------------- what a step is made of

    def get_train_dataloader(self) -> StepLoader:
        """Returns the steps of `dcpc.DataLoader`, one a batch.

        Raises:
            DataError: the data set has no samples by number and is no stream, or an option of the
                loader is wrong.
        """
        if not self._streams and not hasattr(self.train_dataset, "__len__"):
            raise DataError(
                f"train_dataset: got {type(self.train_dataset).__name__}; expected samples by "
                "number, with len(dataset) and dataset[i], or an IterableDataset of torch or of "
                "datasets; make one of these first"
            )
        if self.args.gradient_accumulation_steps != 1:
            raise PlanError(
                "gradient_accumulation_steps: got a value set after the Trainer was made; expected "
                "it in TrainingArguments; set it there"
            )
        if self._step_loader is not None:
            self._step_loader.stream.close()
        compiled = self._compiled()
        loader = DataLoader(self._samples(), compiled, **self._loader_arguments())
        main_input = getattr(self.model, "main_input_name", "input_ids")
        self._step_loader = StepLoader(StepStream(loader, main_input), not self._streams)
        return self._step_loader

    @property
    def _streams(self) -> bool:
        """Whether the data set is a stream, which has no samples by number."""
        return isinstance(self.train_dataset, IterableDataset)

    def _compiled(self) -> CompiledModel:
        """Returns the compiled model, compiled where the model is another than before."""
        if self.compiled is None or self.compiled.model is not self.model:
            options = dict(self.compile_options)
            if self.args.bf16:
                options.setdefault("autocast", torch.bfloat16)
            self.model.train()
            self.compiled = api.compile(self.model, self._declared(), **options)
        return self.compiled

    def _declared(self) -> Buckets:
        assert isinstance(self.buckets, Buckets), "read from its file at first"
        return self.buckets

    def _given(self) -> dict[str, InputSpec]:
        """Returns the inputs that samples have; where rows are packed the loader makes the rest."""
        packing = self.loader_options.get("packing", False)
        made = {POSITIONS, packing} if packing else set()
        return {name: spec for name, spec in self._declared().inputs.items() if name not in made}

    def _samples(self) -> CollatedSamples | CollatedStream:
        """Returns the data set, collated as the Trainer collates it."""
        records, collate = self.train_dataset, self.data_collator
        if hasattr(records, "column_names") and not self._streams:  # a datasets.Dataset
            records = self._remove_unused_columns(records, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        taken = frozenset(inspect.signature(_innermost(self.model).forward).parameters)
        given = self._given()
        made = self._declared().inputs.keys() - given.keys()
        shifts = bool(self._loss_shifts_labels)
        smallest = self._declared().smallest
        samples = CollatedSamples(records, collate, given, taken - made, shifts, smallest)
        return CollatedStream(samples) if self._streams else samples

    def _loader_arguments(self) -> dict[str, Any]:
        """Returns the loader's arguments: `loader_options`, then those of the Trainer."""
        args, found = self.args, dict(self.loader_options)
        if "tokens_per_step" not in found:
            a_step = args.train_batch_size * args.world_size * self._accumulated
            found.setdefault("samples_per_step", a_step)
        found.setdefault("seed", args.seed if args.data_seed is None else args.data_seed)
        if self._streams:
            found.setdefault("num_workers", args.dataloader_num_workers)
        elif args.train_sampling_strategy != "random":
            found.setdefault("shuffle", False)
        elif not self.loader_options.keys() & {"seed", "shuffle", "order"}:
            assert self.train_dataset is not None, "get_train_dataloader has looked"
            found["order"] = partial(accelerates_order, len(self.train_dataset), found["seed"])
        found.setdefault("weight", self._weight())
        found["pad"] = {**self._pad(), **found.get("pad", {})}
        return found

    def _weight(self) -> Weight:
        """Returns the sample weight that the model's loss averages over: labels, or samples."""
        if _LABELS not in self._given():
            return SAMPLES
        return CountLabels(_LABELS, shift=int(self._loss_shifts_labels))

    def _pad(self) -> dict[str, int]:
        """Returns the padding value of each integer input."""
        token = getattr(self.processing_class, "pad_token_id", None) or 0
        known = {"input_ids": token, _LABELS: -100, MASK: 0}
        return {name: known.get(name, 0) for name in self._given()}

    # ------------------------------------------------------------------------------ what runs it

    def _wrap_model(
        self, model: nn.Module, training: bool = True, dataloader: Any = None
    ) -> nn.Module:
        """Returns the compiled model to train; to evaluate the plain one, if ranks have it."""
        if not training and not is_apart(self.compiled):
            plain: nn.Module = super()._wrap_model(model, training=False, dataloader=dataloader)
            return plain
        return self._compiled()

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Runs a step of all ranks and returns its loss, the mean over its labels.

        Every rank returns the same loss and has the whole gradient, unscaled and not clipped.

        Args:
            model: the compiled one.
            inputs: a batch of `get_train_dataloader`.
            num_items_in_batch: None, as a batch has no labels: the step divides by their number.
        """
        assert isinstance(model, CompiledModel), "what _wrap_model returned"
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        return model.train_step(inputs[STEP]).loss.to(self.args.device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Returns the loss of a batch, with `return_outputs` also the model's other outputs.

        Steps do not come here; evaluation does, with the plain model.

        Args:
            model: compiled model, which takes inputs of the buckets, or the plain one.
            inputs: input name -> tensor.
            return_outputs: whether `(loss, outputs)` is wanted, each tensor whole on every rank.
            num_items_in_batch: None for the compiled model, whose loss is a mean over the batch.
        """
        if isinstance(model, CompiledModel):
            if is_apart(model):
                return self.by_all_ranks(model, inputs, return_outputs, num_items_in_batch)
            return model(**inputs, outputs=return_outputs)
        plain: Any = super()
        return plain.compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def autocast_smart_context_manager(
        self, cache_enabled: bool | None = True
    ) -> contextlib.AbstractContextManager[Any]:
        """Returns the autocast of evaluation; in training the compiled graphs have the casts."""
        if not self.args.bf16:
            return contextlib.nullcontext()
        return torch.autocast(
            self.args.device.type, torch.bfloat16, cache_enabled=bool(cache_enabled)
        )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Keeps accelerate from wrapping the model's forward, which dcpc captures."""
        return {**super()._build_accelerator_args(**kwargs), "mixed_precision": "no"}

    # ---------------------------------------------------------------- steps, epochs, checkpoints

    def num_examples(self, dataloader: Any) -> int:
        """Returns the number of samples that a loader goes through."""
        if isinstance(dataloader, StepLoader):
            return len(self.train_dataset)
        return int(super().num_examples(dataloader))

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the samples of a step; of steps by tokens the mean."""
        loader = self._step_loader
        if loader is None or not loader.counted:
            return int(super().get_total_train_batch_size(args)) * self._accumulated
        size = loader.stream.loader.samples_per_step
        return size or max(1, len(self.train_dataset) // loader.count(0))

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        """Returns the numbers of epochs and steps, where epochs may differ in their steps."""
        found: tuple[Any, ...] = super().set_initial_training_values(args, dataloader)
        if not dataloader.counted:
            return found
        epochs, per_epoch, examples, samples, batch, in_epoch, steps = found
        if args.max_steps > 0:
            epochs, left = 0, args.max_steps
            while left > 0:
                left -= dataloader.count(epochs)
                epochs += 1
        else:
            whole = math.ceil(args.num_train_epochs) - 1
            share = args.num_train_epochs - whole
            steps = sum(dataloader.count(e) for e in range(whole))
            steps += math.ceil(share * dataloader.count(whole))
        return epochs, per_epoch, examples, samples, batch, in_epoch, steps

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **kwargs: Any) -> None:
        """Runs an epoch of as many steps as it has."""
        assert self._step_loader is not None, "made before"
        if self._step_loader.counted:
            count = self._step_loader.count(epoch)
            kwargs |= {"steps_in_epoch": count, "num_update_steps_per_epoch": count}
        super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **kwargs)

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Returns the epochs, and the steps of the next one, that a checkpoint has done."""
        epoch, step = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        assert self._step_loader is not None, "made before"
        saved = saved_in(self.state)
        if resume_from_checkpoint is None:
            return epoch, step
        if saved is not None:
            return self._step_loader.resume(saved, not self.args.ignore_data_skip)
        self._step_loader.set_epoch(epoch)
        return epoch, step


def _innermost(model: nn.Module) -> nn.Module:
    """Returns the model within adapters of the peft library, whose forward names its inputs."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model
