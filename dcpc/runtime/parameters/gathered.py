"""Mode "rounds": a rank has its rows of each parameter, and graphs gather the rest while they run.

All ranks of a block go through a step in rounds: in each, every rank runs one micro-batch or, where
it has none, takes part in the gathers and sums of the others. Gradients are summed in each round,
and this rank's rows of them are added up. There is one block of all ranks, or several, which run
free of each other; then ranks with the same rows sum these once, at the end of a step:

    block 0   rank 0   round ─► round ─► round ──► sum with rank 2
              rank 1   round ─► round ─► round ──► sum with rank 3
    block 1   rank 2   round ─► round ───────────► sum with rank 0
              rank 3   round ─► round ───────────► sum with rank 1
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from dcpc.errors import DispatchError
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.reduction import COMM_BUCKET_BYTES, Reduction, trained
from dcpc.runtime.parameters.row_store import RowStore
from dcpc.runtime.parameters.rows import SharedRows
from dcpc.runtime.parameters.store import AwayMemory


class GatheredStore(RowStore):
    """Mode "rounds": the model's own parameters have no memory; graphs take this rank's rows.

    The model gets parameters on the meta device in place of its own, once `install` has run.

    Args:
        parameters: parameters of the model; tied ones count once.
        groups: the process groups, of more than one rank unless the rows are away.
        block: ranks that share the rows out, as for `RowStore`.
        away: where the rows are, their gradients and the optimizer's state of them; None: on the
            device.
    """

    mode = "rounds"
    in_rounds = keeps_meta = True

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        groups: Groups,
        block: int = 0,
        away: AwayMemory | None = None,
    ) -> None:
        self.away = away
        super().__init__(parameters, groups, block)

    def _allocate(self) -> None:
        """Takes this rank's rows of each parameter; the model's own are those of `install`."""
        self._refuse_overlaps()
        self._taken: dict[int, nn.Parameter] = {}
        self._lent: set[int] | None = None
        self._given = [weakref.ref(p) for p in self.whole]
        self._instead: dict[int, nn.Parameter] = {}
        for i, p in enumerate(self.whole):
            split = SharedRows(p.shape, self.block)
            shape = (split.count, *p.shape[1:]) if p.dim() else ()
            # Rows of zeros follow the last one, so that all ranks send as much.
            taken = self.memory(shape, p.dtype).zero_()
            empty = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="meta")
            own = p if p.is_meta else nn.Parameter(empty, p.requires_grad)
            vars(own).update(vars(p))
            self._taken[id(own)] = nn.Parameter(taken, p.requires_grad)
            self._instead[id(p)] = self.whole[i] = own
            if not p.is_meta:
                self.fill(own, p)

    def install(self, model: nn.Module) -> None:
        """Gives a model parameters without memory; the old ones are freed if nobody holds them."""
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    module._parameters[name] = self._instead.get(id(p), p)
        self._instead.clear()

    def memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor of any content where this rank's rows are.

        Raises:
            StoreError: there is no room for it.
        """
        if self.away is not None:
            return self.away.tensor(shape, dtype)
        return torch.empty(tuple(shape), dtype=dtype, device=self.groups.device)

    def fill(self, p: nn.Parameter, value: Tensor) -> None:
        """Writes this rank's rows of a whole parameter's value."""
        rows = SharedRows(p.shape, self.block).of(self.place, value.detach())
        self.rows(p).copy_(rows)

    def taken(self, tensor: Tensor) -> Tensor:
        """Returns the tensor that graphs take: for a parameter of the model this rank's rows."""
        return self._taken.get(id(tensor), tensor)

    def rows(self, whole: Tensor) -> Tensor:
        """Returns this rank's rows of a parameter, without zeros at the end."""
        return self._own(self._taken[id(whole)], whole.shape)

    def _own(self, taken: Tensor, shape: torch.Size) -> Tensor:
        count = SharedRows(shape, self.block).shape_of(self.place)
        return taken.detach()[: count[0]] if count else taken.detach()

    def sharded(self, p: Tensor, rows: Tensor) -> Tensor:
        """Returns the `DTensor` of which this rank has these rows, dense ones."""
        return super().sharded(torch.empty(p.shape, device="meta"), rows)

    def reduction(self, comm_bucket_bytes: int = COMM_BUCKET_BYTES) -> RoundSum:
        """Returns a step's sum of gradients, which sets `grad` of the optimizer's parameters."""
        return RoundSum(self, comm_bucket_bytes)

    def finish(self) -> None:
        """Sets `grad` of the optimizer's parameters to their rows of the sum of all rounds."""
        for p in trained(self.whole):
            taken = self._taken[id(p)]
            gradient, taken.grad = taken.grad, None
            if gradient is not None:
                self._shards[id(p)].grad = self.sharded(p, self._own(gradient, p.shape))

    def follow(self, parameters: Iterable[nn.Parameter]) -> DispatchError | None:
        """Copies changes of `requires_grad` between the model's and the optimizer's parameters."""
        problem = super().follow(parameters)
        for p in self.whole:
            if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
                problem = problem or DispatchError(
                    f"got a hook on a parameter of shape {tuple(p.shape)} of the model; expected "
                    "none with parameters='rounds': no rank ever has its whole gradient; look at "
                    "the gradients of compiled.parameters() after train_step"
                )
            self._taken[id(p)].requires_grad_(p.requires_grad)
        return problem

    def lend(self, parameters: set[int]) -> None:
        """Takes the ids of tensors that a micro-batch of the step has zeros for as gradients."""
        self._lent = parameters if self._lent is None else self._lent & parameters

    def drop_lent(self) -> None:
        """Drops the gradients that are zeros in all rounds of a step: nothing trained these."""
        for taken in self._taken.values():
            if id(taken) in (self._lent or ()):
                taken.grad = None
        self._lent = None

    def failed(self) -> None:
        """Drops the gradients of a step that raised."""
        self._lent = None
        for taken in self._taken.values():
            taken.grad = None

    def of_optimizer(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Returns the parameters whose rows an optimizer has.

        Raises:
            DispatchError: it has one that the model had before.
        """
        before = [p for p in (ref() for ref in self._given) if p is not None]
        self.refuse_own(optimizer, [*self.whole, *before])
        return super().of_optimizer(optimizer)

    def updated(self, params: list[nn.Parameter]) -> None:
        """Does nothing: rows are gathered when they are read."""

    def _loading(self, own: nn.Parameter, value: Tensor) -> Tensor:
        """Writes this rank's rows of a whole value; returns a parameter without memory."""
        if value.shape != own.shape:
            return value  # the model says what is wrong with it
        self.fill(own, value)
        return own.detach()


class RoundSum(Reduction):
    """This rank's rows of the gradients of all rounds, summed over the blocks at the end."""

    takes_all = True

    def __init__(self, store: GatheredStore, comm_bucket_bytes: int = COMM_BUCKET_BYTES) -> None:
        self._store = store
        self._added_bytes = 0
        rows = [store.taken(p) for p in trained(store.whole)]
        super().__init__(cast(list[nn.Parameter], rows), store.groups, comm_bucket_bytes)

    def _over(self) -> dist.ProcessGroup | None:
        """Returns the group of ranks that have the same rows, one of each block; None of one."""
        return self.groups.across(self._store.block)

    @property
    def total_bytes(self) -> int:
        """Bytes of this rank's rows of all sums, of rounds and over blocks."""
        return self._added_bytes + super().total_bytes

    def deliver(self, p: nn.Parameter, gradient: Tensor | None) -> None:
        """Adds the rows of a round's sum to those of the tensor that graphs take."""
        if gradient is None or not p.requires_grad:
            return
        if p.grad is not None:
            p.grad.add_(gradient.to(p.grad.device))
        elif self._store.away is not None:
            p.grad = self._store.memory(p.shape, p.dtype).copy_(gradient)
        else:
            p.grad = gradient
        self._added_bytes += gradient.nbytes
        self.early_bytes += gradient.nbytes

    def finish(self) -> None:
        """Sets `grad` of the optimizer's parameters to this rank's rows of the sum.

        Raises:
            GroupError: a rank of another block did not live.
        """
        self._store.drop_lent()
        super().finish()
        self._store.finish()
