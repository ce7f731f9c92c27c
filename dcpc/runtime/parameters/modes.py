"""Makes the store of each mode of parameters, and the shapes of the rows that a rank keeps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from dcpc.errors import DispatchError
from dcpc.runtime.groups.groups import Groups
from dcpc.runtime.parameters.gathered import GatheredStore
from dcpc.runtime.parameters.row_store import RowStore
from dcpc.runtime.parameters.rows import SharedRows
from dcpc.runtime.parameters.shared import SharedStore
from dcpc.runtime.parameters.store import AwayMemory, ParameterStore, WholeStore

_SHARING: dict[str, type[RowStore]] = {s.mode: s for s in (RowStore, SharedStore, GatheredStore)}
# Those that are in use: a model that is compiled twice has one.
_in_use: weakref.WeakSet[RowStore] = weakref.WeakSet()


def kind_of(mode: str, groups: Groups, away: AwayMemory | None = None) -> type[ParameterStore]:
    """Returns the kind of store of a mode; a rank alone holds all parameters unless away."""
    if groups.world == 1 and away is None:
        return WholeStore
    return _SHARING.get(mode, WholeStore)


def store_of(
    mode: str,
    parameters: Iterable[nn.Parameter],
    groups: Groups,
    block: int = 0,
    away: AwayMemory | None = None,
) -> ParameterStore:
    """Returns the store of a model's parameters in a mode; a rank alone holds all of them.

    Args:
        mode: "whole", "step", "pull" or "rounds".
        parameters: parameters of the model; in "rounds" the store's `install` gives it others.
        groups: the process groups.
        block: number of ranks that share them out; 0: all.
        away: where rows are, in "rounds"; None: on the device.

    Raises:
        DispatchError: another compiled model shares out some of them otherwise.
    """
    own = list(dict.fromkeys(parameters))
    ids = {id(p) for p in own}
    for other in [s for s in _in_use if not ids.isdisjoint(id(p) for p in s.whole)]:
        alike = other.mode == mode and other.block == (block or groups.world)
        if alike and [id(p) for p in other.whole] == [id(p) for p in own]:
            return other
        raise DispatchError(
            f"got parameters={mode!r} for a model whose parameters another compiled model shares "
            f"out ({other.mode!r}, among {other.block} ranks); expected the same model and mode; "
            f"compile it with parameters={other.mode!r} as before, or delete what was compiled "
            "first"
        )
    kind = kind_of(mode, groups, away)
    if kind is WholeStore:
        return WholeStore(own, groups)
    made = GatheredStore(own, groups, block, away) if away else _SHARING[mode](own, groups, block)
    _in_use.add(made)
    return made


def shared_out(model: nn.Module) -> bool:
    """Whether ranks share out a model's parameters, of which each has its rows alone."""
    own = {id(p) for p in model.parameters()}
    return any(s.in_rounds and own == {id(p) for p in s.whole} for s in _in_use)


def shares(parameters: Iterable[nn.Parameter], world: int) -> list[nn.Parameter]:
    """Returns parameters on the meta device like the rows of the rank that has most of them."""
    return [
        nn.Parameter(p.new_empty(SharedRows(p.shape, world).shape_of(0), device="meta"),
                     requires_grad=p.requires_grad)
        for p in parameters
    ]  # fmt: skip
