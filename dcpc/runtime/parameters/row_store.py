"""Mode "step": an optimizer has this rank's rows, and ranks gather the others' afterwards."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from dcpc.errors import DispatchError
from dcpc.fx.torch_api.torch_collectives import all_gather_single
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.hollow import give_memory, is_hollow
from dcpc.runtime.parameters.reduction import (
    COMM_BUCKET_BYTES,
    CommBucket,
    Reduction,
    dense_gradient,
    in_runs,
    trained,
)
from dcpc.runtime.parameters.rows import RowLayout, SharedRows
from dcpc.runtime.parameters.store import AwayMemory, ParameterStore


class RowStore(ParameterStore):
    """Mode "step": an optimizer has this rank's rows, as views of the whole parameters.

    `optimizer.step()` is collective over all ranks: they wait for each other before the first one
    writes and until the last one has written.

    Args:
        parameters: parameters of the model; tied ones count once.
        groups: the process groups, of more than one rank.
        block: ranks that share them out, where there are several such blocks; 0: all ranks do.

    Attributes:
        place: number of this rank among those that share them out.
        away: memory beyond the device's where the rows are; None: on the device.
    """

    mode = "step"
    away: AwayMemory | None = None

    def __init__(self, parameters: Iterable[nn.Parameter], groups: Groups, block: int = 0) -> None:
        self.groups, self.block = groups, block or groups.world
        self.place = groups.rank % self.block
        self.whole = list(dict.fromkeys(parameters))
        self._allocate()
        # Not at the top: whoever keeps parameters whole does not wait for it.
        self._dtensor = importlib.import_module("torch.distributed.tensor")
        self._mesh = self._mesh_of(groups) if groups.world > 1 else None
        self._refuse_overlaps()
        self._make_shards()
        self._comm_bucket_bytes = COMM_BUCKET_BYTES
        self._trains = {id(p): p.requires_grad for p in self.whole}
        self._lies = [p.data for p in self.whole]
        _watch(self)

    def _allocate(self) -> None:
        """Gives memory to hollow parameters, see `hollow.py`."""
        for p in self.whole:
            give_memory(p)

    def _mesh_of(self, groups: Groups) -> Any:
        """Returns how ranks share rows out: all of them, or each block, as FSDP2's users have it.

        Collective over all ranks where there are several blocks.
        """
        make, kind = self._dtensor.DeviceMesh.from_group, groups.device.type
        if self.away is not None:
            return make(groups.control(groups.world), "cpu")
        if self.block == groups.world:
            return make(groups.of(groups.world), kind)
        ranks = torch.tensor(groups.global_ranks).view(-1, self.block)
        over = [groups.across(self.block), groups.of(self.block)]
        return make(over, kind, ranks, mesh_dim_names=("replicate", "shard"))

    def _make_shards(self) -> None:
        """Makes the optimizer's parameters: rows of the memory in which the model's lie now."""
        self._shards = {
            id(p): nn.Parameter(self.sharded(p, self.rows(p)), p.requires_grad) for p in self.whole
        }

    def _refuse_overlaps(self) -> None:
        seen: set[int] = set()
        for p in self.whole:
            if not p.numel() or p.is_meta or is_hollow(p):
                continue
            if p.untyped_storage().data_ptr() in seen:
                raise DispatchError(
                    f"two parameters share memory, one of shape {tuple(p.shape)}; expected each "
                    "to have its own where ranks share them out: rows that two ranks update would "
                    "be of neither; tie them as one nn.Parameter, or take parameters='whole'"
                )
            seen.add(p.untyped_storage().data_ptr())

    @property
    def kept(self) -> list[nn.Parameter]:
        """Parameters that an optimizer has, in the order of `whole`: a `DTensor` each."""
        return [self._shards[id(p)] for p in self.whole]

    def shard(self, tensor: Any) -> Any:
        """Returns a user's tensor for one of the model's: itself if it is no parameter."""
        return self._shards.get(id(tensor), tensor)

    def rows(self, whole: Tensor) -> Tensor:
        """Returns this rank's rows of a tensor, a view of it."""
        return SharedRows(whole.shape, self.block).of(self.place, whole.detach())

    def sharded(self, p: Tensor, rows: Tensor) -> Tensor:
        """Returns the `DTensor` of which this rank has these rows; on a rank alone the rows.

        Args:
            p: whole parameter, whose shape it has.
            rows: rows of this rank; alone they are all that there are.
        """
        if self._mesh is None:
            return rows
        same = self._dtensor.Replicate()
        places = [same] * (self._mesh.ndim - 1) + [self._dtensor.Shard(0) if p.dim() else same]
        found: Tensor = self._dtensor.DTensor.from_local(
            rows, self._mesh, places, run_check=False, shape=p.shape, stride=p.stride()
        )
        return found

    def give(self, p: nn.Parameter, gradient: Tensor) -> None:
        """Sets `grad` of the optimizer's parameter to this rank's rows of a gradient."""
        rows = self.rows(p)
        same = gradient.stride() == rows.stride()
        local = gradient if same else torch.empty_like(rows).copy_(gradient)
        self._shards[id(p)].grad = self.sharded(p, local)

    def reduction(self, comm_bucket_bytes: int = COMM_BUCKET_BYTES) -> Reduction:
        """Returns a step's sum of gradients, which sets `grad` of the optimizer's parameters."""
        self._comm_bucket_bytes = comm_bucket_bytes

        def bucket(params: list[nn.Parameter]) -> CommBucket:
            return _ScatteredBucket(params, store=self)

        return Reduction(trained(self.whole), self.groups, comm_bucket_bytes, bucket)

    def follow(self, parameters: Iterable[nn.Parameter]) -> DispatchError | None:
        """Takes over changes of `requires_grad`, and values in other memory; says why not."""
        if [id(p) for p in dict.fromkeys(parameters)] != [id(p) for p in self.whole]:
            return DispatchError(
                "a parameter of the model was replaced since it was compiled, and ranks share out "
                "the old one; expected the same parameters, with other values at most; copy into "
                "them (load_state_dict), or compile the model again"
            )
        for p in self.whole:
            shard, before = self._shards[id(p)], self._trains[id(p)]
            if shard._backward_hooks or getattr(shard, "_post_accumulate_grad_hooks", None):
                return DispatchError(
                    f"got a hook on a parameter of shape {tuple(p.shape)} that ranks share out; "
                    "expected none: backward makes no gradient of it, and would never call it; "
                    "look at compiled.parameters() after train_step"
                )
            now = p.requires_grad if p.requires_grad != before else shard.requires_grad
            for each in (p, shard):
                each.requires_grad_(now)
            self._trains[id(p)] = now
        return self._return()

    def failed(self) -> None:
        """Drops the gradients of a step that raised."""
        for p in self.whole:
            p.grad = None

    def _return(self) -> DispatchError | None:
        """Gives each parameter the memory back of which an optimizer has rows, with its value.

        `model.to("cpu:0")`, `vector_to_parameters` and `p.data = x` give it other memory, which no
        update of the rows would reach.

        Returns:
            Reason why a value cannot be taken; None: there is none.
        """
        for p, memory in zip(self.whole, self._lies, strict=True):
            if p.data_ptr() == memory.data_ptr() and p.dtype == memory.dtype:
                continue
            if (p.shape, p.dtype, p.device) != (memory.shape, memory.dtype, memory.device):
                return DispatchError(
                    f"a parameter was given {p.dtype}{list(p.shape)} on {p.device} since the model "
                    f"was compiled; expected {memory.dtype}{list(memory.shape)} on "
                    f"{memory.device}, of which an optimizer has rows; give it these back, or "
                    "compile the model again"
                )
            problem = self._take_back(p, memory)
            if problem is not None:
                return problem
            p.data = memory
        return None

    def _take_back(self, p: nn.Parameter, memory: Tensor) -> DispatchError | None:
        """Writes a parameter's value to where it lay; returns why it cannot, None if it can."""
        memory.copy_(p.data)
        return None

    def updating(self) -> None:
        """Runs before an optimizer writes; collective over all ranks."""

    def updated(self, params: list[nn.Parameter]) -> None:
        """Gathers the rows of parameters that each rank has written; collective over all ranks.

        Args:
            params: whole parameters, the same on every rank.
        """
        pg = self.groups.of(self.groups.world)
        with torch.no_grad():
            for run in in_runs(params, self._comm_bucket_bytes):
                layout = RowLayout.of(run, self.groups.world)
                part = run[0].new_zeros(layout.part_numel)
                for piece, p in zip(layout.own(part, self.groups.rank), run, strict=True):
                    piece.copy_(self.rows(p))
                flat = part.new_empty(layout.world * layout.part_numel)
                all_gather_single(flat, part, group=pg)
                for parts, split, p in zip(layout.split(flat), layout.splits, run, strict=True):
                    split.read(parts, p)

    def of_optimizer(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Returns the parameters whose rows an optimizer has.

        Raises:
            DispatchError: it has one of the model's own.
        """
        self.refuse_own(optimizer, self.whole)
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return [p for p in self.whole if id(self._shards[id(p)]) in own]

    @staticmethod
    def refuse_own(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
        """Refuses an optimizer of the model's own parameters.

        Raises:
            DispatchError: it has one of them.
        """
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(p) in own for p in parameters):
            raise DispatchError(
                f"{type(optimizer).__name__}: got the model's own parameters; expected those of "
                "the compiled model, of which this rank updates its rows: the gradients are "
                "theirs; make the optimizer of compiled.parameters()"
            )

    def state_dict(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Returns a model's state, with a `DTensor` for each parameter."""
        keeps = kwargs.pop("keep_vars", False)
        found = model.state_dict(*args, keep_vars=True, **kwargs)
        for name, value in found.items():
            if isinstance(value, Tensor):
                kept = self.shard(value)
                found[name] = kept if keeps else kept.detach()
        return found

    def load(self, values: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
        """Writes the rows of values that are `DTensor`s; collective over all ranks.

        Returns:
            The state dict, with the whole parameters in place of these.
        """
        found, named = dict(values), model.state_dict(keep_vars=True)
        for name, value in values.items():
            own = named.get(name)
            if own is None or id(own) not in self._shards:
                continue
            shard: Any = self._shards[id(own)].detach()
            if isinstance(value, self._dtensor.DTensor):
                kind = (value.device_mesh, value.placements, value.shape)
                if kind == (shard.device_mesh, shard.placements, shard.shape):
                    shard.to_local().copy_(value.to_local())
                    found[name] = own.detach()
                    continue
                value = value.full_tensor()
            found[name] = self._loading(own, value)
        self.updated(self.whole)
        return found

    def _loading(self, own: nn.Parameter, value: Tensor) -> Tensor:
        """Returns the value that the model loads for one of its parameters: the whole one."""
        return value


@dataclass(slots=True)
class _ScatteredBucket(CommBucket):
    """A comm bucket of whose sum each rank gets its rows.

    Each rank sends the others their rows and adds what it gets, in the order of the ranks: half the
    bytes of an all-reduce, which the gather of rows sends after the optimizer's step.
    """

    in_flight = 1  # what arrives takes as much memory as what is sent

    store: RowStore | None = None
    _arrived: Tensor | None = None
    _part: Tensor | None = None

    def start(self, pg: dist.ProcessGroup) -> None:
        """Puts the gradients on the wire."""
        first, world = self.params[0], pg.size()
        layout = RowLayout.of(self.params, world)
        self.flat = first.new_zeros(world * layout.part_numel)
        each = zip(self.params, layout.splits, layout.split(self.flat), strict=True)
        for p, split, parts in each:
            grad, p.grad = p.grad, None
            if grad is not None:
                split.write(parts, dense_gradient(grad))
        self._arrived = torch.empty_like(self.flat)
        self.work = dist.all_to_all_single(self._arrived, self.flat, group=pg, async_op=True)

    def wait(self) -> None:
        """Waits for all ranks' gradients of this rank's rows, and adds them."""
        if self._part is None:
            CommBucket.wait(self)
            assert self.store is not None, "made by a store"
            assert self._arrived is not None, "nothing was sent"
            self._part = self._arrived.view(self.store.groups.world, -1).sum(0)
            self._arrived = self.flat = None

    def spread(self, used: Mapping[int, int]) -> None:
        """Sets `grad` of the optimizer's parameters to their rows of the sum."""
        assert self.store is not None, "made by a store"
        assert self._part is not None, "nobody waited"
        groups = self.store.groups
        pieces = RowLayout.of(self.params, groups.world).own(self._part, groups.rank)
        for p, piece in zip(self.params, pieces, strict=True):
            if used[id(p)]:
                self.store.give(p, piece)
        self._part = None


def _watch(store: RowStore) -> None:
    """Has every optimizer that has rows of a store wait for the other ranks around its step."""
    ref = weakref.ref(store)

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = ref()
        if found is not None and found.of_optimizer(optimizer):
            problem = found._return()
            if problem is not None:
                raise problem
            with found.groups.watch.naming():
                found.updating()

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found = ref()
        params = [] if found is None else found.of_optimizer(optimizer)
        if found is not None and params:
            with found.groups.watch.naming():
                found.updated(params)

    for handle in (
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(after),
    ):
        weakref.finalize(store, handle.remove)
