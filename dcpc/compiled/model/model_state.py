"""The state that training goes on from: memory and values of the model, and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from dcpc.buckets import path_of
from dcpc.compiled.materialize import Init, made_real, memory_of
from dcpc.compiled.model.core import ModelCore
from dcpc.errors import CheckpointError, DispatchError, checking_call
from dcpc.runtime.checkpoint.checkpoints import CheckpointWriter
from dcpc.runtime.checkpoint.parts import Checkpoint, NamedParameters, Parts, Stateful
from dcpc.runtime.checkpoint.saving import Saving
from dcpc.runtime.groups.agreement import agree


class ModelSaving:
    """Gives a compiled model its memory, saves and loads it.

    Args:
        core: state that all parts of the model share.
        model: compiled model, for its parameters and buffers.
    """

    def __init__(self, core: ModelCore, model: NamedParameters) -> None:
        self.core, self._model = core, model
        self._checkpoints = CheckpointWriter(core.groups)

    def materialize(self, init: Init = None) -> None:
        """Gives a model that was compiled on the meta device memory and values.

        `dcpc.materialize` says how. Collective over all ranks.
        """
        core = self.core
        if not core.unmade:
            raise DispatchError(
                "dcpc.materialize: got a compiled model that has its memory; expected one whose "
                "model was on the meta device at compile, once; leave the call out, or load other "
                "values with compiled.load_state_dict"
            )
        problem = core.editions.first.followed.problem(core.model)
        if problem is not None:
            raise problem
        with core.groups.watch.section("materialize"):
            asked = core.planned.request
            memory = memory_of(asked.held_away)
            core.hold(
                made_real(core.model, asked.parameters, core.groups, init, asked.block, memory)
            )
            core.unmade, core.dispatch.store = False, core.store
            core.dispatch.bind_blocks()
            core.editions.first.followed.materialized(core.model)
            if init == "empty":  # what is compared with the model waits for values
                return
            wrong = core.verifier.postponed_problem()
            agree(core.groups, core.groups.world, "verification", str(wrong or ""))
            if wrong is not None:
                raise wrong

    @checking_call("save", CheckpointError)
    def save(
        self,
        folder: str | Path,
        step: int,
        *,
        optimizer: Optimizer | None = None,
        loader: Stateful | None = None,
        scheduler: Stateful | None = None,
        extra: Any = None,
        keep: int = 3,
        wait: bool = False,
    ) -> Saving:
        """Saves the state of training as `folder/step-...`, while training goes on.

        All of it is copied to the CPU, then a thread writes it. A folder has its name once it is
        whole, so a crash leaves those before it. Collective over all ranks, which see one folder.

        Args:
            folder: folder of all checkpoints.
            step: number of this checkpoint; `load` takes the largest.
            optimizer: optimizer of `parameters()`.
            loader: object whose `state_dict()` is the same on every rank, as a `dcpc.DataLoader`.
            scheduler: object with such a state, as the loader.
            extra: values and tensors of your own; rank 0's are kept.
            keep: number of whole checkpoints that stay, this one included.
            wait: whether to return only once the checkpoint is whole.

        Returns:
            The writing, with `wait()`. The process waits for it at its end.

        Raises:
            CheckpointError: it cannot be written, or the one before could not be; or a state has
                values that are no plain ones.
            GroupError: ranks save different steps, or one could not.
        """
        path = path_of(folder, CheckpointError, "save")
        with self.core.groups.watch.section(f"save, step {step}"):
            parts = self._parts(optimizer, loader, scheduler)
            return self._checkpoints.save(path, step, parts, extra, keep=keep, wait=wait)

    @checking_call("load", CheckpointError)
    def load(
        self,
        folder: str | Path,
        *,
        optimizer: Optimizer | None = None,
        loader: Stateful | None = None,
        scheduler: Stateful | None = None,
        missing: str = "error",
    ) -> Checkpoint:
        """Goes on from the newest checkpoint that is whole; a damaged one is named in a warning.

        At any world size and in any mode of parameters. Reads no pickle. Logs what was found, at
        INFO. Collective over all ranks, which see one folder.

        Args:
            folder: folder of all checkpoints, as in `save`.
            optimizer: optimizer made as the one that was saved; its state is replaced.
            loader: loader that then goes on after the last step that was yielded before.
            scheduler: scheduler that then goes on as it was.
            missing: effect of a folder that is not there or has no checkpoint: "error", or "start",
                which changes nothing and returns step 0, so that one script starts and goes on.

        Returns:
            Its step (0: there is none), `extra` and folder.

        Raises:
            CheckpointError: there is none, or it is of another model or optimizer, or lacks a part,
                or all checkpoints are damaged.
            DataError: the loader's data or order are others.
        """
        path = path_of(folder, CheckpointError, "load")
        with self.core.groups.watch.section("load"):
            parts = self._parts(optimizer, loader, scheduler)
            return self._checkpoints.load(path, parts, missing)

    def _parts(
        self, optimizer: Optimizer | None, loader: Stateful | None, scheduler: Stateful | None
    ) -> Parts:
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise CheckpointError(
                f"optimizer=: got {type(optimizer).__name__}; expected a torch.optim.Optimizer of "
                "compiled.parameters(); pass it, or leave it out"
            )
        for name, part in (("loader", loader), ("scheduler", scheduler)):
            if part is not None and not isinstance(part, Stateful):
                raise CheckpointError(
                    f"{name}=: got {type(part).__name__}; expected an object with state_dict() and "
                    "load_state_dict(); pass one, or leave it out"
                )
        store, seeds = self.core.store, self.core.seeds
        return Parts(self._model, seeds, store.mode, optimizer, loader, scheduler, store.partial)
