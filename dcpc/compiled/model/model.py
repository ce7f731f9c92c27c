"""A compiled model: an `nn.Module` that runs the variant of each call's shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, NoReturn, Self, SupportsIndex

from torch import Tensor, nn

from dcpc.compiled.model.core import ModelCore
from dcpc.compiled.model.handed import handed, shown
from dcpc.compiled.model.insight import ModelInsight
from dcpc.compiled.model.model_runs import ModelRuns
from dcpc.compiled.model.model_state import ModelSaving
from dcpc.compiled.model.running import ModelExecution
from dcpc.errors import CheckpointError, DispatchError, bare
from dcpc.plan.planning import Planned
from dcpc.verify import Verifier


class CompiledModel(nn.Module):
    """A model compiled for shape buckets; made by `dcpc.compile`.

    Shares the user's parameters: `parameters()` and `state_dict()` are the model's own, or, where
    ranks share them out, a `DTensor` for each, whose local part are the rows of this rank.
    """

    def __init__(self, core: ModelCore, execution: ModelExecution, insight: ModelInsight) -> None:
        """Puts the parts together that `dcpc.compile` made; users call that."""
        super().__init__()
        self.model, self.training = core.model, core.model.training
        self.buckets, self.planned, self.groups = core.buckets, core.planned, core.groups
        self.verifier, self.plans, self.tables = core.verifier, core.plans, core.tables
        self.memory_bytes = core.planned.memory_bytes
        self.block, self.node_ranks = core.planned.block, core.planned.device.node_ranks
        self.value_ranges, self.batch_planner = core.dispatch.value_ranges, execution.planner
        self._core, self._execution, self._insight = core, execution, insight
        self._runs, self._saving = ModelRuns(core, execution), ModelSaving(core, self)
        self.staging = insight.staging

    # Calls and steps
    evaluate = handed("_runs", ModelRuns.evaluate)
    train_step = handed("_runs", ModelRuns.train_step)
    log_to = handed("_runs", ModelRuns.log_to)
    reduce_gradients = handed("_runs", ModelRuns.reduce_gradients)
    clip_grad_norm_ = handed("_runs", ModelRuns.clip_grad_norm_)
    comm_bucket_bytes = property(
        attrgetter("_core.comm_bucket_bytes"),
        lambda model, count: setattr(model._core, "comm_bucket_bytes", count),
        doc="Bytes of gradients that are sent at once.",
    )
    # Memory and checkpoints
    materialize = handed("_saving", ModelSaving.materialize)
    save = handed("_saving", ModelSaving.save)
    load = handed("_saving", ModelSaving.load)
    module = property(attrgetter("model"), doc="The user's module: `compiled.module.generate()`.")
    close = handed("_core", ModelCore.close)
    __exit__ = handed("_core", ModelCore.__exit__)
    # Reports
    report = handed("_insight", ModelInsight.report)
    source = handed("_insight", ModelInsight.source)
    profile = handed("_insight", ModelInsight.profile)
    predict = handed("_insight", ModelInsight.predict)
    stats = handed("_insight", ModelInsight.stats)
    own_lengths = handed("_insight", ModelInsight.own_lengths)
    division_problems = handed("verifier", Verifier.division_problems)
    packing_problem = handed("verifier", Verifier.packing_problem)
    packable = shown("_insight", ModelInsight.packable)
    replans = shown("_insight", ModelInsight.replans)
    speeds = shown("_insight", ModelInsight.speeds)
    program = shown("planned", Planned.program)
    runnable = shown("planned", Planned.runnable)

    def __enter__(self) -> Self:
        """Returns it, to be closed at the end of the block."""
        return self

    @bare
    def forward(self, *args: Tensor, outputs: bool | str | Tensor = False, **inputs: Tensor) -> Any:
        """Returns the model's loss, computed by the variant of these inputs' shape.

        Lengths that no bucket has are run as they are, with the plan of the smallest bucket that
        holds them.

        With `outputs=` it returns `(loss, outputs)`: what forward returns, in its own structure. A
        gradient flows through the loss alone: backward through another output is an error.

        With sp > 1 all ranks of the SP group pass the same inputs and get the same loss; each one's
        `backward` adds its share of the gradient, which `reduce_gradients` sums. With
        `parameters="rounds"` all ranks of a block call at once, each group with inputs of its own.

        Args:
            args: inputs by position, in the order of the buckets' specs, if forward has the same.
            outputs: whether what forward returns comes back, too: "gathered" (or True), each tensor
                whole on every rank of an SP group; or "sharded", as an `OutputPiece` each. A tensor
                is an input of that name.
            inputs: inputs by name.

        Raises:
            DispatchError: names, dtypes or shapes match no bucket, the bucket's graphs are not
                right at these lengths, the model changed since it was compiled or was not
                materialized, or a gradient is asked for and ranks share out the parameters.
            GroupError: ranks of the SP group passed different shapes, or different values of
                inputs that are no floats.
            TraceError: with outputs, forward returns something else than tensors and numbers.
        """
        return self._runs.forward(args, outputs, inputs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's own state, as without dcpc; with `DTensor`s where ranks share it."""
        self._core.refuse_unmade("state_dict")
        return self._core.store.state_dict(self.model, *args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads the model's own state, as without dcpc; every rank loads the same.

        The next step compares what the ranks have loaded. Where ranks share out the parameters it
        is collective over all ranks, and takes `DTensor`s as well as whole tensors.

        Raises:
            CheckpointError: it is of another model.
        """
        if not isinstance(state_dict, Mapping):
            raise CheckpointError(
                f"load_state_dict: got {type(state_dict).__name__}; expected a mapping of names to "
                "tensors, as state_dict() gives; read a file by torch.load first, and a folder of "
                "compiled.save by compiled.load"
            )
        self._core.refuse_unmade("load_state_dict")
        values = self._core.store.load(state_dict, self.model)
        try:
            loaded = self.model.load_state_dict(values, *args, **kwargs)
        except RuntimeError as error:
            said = " ".join(str(error).split()).rstrip(".")
            raise CheckpointError(
                f"load_state_dict: got another model's state: {said}; expected the names and "
                "shapes of compiled.state_dict(); load it into the model that it is of, or pass "
                "strict=False where only names differ"
            ) from error
        self._core.store.loaded()
        self._core.agreed.loaded()
        return loaded

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters under their own names; `DTensor`s where ranks share them.

        They are the compiled model's own, whatever `recurse` says: it has no children, so that
        torch.distributed.checkpoint finds each once.
        """
        self._core.refuse_unmade("parameters")
        return self._core.store.named_parameters(self.model, prefix, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yields the model's buffers under their own names, as `named_parameters` does."""
        return self.model.named_buffers(prefix, True, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yields nothing: see `named_parameters`."""
        return iter(())

    def children(self) -> Iterator[nn.Module]:
        """Yields the model, as `to` and `apply` want it."""
        return iter((self.model,))

    def _fqn_modifiers(self) -> dict[str, str]:
        """Has torch.distributed.checkpoint look for every name in the user's module.

        A model may have a `block`, a `stage` or a `model` of its own, which here is something else.
        """
        own = self.model
        return dict.fromkeys((*own._modules, *own._parameters, *own._buffers), "module")

    def __getattr__(self, name: str) -> Any:
        """Returns the model's attribute of a name that the compiled model lacks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":  # it is not there yet
                raise
            return getattr(self.model, name)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuses copies and pickles: process groups and compiled graphs have none."""
        raise DispatchError(
            "got a copy or a pickle of a compiled model; expected it to stay where it was made: it "
            "holds process groups and compiled graphs; copy.deepcopy(compiled.model), or save "
            "compiled.state_dict()"
        )
