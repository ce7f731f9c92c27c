"""The store of a model in stages: each rank has memory for the parameters of its stage alone.

After compile a parameter that a rank's stage does not read is on the meta device there: it has a
shape and no memory, and torch refuses whatever would read it. One that no stage reads stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dcpc.compiled.agreed_state import AgreedState
from dcpc.compiled.pipeline.model_stage import ModelStage
from dcpc.errors import DcpcError, DispatchError, GroupError
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.groups.same_state import share_of
from dcpc.runtime.groups.subsets import subset
from dcpc.runtime.parameters.row_store import RowStore
from dcpc.runtime.parameters.store import ParameterStore
from dcpc.runtime.pipeline.grid import PipelineGrid
from dcpc.runtime.pipeline.layout import PipelineLayout
from dcpc.runtime.step.execution import StepState


class StageStore(ParameterStore):
    """Parameters of which each rank has those of its stage.

    Args:
        model: model of the user; parameters of other stages are replaced in it.
        stages: stages of the pipeline.
        groups: process groups of all ranks.
        layout: stage of each rank of a pipeline.
    """

    mode, partial = "stages", True

    def __init__(
        self, model: nn.Module, stages: Sequence[ModelStage], groups: Groups, layout: PipelineLayout
    ) -> None:
        self._owners: dict[str, int] = {}
        for stage in reversed(stages):
            self._owners |= dict.fromkeys(stage.parameters, layout.rank(0, stage.index))
        own = stages[layout.stage(groups.rank)]
        self._own = own.parameters
        every = model.named_parameters()
        held = {id(p) for n, p in every if n in self._own or n not in self._owners}
        _leave_to_others(model, held)
        self.groups, self.whole = groups, [*self.named(model).values()]
        self._rows: list[RowStore] = []
        dtype = next((p.dtype for p in model.parameters()), None)
        empty = torch.empty(0, 0, dtype=dtype, device=groups.device)
        # By a name that no parameter of a model has.
        self._untrained = f"(stage {own.index} trains none)", nn.Parameter(empty)

    def share_out(self, model: nn.Module, grid: PipelineGrid) -> None:
        """Has the ranks that read a parameter share out its rows, as with parameters="step".

        Collective over all ranks.

        Args:
            model: model of the user.
            grid: place of this rank among the stages and pipelines.
        """
        own = self.named(model)
        for which, members in grid.summing():
            ranks = subset(self.groups, members, f"stages {which}")
            if ranks is None or ranks.world == 1:
                continue
            read = [p for n, p in own.items() if grid.readers.get(n) == which and p.requires_grad]
            if read:
                self._rows.append(RowStore(read, ranks))

    def named_parameters(
        self, model: nn.Module, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields this stage's parameters; where it trains none also one without elements."""
        trains = False
        for name, p in model.named_parameters(prefix, True, remove_duplicate):
            if not p.is_meta:
                own = self.shard(p)
                yield name, own
                trains = trains or own.requires_grad
        if not trains:
            yield self._untrained

    @property
    def kept(self) -> list[nn.Parameter]:
        """Parameters that an optimizer has, in the order of `whole`."""
        return [self.shard(p) for p in self.whole]

    def shard(self, tensor: Any) -> Any:
        """Returns a user's tensor for one of the model's: its rows, where ranks share them."""
        found = (store.shard(tensor) for store in self._rows)
        return next((shard for shard in found if shard is not tensor), tensor)

    def follow(self, parameters: Iterable[nn.Parameter]) -> DispatchError | None:
        """Returns the reason why no step can be taken; None: there is none."""
        self.whole = list(dict.fromkeys(p for p in parameters if not p.is_meta))
        for store in self._rows:
            own = {id(p) for p in store.whole}
            problem = store.follow([p for p in self.whole if id(p) in own])
            if problem is not None:
                return problem
        return None

    def failed(self) -> None:
        """Drops the gradients of a step that raised."""
        for store in self._rows:
            store.failed()

    def sum_gradients(self, model: nn.Module, grid: PipelineGrid) -> int:
        """Sums the gradients of a step over all ranks that read a parameter; collective.

        Args:
            model: model of the user.
            grid: place of this rank among the stages and pipelines.

        Returns:
            The bytes of gradients that this rank put into sums.
        """
        if not self._rows:
            return grid.sum_gradients(self.named(model).items())
        summed_bytes = 0
        for store in self._rows:
            reduction = store.reduction()
            reduction.finish()
            summed_bytes += reduction.total_bytes
        return summed_bytes

    def named(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Returns the parameters of this rank's stage, as the model has them now."""
        found = dict(model.named_parameters())
        return {name: found[name] for name in self._own}

    def state_dict(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Returns the whole model's state, sent by the ranks that have it; collective."""
        found = model.state_dict(*args, **kwargs)
        first = {id(p): n for n, p in model.named_parameters()}
        names = {n: first[id(p)] for n, p in model.named_parameters(remove_duplicate=False)}
        sent: dict[str, Tensor] = {}
        pg = self.groups.of(self.groups.world)
        for name, p in model.named_parameters():
            if name in self._owners:
                value = torch.empty_like(p, device=self.groups.device, requires_grad=False)
                if self.groups.rank == self._owners[name]:
                    value.copy_(p.detach())
                dist.broadcast(value, group=pg, group_src=self._owners[name])
                sent[name] = value
        prefix = kwargs.get("prefix", "")
        for name, own in names.items():
            if own in sent and prefix + name in found:
                found[prefix + name] = sent[own]
        return found

    def load(self, values: Mapping[str, Any], model: nn.Module) -> Mapping[str, Any]:
        """Returns the part of a whole state that is loaded: other stages' parameters stay away.

        Raises:
            DispatchError: a parameter has another shape.
        """
        found = dict(values)
        for name, p in model.named_parameters(remove_duplicate=False):
            if p.is_meta and name in found:
                if found[name].shape != p.shape:
                    raise DispatchError(
                        f"load_state_dict: {name}: got shape {tuple(found[name].shape)}; expected "
                        f"{tuple(p.shape)}, as the model has it; load a state of this model"
                    )
                found[name] = p.detach()
        return found


class AgreedStages(AgreedState):
    """Parameters that must be the same on every rank of a stage; a step compares a share of them.

    Args:
        parameters: function that returns the parameters of this rank's stage, by name.
        grid: place of this rank among the stages and pipelines.
    """

    def __init__(
        self, parameters: Callable[[], Mapping[str, nn.Parameter]], grid: PipelineGrid
    ) -> None:
        self._parameters, self._grid = parameters, grid
        self._next_shared = 0  # place of the first tensor that the next step compares

    def loaded(self) -> None:
        """Does nothing: a step compares the next share as ever."""

    def of_step(self, problem: DcpcError | None) -> StepState:
        """Returns the first problem, for all ranks to raise; collective over all ranks."""
        apart = self._apart()  # all ranks take part, whatever is wrong here
        return StepState(problem=problem or apart)

    def _apart(self) -> GroupError | None:
        """Returns the error of a rank whose parameters differ from those of its stage's first rank.

        Collective over all ranks.
        """
        grid, groups = self._grid, self._grid.groups
        share, self._next_shared = share_of(self._parameters(), self._next_shared)
        told: list[str] = [share] * groups.world
        if groups.world > 1:
            with groups.watch.naming():
                dist.all_gather_object(told, share, group=groups.control(groups.world))
        stages = [grid.layout.stage(rank) for rank in range(groups.world)]
        firsts = [grid.layout.rank(0, stage) for stage in stages]
        apart = [r for r, first in enumerate(firsts) if told[r] != told[first]]
        if not apart:
            return None
        rank, first = apart[0], firsts[apart[0]]
        return GroupError(
            f"stage {stages[rank]}: got other values of its parameters on rank {rank} than "
            f"on rank {first} ({told[rank]}, {told[first]}); expected "
            "the same in every pipeline; give each rank's optimizer the same arguments, and load "
            "the same state"
        )


def _leave_to_others(model: nn.Module, held: set[int]) -> None:
    """Puts parameters that this rank does not hold on the meta device, tied ones as one."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(p) not in held and not p.is_meta:
                meta = made.get(id(p))
                if meta is None:
                    meta = nn.Parameter(p.detach().to("meta"), p.requires_grad)
                    made[id(p)] = meta
                setattr(module, name, meta)
